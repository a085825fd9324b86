"""Whom a scheduler keeps back, over stand-ins of vLLM's objects; tests/engines has the genuine ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from runner_adapter.adapters.vllm import SchedulerMixin
from runner_adapter.adapters.vllm.telling import ASKED, Asked, Fed, tell

Status = Enum("Status", "WAITING RUNNING PREEMPTED WAITING_FOR_REMOTE_KVS WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")


class Queue(deque[Any]):
    def remove_requests(self, requests: Iterable[Any]) -> None:
        for one in list(requests):
            self.remove(one)

    def add_request(self, one: Any) -> None:
        self.append(one)


class Engine:
    """A scheduler: all that run, then those that wait, while there are places. What they wait for besides is there."""

    def __init__(self, places: int) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting, self.skipped_waiting = Queue(), Queue()
        self.max_num_running_reqs = places
        #: To be preempted in the next step.
        self.victims: set[str] = set()

    def add_request(self, one: Any) -> None:
        if one.request_id not in self.requests:
            self.requests[one.request_id] = one
            self.waiting.append(one)

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


class Scheduling(SchedulerMixin, Engine):
    """Its runner says whose input is there."""

    def add(self, *rids: str, status: Status = Status.WAITING) -> None:
        for rid in rids:
            self.add_request(SimpleNamespace(request_id=rid, status=status, is_prefill_chunk=False))

    def leave(self, *rids: str) -> None:
        for rid in rids:
            one = self.requests.pop(rid)
            for queue in (self.running, self.waiting):
                if one in queue:
                    queue.remove(one)

    def hear(self, made: Any, here: str = "", whole: str = "") -> list[str]:
        self.update_from_output(made, tell(SimpleNamespace(), {}, Fed(frozenset(here), frozenset(whole))))
        return list(made.num_scheduled_tokens)

    def step(self, here: str = "", whole: str = "") -> list[str]:
        """Who was in the step; then whose input is there."""
        return self.hear(self.schedule(), here, whole)

    @property
    def queue(self) -> str:
        return "".join(one.request_id for one in self.waiting)

    @property
    def batch(self) -> str:
        return "".join(one.request_id for one in self.running)


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
    assert scheduling.batch == "ba"


def test_one_that_is_kept_back_has_its_place_in_the_batch(scheduling: Scheduling) -> None:
    scheduling.add("a", "b", "c")
    scheduling.step("abc")
    assert scheduling.step("c") == ["a", "b"]
    assert scheduling.step() == [] and scheduling.max_num_running_reqs == 2
    assert scheduling.queue == "c"


def test_those_that_wait_to_begin_keep_their_order(scheduling: Scheduling) -> None:
    scheduling.add("a", "b", "c", "d")
    scheduling.step("c")
    assert scheduling.queue == "abcd"
    assert scheduling.step() == ["c"]
    assert scheduling.queue == "abd"


def test_who_may_begin_and_finds_no_place_begins_before_those_that_came_later(scheduling: Scheduling) -> None:
    """Whether the runner says it again or not, and whoever is kept back behind it."""
    scheduling.add("a", "b", "c", "d")
    scheduling.step("abc")
    scheduling.step("ab")
    for newcomer in "efg":
        scheduling.add(newcomer)
        assert scheduling.step("ab" + newcomer) == ["a", "b"]
    assert scheduling.queue == "cdefg"
    scheduling.leave("a")
    assert scheduling.step() == ["b", "c"]


def test_a_request_whose_step_is_under_way_is_in_no_further_one(scheduling: Scheduling) -> None:
    """Unless its input has ended."""
    scheduling.add("a", "b")
    scheduling.step("ab")
    first = scheduling.schedule()
    assert scheduling.schedule().num_scheduled_tokens == {}
    scheduling.hear(first, "ab", "b")
    second, third = scheduling.schedule(), scheduling.schedule()
    assert (list(second.num_scheduled_tokens), list(third.num_scheduled_tokens)) == (["a", "b"], ["b"])


def test_a_prompt_that_is_read_in_parts_is_not_kept_back_between_them(scheduling: Scheduling) -> None:
    scheduling.add("a")
    scheduling.step("a")
    assert scheduling.step() == ["a"]
    scheduling.running[0].is_prefill_chunk = True
    assert scheduling.step() == ["a"]


@pytest.mark.parametrize("status", [Status.WAITING_FOR_REMOTE_KVS, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR])
def test_what_the_engine_waits_for_does_not_stand_for_input(scheduling: Scheduling, status: Status) -> None:
    """It may be there in the step in which the engine looks, and then the request runs. One that has begun is the
    engine's."""
    scheduling.add("a", status=status)
    assert scheduling.step() == []
    assert scheduling.step("a") == []
    assert scheduling.step() == ["a"]
    scheduling.running[0].status = status
    assert scheduling.step() == ["a"]


