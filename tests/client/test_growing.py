"""Chunks of several streams that share a block and a Seal: who reads them cannot tell."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import connector
from connector.client import growing, reserving
from connector.client.pairs import Pair
from connector.client.session import Session
from connector.core.names import Edge, Handle
from connector.wire import messages as msg
from tests.client.grown import HANG, MANY, Streams, handle, left, nothing_left, unread, unsaid, value


@pytest.fixture
def streams(told_host: connector.Node) -> Iterator[Streams]:
    with nothing_left(Streams(told_host.endpoint, 12), told_host) as made:
        made.begin()
        yield made


def test_many_rounds_are_read_before_the_broker_hears_of_them(streams: Streams, told_host: connector.Node) -> None:
    shared = 0
    for _ in range(40):
        sealed = told_host.status()["payloads_sealed"]
        with unsaid(streams.writer):
            tickets = streams.put_all()
            found = streams.read()
            assert told_host.status()["payloads_sealed"] == sealed
            assert not any(ticket.done() for ticket in tickets)
            shared += len(streams.rids) - len({handle(one) for (one,) in found.values()})
            del found
        streams.settle()
        assert [ticket.result() for ticket in tickets] == ["stored"] * len(streams.rids)
        assert left(told_host)[0] == 0
    assert shared > 300


def joined(streams: Streams) -> Handle:
    """Within `unsaid`: the block of a step that has two chunks and takes more."""
    for _ in range(MANY):
        streams.put_all(streams.rids[:2])
        found = streams.read()
        first, second = (handle(found[rid][-1]) for rid in streams.rids[:2])
        if first == second:
            return first
    raise AssertionError("no chunk joined another")


def where(streams: Streams, rid: str) -> Handle:
    """The block of the stream's one chunk that was put and not read."""
    ((payload,),) = streams.read().values()
    assert payload.rid == rid
    return handle(payload)


def goes_elsewhere(streams: Streams, rid: str, **how: Any) -> Handle:
    """What is put of the stream joins no step that is there, and is right all the same."""
    before = joined(streams)
    streams.put(rid, **how)
    found = where(streams, rid)
    assert found != before
    return found


def test_a_chunk_joins(streams: Streams) -> None:
    """Or those below could not fail."""
    with unsaid(streams.writer):
        before = joined(streams)
        streams.put("r2")
        assert where(streams, "r2") == before


def test_a_second_chunk_of_a_stream_goes_in_another_step(streams: Streams) -> None:
    """The broker has one chunk of a stream in a block that is whole; others may join the other."""
    with unsaid(streams.writer):
        second = goes_elsewhere(streams, "r1")
        streams.put("r2")
        assert where(streams, "r2") == second


def test_a_chunk_of_another_layout_goes_alone_the_first_time(streams: Streams) -> None:
    with unsaid(streams.writer):
        alone = goes_elsewhere(streams, "r2", rows=9)
        streams.put("r3")
        assert where(streams, "r3") != alone


def test_a_stream_of_another_layout_joins_none(streams: Streams) -> None:
    """Its chunks are as long, and what is told of them is not."""
    for _ in range(MANY):
        streams.put("r2", rows=7)
        streams.read()
        streams.settle()
        if streams.is_again("r2"):
            break
    with unsaid(streams.writer):
        goes_elsewhere(streams, "r2", rows=7)


def test_the_last_chunk_goes_alone(streams: Streams) -> None:
    with unsaid(streams.writer):
        before = joined(streams)
        streams.put("r2", last=True)
    assert where(streams, "r2") != before
    assert streams.into.poll().ended <= {"r2"}


def test_a_large_chunk_goes_alone(streams: Streams) -> None:
    for _ in range(3):
        streams.put("r2", rows=1 << 14)
        streams.read()
        streams.settle()
    assert streams.is_again("r2")
    with unsaid(streams.writer):
        goes_elsewhere(streams, "r2", rows=1 << 14)


@pytest.mark.parametrize("word", ["finish", "begin"])
def test_a_use_that_is_new_joins_none(streams: Streams, word: str) -> None:
    """What was said in between is between the two at the broker, too."""
    with unsaid(streams.writer):
        before = joined(streams)
        getattr(streams.writer, word)("r2")
        streams.put("r3")
        assert where(streams, "r3") != before
    streams.reader.finish("r2")
    streams.settle()
    streams.sent["r2"], streams.came["r2"] = [], 0
    streams.put_all()
    streams.read()


def test_a_use_that_the_broker_may_not_know_of_is_no_step_s(streams: Streams) -> None:
    """A dead writer's block is left out whole, if one of its payloads is of a use that was not said."""
    with unsaid(streams.writer):
        joined(streams)
        streams.put_all(streams.rids[5:10])
        streams.read()
        streams.out.open("r2")
        for _ in range(2):
            streams.put("r2")
        found = [handle(payload) for payload in streams.read()["r2"]]
        streams.put("r3")
        assert where(streams, "r3") not in found
        assert len(set(found)) == 2


def test_what_was_taken_meanwhile_is_said_before_what_is_put_then(streams: Streams) -> None:
    back = streams.writer.edge("b", "a")
    back.poll()
    with unsaid(streams.writer):
        streams.reader.edge("b", "a").put("q", value(0))
        assert back.wait(HANG)
        before = joined(streams)
        assert back.poll().ended == {"q"}
        assert streams.writer.session.holds.has_words()
        streams.put("r2")
        alone = where(streams, "r2")
        streams.put("r3")
        assert len({before, alone, where(streams, "r3")}) == 3
        kinds = [type(message) for message in streams.writer.session.out.waiting]
        assert kinds[-3:] == [msg.Release, msg.Seal, msg.Seal]


