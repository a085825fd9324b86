"""What arrived waits for its step: by request and life, owned, each once; and finish is the receiver's half."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from connector import Node, errors
from runner_adapter.inbox import Inbox
from runner_adapter.outbox import Outbox
from tests.handover.links import CONFIG, FROM, TO, Link, ids, keyed, link, read


@pytest.fixture
def pair(endpoint: str) -> Iterator[Link]:
    with link(endpoint) as made:
        yield made
        gc.collect()
        made.settle()
        assert list(made.sender.payloads()) == [], "no payload is left at the broker"


def put(pair: Link, rid: str, *numbers: int, last: bool = False) -> None:
    pair.out().put(rid, keyed(rid, *numbers), last=last)


def live(node: Node) -> int:
    """Payloads that the broker still keeps a block for."""
    node.status()
    return len(list(node.payloads()))


# -- what a step gets -----------------------------------------------------------------------------


def test_a_step_gets_what_came_for_its_requests_and_the_rest_waits(pair: Link) -> None:
    inbox = pair.inbox()
    for rid in "abc":
        pair.out().put(rid, keyed(rid, ord(rid)))
    pair.settle()
    first = inbox.pull(["c"])
    assert (read(first.payloads), first.ended) == ({"c": [[99]]}, {"c"})
    second = inbox.pull(["b", "unknown", "a"])
    assert (read(second.payloads), second.ended) == ({"b": [[98]], "a": [[97]]}, {"a", "b"})
    assert list(second.payloads) == ["b", "a"], "in the step's order"
    for rid in "abc":
        inbox.finish(rid)
    assert list(inbox) == []


def test_chunks_of_several_rows_keep_their_order_across_steps(pair: Link) -> None:
    """1, 1, 4 and 2 rows in four chunks are eight rows, whenever the steps come (B17)."""
    inbox = pair.inbox()
    got = []
    for chunk, last in (([0], False), ([1], False), ([2, 3, 4, 5], False), ([6, 7], True)):
        put(pair, "r", *chunk, last=last)
        pair.settle()
        if chunk[0] != 1:
            got.append(inbox.pull(["r"]))
    assert [read(step.payloads) for step in got] == [{"r": [[0]]}, {"r": [[1], [2, 3, 4, 5]]}, {"r": [[6, 7]]}]
    assert [step.ended for step in got] == [set(), set(), {"r"}]
    inbox.finish("r")


def test_a_pull_finds_nothing_and_does_not_wait(pair: Link) -> None:
    inbox = pair.inbox()
    arrived = inbox.pull(["r"])
    assert not arrived
    assert (arrived.payloads, arrived.ended, arrived.failed) == ({}, set(), {})
    assert list(inbox) == []


def test_what_waits_is_a_copy_and_its_block_goes_back_at_once(pair: Link) -> None:
    inbox = pair.inbox()
    put(pair, "later", 1, last=True)
    put(pair, "now", 2, last=True)
    pair.settle()
    arrived = inbox.pull(["now"])
    assert live(pair.reader) == 1, "what the step got lies in shared memory"
    del arrived
    assert live(pair.reader) == 0, "the other does not"
    assert read(inbox.pull(["later"]).payloads) == {"later": [[1]]}
    assert inbox.counters == {"given": 2, "kept": 1, "dropped": 0}
    for rid in ("now", "later"):
        inbox.finish(rid)


def test_rids_are_not_claimed(pair: Link) -> None:
    """The node's other callers see at `poll` what comes next."""
    inbox = pair.inbox()
    put(pair, "r", 1)
    pair.settle()
    inbox.pull(["r"])
    put(pair, "r", 2, last=True)
    pair.settle()
    assert read(pair.reader.edge(FROM, TO).poll()) == {"r": [[2]]}
    inbox.finish("r")


# -- END and failure ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["with the last chunk", "alone", "by finish"])
@pytest.mark.parametrize("when", ["before the pull", "between two", "nobody there yet"])
def test_a_stream_ends_once_with_all_its_data(pair: Link, how: str, when: str) -> None:
    """B62, all of its ways."""
    inbox = pair.inbox() if when != "nobody there yet" else None
    steps = []

    def step() -> None:
        pair.settle()
        if inbox is not None:
            steps.append(inbox.pull(["r"]))

    put(pair, "r", 1)
    if when == "between two":
        step()
    if how == "with the last chunk":
        put(pair, "r", 2, last=True)
    else:
        put(pair, "r", 2)
        if when == "between two":
            step()
        pair.out().end("r") if how == "alone" else pair.sender.finish("r")
    inbox = inbox or pair.inbox()
    step()
    step()
    assert [n for found in steps for chunk in found.payloads.get("r", []) for n in read({"r": [chunk]})["r"][0]] == [
        1,
        2,
    ]
    assert [found.ended for found in steps].count({"r"}) == 1
    assert not steps[-1]
    inbox.finish("r")


