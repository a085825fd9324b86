"""The mixin for vLLM's V1 model runner, and for vLLM-Omni's, which is derived from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from connector import errors
from runner_adapter.adapters.vllm.hooked import Hooked

if TYPE_CHECKING:

    class _Runner:
        """What of vllm.v1.worker.gpu_model_runner.GPUModelRunner is overridden or read here."""

        model: Any
        requests: dict[str, Any]
        input_batch: Any
        input_ids: Any
        inputs_embeds: Any
        model_config: Any
        cache_config: Any
        supports_mm_inputs: bool
        enable_prompt_embeds: bool

        def _update_states(self, scheduler_output: Any) -> Callable[[], None] | None: ...
        def _preprocess(
            self, scheduler_output: Any, num_input_tokens: int, intermediate_tensors: Any = None
        ) -> tuple[Any, ...]: ...
        def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...
        def _model_forward(self, *args: Any, **kwargs: Any) -> Any: ...
        def _build_model_kwargs_extra(self) -> dict[str, Any]: ...
        def _gather_runtime_additional_information(self) -> list[dict[str, Any]]: ...
        def _update_intermediate_buffer(self, req_id: str, upd: Any) -> None: ...
        def _process_additional_information_updates(self, *args: Any, **kwargs: Any) -> None: ...

else:
    _Runner = object


class V1RunnerMixin(Hooked, _Runner):
    """Put it before vLLM's GPUModelRunner, or vLLM-Omni's OmniGPUModelRunner, in the bases of a runner.

    The buffer is the adapter's, keyed by rid: it follows requests through preemption, and this step's order is that of
    `input_batch.req_ids` after the engine has condensed and reordered it. The engine's own steps run as they are; of
    vLLM-Omni's, those that call the model's hooks or fill its buffer are the adapter's here.

    UsageError, beside those of `Steps`: a model with a preprocess hook whose compiled forward takes no embeddings;
    with vLLM-Omni's runner, a model with a postprocess hook and prefix caching.
    """

    #: Rows that the graph of the step under way was captured with; None if none was captured for its number of rows.
    _graph_rows: int | None = None

    def _takes_embeds(self) -> bool:
        return self.supports_mm_inputs or self.enable_prompt_embeds

    @property
    def _is_omni(self) -> bool:
        """Whether the runner below builds kwargs for the forward, which vLLM's does not."""
        return getattr(super(), "_build_model_kwargs_extra", None) is not None

    def _check_forward(self) -> None:
        hooked = bool(getattr(self.model, "has_preprocess", False))
        if hooked and not (self._takes_embeds() or self._is_omni or self.model_config.enforce_eager):
            raise errors.UsageError(
                "the model has a preprocess hook, and the engine compiles a forward that takes no embeddings: "
                "set enable_prompt_embeds or enforce_eager",
                model=type(self.model).__name__,
            )
        if self._is_omni and self.cache_config.enable_prefix_caching and getattr(self.model, "has_postprocess", False):
            raise errors.UsageError(
                "the rows that a prefix cache holds are not given to postprocess: switch off enable_prefix_caching",
                model=type(self.model).__name__,
            )

    def _update_states(self, scheduler_output: Any) -> Callable[[], None] | None:
        steps = self._steps
        if steps is None:
            return super()._update_states(scheduler_output)
        steps.take(scheduler_output)
        corrections = super()._update_states(scheduler_output)
        steps.begin(scheduler_output)
        steps.mirror(self._put_mirror)
        return corrections

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """How the step runs: (mode, the batch's descriptor, …). `_preprocess` is told its tokens alone."""
        found = super()._determine_batch_execution_and_padding(*args, **kwargs)
        self._graph_rows = found[1].num_reqs
        return found

    def _preprocess(
        self, scheduler_output: Any, num_input_tokens: int, intermediate_tensors: Any = None
    ) -> tuple[Any, ...]:
        steps, graph_rows = self._steps, self._graph_rows
        if steps is None:
            return super()._preprocess(scheduler_output, num_input_tokens, intermediate_tensors)
        with _without_hooks(self.model):
            ids, embeds, *rest = super()._preprocess(scheduler_output, num_input_tokens, intermediate_tensors)
        batch, counts = self.input_batch, scheduler_output.num_scheduled_tokens
        computed = {engine_id: int(batch.num_computed_tokens_cpu[row]) for row, engine_id in enumerate(batch.req_ids)}
        steps.plan(batch.req_ids, counts, computed, padded_tokens=num_input_tokens, padded_rows=graph_rows)
        if embeds is None and steps.has_preprocess:
            embeds = self.inputs_embeds.gpu[:num_input_tokens]
            embeds.zero_()
        if embeds is not None:
            # Where the forward is given embeddings alone, hooks still read the ids that stand in the engine's buffer.
            given = self.input_ids.gpu[:num_input_tokens] if ids is None else ids
            steps.preprocess(given, embeds, self.extras)
            if self._is_omni and steps.has_preprocess:
                ids = given
        return (ids, embeds, *rest)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        steps = self._steps
        if steps is None or steps.current is None:
            return super()._model_forward(*args, **kwargs)
        extra = {} if self._is_omni else steps.kwargs()
        output = super()._model_forward(*args, **kwargs, **extra)
        steps.after(output, self.beside)
        steps.mirror(self._put_mirror)
        return output

    def _put_mirror(self, engine_id: str, name: str, value: Mapping[str, Any]) -> None:
        setattr(self.requests[engine_id], name, value)

    # -- what only vLLM-Omni's runner has ---------------------------------------------------------

    def _build_model_kwargs_extra(self) -> dict[str, Any]:
        given = super()._build_model_kwargs_extra()
        if self._steps is None or self._steps.current is None:
            return given
        kept = {name: value for name, value in given.items() if not self._steps.drops(name)}
        return {**kept, **self._steps.kwargs()}

    def _gather_runtime_additional_information(self) -> list[dict[str, Any]]:
        if self._steps is None or self._steps.current is None:
            return super()._gather_runtime_additional_information()
        return self._steps.adapter.gather(self._steps.current)

    def _update_intermediate_buffer(self, req_id: str, upd: Any) -> None:
        """What vLLM-Omni's own connector brings during a step. Before it begins, the engine keeps for itself what new
        requests bring; the adapter has that from the requests."""
        if self._steps is None or not self._steps.began:
            super()._update_intermediate_buffer(req_id, upd)
        else:
            self._steps.bring_one(req_id, upd)

    def _process_additional_information_updates(self, *args: Any, **kwargs: Any) -> None:
        """Postprocess ran behind the forward already, in the model's thread; this is called later, by others, too."""
        if self._steps is None:
            super()._process_additional_information_updates(*args, **kwargs)


@contextmanager
def _without_hooks(model: Any) -> Iterator[None]:
    """vLLM-Omni's runner calls the hooks of a model that says it has them, and lets one request's failure be all's."""
    if not getattr(model, "has_preprocess", False):
        yield
        return
    own = vars(model)
    before = {"has_preprocess": own["has_preprocess"]} if "has_preprocess" in own else {}
    model.has_preprocess = False
    try:
        yield
    finally:
        del model.has_preprocess
        for name, value in before.items():
            setattr(model, name, value)
