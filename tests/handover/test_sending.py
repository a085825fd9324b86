"""What was sent is what it was; steps behind the model keep their order, wait for room, and fail like others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import connector
from connector import errors
from runner_adapter.outbox import Outbox
from tests.handover.links import (
    AUDIO,
    CONFIG,
    FROM,
    IDS,
    TO,
    Gate,
    Link,
    ids,
    read,
    received,
    with_calls,
)

#: The requests of these tests.
RIDS = [*"abcdrst", "good", "bad", "bad-1", "held", "waits", "queued", "req-a-b", *(f"r{i}" for i in range(8))]

BOTH = pytest.mark.parametrize("background", [False, True], ids=["inline", "background"])


BROKER = {"put_timeout": 2.0}


# -- the model's next step ------------------------------------------------------------------------


@BOTH
def test_what_was_sent_is_what_it_was_when_send_returned(pair: Link, background: bool) -> None:
    """B16: the model writes its next step into the same tensors at once, 200 times."""
    outbox = pair.outbox(background=background)
    buffer = torch.empty(4, 8, dtype=torch.int64)
    for step in range(200):
        buffer.fill_(step)
        outbox.send(step, {"r": {IDS: buffer[1:3], AUDIO: buffer.t()[2]}}, last=["r"] if step == 199 else [])
        buffer.fill_(-1)
    found = received(pair, "r")
    assert [chunk["r-thinker_input_ids"] for chunk in found] == [[[step] * 8] * 2 for step in range(200)]
    assert [chunk["r-codes.audio"] for chunk in found] == [[step] * 4 for step in range(200)]
    outbox.finish("r")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BOTH
def test_what_was_sent_from_a_device_is_what_it_was(pair: Link, background: bool) -> None:
    """Also where the model works on a stream of its own."""
    outbox = pair.outbox(background=background)
    with torch.cuda.stream(torch.cuda.Stream()):
        buffer = torch.empty(1 << 18, dtype=torch.int32, device="cuda")
        for step in range(20):
            buffer.fill_(step)
            outbox.send(step, {"r": {IDS: buffer[:8]}, "s": {IDS: buffer}}, last=["r", "s"] if step == 19 else [])
            buffer.fill_(-1)
    assert [chunk["r-thinker_input_ids"] for chunk in received(pair, "r")] == [[step] * 8 for step in range(20)]


# -- behind the model -----------------------------------------------------------------------------


def test_steps_behind_the_model_are_put_in_order_and_finish_stands_behind_them(pair: Link) -> None:
    gate = Gate()
    outbox, calls = with_calls(pair, instead={"a": gate}, background=True)
    outbox.send(1, {"a": ids(1)})
    assert gate.reached.wait(60.0)
    outbox.send(2, {"b": ids(2)})
    outbox.finish("b")
    outbox.send(3, {"b": ids(3)}, last=["b"])
    assert calls.puts == [["a"]]
    gate.open.set()
    outbox.flush()
    assert calls.puts == [["a"], ["b"], ["b"]]
    assert received(pair, "b") == [{"b-thinker_input_ids": [2]}, {}]
    pair.reader.finish("b")
    assert received(pair, "b") == [{"b-thinker_input_ids": [3]}]


def test_what_waits_behind_the_model_is_a_copy(pair: Link) -> None:
    gate = Gate()
    outbox, _ = with_calls(pair, instead={"a": gate}, background=True)
    outbox.send(1, {"a": ids(1)})
    assert gate.reached.wait(60.0)
    buffer = torch.full((4,), 7)
    outbox.send(2, {"r": {IDS: buffer[1:]}}, last=["r"])
    buffer.fill_(-1)
    gate.open.set()
    assert received(pair, "r") == [{"r-thinker_input_ids": [7, 7, 7]}]


def test_a_send_waits_while_depth_steps_are_under_way(pair: Link) -> None:
    """The gate opens when a send has begun to wait, so that no step could have been left out or queued beyond."""
    gate = Gate()
    outbox, calls = with_calls(pair, instead={"a": gate}, background=True, depth=2)

    def watch() -> None:
        while not outbox.counters["waited"] and not done.wait(0.001):
            pass
        seen.append((outbox.counters["waited"], list(calls.puts)))
        gate.open.set()

    seen: list[Any] = []
    done = threading.Event()
    watcher = threading.Thread(target=watch)
    outbox.send(1, {"a": ids(1)})
    assert gate.reached.wait(60.0)
    watcher.start()
    outbox.send(2, {"b": ids(2)})
    for rid in "cde":
        outbox.finish(rid)
    outbox.send(3, {"b": ids(3)}, last=["b"])
    done.set()
    watcher.join()
    assert seen == [(1, [["a"]])]
    assert len(received(pair, "b")) == 2


def test_a_failure_of_a_finished_use_is_not_the_next_ones(pair: Link) -> None:
    """The former use's put fails behind the model, when the rid is in use again."""
    gate = Gate()
    inbox = pair.inbox()
    outbox, calls = with_calls(pair, background=True)

    def fail_once() -> None:
        del calls.instead["r"]
        gate()
        raise errors.PayloadTooLarge("no", rid="r")

    calls.instead["r"] = fail_once
    outbox.send(1, {"r": ids(1)})
    assert gate.reached.wait(60.0)
    outbox.finish("r")
    outbox.send(2, {"r": ids(2)}, last=["r"])
    gate.open.set()
    outbox.flush()
    assert outbox.failures() == {}
    assert outbox.counters["failed"] == 1
    pair.settle()
    assert read(inbox.pull(["r"]).payloads) == {"r": [[2]]}


