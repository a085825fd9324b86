"""Aborts and the uses of a rid: who hears, who does not say it again, and that the next use is spared."""

from __future__ import annotations

import pytest
import torch

from connector import errors
from runner_adapter import RunnerAdapter
from tests.client.held import deaf
from tests.handover.links import CONFIG, FROM, IDS, TO, Link, ids, keyed, read
from tests.handover.middle import Middle, hidden, only_reads, plan_of

RIDS = ["r", "other", "a", "b"]


@pytest.mark.parametrize("background", [False, True])
def test_a_request_whose_first_put_fails_fails_at_the_reader_that_has_begun_it(pair: Link, background: bool) -> None:
    inbox, outbox = pair.inbox(), pair.outbox(background=background)
    for rid in ("r", "other"):
        inbox.begin(rid)
    outbox.send(1, {"r": {IDS: torch.tensor(1).to_sparse()}, "other": ids(1)})
    outbox.flush()
    pair.settle()
    arrived = inbox.pull(["r", "other"])
    assert {rid: type(error) for rid, error in arrived.failed.items()} == {"r": errors.RequestAborted}
    assert "UnsupportedTensor" in str(arrived.failed["r"])
    assert read(arrived.payloads) == {"other": [[1]]}


def test_a_stage_hears_the_failure_of_a_request_of_which_nothing_came(pair: Link) -> None:
    adapter = only_reads(pair)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    pair.sender.abort("a", "made no first token")
    pair.settle()
    adapter.receive()
    found = adapter.failures()
    assert found.keys() == {"a"} and "made no first token" in str(found["a"])


@pytest.mark.parametrize("came", [True, False])
def test_an_abort_that_is_heard_late_is_not_the_next_uses(pair: Link, came: bool) -> None:
    """This stage aborts by another node; its inbox hears when the rid is in use again."""
    inbox, edge = pair.inbox(), pair.out()
    inbox.begin("r")
    if came:
        edge.put("r", keyed("r", 1), last=False)
        pair.settle()
        inbox.pull(["r"])
    with deaf(pair.reader):
        pair.sender.abort("r", "away")
        inbox.fail("r", errors.RequestAborted("away", rid="r"))
        inbox.finish("r")
        inbox.begin("r")
    pair.settle()
    assert not inbox.pull(["r"])
    pair.sender.finish("r")
    edge.put("r", keyed("r", 2), last=True)
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (read(arrived.payloads), arrived.ended, arrived.failed) == ({"r": [[2]]}, {"r"}, {})


def test_a_use_behind_an_aborted_one_of_which_nothing_came_is_finished(pair: Link) -> None:
    """The stage took no part in the aborted one; in the next nothing comes; the third is all its own."""
    inbox, outbox = pair.inbox(), pair.outbox()
    outbox.begin("r")
    outbox.abort("r", "the first")
    outbox.finish("r")
    pair.settle()
    for step in (2, 3):
        outbox.begin("r")
        inbox.begin("r")
        pair.settle()
        if step == 3:
            outbox.send(step, {"r": ids(step)}, last=["r"])
            pair.settle()
            arrived = inbox.pull(["r"])
            assert (read(arrived.payloads), arrived.ended) == ({"r": [[3]]}, {"r"})
        outbox.finish("r")
        inbox.finish("r")
        pair.settle()


def test_an_abort_that_is_heard_between_two_uses_is_not_the_next_ones(pair: Link) -> None:
    outbox = pair.outbox()
    for step in (1, 2):
        outbox.begin("r")
        outbox.send(step, {"r": ids(step)}, last=["r"])
        assert outbox.failures() == {}
        payload = pair.reader.edge(FROM, TO).take("r", timeout=10.0)
        assert payload["r-thinker_input_ids"].tolist() == [step]
        del payload
        outbox.finish("r")
        pair.reader.finish("r")
        pair.settle()
        # Of a use that is over everywhere: nobody can say whose it was.
        pair.reader.abort("r", "a client that left late")
        pair.reader.finish("r")
        pair.settle()


def test_a_request_that_another_stage_aborted_is_finished_without_a_word(
    pair: Link, caplog: pytest.LogCaptureFixture
) -> None:
    """Its stream has no END to say, and that is no failure."""
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    pair.settle()
    pair.reader.abort("r", "cancelled")
    pair.settle()
    outbox.finish("r")
    assert caplog.messages == [] and outbox.counters["failed"] == 0
    outbox.send(2, {"r": ids(2)}, last=["r"])
    assert outbox.failures() == {}


def test_an_abort_that_was_heard_is_not_said_again(pair: Link) -> None:
    """It could meet what others have begun under the rid since."""
    said: list[str] = []
    adapter = RunnerAdapter(
        object(), CONFIG, inbox=pair.inbox(), abort=lambda rid, reason: said.append(f"{rid}: {reason[:12]}")
    )
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    pair.out().put("a", keyed("a", 1), last=False)
    pair.out().put("b", {"of no template": torch.ones(1)}, last=False)
    pair.sender.abort("a")
    pair.settle()
    adapter.receive()
    assert {rid: type(error) for rid, error in adapter.failures().items()} == {
        "a": errors.RequestAborted,
        "b": errors.InvalidPayload,
    }
    assert said == ["b: InvalidPaylo"]


def test_a_failed_put_is_one_abort(pair: Link) -> None:
    middle, plan = Middle(pair), plan_of(a=1)
    before = pair.sender.counters()["aborts"]
    middle.adapter.begin_step(new=["a"], scheduled=["a"])
    middle.adapter.send(plan, hidden(plan), beside={"a": {IDS: torch.tensor(1).to_sparse()}})
    assert middle.adapter.failures().keys() == {"a"}
    assert pair.sender.counters()["aborts"] == before + 1
