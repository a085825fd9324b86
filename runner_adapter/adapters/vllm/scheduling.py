"""How a request that failed in a runner ends: what its runner tells, and the scheduler that hears it.

vLLM has no word for it in what a runner gives to a scheduler (`ModelRunnerOutput`); the nearest, `failed_recving` of a
KV connector, is heard for requests that wait for its blocks only. So it is an attribute of that object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

#: The attribute: why, by the engine's ids.
FAILURES = "adapter_failures"
#: Characters of an error that clients are told.
MOST_TOLD = 1000

if TYPE_CHECKING:

    class _Scheduler:
        requests: dict[str, Any]

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]: ...
        def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]: ...

else:
    _Scheduler = object


def tell(output: Any, failed: Mapping[str, Exception]) -> Any:
    """A runner's output that tells what failed, by the engine's ids; the same object if nothing did. One that is still
    being copied from the device tells it when it is there."""
    if not failed:
        return output
    told = {engine_id: f"{type(error).__name__}: {error}"[:MOST_TOLD] for engine_id, error in failed.items()}
    get: Callable[[], Any] | None = getattr(output, "get_output", None)
    if get is not None:
        output.get_output = lambda: _marked(get(), told)
        return output
    return _marked(output, told)


def _marked(output: Any, told: Mapping[str, str]) -> Any:
    # A copy: an empty output is one object for all steps.
    output = copy.copy(output)
    setattr(output, FAILURES, told)
    return output


class SchedulerMixin(_Scheduler):
    """Put it before vLLM's Scheduler or AsyncScheduler in the bases of a `scheduler_cls`: requests that failed in the
    runner end as errors, in the step that says so, and their clients are told why (`stop_reason`)."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.request import RequestStatus

        outputs = super().update_from_output(scheduler_output, model_runner_output)
        failed: Mapping[str, str] = getattr(model_runner_output, FAILURES, {})
        for request in self.finish_requests(list(failed), RequestStatus.FINISHED_ERROR):
            ended = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=failed[request.request_id],
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(ended)
        return outputs