def test_close_puts_what_is_queued(pair: Link) -> None:
    outbox = pair.outbox(background=True)
    for step in range(5):
        outbox.send(step, {"r": ids(step)}, last=["r"] if step == 4 else [])
    outbox.close()
    outbox.close()
    assert [chunk["r-thinker_input_ids"] for chunk in received(pair, "r")] == [[0], [1], [2], [3], [4]]
    with pytest.raises(errors.ClientClosed):
        outbox.send(9, {"r": ids(9)})


def test_close_fails_at_both_ends_what_it_cannot_put_in_time(pair: Link) -> None:
    """The pool is full, and nobody reads: the put under way is ended, the queued one is not begun."""
    outbox, calls = with_calls(pair, background=True, timeout=60.0)
    big = {IDS: torch.zeros(5 << 20, dtype=torch.uint8)}
    outbox.send(1, {"held": big})
    outbox.flush()
    outbox.send(2, {"waits": big})
    outbox.send(3, {"queued": ids(1)})
    outbox.close(timeout=0.0)
    assert sorted(outbox.failures()) == ["queued", "waits"]
    assert ["queued"] not in calls.puts
    for rid in ("waits", "queued"):
        with pytest.raises(errors.RequestAborted):
            pair.reader.edge(FROM, TO).take(rid, timeout=0.0)


def test_what_the_thread_raises_that_is_no_refusal_is_raised_by_the_next_call(pair: Link) -> None:
    def broken() -> None:
        raise RuntimeError("a device error")

    outbox, _ = with_calls(pair, instead={"r": broken}, background=True)
    outbox.send(1, {"r": ids(1)})
    with pytest.raises(RuntimeError, match="a device error"):
        outbox.flush()


def test_flush_says_when_it_is_not_done_in_time(pair: Link) -> None:
    gate = Gate()
    outbox, _ = with_calls(pair, instead={"r": gate}, background=True)
    outbox.send(1, {"r": ids(1)})
    with pytest.raises(errors.Unavailable):
        outbox.flush(timeout=0.0)
    gate.open.set()
    outbox.flush()


def test_depth_is_one_at_least(pair: Link) -> None:
    with pytest.raises(errors.UsageError):
        Outbox(pair.sender, pair.out(), CONFIG, background=True, depth=0)


def test_aborts_do_not_wait_one_by_one_for_a_broker_that_is_away() -> None:
    """A broker that has ended: eight requests fail at once, each told."""
    with connector.connect(stage=FROM, embedded=True, pool="8MiB", log_level="error") as node:
        outbox = Outbox(node, node.edge(FROM, TO), CONFIG, timeout=0.0)
        rids = [f"r{i}" for i in range(8)]
        outbox.send(1, {rid: ids(1) for rid in rids})
        outbox.flush()
        # As of a broker that is not private, and may come back.
        node._link._ended = None
        node._broker.end(0.0)  # type: ignore[union-attr]
        outbox.send(2, {rid: ids(2) for rid in rids})
        assert {type(error) for error in outbox.failures().values()} <= {errors.BrokerLost, errors.BrokerStopping}
        assert node.answer_timeout == 10.0
