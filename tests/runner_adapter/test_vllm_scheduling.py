"""What runner and scheduler tell each other, over stand-ins of vLLM's objects; tests/engines has the genuine ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from runner_adapter.adapters.vllm import SchedulerMixin
from runner_adapter.adapters.vllm.scheduling import ASKED, FED, Asked, Fed, tell
from runner_adapter.adapters.vllm.steps import Steps
from runner_adapter.runner import RunnerAdapter
from tests.runner_adapter.test_vllm_steps import CONFIG, output, request

Status = Enum("Status", "WAITING RUNNING PREEMPTED WAITING_FOR_REMOTE_KVS")


class Queue(deque[Any]):
    def remove_requests(self, requests: Iterable[Any]) -> None:
        for one in requests:
            self.remove(one)

    def prepend_request(self, one: Any) -> None:
        self.appendleft(one)


class Engine:
    """A scheduler: all that run, then those that wait, while there are places."""

    def __init__(self, places: int) -> None:
        self.running: list[Any] = []
        self.waiting, self.skipped_waiting = Queue(), Queue()
        self.max_num_running_reqs = places
        #: To be preempted in the next step.
        self.victims: set[str] = set()

    def schedule(self, throttle: bool = False) -> Any:
        for one in [one for one in self.running if one.request_id in self.victims]:
            self.running.remove(one)
            one.status = Status.PREEMPTED
            self.waiting.appendleft(one)
        while self.waiting and not self.victims and len(self.running) < self.max_num_running_reqs:
            self.running.append(self.waiting.popleft())
            self.running[-1].status = Status.RUNNING
        self.victims = set()
        return SimpleNamespace(num_scheduled_tokens={one.request_id: 1 for one in self.running})

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        return {}

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        return []


class Scheduling(SchedulerMixin, Engine):
    """Its runner says whose input is there."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        # What follows there needs vLLM.
        self._under_way -= type(self._under_way)(scheduler_output.num_scheduled_tokens.keys())
        self._fed = getattr(model_runner_output, FED, None)
        return {}

    def add(self, *rids: str, status: Status = Status.WAITING) -> None:
        for rid in rids:
            self.waiting.append(SimpleNamespace(request_id=rid, status=status, is_prefill_chunk=False))

    def step(self, here: str = "", whole: str = "") -> list[str]:
        """Who was in the step; then whose input is there."""
        made = self.schedule()
        self.update_from_output(made, tell(SimpleNamespace(), {}, Fed(frozenset(here), frozenset(whole))))
        return list(made.num_scheduled_tokens)


@pytest.fixture
def scheduling() -> Scheduling:
    return Scheduling(2)


def test_a_request_is_in_a_step_when_its_input_is_there(scheduling: Scheduling) -> None:
    scheduling.add("a", "b")
    assert scheduling.step("b") == []
    assert scheduling.step("") == ["b"]
    assert scheduling.step("ab") == []
    assert scheduling.step("a") == ["b", "a"]
    assert scheduling.step(whole="b") == ["a"]
    assert [scheduling.step(whole="b") for _ in range(2)] == [["b"], ["b"]]
    assert [one.request_id for one in scheduling.running] == ["b", "a"]


def test_one_that_is_kept_back_has_its_place_in_the_batch(scheduling: Scheduling) -> None:
    scheduling.add("a", "b", "c")
    scheduling.step("abc")
    assert scheduling.step("c") == ["a", "b"]
    assert scheduling.step() == [] and scheduling.max_num_running_reqs == 2
    assert [one.request_id for one in scheduling.waiting] == ["c"]


def test_those_that_wait_to_begin_keep_their_order(scheduling: Scheduling) -> None:
    scheduling.add("a", "b", "c", "d")
    scheduling.step("c")
    assert [one.request_id for one in scheduling.waiting] == ["a", "b", "c", "d"]
    assert scheduling.step() == ["c"]
    assert [one.request_id for one in scheduling.waiting] == ["a", "b", "d"]


def test_a_request_whose_step_is_under_way_is_in_no_further_one(scheduling: Scheduling) -> None:
    """Unless its input has ended."""
    scheduling.add("a", "b")
    scheduling.step("ab")
    first = scheduling.schedule()
    assert scheduling.schedule().num_scheduled_tokens == {}
    scheduling.update_from_output(first, tell(SimpleNamespace(), {}, Fed(frozenset("ab"), frozenset("b"))))
    second, third = scheduling.schedule(), scheduling.schedule()
    assert (list(second.num_scheduled_tokens), list(third.num_scheduled_tokens)) == (["a", "b"], ["b"])