def test_an_end_without_a_payload_is_an_end(pair: Link) -> None:
    inbox = pair.inbox()
    pair.out().end("r")
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (arrived.payloads, arrived.ended) == ({}, {"r"})
    inbox.finish("r")


def test_an_empty_payload_in_a_stream_is_given_and_an_empty_last_one_is_the_end(pair: Link) -> None:
    inbox = pair.inbox()
    pair.out().put("r", {}, last=False)
    pair.out().put("r", {}, last=True)
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (arrived.payloads, arrived.ended) == ({"r": [{}]}, {"r"})
    inbox.finish("r")


def test_a_failure_is_given_once_behind_what_came_before(pair: Link) -> None:
    inbox = pair.inbox()
    put(pair, "r", 1)
    pair.settle()
    inbox.waiting(["r"])
    pair.sender.abort("r", "no more")
    pair.settle()
    arrived = inbox.pull(["r"])
    assert read(arrived.payloads) == {"r": [[1]]}
    assert arrived.ended == set()
    assert isinstance(arrived.failed["r"], errors.RequestAborted)
    assert arrived.failed["r"].facts["reason"] == "no more"
    assert not inbox.pull(["r"])
    inbox.finish("r")


def test_a_writer_that_leaves_before_its_end_fails_its_request(pair: Link) -> None:
    """B64: nobody is parked for a chunk that never comes."""
    inbox = pair.inbox()
    with link(pair.endpoint) as other:
        other.out().put("r", keyed("r", 1), last=False)
        other.settle()
    pair.settle()
    arrived = inbox.pull(["r"])
    assert read(arrived.payloads) == {"r": [[1]]}
    assert isinstance(arrived.failed["r"], errors.WriterDied)
    inbox.finish("r")


# -- finish --------------------------------------------------------------------------------------


def test_finish_drops_what_is_unread_and_what_still_comes(pair: Link) -> None:
    inbox = pair.inbox()
    put(pair, "r", 1)
    put(pair, "r", 2)
    pair.settle()
    inbox.waiting(["r"])
    put(pair, "r", 3)
    pair.settle()
    inbox.finish("r")
    assert inbox.counters["dropped"] == 3
    put(pair, "r", 4, last=True)
    pair.settle()
    assert not inbox.pull(["r"])
    assert list(inbox) == []
    assert live(pair.reader) == 0


def test_a_stage_that_is_done_with_its_input_goes_on_sending(pair: Link) -> None:
    """PR, third fix: a middle stage finishes the receiver's half in the middle of its own stream."""
    inbox = pair.inbox()
    with link(pair.endpoint) as onward:
        out = onward.sender.edge(TO, "code2wav")
        outbox = Outbox(onward.sender, out, CONFIG)
        put(pair, "r", 1, last=True)
        pair.settle()
        inbox.pull(["r"])
        outbox.send(1, {"r": ids(10)})
        inbox.finish("r")
        outbox.send(2, {"r": ids(20)}, last=["r"])
        onward.settle()
        found = list(onward.reader.edge(TO, "code2wav").stream("r", timeout=10.0))
        assert read({"r": found}) == {"r": [[10], [20]]}
        del found
        outbox.finish("r")


def test_a_node_has_one_inbox_or_outbox(pair: Link) -> None:
    """Its finish would end what the other does; the error says what to do."""
    inbox = pair.inbox()
    for make in (lambda: Outbox(pair.reader, pair.reader.edge(TO, "x"), CONFIG), pair.inbox):
        with pytest.raises(errors.UsageError, match="connector.connect") as caught:
            make()
        assert caught.value.facts["owner"] == "Inbox"
    del inbox, caught
    gc.collect()
    pair.inbox()


def test_who_cannot_be_the_reader_hears_it_when_the_inbox_is_made(pair: Link) -> None:
    inbox = pair.inbox()
    other = pair.node(TO)
    with pytest.raises(errors.ReaderTaken):
        Inbox(other, other.edge(FROM, TO))
    del inbox


# -- full payloads --------------------------------------------------------------------------------


def test_a_request_waits_until_its_full_payload_is_there(pair: Link) -> None:
    inbox = pair.inbox(full_payload=True)
    assert inbox.waiting(["a", "b"]) == {"a", "b"}
    put(pair, "a", 1, last=True)
    put(pair, "b", 2)
    pair.settle()
    assert inbox.waiting(["a", "b"]) == {"b"}
    arrived = inbox.pull(["a", "b"])
    assert (read(arrived.payloads), arrived.ended) == ({"a": [[1]]}, {"a"})
    assert live(pair.reader) == 0, "what waited is a copy"
    pair.out().end("b")
    pair.settle()
    assert inbox.waiting(["a", "b"]) == set()
    assert read(inbox.pull(["b"]).payloads) == {"b": [[2]]}
    for rid in "ab":
        inbox.finish(rid)


