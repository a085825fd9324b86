"""SchedulerMixin over vLLM's genuine schedulers: requests of a stage that reads run when their input is there."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

import connector
from connector import Node
from runner_adapter.adapters.vllm import SchedulerMixin, V1RunnerMixin, V2RunnerMixin
from runner_adapter.inbox import Inbox
from tests.engines.v2_twins import TwinRunner, v2
from tests.engines.vllm_steps import (
    TRANSFER,
    Loop,
    PlainModel,
    StageModel,
    foreign,
    numbers,
    settings,
    v1,
    with_adapter,
)


class VllmRunner(V1RunnerMixin, CPUModelRunner):
    pass


class OmniRunner(V1RunnerMixin, OmniGPUModelRunner, CPUModelRunner):
    pass


class V2Runner(V2RunnerMixin, TwinRunner):
    pass


KINDS = {"vllm": (v1, VllmRunner), "omni": (v1, OmniRunner), "v2": (v2, V2Runner)}


class Talker:
    """A stage that reads, and the one before it."""

    def __init__(self, broker: Node, kind: str, **own: Any) -> None:
        self.sender = connector.connect(stage="thinker", endpoint=broker.endpoint)
        self.reader = connector.connect(stage="talker", endpoint=broker.endpoint)
        self.out = self.sender.edge("thinker", "talker")
        make, runner = KINDS[kind]
        inbox = Inbox(self.reader, self.reader.edge("thinker", "talker"), full_payload=own.pop("full_payload", False))
        options = {"transfer": TRANSFER, "inbox": inbox, "abort": self.reader.abort, "form": "keys", **own}
        self.run: Loop = with_adapter(make(runner, settings(), PlainModel()), **options)

    def close(self) -> None:
        for node in (self.sender, self.reader):
            node.close()

    def put(self, rid: str, number: int, last: bool = False) -> None:
        self.out.put(rid, {f"{rid}-row": torch.tensor([number])}, last=last)
        self.settle()

    def settle(self) -> None:
        for node in (self.sender, self.reader):
            node.status()

    def step(self) -> dict[str, int]:
        """Whom it held, and the row that each was given last."""
        output = self.run.step()
        if not output.num_scheduled_tokens:
            return {}
        maps = self.run.runner.model.seen[-1]["model_intermediate_buffer"]
        return {rid: numbers(maps[rid]).get(f"{rid}-row", [0])[0] for rid in output.num_scheduled_tokens}

    def steps(self, count: int) -> list[dict[str, int]]:
        """Those of so many steps that held anybody."""
        return [held for _ in range(count) if (held := self.step())]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def talker(broker: Node, kind: str) -> Iterator[Talker]:
    made = Talker(broker, kind)
    yield made
    made.close()


def test_a_request_is_in_a_step_when_its_next_input_is_there(talker: Talker) -> None:
    """From its prompt on, until the input has ended: then it goes on alone."""
    talker.run.add("A", 1, 2, tokens=5)
    assert talker.steps(3) == []
    for number in (1, 2, 3):
        talker.put("A", number, last=number == 3)
        assert talker.steps(1 if number == 3 else 3) in ([{"A": number}], []), "none without its row"
    assert talker.steps(5) == [{"A": 3}] * 3
    assert talker.run.tokens == {"A": [3, 4, 5, 6, 7]}
    assert talker.run.adapter.input_ended("A") is False and talker.run.ended.keys() == {"A"}


def test_others_run_while_a_request_waits_which_keeps_its_map_and_its_place(talker: Talker) -> None:
    for rid in "AB":
        talker.run.add(rid, 1, tokens=6)
        talker.put(rid, 1)
    assert talker.steps(4) == [{"A": 1, "B": 1}]
    for number in (2, 3):
        talker.put("B", number)
        assert talker.steps(3) == [{"B": number}]
    talker.put("A", 2)
    talker.put("B", 4)
    assert talker.steps(3) == [{"A": 2, "B": 4}]
    assert [request.request_id for request in talker.run.scheduler.running] == ["A", "B"]


def test_those_that_wait_count_as_running(talker: Talker) -> None:
    """The engine's batch has eight places."""
    rids = [f"r{number}" for number in range(9)]
    for rid in rids:
        talker.run.add(rid, 1, tokens=2)
    for rid in rids[:8]:
        talker.put(rid, 1)
    assert [sorted(held) for held in talker.steps(3)] == [rids[:8]]
    talker.put("r8", 1, last=True)
    assert talker.steps(3) == []
    talker.put("r3", 2, last=True)
    assert talker.steps(4) == [{"r3": 2}, {"r8": 1}, {"r8": 1}]


