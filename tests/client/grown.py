"""Streams whose chunks share blocks: put while nothing of their writer leaves, and read meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import connector
from connector.arena import blocks
from connector.client.growing import Step
from connector.client.outgoing import Ticket
from connector.core.names import Edge, Handle
from connector.wire import messages as msg

HANG = 30.0
#: Rounds after which what has not come about never will.
MANY = 200


def value(number: int, rows: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(number, number + rows), "y": torch.full((1, 4), float(number))}


@contextmanager
def unsaid(node: connector.Node) -> Iterator[None]:
    """What the node says meanwhile is sent afterwards, but for what a put that waits for room has queued."""
    session: Any = node.session
    collect = session.collect

    def collected() -> list[msg.Message]:
        waits = any(type(r.message) is msg.Reserve and not r.message.ahead for r in session.requests)
        return collect() if waits else []

    session.collect = collected
    try:
        yield
    finally:
        session.collect = collect
        session.push()


@contextmanager
def unread(node: connector.Node) -> Iterator[None]:
    """What comes to the node meanwhile lies in its sockets."""
    inlet: Any = node.session.drain
    with inlet.__self__._reading:
        yield


def handle(payload: connector.Payload) -> Handle:
    return payload._told.handle


class Streams:
    """So many streams of one edge, and what was put to and read of each."""

    def __init__(self, endpoint: str, count: int, rows: int = 8, alone: bool = False) -> None:
        """`rows`: of a chunk; `alone`: the reader is elsewhere."""
        self.writer = connector.connect(stage="a", endpoint=endpoint)
        self.out = self.writer.edge("a", "b")
        if not alone:
            self.reader = connector.connect(stage="b", endpoint=endpoint)
            self.into = self.reader.edge("a", "b")
        self.rids = [f"r{number}" for number in range(count)]
        self.rows = rows
        self.sent: dict[str, list[int]] = {rid: [] for rid in self.rids}
        self.came = dict.fromkeys(self.rids, 0)
        self.values = 0
        #: The stream that was put to last.
        self.last = ""

    def put(self, rid: str, rows: int = 0, **how: Any) -> Ticket:
        """The stream's next chunk, unlike any other's."""
        self.values, self.last = self.values + 1, rid
        # Before it is put: what is interrupted may come, too.
        self.sent[rid].append(self.values)
        return self.out.put(rid, value(self.values, rows or self.rows), **{"last": False, **how})

    def put_all(self, rids: Sequence[str] = ()) -> list[Ticket]:
        return [self.put(rid) for rid in rids or self.rids]

    def read(self) -> dict[str, list[connector.Payload]]:
        """All that was put and not read yet: each chunk as it was put, in its stream's order."""
        found: dict[str, list[connector.Payload]] = {}
        while any(self.came[rid] < len(sent) for rid, sent in self.sent.items()):
            assert self.into.wait(HANG)
            polled = self.into.poll()
            assert not polled.failed
            for rid, payloads in polled.items():
                for payload in payloads:
                    self.is_next(rid, payload)
                    found.setdefault(rid, []).append(payload)
        return found

    def is_next(self, rid: str, payload: connector.Payload) -> None:
        index, number = payload.index, self.sent[rid][self.came[rid]]
        assert (payload.rid, index) == (rid, self.came[rid])
        meant = value(number, len(payload["x"]))
        assert list(payload) == list(meant)
        assert all(torch.equal(payload[key], tensor) for key, tensor in meant.items())
        self.came[rid] += 1

    def begin(self) -> None:
        """Until a round of chunks shares blocks."""
        self.into.poll()
        self.warm()
        for _ in range(MANY):
            self.settle()
            with unsaid(self.writer):
                self.put_all()
                found = self.read()
            if len({handle(payloads[0]) for payloads in found.values()}) < len(self.rids) / 2:
                self.settle()
                return
        raise AssertionError("no chunks shared a block")

    def warm(self) -> None:
        """Until every stream's next chunk may go the short way."""
        for _ in range(MANY):
            self.put_all()
            self.read()
            self.settle()
            if all(map(self.is_again, self.rids)):
                return
        raise AssertionError("not all streams are told directly")

    def settle(self) -> None:
        """All that both said was heard, and blocks that were asked for have come."""
        for node in (self.reader, self.writer):
            node.flush()
            node.status()

    def step(self) -> Step | None:
        return self.writer.session.growing.step

    def headers(self, found: Sequence[connector.Payload]) -> dict[Handle, int]:
        """How many payloads the blocks of these have, as their headers say, which pass their checks."""
        arena = self.writer.session.arena
        assert arena is not None
        lengths = {handle(payload): payload._told.length for payload in found}
        return {
            one: blocks.read_header(arena, one.offset, length, one.generation).members
            for one, length in lengths.items()
        }

    def is_again(self, rid: str) -> bool:
        stream = self.writer.session.outgoing.streams.get((Edge("a", "b"), rid))
        return stream is not None and stream.again is not None


def left(node: connector.Node) -> list[int]:
    """What is left at the broker, and what it has seen wrong."""
    status = node.status()
    return [int(status[name]) for name in ("payloads", "reserved_bytes", "violations", "puts_refused")]


@contextmanager
def nothing_left(streams: Streams, host: connector.Node) -> Iterator[Streams]:
    """Close both ends; nothing is left at the broker, which has refused nothing."""
    refused = left(host)[3]
    with streams.writer, streams.reader:
        yield streams
        streams.settle()
        assert left(host)[0] == 0
        for node in (streams.writer, streams.reader):
            for rid in streams.rids:
                node.finish(rid)
    assert left(host) == [0, 0, 0, refused]
