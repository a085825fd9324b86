"""What a runner of either version has of its adapter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from connector import errors
from runner_adapter.adapters.vllm.ids import client_id
from runner_adapter.adapters.vllm.steps import Steps
from runner_adapter.adapters.vllm.telling import Asked, tell
from runner_adapter.hooks import Extras
from runner_adapter.plan import StepPlan
from runner_adapter.runner import RunnerAdapter

if TYPE_CHECKING:

    class _Runner:
        model: Any
        vllm_config: Any

        def load_model(self, *args: Any, **kwargs: Any) -> None: ...
        def execute_model(self, *args: Any, **kwargs: Any) -> Any: ...
        def sample_tokens(self, *args: Any, **kwargs: Any) -> Any: ...
        def _dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any: ...

else:
    _Runner = object

#: Where vLLM is told to keep its clients' ids as they are (vllm.envs).
KEEPS_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"


class Hooked(_Runner):
    """A runner whose model's hooks and hand-over are an adapter's.

    Without an adapter every method is the engine's own. Raises as `Steps` does when it is given one.
    """

    _steps: Steps | None = None
    #: By the engine's ids, as its requests may be finished and their rids others' by the time that they are asked for.
    _failures: Mapping[str, Exception] = {}
    #: Whether the engine says of new requests what their clients call them, and makes no ids of its own.
    _named = False

    @property
    def adapter(self) -> RunnerAdapter | None:
        return None if self._steps is None else self._steps.adapter

    def make_adapter(self) -> RunnerAdapter:
        """To be overridden: the adapter of this rank, for `self.model`, which is loaded."""
        raise errors.UsageError("a runner says in make_adapter what its adapter is", runner=type(self).__name__)

    def beside(self, plan: StepPlan) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """To be overridden: by rid and name, what is handed over beside the forward's output. The plan's rows are those
        that go; of a preempted request that computes tokens again, the others."""
        return {}

    def extras(self, plan: StepPlan) -> Extras:
        """To be overridden: by rid, the model's own values for its preprocess hook, over what the engine's runner tells
        it. The plan's rows are this step's; what is for others is not used."""
        return {}

    def external_id(self, engine_id: str, request: Any) -> str:
        """The rid, on which all stages must agree, of what the engine calls `engine_id`. May be overridden.

        `request`: what the scheduler calls new; or `Asked`, which has the two ids alone, if it waits for input before
        that, and then the rid stays what was said of it; or None if it was finished before any of that.

        By default its `external_req_id`, which vLLM-Omni has; or else what the client called it, of which vLLM made its
        own id (`client_id`), unless it is told not to.
        """
        named: str | None = getattr(request, "external_req_id", None)
        if named is not None:
            # What waits may have one by another plug-in, where the engine makes ids of its own all the same.
            self._named = self._named or not isinstance(request, Asked)
            return named
        return engine_id if self._named or int(os.environ.get(KEEPS_IDS, "0")) else client_id(engine_id)

    def engine_id(self, rid: str) -> str:
        """What the engine calls a live request, in its own tables; UnknownRequest if none has this rid."""
        if self._steps is None:
            raise errors.UsageError("the runner has no adapter yet", runner=type(self).__name__, rid=rid)
        return self._steps.ids.engine_id(rid)

    def adapter_failures(self) -> dict[str, Exception]:
        """Requests that failed and are not finished, each once, by the engine's ids. vLLM's output of a runner has no
        place for them: who calls this ends them, or a scheduler with `SchedulerMixin` does."""
        if self._steps is None:
            return {}
        found = {**self._failures, **self._steps.failures()}
        self._failures = {}
        return {engine_id: error for engine_id, error in found.items() if engine_id in self._steps.ids}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.use_adapter(self.make_adapter())

    def use_adapter(self, adapter: RunnerAdapter) -> None:
        """Run the steps from now on with this adapter. UsageError if there is one, or the engine's settings forbid."""
        if self._steps is not None:
            raise errors.UsageError("the runner has an adapter", runner=type(self).__name__)
        self._check_forward()
        self._steps = Steps(
            adapter,
            self.model,
            self.vllm_config,
            embeds=self._takes_embeds(),
            talking=self._forward_context,
            external_id=self.external_id,
        )
        self._begin_with(self._steps)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        return self._telling(super().execute_model(*args, **kwargs))

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._telling(super().sample_tokens(*args, **kwargs))

    @torch.inference_mode()
    def _dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Profiling, warm-up and capture of this size, behind the talker's call of it, as in a step."""
        if self._steps is not None:
            self._steps.warm_up(num_tokens)
        return super()._dummy_run(num_tokens, *args, **kwargs)

    def _telling(self, output: Any) -> Any:
        """The output, with what failed and who is fed; None goes to no scheduler."""
        if output is None or self._steps is None:
            return output
        fresh, ids = self._steps.failures(), self._steps.ids
        self._failures = {id_: error for id_, error in {**self._failures, **fresh}.items() if id_ in ids}
        held = self._steps.held
        return tell(output, {**fresh, **held.refused}, held.fed)

    def _forward_context(self) -> AbstractContextManager[Any]:
        """Where a talker's layers find the engine's settings."""
        from vllm.forward_context import set_forward_context

        found: AbstractContextManager[Any] = set_forward_context(None, self.vllm_config)
        return found

    # -- what differs between the versions --------------------------------------------------------

    def _takes_embeds(self) -> bool:
        """Whether the engine's forward is given embeddings."""
        raise NotImplementedError

    def _check_forward(self) -> None:
        """UsageError if what the adapter makes would not reach the forward."""
        raise NotImplementedError

    def _begin_with(self, steps: Steps) -> None:
        """The runner has its steps."""