def test_a_prompt_that_is_read_in_parts_is_not_kept_back_between_them(scheduling: Scheduling) -> None:
    scheduling.add("a")
    scheduling.step("a")
    assert scheduling.step() == ["a"]
    scheduling.running[0].is_prefill_chunk = True
    assert scheduling.step() == ["a"]


def test_what_the_engine_waits_for_is_the_engines(scheduling: Scheduling) -> None:
    scheduling.add("a", status=Status.WAITING_FOR_REMOTE_KVS)
    assert scheduling.step() == ["a"]


def test_a_preempted_request_is_in_one_queue(scheduling: Scheduling) -> None:
    scheduling.add("a", "b")
    scheduling.step("ab")
    scheduling.step("a")
    scheduling.victims = {"a"}
    assert scheduling.step("b") == []
    assert [one.request_id for one in scheduling.running] == ["b"]
    assert [one.request_id for one in scheduling.waiting] == ["a"]


def test_a_runner_that_reads_nothing_keeps_nobody_back(scheduling: Scheduling) -> None:
    scheduling.add("a")
    made = scheduling.schedule()
    assert getattr(made, ASKED) == [Asked("a", None)]
    scheduling.update_from_output(made, SimpleNamespace())
    assert list(scheduling.schedule().num_scheduled_tokens) == ["a"]


# -- the runner -----------------------------------------------------------------------------------


class Source:
    """An inbox that has input for some."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.begun: list[str] = []
        self.waits: list[float] = []

    def begin(self, rid: str) -> None:
        self.begun.append(rid)

    def finish(self, rid: str) -> None:
        self.here.discard(rid)

    def waiting(self, rids: Iterable[str]) -> set[str]:
        return set(rids) - self.here

    def pull(self, rids: Iterable[str]) -> Any:
        return SimpleNamespace(payloads={}, ended=set(), failed={})

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        return False


class Run:
    def __init__(self, source: Source | None) -> None:
        inbox: Any = source
        adapter = RunnerAdapter(object(), inbox=inbox, abort=lambda rid, reason: None)
        self.steps = Steps(adapter, object(), CONFIG, embeds=False)

    def step(self, made: Any, *asked: str) -> Fed | None:
        setattr(made, ASKED, [Asked(rid, None) for rid in asked])
        self.steps.take(made)
        self.steps.begin(made)
        if made.num_scheduled_tokens:
            rids = list(made.num_scheduled_tokens)
            self.steps.plan(rids, dict.fromkeys(rids, 1), dict.fromkeys(rids, 0), padded_tokens=len(rids))
            self.steps.after((None, {}), lambda plan: {})
        return self.steps.fed


def empty(**more: Any) -> Any:
    made = output(**more)
    made.num_scheduled_tokens = {}
    return made


def test_a_runner_tells_whose_input_is_there_of_those_that_run_and_those_that_it_is_asked_for() -> None:
    source = Source()
    run = Run(source)
    source.here = {"b"}
    assert run.step(empty(), "a", "b") == Fed(frozenset("b"), frozenset())
    source.here = {"a"}
    assert run.step(output(request("b")), "a") == Fed(frozenset("a"), frozenset())
    run.steps.adapter._ended.add("b")
    assert run.step(empty()) == Fed(frozenset(), frozenset("b"))


def test_a_step_without_requests_waits_a_moment_for_input() -> None:
    source = Source()
    run = Run(source)
    run.step(output(request("a")))
    assert source.waits == []
    run.step(empty(), "b")
    assert len(source.waits) == 1
    run.step(empty(finished=["a"]))
    assert len(source.waits) == 1, "that of a finished one has something to say"


def test_those_that_wait_to_begin_are_expected_once() -> None:
    source = Source()
    run = Run(source)
    for _ in range(3):
        run.step(empty(), "a")
    run.step(empty(), "a", "b")
    assert source.begun == ["a", "b"]


def test_who_is_not_asked_or_reads_nothing_tells_nothing() -> None:
    source = Source()
    run = Run(source)
    made = empty()
    run.steps.take(made)
    run.steps.begin(made)
    assert run.steps.fed is None and source.waits == []
    assert Run(None).step(empty(), "a") is None


def test_an_output_that_is_still_on_its_way_tells_when_it_is_there() -> None:
    late = SimpleNamespace(get_output=lambda: SimpleNamespace(tokens=[1]))
    fed = Fed(frozenset("b"), frozenset())
    assert tell(late, {"a": ValueError("of a")}, fed) is late
    found = late.get_output()
    assert (found.tokens, found.adapter_failures, found.adapter_fed) == ([1], {"a": "ValueError: of a"}, fed)


def test_an_output_of_which_there_is_nothing_to_tell_is_the_same() -> None:
    one = SimpleNamespace()
    assert tell(one, {}, None) is one
