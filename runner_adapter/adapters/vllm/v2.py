"""The mixin for vLLM's V2 model runner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from connector import errors
from runner_adapter.adapters.vllm.hooked import Hooked
from runner_adapter.adapters.vllm.steps import Steps

_Inputs = Callable[..., dict[str, Any]]
#: The engine's ids of requests that the engine makes up to warm itself up.
WARM_UP = ("_warmup_", "_v2_mixed_warmup_")

if TYPE_CHECKING:

    class _Runner:
        """What of vllm.v1.worker.gpu.model_runner.GPUModelRunner is overridden or read here."""

        model_state: Any
        model_config: Any
        execute_model_state: Any
        uses_inputs_embeds: bool
        max_num_tokens: int
        dtype: torch.dtype
        device: torch.device

        def add_requests(self, scheduler_output: Any) -> None: ...
        def update_requests(self, scheduler_output: Any) -> None: ...
        def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any: ...

else:
    _Runner = object


class V2RunnerMixin(Hooked, _Runner):
    """Put it before vLLM's V2 GPUModelRunner in the bases of a runner.

    The engine keeps its requests in slots: it frees that of a preempted one, or of one whose input goes on, and adds it
    again. The buffer is the adapter's, keyed by rid, and knows nothing of slots: such a request's map stays, and is
    merged into. The forward is given what the adapter makes through the engine's own ModelState, whose `prepare_inputs`
    this wraps; so captured graphs read its embeddings at one address.

    UsageError, beside those of `Steps`: vLLM-Omni's V2 runner, whose ModelState keeps a buffer by slot.
    """

    _embeds: torch.Tensor | None = None
    #: Embeddings that the engine made for this step.
    _engine_embeds: torch.Tensor | None = None

    def _takes_embeds(self) -> bool:
        return self.uses_inputs_embeds

    def _check_forward(self) -> None:
        if getattr(self.model_state, "intermediate_buffer", None) is not None:
            raise errors.UsageError(
                "vLLM-Omni's V2 runner calls the hooks itself, over a buffer by slot: use its V1 runner",
                state=type(self.model_state).__name__,
            )

    def _begin_with(self, steps: Steps) -> None:
        if steps.has_preprocess and not self._takes_embeds():
            width = self.model_config.get_inputs_embeds_size()
            self._embeds = torch.zeros(self.max_num_tokens, width, dtype=self.dtype, device=self.device)
        state = self.model_state
        state.prepare_inputs = partial(self._state_inputs, steps, state.prepare_inputs)
        state.prepare_inputs_embeds = partial(self._state_embeds, state.prepare_inputs_embeds)
        state.prepare_dummy_inputs = partial(self._state_dummy_inputs, steps, state.prepare_dummy_inputs)

    def add_requests(self, scheduler_output: Any) -> None:
        if self._steps is not None:
            self._steps.take(scheduler_output)
        super().add_requests(scheduler_output)

    def update_requests(self, scheduler_output: Any) -> None:
        """The last that the engine does to its states: finished requests have left, and new ones entered."""
        super().update_requests(scheduler_output)
        if self._steps is not None and not _warms_up(scheduler_output):
            self._steps.begin(scheduler_output)

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        if self._steps is not None and not _warms_up(scheduler_output):
            engine_ids: list[str] = batch.req_ids
            self._steps.plan(
                engine_ids,
                dict(zip(engine_ids, batch.num_scheduled_tokens.tolist(), strict=True)),
                dict(zip(engine_ids, batch.num_computed_tokens_np.tolist(), strict=True)),
                padded_tokens=batch.num_tokens_after_padding,
                padded_rows=batch.num_reqs_after_padding,
            )
        return batch

    @torch.inference_mode()
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        steps, state = self._steps, self.execute_model_state
        if steps is not None and steps.current is not None and state is not None:
            hidden, aux = state.hidden_states, state.aux_hidden_states
            steps.after(hidden if aux is None else (hidden, aux), self.beside)
        return output

    # -- what the engine's ModelState is asked ----------------------------------------------------

    def _state_embeds(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._engine_embeds = engine(*args, **kwargs)
        return self._engine_embeds

    def _state_inputs(self, steps: Steps, engine: _Inputs, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """For a forward; without requests, for profiling, there is no plan."""
        rows, tokens = input_batch.num_reqs_after_padding, input_batch.num_tokens_after_padding
        given, embeds = engine(input_batch, req_states), self._engine_embeds
        self._engine_embeds = None
        if self._embeds is not None:
            embeds = self._embeds[:tokens]
            embeds.zero_()
        if embeds is not None:
            steps.preprocess(input_batch.input_ids, embeds, self.extras)
            given = {**given, "inputs_embeds": embeds}
        return {**given, **steps.kwargs(rows, tokens)}

    def _state_dummy_inputs(self, steps: Steps, engine: _Inputs, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """For capture, before it begins."""
        steps.warm_up(num_reqs)
        given = engine(num_reqs, num_tokens)
        if self._embeds is not None:
            given = {**given, "inputs_embeds": self._embeds[:num_tokens]}
        return {**given, **steps.kwargs(num_reqs, num_tokens)}


def _warms_up(scheduler_output: Any) -> bool:
    engine_ids = (*scheduler_output.num_scheduled_tokens, *scheduler_output.finished_req_ids)
    return any(engine_id.startswith(WARM_UP) for engine_id in engine_ids)
