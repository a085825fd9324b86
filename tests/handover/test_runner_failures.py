"""A request that fails: its neighbours and its runner hear it, and the next of its id is another."""

from __future__ import annotations

import logging

import pytest
import torch

from connector import errors
from runner_adapter.failing import Failing
from runner_adapter.runner import Received, RunnerAdapter
from tests.handover.links import CONFIG, IDS, TO, Link, ids, keyed
from tests.handover.middle import NEXT, Middle, hidden, only_reads, plan_of
from tests.runner_adapter.models import HookModel, flat, raises

BROKER = {"put_timeout": 5.0}
RIDS = ["a", "b", "c"]


def test_a_failure_is_told_to_both_neighbours_at_once(middle: Middle) -> None:
    middle.put("a", 1)
    middle.adapter.begin_step(new=["a"], scheduled=["a"])
    middle.adapter.receive()
    middle.adapter.fail("a", ValueError("a reason"))
    with pytest.raises(errors.RequestAborted, match="ValueError: a reason"):
        middle.take("a")
    middle.pair.settle()
    with pytest.raises(errors.RequestAborted, match="ValueError: a reason"):
        middle.before.put("a", keyed("a", 2))


def test_a_stage_that_only_reads_tells_by_its_node(pair: Link) -> None:
    adapter, edge = only_reads(pair), pair.out()
    edge.put("a", keyed("a", 1))
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.fail("a", ValueError("a reason"))
    pair.settle()
    with pytest.raises(errors.RequestAborted, match="ValueError: a reason"):
        edge.put("a", keyed("a", 2))


def test_a_stage_that_only_reads_and_cannot_tell_is_refused(pair: Link) -> None:
    with pytest.raises(errors.UsageError):
        RunnerAdapter(object(), CONFIG, inbox=pair.inbox())


def test_a_failure_is_given_to_the_runner_once_until_it_is_finished() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.fail("a", ValueError("first"))
    adapter.fail("a", ValueError("second"))
    assert str(adapter.failures()["a"]) == "first"
    assert adapter.failures() == {}
    adapter.begin_step(finished=["a"])
    assert adapter._failed.errors == {}
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.fail("a", ValueError("another request's"))
    assert str(adapter.failures()["a"]) == "another request's"


def test_a_hand_over_that_is_refused_later_fails_its_request(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.send(plan, hidden(plan), beside={"a": {IDS: torch.tensor(1).to_sparse()}})
    assert {rid: type(error) for rid, error in adapter.failures().items()} == {"a": errors.UnsupportedTensor}


def test_input_of_a_request_that_failed_is_not_merged(middle: Middle) -> None:
    adapter = middle.adapter
    middle.put("a", 1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.fail("a", ValueError("away"))
    assert adapter.receive() == Received(set(), set())
    assert adapter.buffer["a"] == {}


@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
def test_a_hook_that_fails_is_told_to_the_next_stage_at_once(pair: Link, hook: str) -> None:
    model = HookModel(a=raises(ValueError("of a")))
    middle, plan = Middle(pair, model), plan_of(a=1)
    middle.adapter.begin_step(new=["a"], scheduled=["a"])
    middle.adapter.send(plan, hidden(plan), beside={"a": ids(1)})
    if hook == "preprocess":
        middle.adapter.preprocess(plan, torch.tensor([5]))
    else:
        middle.adapter.postprocess(plan, hidden(plan))
    with pytest.raises(errors.RequestAborted, match="of a"):
        list(middle.after.edge(TO, NEXT).stream("a", timeout=10.0))


def test_only_a_live_request_fails() -> None:
    adapter = RunnerAdapter(HookModel(a=raises(ValueError("of a row"))))
    with pytest.raises(errors.UnknownRequest):
        adapter.fail("a", ValueError("whose?"))
    # A row of no request.
    adapter.preprocess(plan_of(a=1), torch.tensor([5]))
    assert adapter.failures() == {}
    adapter.begin_step(new={"a": {"x": torch.tensor(1)}}, scheduled=["a"])
    adapter.bring({"a": {"y": torch.tensor(2)}})
    assert flat(adapter.buffer.nested("a")) == {"x": 1, "y": 2} and adapter.failures() == {}


def test_the_next_request_of_an_id_whose_input_ended_gets_its_own_input(middle: Middle) -> None:
    adapter = middle.adapter
    for number in (1, 2):
        middle.put("a", number, last=True)
        adapter.begin_step(new=["a"], scheduled=["a"])
        assert not adapter.input_ended("a")
        assert adapter.receive() == Received({"a"}, {"a"})
        assert flat(adapter.buffer["a"]) == {"a-thinker_input_ids": [number]}
        adapter.begin_step(finished=["a"])
        middle.pair.sender.finish("a")
        middle.pair.settle()


@pytest.mark.parametrize("settled", [True, False])
def test_the_next_request_of_an_id_that_failed_gets_its_own_input(middle: Middle, settled: bool) -> None:
    adapter = middle.adapter
    middle.put("a", 1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.receive()
    adapter.fail("a", ValueError("away"))
    if settled:
        middle.pair.settle()
    adapter.begin_step(finished=["a"])
    middle.pair.sender.finish("a")
    middle.put("a", 2, last=True)
    adapter.begin_step(new=["a"], scheduled=["a"])
    assert adapter.receive() == Received({"a"}, {"a"})
    assert flat(adapter.buffer["a"]) == {"a-thinker_input_ids": [2]}
    assert adapter.failures() == {}


def test_the_others_hear_an_abort_of_each_request_in_a_thousand_characters() -> None:
    told: list[tuple[str, object]] = []

    class Input:
        def fail(self, rid: str, error: Exception) -> None:
            told.append((rid, type(error)))

    failing = Failing(Input(), lambda rid, reason: told.append((rid, len(reason))))
    for _ in range(2):
        failing.add("a", ValueError("x" * 2000))
        failing.settle()
        failing.forget("a")
    # To an inbox it is one: of what is aborted it finishes nothing, which could be the next request's.
    assert told == [("a", errors.RequestAborted), ("a", 1000)] * 2


def test_a_failure_is_logged_once_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new=["a"], scheduled=["a"])
    with caplog.at_level(logging.ERROR, "runner_adapter"):
        adapter.fail("a", ValueError("a reason"))
        adapter.fail("a", ValueError("a reason"))
    assert [record.getMessage() for record in caplog.records] == ["request failed: rid='a' ValueError: a reason"]


def test_a_broker_that_is_away_does_not_stop_the_step(caplog: pytest.LogCaptureFixture) -> None:
    def away(rid: str, reason: str) -> None:
        raise errors.BrokerLost("the broker does not answer")

    failing = Failing(None, away)
    failing.add("a", ValueError("first"))
    failing.add("b", ValueError("second"))
    assert list(failing.errors) == ["a", "b"]
    assert sum("when the broker is back" in record.getMessage() for record in caplog.records) == 2