def test_those_that_wait_to_begin_keep_their_order(talker: Talker) -> None:
    for rid in "ABCD":
        talker.run.add(rid, 1)
    talker.put("C", 1)
    assert talker.steps(2) == [{"C": 1}]
    assert [request.request_id for request in talker.run.scheduler.waiting] == ["A", "B", "D"]
    for rid in "DB":
        talker.put(rid, 1)
    assert [list(held) for held in talker.steps(3)] == [["B", "D"]]


def test_requests_wait_by_priority_too(talker: Talker) -> None:
    scheduler = talker.run.scheduler
    scheduler.policy = type(scheduler.policy)("priority")
    scheduler.waiting = create_request_queue(scheduler.policy)
    for rid in "AB":
        talker.run.add(rid, 1)
    scheduler.requests["A"].priority = 1
    talker.put("A", 1)
    assert talker.steps(3) == [{"A": 1}]
    assert [request.request_id for request in scheduler.waiting] == ["B"]


def test_a_preempted_request_waits_for_the_row_that_comes_next(talker: Talker) -> None:
    for rid in "AB":
        talker.run.add(rid, *range(1, 31), tokens=8)
        talker.put(rid, 1)
    assert talker.steps(2) == [{"A": 1, "B": 1}]
    scheduler = talker.run.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    assert talker.steps(3) == []
    talker.put("B", 2)
    assert talker.steps(3) == [{"B": 2}]


def test_with_full_payloads_a_request_begins_when_its_payload_is_there(broker: Node, kind: str) -> None:
    talker = Talker(broker, kind, full_payload=True)
    try:
        talker.run.add("A", 1, tokens=3)
        assert talker.steps(2) == []
        talker.put("A", 7, last=True)
        assert talker.steps(6) == [{"A": 7}] * 3
    finally:
        talker.close()


def test_no_step_is_made_ahead_of_a_row(broker: Node, kind: str) -> None:
    """Of a step whose output is not back nobody knows whether its next row has come."""
    talker = Talker(broker, kind, late=True)
    run = talker.run
    try:
        run.add("A", 1, tokens=4)
        talker.put("A", 1)
        run.step()
        under_way = run.schedule()
        assert under_way.num_scheduled_tokens == {"A": 1}
        ahead = run.schedule()
        assert ahead.num_scheduled_tokens == {}
        for output in (under_way, ahead):
            run.update(output, run.run(output))
        assert talker.steps(2) == []
        talker.put("A", 2, last=True)
        assert talker.steps(2) == [{"A": 2}]
        # The input has ended: steps are made ahead again.
        first, second = run.schedule(), run.schedule()
        assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"A": 1}, {"A": 1})
        for output in (first, second):
            run.update(output, run.run(output))
        assert len(run.tokens["A"]) == 4
    finally:
        talker.close()


@pytest.mark.parametrize("begun", [True, False])
def test_a_request_that_fails_elsewhere_while_it_waits_ends(talker: Talker, begun: bool) -> None:
    talker.run.add("A", 1)
    talker.run.add("B", 1)
    if begun:
        talker.put("A", 1)
    else:
        talker.out.open("A")
    talker.steps(3)
    talker.sender.abort("A", "the thinker broke", mine=True)
    talker.settle()
    talker.steps(3)
    ended = talker.run.ended
    assert ended.keys() == {"A"} and ended["A"].finish_reason is FinishReason.ERROR
    assert "the thinker broke" in ended["A"].stop_reason
    talker.put("B", 1)
    assert talker.steps(3) == [{"B": 1}]