def test_a_preempted_request_is_in_one_queue(scheduling: Scheduling) -> None:
    scheduling.add("a", "b")
    scheduling.step("ab")
    scheduling.step("a")
    scheduling.add("c", "d")
    scheduling.victims = {"a"}
    assert scheduling.step("b") == []
    assert (scheduling.batch, scheduling.queue) == ("b", "acd")


def test_a_runner_is_told_once_of_those_that_wait_to_begin(scheduling: Scheduling) -> None:
    asked = []
    for added in ("ab", "c", ""):
        scheduling.add(*added)
        made = scheduling.schedule()
        scheduling.hear(made)
        asked.append(getattr(made, ASKED))
    assert asked == [[Asked("a", None), Asked("b", None)], [Asked("c", None)], []]


@pytest.mark.parametrize("begun", [True, False])
def test_an_id_that_is_used_again_is_a_request_that_waits(scheduling: Scheduling, begun: bool) -> None:
    """What was said of the one before is nothing to it, nor what a step says that was made before it was added."""
    scheduling.add("a")
    scheduling.step("a")
    if begun:
        scheduling.step(whole="a")
    under_way = scheduling.schedule()
    scheduling.leave("a")
    scheduling.add("a")
    scheduling.hear(under_way, "a", "a")
    made = scheduling.schedule()
    assert scheduling.hear(made, "a") == [] and getattr(made, ASKED) == [Asked("a", None)]
    assert scheduling.step() == ["a"]


def test_a_further_segment_of_a_request_is_no_other_request(scheduling: Scheduling) -> None:
    scheduling.add("a")
    scheduling.step("a")
    assert scheduling.step(whole="a") == ["a"]
    scheduling.add("a")
    assert scheduling.step() == ["a"]


def test_a_runner_that_reads_nothing_keeps_nobody_back(scheduling: Scheduling) -> None:
    """It is asked all the same: one that reads would say so, whatever it said before."""
    scheduling.add("a")
    made = scheduling.schedule()
    assert getattr(made, ASKED) == [Asked("a", None)]
    scheduling.update_from_output(made, SimpleNamespace())
    made = scheduling.schedule()
    assert list(made.num_scheduled_tokens) == ["a"] and getattr(made, ASKED) == []
    scheduling.hear(made)
    assert scheduling.step() == []


def test_an_output_that_says_nothing_changes_nothing(scheduling: Scheduling) -> None:
    scheduling.add("a", "b")
    scheduling.step("a")
    scheduling.update_from_output(scheduling.schedule(), SimpleNamespace())
    assert scheduling.queue == "b"
    assert scheduling.step("b") == ["a"]


def test_what_is_known_of_requests_that_left_is_forgotten(scheduling: Scheduling) -> None:
    for number in range(2000):
        scheduling.add(f"r{number}")
        made = scheduling.schedule()
        scheduling.update_from_output(made, tell(SimpleNamespace(), {}, Fed(frozenset([f"r{number}"]))))
        scheduling.schedule()
        scheduling.leave(f"r{number}")
    turns = scheduling._turns
    assert len(turns._told) + len(turns._ready) + len(turns._begun) < 1000
