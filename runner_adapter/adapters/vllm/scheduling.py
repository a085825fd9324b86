"""vLLM's scheduler, with requests that wait for input and requests that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runner_adapter.adapters.vllm.telling import ASKED, FAILURES, FED, MADE, Asked
from runner_adapter.adapters.vllm.turns import Turns

if TYPE_CHECKING:

    class _Scheduler:
        requests: dict[str, Any]
        running: list[Any]
        waiting: Any
        skipped_waiting: Any
        max_num_running_reqs: int

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def add_request(self, request: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]: ...
        def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]: ...

else:
    _Scheduler = object


class SchedulerMixin(_Scheduler):
    """Put it before vLLM's Scheduler or AsyncScheduler in the bases of a `scheduler_cls`.

    Requests of a stage that reads are in a step when their next input is there: first when they begin, then at each
    token, until their input has ended. The runner is asked in each step, in one without tokens, too. A request that
    waits keeps its blocks and its place, and is counted as running.

    Requests that failed in the runner, or elsewhere before they began here, end as errors, in the step that says so,
    whose tokens they do not get; their clients are told why (`stop_reason`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = Turns()

    def add_request(self, request: Any) -> None:
        if request.request_id not in self.requests:
            # Otherwise it is a further segment of that one's input.
            self._turns.add(request.request_id)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        asked: list[Asked] = []
        if self._turns.reads is False:
            output = super().schedule(*args, **kwargs)
        else:
            with self._held() as asked:
                output = super().schedule(*args, **kwargs)
        setattr(output, ASKED, asked)
        setattr(output, MADE, self._turns.schedule(output.num_scheduled_tokens.keys(), self.requests))
        return output

    @contextmanager
    def _held(self) -> Iterator[list[Asked]]:
        """The queues without those that wait for input; those of them that the runner is to be told of."""
        may_run = self._turns.may_run
        running, most = self.running, self.max_num_running_reqs
        self.running = [request for request in running if may_run(request)]
        # Those that are kept back are running all the same.
        self.max_num_running_reqs -= len(running) - len(self.running)
        awake = {request.request_id for request in self.running}
        queues = [(queue, list(queue)) for queue in (self.waiting, self.skipped_waiting)]
        kept = [[request for request in before if not may_run(request)] for _, before in queues]
        for (queue, _), back in zip(queues, kept, strict=True):
            queue.remove_requests(back)
        try:
            yield self._turns.ask([*kept[0], *kept[1]])
        finally:
            left = {request.request_id for request in self.running}
            known = {request.request_id for request in running}
            # Who was in the step and is no longer running was preempted.
            stayed = [r for r in running if r.request_id in left or r.request_id not in awake]
            self.running = [*stayed, *(r for r in self.running if r.request_id not in known)]
            self.max_num_running_reqs = most
            for (queue, before), back in zip(queues, kept, strict=True):
                _put_back(queue, before, back)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        fed = getattr(model_runner_output, FED, None)
        held = scheduler_output.num_scheduled_tokens.keys()
        new = self._turns.hear(getattr(scheduler_output, MADE), held, fed)
        told: Mapping[str, str] = getattr(model_runner_output, FAILURES, {})
        failed = {engine_id: why for engine_id, why in told.items() if engine_id not in new}
        # Before the engine hears of their tokens: the last of them would end them as if nothing had happened.
        ended = self._end(list(failed)) if failed else []
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in ended:
            _say(outputs, request, failed[request.request_id])
        return outputs

    def _end(self, engine_ids: Sequence[str]) -> list[Any]:
        from vllm.v1.request import RequestStatus

        return self.finish_requests(engine_ids, RequestStatus.FINISHED_ERROR)


def _say(outputs: dict[int, Any], request: Any, why: str) -> None:
    """To the request's client: that it ended, and why."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    said = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=why,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
    outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(said)


def _put_back(queue: Any, before: Sequence[Any], kept: Sequence[Any]) -> None:
    """Those that were kept back stand where they stood, behind what is new in the queue, such as who was preempted."""
    if not kept:
        return
    place = {request.request_id: number for number, request in enumerate(before)}
    there = list(queue)
    new = [request for request in there if request.request_id not in place]
    old = [request for request in there if request.request_id in place]
    queue.remove_requests(there)
    for request in (*new, *sorted([*old, *kept], key=lambda request: place[request.request_id])):
        queue.add_request(request)
