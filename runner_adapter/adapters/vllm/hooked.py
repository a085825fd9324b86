"""What a runner of either version has of its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from connector import errors
from runner_adapter.adapters.vllm.scheduling import tell
from runner_adapter.adapters.vllm.steps import Steps
from runner_adapter.plan import StepPlan
from runner_adapter.runner import RunnerAdapter

if TYPE_CHECKING:

    class _Runner:
        model: Any
        vllm_config: Any

        def load_model(self, *args: Any, **kwargs: Any) -> None: ...
        def execute_model(self, *args: Any, **kwargs: Any) -> Any: ...
        def sample_tokens(self, *args: Any, **kwargs: Any) -> Any: ...

else:
    _Runner = object


class Hooked(_Runner):
    """A runner whose model's hooks and hand-over are an adapter's.

    Without an adapter every method is the engine's own. Raises as `Steps` does when it is given one.
    """

    _steps: Steps | None = None
    _failures: Mapping[str, Exception] = {}

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

    def adapter_failures(self) -> dict[str, Exception]:
        """Requests that failed and are not finished, each once. vLLM's output of a runner has no place for them: who
        calls this ends them, or a scheduler with `SchedulerMixin` does."""
        if self._steps is None:
            return {}
        found = {**self._failures, **self._steps.adapter.failures()}
        self._failures = {}
        return {rid: error for rid, error in found.items() if rid in self._steps.adapter.requests}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.use_adapter(self.make_adapter())

    def use_adapter(self, adapter: RunnerAdapter) -> None:
        """Run the steps from now on with this adapter. UsageError if there is one, or the engine's settings forbid."""
        if self._steps is not None:
            raise errors.UsageError("the runner has an adapter", runner=type(self).__name__)
        self._check_forward()
        self._steps = Steps(
            adapter, self.model, self.vllm_config, embeds=self._takes_embeds(), talking=self._forward_context
        )
        self._begin_with(self._steps)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_failures(super().execute_model(*args, **kwargs))

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_failures(super().sample_tokens(*args, **kwargs))

    def _with_failures(self, output: Any) -> Any:
        """The output, with what failed; None goes to no scheduler."""
        if output is None or self._steps is None:
            return output
        adapter = self._steps.adapter
        fresh = adapter.failures()
        self._failures = {rid: e for rid, e in {**self._failures, **fresh}.items() if rid in adapter.requests}
        return tell(output, fresh)

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
