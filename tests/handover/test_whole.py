"""One payload a request: a sender that merges a request's steps, and a reader that waits for all of it."""

from __future__ import annotations

import pytest
import torch

from connector import errors
from runner_adapter import MergeRules
from tests.handover.links import AUDIO, CONFIG, IDS, Link, ids, keyed, with_calls

GROWS = MergeRules(accumulated=[IDS])


RIDS = ["r", "s"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("how", ["end", "finish"])
def test_a_requests_steps_are_one_payload_when_it_ends(pair: Link, background: bool, how: str) -> None:
    """Rows that grow are all in it, another name as the last step had it; a buffer may be used again at once."""
    outbox, calls = with_calls(pair, background=background, whole=GROWS)
    inbox = pair.inbox(full_payload=True)
    scratch = torch.zeros(1, dtype=torch.int64)
    for step in (1, 2, 3):
        scratch.fill_(step)
        last = ["r"] if how == "end" and step == 3 else []
        outbox.send(step, {"r": {IDS: scratch, AUDIO: scratch + 10}, "s": {IDS: scratch}}, last)
        scratch.fill_(99)
    if how == "finish":
        outbox.finish("r")
    outbox.flush()
    pair.settle()
    assert calls.puts == [["r"]] and outbox.counters["chunks"] == 1
    assert inbox.waiting(["r", "s"]) == {"s"}
    arrived = inbox.pull(["r", "s"])
    assert arrived.ended == {"r"} and not arrived.failed
    (payload,) = arrived.payloads["r"]
    assert {key: tensor.tolist() for key, tensor in payload.items()} == {
        "r-thinker_input_ids": [1, 2, 3],
        "r-codes.audio": [13],
    }
    if how == "end":
        outbox.finish("r")
    assert list(outbox) == ["s"]


def test_a_request_that_hands_nothing_on_is_an_empty_payload(pair: Link) -> None:
    outbox, inbox = pair.outbox(whole=GROWS), pair.inbox(full_payload=True)
    outbox.send(1, {"r": {"hidden_states.layers[7]": torch.ones(1)}}, ["r"])
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (arrived.payloads, arrived.ended) == ({"r": [{}]}, {"r"})


def test_rows_that_do_not_fit_fail_their_request_alone_at_both_ends(pair: Link) -> None:
    outbox, inbox = pair.outbox(whole=GROWS), pair.inbox(full_payload=True)
    inbox.begin("r")
    outbox.send(1, {"r": ids(1), "s": ids(1)})
    outbox.send(2, {"r": {IDS: torch.ones(1, 2)}, "s": ids(2)}, ["r", "s"])
    failed = outbox.failures()
    assert {rid: type(error) for rid, error in failed.items()} == {"r": errors.InvalidPayload}
    assert failed["r"].facts["name"] == IDS and failed["r"].facts["rid"] == "r"
    outbox.finish("r")
    pair.settle()
    arrived = inbox.pull(["r", "s"])
    assert arrived.failed.keys() == {"r"} and arrived.ended == {"s"}
    assert arrived.payloads["s"][0]["s-thinker_input_ids"].tolist() == [1, 2]


@pytest.mark.parametrize("whole", [GROWS, None], ids=["whole", "chunks"])
def test_what_comes_behind_the_end_is_a_failure(pair: Link, whole: MergeRules | None) -> None:
    """At this end, not a loss without a word."""
    outbox = pair.outbox(whole=whole)
    outbox.send(1, {"r": ids(1)}, ["r"])
    outbox.send(2, {"r": ids(2)})
    assert isinstance(outbox.failures()["r"], errors.StreamEnded)


def test_a_request_that_failed_hands_nothing_on_and_its_next_use_starts_empty(pair: Link) -> None:
    outbox, inbox = pair.outbox(whole=GROWS), pair.inbox(full_payload=True)
    outbox.send(1, {"r": ids(1)})
    outbox.abort("r", "away")
    outbox.finish("r")
    outbox.send(2, {"r": ids(2)}, ["r"])
    pair.settle()
    arrived = inbox.pull(["r"])
    assert [payload["r-thinker_input_ids"].tolist() for payload in arrived.payloads["r"]] == [[2]]


@pytest.mark.parametrize("how", ["end", "finish"])
def test_a_reader_of_one_payload_takes_an_end_that_comes_alone(pair: Link, how: str) -> None:
    """Of a sender that does not know at its payload that it is the last."""
    inbox, outbox = pair.inbox(full_payload=True), pair.outbox(CONFIG)
    outbox.send(1, {"r": ids(1)})
    pair.settle()
    assert inbox.waiting(["r"]) == {"r"}
    if how == "end":
        outbox.send(2, {}, ["r"])
    outbox.finish("r")
    pair.settle()
    arrived = inbox.pull(["r"])
    assert arrived.ended == {"r"} and not arrived.failed
    assert [payload["r-thinker_input_ids"].tolist() for payload in arrived.payloads["r"]] == [[1]]
    pair.out().put("s", keyed("s", 1), last=False)
    pair.out().put("s", keyed("s", 2), last=True)
    pair.settle()
    assert isinstance(inbox.pull(["s"]).failed["s"], errors.InvalidPayload)
