"""What a runner and its scheduler tell each other: who failed, and whose input is there.

vLLM has no word for either in what they give each other (`ModelRunnerOutput`, `SchedulerOutput`): `failed_recving` of a
KV connector, the nearest, is heard for requests that wait for its blocks only. So they are attributes of these objects,
which travel with them, whatever processes the two are in.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

#: Of a runner's output: why requests failed, by the engine's ids; and `Fed`, if it reads and was asked.
FAILURES, FED = "adapter_failures", "adapter_fed"
#: Of a scheduler's output: the requests, `Asked`, that are to begin when their input is there.
ASKED = "adapter_asked"
#: Characters of an error that clients are told.
MOST_TOLD = 1000


class Asked(NamedTuple):
    """A request that has not run yet, as `external_id` is given it."""

    req_id: str
    external_req_id: str | None


class Fed(NamedTuple):
    """Requests, by the engine's ids, whose next input is there; and those whose input has come whole."""

    here: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()


if TYPE_CHECKING:

    class _Scheduler:
        requests: dict[str, Any]
        running: list[Any]
        waiting: Any
        skipped_waiting: Any
        max_num_running_reqs: int

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]: ...
        def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]: ...

else:
    _Scheduler = object


def tell(output: Any, failed: Mapping[str, Exception], fed: Fed | None) -> Any:
    """A runner's output that tells who failed, by the engine's ids, and who is fed; the same object if there is nothing
    to tell. One that is still being copied from the device tells it when it is there."""
    told: dict[str, Any] = {}
    if failed:
        told[FAILURES] = {one: f"{type(error).__name__}: {error}"[:MOST_TOLD] for one, error in failed.items()}
    if fed is not None:
        told[FED] = fed
    if not told:
        return output
    get: Callable[[], Any] | None = getattr(output, "get_output", None)
    if get is not None:
        output.get_output = lambda: _marked(get(), told)
        return output
    return _marked(output, told)


def _marked(output: Any, told: Mapping[str, Any]) -> Any:
    # A copy: an empty output is one object for all steps.
    output = copy.copy(output)
    for name, value in told.items():
        setattr(output, name, value)
    return output


class SchedulerMixin(_Scheduler):
    """Put it before vLLM's Scheduler or AsyncScheduler in the bases of a `scheduler_cls`.

    Requests of a stage that reads are in a step when their next input is there: first when they begin, then at each
    token, until their input has ended. The runner is asked in each step, in one without tokens, too. A request that
    waits keeps its blocks and its place, and is counted as running.

    Requests that failed in the runner end as errors, in the step that says so, and their clients are told why
    (`stop_reason`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: What the runner said last; None if it reads nothing. Before its first word nobody has input.
        self._fed: Fed | None = Fed()
        #: Steps that hold a request and whose output is not back, by the engine's id.
        self._under_way: Counter[str] = Counter()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._fed is None:
            return super().schedule(*args, **kwargs)
        with self._held() as asked:
            output = super().schedule(*args, **kwargs)
        self._under_way.update(output.num_scheduled_tokens.keys())
        setattr(output, ASKED, asked)
        return output

    @contextmanager
    def _held(self) -> Iterator[list[Asked]]:
        """The queues without those that wait for input; of these, the ones that have not begun."""
        running, most = self.running, self.max_num_running_reqs
        self.running = [request for request in running if self._may_run(request)]
        # Those that are kept back are running all the same.
        self.max_num_running_reqs -= len(running) - len(self.running)
        kept = {
            name: [r for r in getattr(self, name) if not self._may_run(r)] for name in ("waiting", "skipped_waiting")
        }
        for name, requests in kept.items():
            getattr(self, name).remove_requests(requests)
        awake = {request.request_id for request in self.running}
        try:
            yield [
                Asked(r.request_id, getattr(r, "external_req_id", None))
                for r in (*kept["waiting"], *kept["skipped_waiting"])
            ]
        finally:
            left = {request.request_id for request in self.running}
            known = {request.request_id for request in running}
            # Who was in the step and is no longer running was preempted.
            stayed = [r for r in running if r.request_id in left or r.request_id not in awake]
            self.running = [*stayed, *(r for r in self.running if r.request_id not in known)]
            self.max_num_running_reqs = most
            for name, requests in kept.items():
                for request in reversed(requests):
                    getattr(self, name).prepend_request(request)

    def _may_run(self, request: Any) -> bool:
        assert self._fed is not None
        engine_id = request.request_id
        if request.status.name not in ("WAITING", "RUNNING", "PREEMPTED"):
            # It waits for something of the engine's.
            return True
        if request.is_prefill_chunk or engine_id in self._fed.whole:
            return True
        # Of a step that is under way nobody knows yet what it leaves.
        return engine_id in self._fed.here and not self._under_way[engine_id]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.request import RequestStatus

        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._under_way -= Counter(scheduler_output.num_scheduled_tokens.keys())
        self._fed = getattr(model_runner_output, FED, None)
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