@pytest.mark.parametrize("places", ["free", "none"])
def test_a_request_that_failed_before_it_was_submitted_ends_without_having_run(talker: Talker, places: str) -> None:
    """Also while those that run, and wait for their rows, have all places."""
    rids = [f"r{number}" for number in range(8 if places == "none" else 0)]
    for rid in rids:
        talker.run.add(rid, 1, tokens=3)
        talker.put(rid, 1)
    talker.steps(3)
    talker.out.open("A")
    talker.sender.abort("A", "made no first token", mine=True)
    talker.settle()
    talker.run.add("A", 1)
    assert talker.steps(4) == []
    assert "made no first token" in talker.run.ended["A"].stop_reason and talker.run.tokens["A"] == []
    assert len(talker.run.scheduler.running) == len(rids) and not talker.run.scheduler.waiting


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_request_that_fails_in_its_last_step_fails(kind: str, tokens: int) -> None:
    """And is not told as one whose tokens are all there; the token of that step is none."""
    make, runner = KINDS[kind]
    model = StageModel()
    run = with_adapter(make(runner, settings(), model))
    for rid in "AB":
        run.add(rid, 1, tokens=tokens)
    for left in range(tokens, 0, -1):
        if left == 1:
            model.raises["A"] = ValueError("broke")
        run.step()
    assert (run.ended["A"].finish_reason, run.ended["B"].finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert run.ended["A"].stop_reason == "ValueError: broke"
    assert [len(run.tokens[rid]) for rid in "AB"] == [tokens - 1, tokens]


def test_a_request_waits_under_the_id_that_its_client_gave_it(talker: Talker) -> None:
    """Where vLLM-Omni is installed it puts that on each request, whichever runner is used; vLLM's own, which a runner
    of its own calls new, have it not."""
    made = Request("A-0123abcd", [1], SamplingParams(max_tokens=2, ignore_eos=True), None)
    made.external_req_id = "A"
    talker.run.scheduler.add_request(made)
    assert talker.steps(2) == []
    talker.put("A", 3, last=True)
    held = [list(output.num_scheduled_tokens) for output in (talker.run.step() for _ in range(4))]
    assert [one for one in held if one] == [["A-0123abcd"]] * 2
    assert numbers(talker.run.runner.model.seen[-1]["model_intermediate_buffer"]["A"]) == {"A-row": [3]}
    assert talker.run.ended["A-0123abcd"].finish_reason is FinishReason.LENGTH


def test_an_id_that_is_used_again_waits_for_its_own_input(talker: Talker) -> None:
    """The one before had all of its own."""
    talker.run.add("A", 1, tokens=2)
    talker.put("A", 1, last=True)
    assert talker.steps(4) == [{"A": 1}] * 2
    talker.run.add("A", 1, tokens=1)
    assert talker.steps(3) == []
    talker.sender.finish("A")
    talker.put("A", 5, last=True)
    assert talker.steps(3) == [{"A": 5}]


def test_structured_output_waits_for_input_too(talker: Talker) -> None:
    """Its grammar is ready first, in the step in which the engine would run it."""
    talker.run.add("A", 1, tokens=1)
    waiting = talker.run.scheduler.requests["A"]
    waiting.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    waiting.structured_output_request = SimpleNamespace(grammar=object())
    assert talker.steps(3) == []
    talker.sender.abort("A", "broke")
    talker.settle()
    assert talker.steps(3) == []
    assert talker.run.ended["A"].finish_reason is FinishReason.ERROR


def test_a_request_that_leaves_while_it_waits_leaves_nothing(talker: Talker) -> None:
    talker.run.add("A", 1)
    talker.steps(2)
    talker.put("A", 1)
    talker.run.abort("A")
    talker.steps(3)
    assert "A" not in talker.run.adapter.inbox
    talker.settle()
    assert talker.reader.status()["payloads"] == 0


def test_a_stage_that_reads_nothing_keeps_nobody_waiting(kind: str) -> None:
    make, runner = KINDS[kind]
    run = with_adapter(make(runner, settings(), PlainModel()))
    run.add("A", 1, tokens=2)
    assert [run.step().num_scheduled_tokens for _ in range(2)] == [{"A": 1}] * 2
    assert run.tokens == {"A": [2, 3]}


def test_the_mixin_overrides_what_it_means_to_and_nothing_else(talker: Talker) -> None:
    assert foreign(SchedulerMixin, Scheduler, {"add_request", "schedule", "update_from_output"}) == set()