def test_behind_an_abort_that_was_heard_another_step_is_begun(streams: Streams, told_host: connector.Node) -> None:
    with unsaid(streams.writer):
        before = joined(streams)
        streams.reader.abort("r5", "enough")
        while streams.writer.aborted("r5") is None:
            told_host.status()
        streams.put("r2")
        found = streams.into.poll()
        while "r2" not in found:
            assert streams.into.wait(HANG)
            found |= streams.into.poll()
        assert handle(found["r2"][0]) != before
        streams.is_next("r2", found["r2"][0])


def test_another_edge_has_steps_of_its_own(streams: Streams) -> None:
    """Though it is the same reader that is told."""
    out, into = streams.writer.edge("a", "c"), streams.reader.edge("a", "c")
    into.poll()
    for number in range(MANY):
        out.put("r2", value(number), last=False)
        assert into.wait(HANG)
        into.poll()
        streams.settle()
        stream = streams.writer.session.outgoing.streams[(Edge("a", "c"), "r2")]
        if stream.again is not None:
            break
    with unsaid(streams.writer):
        before = joined(streams)
        out.put("r2", value(MANY), last=False)
        assert into.wait(HANG)
        (payload,) = into.poll()["r2"]
        assert handle(payload) != before
        assert int(payload["x"][0]) == MANY


def test_a_step_of_another_time_takes_no_more(streams: Streams) -> None:
    """What was heard meanwhile is not what the broker is told that its first chunk was put behind."""
    with unsaid(streams.writer):
        before = joined(streams)
        with streams.writer.session.lock:
            streams.writer.session.seen += 1
        streams.put("r2")
        assert where(streams, "r2") != before
        with streams.writer.session.lock:
            streams.writer.session.seen -= 1


def test_a_stream_alone_grows_no_block(told_host: connector.Node) -> None:
    """However fast its puts come: each lies in a block of its own, no larger than ever."""
    with nothing_left(Streams(told_host.endpoint, 1), told_host) as alone:
        alone.into.poll()
        alone.warm()
        alone.put("r0")
        (payload,) = alone.read()["r0"]
        length = payload._told.length
        del payload
        for _ in range(10):
            with unsaid(alone.writer):
                for _ in range(20):
                    alone.put("r0")
                found = alone.read()["r0"]
            assert {one._told.length for one in found} == {length}
            assert len({handle(one) for one in found}) == len(found)
            del found
            alone.settle()


def test_one_chunk_of_a_block_is_kept_while_all_others_go(streams: Streams, told_host: connector.Node) -> None:
    with unsaid(streams.writer):
        before = joined(streams)
        streams.put_all(streams.rids[2:])
        found = streams.read()
        assert sum(handle(payload) == before for (payload,) in found.values()) > 4
        kept = found["r3"][0]["x"][2:]
        assert handle(found.pop("r3")[0]) == before
        del found
    expected = kept.clone()
    for _ in range(20):
        streams.settle()
        assert left(told_host)[0] == 1
        with unsaid(streams.writer):
            streams.put_all()
            streams.read()
    assert torch.equal(kept, expected)
    del kept
    streams.settle()
    assert left(told_host)[0] == 0


def test_chunks_for_a_full_socket_come_in_order(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are told, the rest goes through the broker; a step that was being told ends there."""
    went: list[bool] = []
    send = Pair.send

    def noted(pair: Pair, frame: bytes) -> bool:
        went.append(send(pair, frame))
        return went[-1]

    monkeypatch.setattr(Pair, "send", noted)
    (pair,) = streams.writer.session.pairs.values()
    room = pair.stream.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    for turn in range(10):
        pair.stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096 + 1024 * turn)
        with unsaid(streams.writer), unread(streams.reader):
            tickets = [ticket for _ in range(3) for ticket in streams.put_all()]
        streams.read()
        streams.settle()
        assert {ticket.result() for ticket in tickets} == {"stored"}
        pair.stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        streams.warm()
        assert not all(went)
        went.clear()


def test_in_a_small_pool_no_step_takes_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    at_hand = reserving.at_hand

    def noted(session: Session, edge: Edge, length: int) -> Any:
        lengths.append(length)
        return at_hand(session, edge, length)

    monkeypatch.setattr(growing, "at_hand", noted)
    with connector.connect(stage="host", embedded=True, pool="1MiB", log_level="error", direct=True) as host:
        with nothing_left(Streams(host.endpoint, 12, rows=120), host) as streams:
            streams.begin()
            for _ in range(20):
                before = len(lengths)
                with unsaid(streams.writer):
                    streams.put_all()
                    streams.put_all()
                    streams.read()
                # Steps are begun to the last.
                assert len(lengths) > before
                streams.settle()
    assert max(lengths) <= (1 << 20) // 64


def test_a_seal_that_is_said_again_takes_no_more(streams: Streams) -> None:
    """The broker may have it as it was said first, and then applies no other of its number."""
    writer = streams.writer
    with unread(writer):
        with unsaid(writer):
            before = joined(streams)
            step = streams.step()
            assert step is not None
        # It was sent, and no answer is heard.
        assert not writer.session.out.waiting
        with unsaid(writer):
            with writer.session.lock:
                writer.session.say_again(step.message.number)
            streams.put("r2")
            assert where(streams, "r2") != before
    streams.settle()
    streams.put_all()
    streams.read()