def test_an_empty_full_payload_is_a_payload(pair: Link) -> None:
    """A request of which nothing was left to send is ready, with nothing (B06, B65)."""
    inbox = pair.inbox(full_payload=True)
    pair.out().put("r", {})
    pair.settle()
    assert inbox.waiting(["r"]) == set()
    arrived = inbox.pull(["r"])
    assert (arrived.payloads, arrived.ended) == ({"r": [{}]}, {"r"})
    inbox.finish("r")


def test_a_stream_where_a_full_payload_is_expected_fails_its_request_alone(pair: Link) -> None:
    """B67: the stages were set up for different modes."""
    inbox = pair.inbox(full_payload=True)
    put(pair, "r", 1)
    put(pair, "r", 2)
    put(pair, "s", 3, last=True)
    pair.settle()
    arrived = inbox.pull(["r", "s"])
    assert read(arrived.payloads) == {"s": [[3]]}
    assert isinstance(arrived.failed["r"], errors.InvalidPayload)
    assert arrived.failed["r"].facts["index"] == 1
    put(pair, "r", 4, last=True)
    pair.settle()
    assert not inbox.pull(["r", "s"])
    for rid in "rs":
        inbox.finish(rid)


def test_a_full_payload_that_never_comes_is_a_failure_and_no_hang(pair: Link) -> None:
    inbox = pair.inbox(full_payload=True)
    pair.out().end("r")
    pair.settle()
    assert inbox.waiting(["r"]) == set()
    assert isinstance(inbox.pull(["r"]).failed["r"], errors.InvalidPayload)
    inbox.finish("r")


def test_without_full_payload_a_request_waits_for_its_next_chunk(pair: Link) -> None:
    inbox = pair.inbox()
    put(pair, "r", 1)
    pair.settle()
    assert inbox.waiting(["r", "s"]) == {"s"}
    inbox.pull(["r"])
    assert inbox.waiting(["r"]) == {"r"}
    pair.out().end("r")
    pair.settle()
    assert inbox.waiting(["r"]) == set()
    inbox.pull(["r"])
    assert inbox.waiting(["r"]) == set(), "nothing more is to come"
    inbox.finish("r")


# -- nobody's -------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_nobody_asks_for_is_dropped_after_patience_and_whoever_asks_later_is_told(pair: Link) -> None:
    clock = Clock()
    inbox = pair.inbox(patience=60.0, clock=clock)
    put(pair, "asked", 1)
    put(pair, "stray", 2)
    pair.settle()
    inbox.waiting(["asked"])
    clock.now += 60.0
    inbox.pull(())
    assert inbox.counters["dropped"] == 0
    clock.now += 0.1
    inbox.pull(())
    assert inbox.counters["dropped"] == 1
    arrived = inbox.pull(["asked", "stray"])
    assert read(arrived.payloads) == {"asked": [[1]]}
    assert isinstance(arrived.failed["stray"], errors.Unclaimed)
    put(pair, "stray", 3, last=True)
    pair.settle()
    assert not inbox.pull(["stray"]), "the broker drops what still comes"
    for rid in ("asked", "stray"):
        inbox.finish(rid)
    assert list(inbox) == []


def test_rids_that_were_nobodys_are_forgotten_in_the_end(pair: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner_adapter.inbox.MOST_UNCLAIMED", 2)
    clock = Clock()
    inbox = pair.inbox(patience=1.0, clock=clock)
    for rid in "abcd":
        put(pair, rid, 1, last=True)
    pair.settle()
    inbox.pull(())
    clock.now += 2.0
    inbox.pull(())
    assert list(inbox) == ["c", "d"]
    inbox.validate()


def test_tensors_of_the_inbox_are_the_bits_that_were_put(pair: Link) -> None:
    """As views and as copies: empty, 0-dim, bfloat16, bool."""
    inbox = pair.inbox()
    payload = {
        "e": torch.empty(0, 3),
        "s": torch.tensor(False),
        "h": torch.tensor([-0.0, float("nan"), 1.5]).bfloat16(),
    }
    for rid in ("view", "copy"):
        pair.out().put(rid, payload)
    pair.settle()
    found = {**inbox.pull(["view"]).payloads, **inbox.pull(["copy"]).payloads}
    for rid in ("view", "copy"):
        (got,) = found[rid]
        assert {k: (t.dtype, t.shape) for k, t in got.items()} == {k: (t.dtype, t.shape) for k, t in payload.items()}
        assert torch.equal(got["h"].view(torch.int16), payload["h"].view(torch.int16))
        inbox.finish(rid)
    del found, got


def test_an_inbox_tells_which_rids_it_knows(pair: Link) -> None:
    inbox: Inbox = pair.inbox()
    put(pair, "r", 1, last=True)
    pair.settle()
    inbox.pull(())
    assert ("r" in inbox, "s" in inbox, list(inbox)) == (True, False, ["r"])
    inbox.finish("r")
    assert "r" not in inbox
