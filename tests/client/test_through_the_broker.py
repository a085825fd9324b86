"""A stream's next chunk is made ready at both ends, too, where the broker tells the reader of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import connector
from connector.client import again, payload
from connector.core.names import Handle
from connector.wire import messages as msg
from tests.client.told import Stream, both_ends, chunk, hosting
from tests.kill.brokers import BrokerProcess, run_directory


@pytest.fixture
def plain_host() -> Iterator[connector.Node]:
    """Its broker lets nobody tell."""
    with hosting(False) as node:
        yield node


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that a reader opened before they came."""
    found: list[int] = []
    open_ahead = payload.open_ahead

    def opening(told: Any, *where: Any) -> Any:
        found.append(told.index)
        return open_ahead(told, *where)

    monkeypatch.setattr("connector.client.edge.open_ahead", opening)
    return found


def ready(stream: Stream) -> again.Next | None:
    """What the writer has made ready."""
    (known,) = stream.writer.session.outgoing.streams.values()
    return known.again.next if known.again is not None else None


def test_chunks_are_made_ready_and_opened_before_they_come(plain_host: connector.Node, opened: list[int]) -> None:
    stream = Stream(plain_host)
    with both_ends(stream, plain_host):
        held = []
        for value in range(40):
            # Who waits has opened what was named.
            stream.into.wait(0.0)
            stream.out.put("r", chunk(value), last=False)
            held.append(stream.next())
            stream.is_next(held[-1], chunk(value))
        assert not stream.writer.session.pairs
        made = ready(stream)
        assert made is not None and made.index == 40 and made.frame == b""
        assert opened == list(range(opened[0], 40)) and len(opened) > 20
        for value, found in enumerate(held):
            assert torch.equal(found["x"], chunk(value)["x"])
        stream.out.end("r")
        del held, found


@pytest.mark.parametrize(
    "other",
    [
        lambda stream: stream.out.put("r", {"x": torch.arange(3)}, last=False),
        lambda stream: stream.out.put("r", chunk(7), last=False, index=stream.sent, attempt=1),
        lambda stream: stream.out.put("r", {**chunk(7), "z": torch.empty(0)}, last=False),
        lambda stream: stream.out.put("r", {"x": torch.zeros(1 << 15)}, last=False),
    ],
    ids=["shape", "attempt", "key", "large"],
)
def test_what_was_opened_in_vain_is_no_payload(
    plain_host: connector.Node, opened: list[int], other: Callable[[Stream], object]
) -> None:
    stream = Stream(plain_host)
    with both_ends(stream, plain_host):
        for value in range(8):
            stream.out.put("r", chunk(value), last=False)
            stream.is_next(stream.next(), chunk(value))
        assert ready(stream) is not None
        stream.into.wait(0.0)
        other(stream)
        found = stream.next()
        assert found.index == 8 and len(found) in (1, 2, 3)
        del found
        stream.sent = 9
        for value in range(9, 16):
            stream.out.put("r", chunk(value), last=False)
            stream.is_next(stream.next(), chunk(value))
        assert opened
        stream.out.end("r")


def test_what_the_broker_names_ahead_may_be_nonsense(plain_host: connector.Node, opened: list[int]) -> None:
    """The block ahead is a writer's word: nothing comes of a wrong one."""
    stream = Stream(plain_host)
    with both_ends(stream, plain_host):
        for value in range(12):
            made = ready(stream) if value else None
            if made is not None:
                made.message.ahead = Handle(64 * value + 7 * (value % 2), 1 << 40)
            stream.into.wait(0.0)
            stream.out.put("r", chunk(value), last=False)
            stream.is_next(stream.next(), chunk(value))
        assert opened
        stream.out.end("r")


def test_each_of_two_readers_has_all(plain_host: connector.Node) -> None:
    """They are told as descriptors, each as the reader that it is."""
    with (
        connector.connect(stage="a", endpoint=plain_host.endpoint) as writer,
        connector.connect(stage="b", endpoint=plain_host.endpoint) as first,
        connector.connect(stage="b", endpoint=plain_host.endpoint) as second,
    ):
        out = writer.edge("a", "c", readers=2)
        edges = [first.edge("a", "c", reader=0, readers=2), second.edge("a", "c", reader=1, readers=2)]
        for value in range(12):
            out.put("r", chunk(value), last=value == 11)
            for edge in edges:
                found = edge.take("r", timeout=30.0, copy=False)
                assert found.index == value and torch.equal(found["x"], chunk(value)["x"])


def test_what_cannot_be_read_is_named_in_the_log_and_nothing_else(
    plain_host: connector.Node, caplog: pytest.LogCaptureFixture
) -> None:
    from connector.client import receive

    with connector.connect(stage="b", endpoint=plain_host.endpoint) as reader:
        with reader.session.lock:
            receive.HANDLERS[msg.Next](reader.session, msg.Next(b"\xc1"))
        assert "cannot be read" in caplog.text
        assert reader.status()["violations"] == 0


def test_what_was_opened_of_a_lost_broker_is_none_of_the_next(opened: list[int]) -> None:
    """Although that names the same block of the same life: its arena is another."""
    with run_directory() as run_dir:
        broker = BrokerProcess(run_dir, direct=False)
        stream = Stream(SimpleNamespace(endpoint=run_dir))
        with stream.writer, stream.reader:
            stream.into.poll()
            for value in range(8):
                stream.into.wait(0.0)
                stream.out.put("r", chunk(value), last=False)
                stream.is_next(stream.next(), chunk(value))
            stream.into.wait(0.0)
            assert opened[-1] == 8
            broker.end(signal.SIGKILL)
            broker = BrokerProcess(run_dir, direct=False)
            for node in (stream.reader, stream.writer):
                node.status()
                node.finish("r")
            stream.into.poll()
            stream.sent, opened[:] = 0, []
            for value in range(100, 116):
                stream.out.put("r", chunk(value), last=False)
                # Who does not wait opens nothing ahead.
                while not (found := stream.into.poll()):
                    assert not opened
                stream.is_next(found["r"][0], chunk(value))
                del found
            for node in (stream.writer, stream.reader):
                node.finish("r")
        assert broker.end() == 0
