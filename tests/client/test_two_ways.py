"""Small words go over the lifeline, large ones over ZeroMQ: they arrive in the order of their saying."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

import connector
from connector.wire.order import LINE_BYTES

#: Keys of which the manifest alone is too large for the lifeline.
WIDE = LINE_BYTES // 16


@pytest.fixture
def ends() -> Iterator[tuple[connector.Node, connector.Node]]:
    with connector.connect(stage="a", embedded=True, pool="64MiB") as writer:
        with connector.connect(stage="b", endpoint=writer.endpoint) as reader:
            yield writer, reader


def payload(index: int) -> dict[str, torch.Tensor]:
    return {f"key-{number}": torch.tensor(index) for number in range(WIDE if index % 3 == 1 else 1)}


def test_chunks_of_any_size_keep_their_order(ends: tuple[connector.Node, connector.Node]) -> None:
    writer, reader = ends
    out, into = writer.edge("a", "b"), reader.edge("a", "b")
    into.poll()
    for index in range(30):
        out.put("r", payload(index), last=index == 29)
    got = list(into.stream("r", timeout=60.0))
    assert [(chunk.index, len(chunk), int(chunk["key-0"])) for chunk in got] == [
        (index, len(payload(index)), index) for index in range(30)
    ]


def test_a_finish_behind_a_large_put_ends_that_use(ends: tuple[connector.Node, connector.Node]) -> None:
    writer, reader = ends
    out, into = writer.edge("a", "b"), reader.edge("a", "b")
    for use in range(10):
        out.put("r", {**payload(1), "use": torch.tensor(use)})
        writer.finish("r")
        with into.take("r", timeout=60.0) as taken:
            assert int(taken["use"]) == use
        reader.finish("r")
        del taken
    writer.flush()


def test_a_good_bye_behind_large_puts_loses_none_of_them(ends: tuple[connector.Node, connector.Node]) -> None:
    writer, reader = ends
    with connector.connect(stage="c", endpoint=writer.endpoint) as third:
        tickets = [third.edge("a", "b").put(f"r{number}", payload(number)) for number in range(12)]
    assert [ticket.outcome for ticket in tickets] == ["stored"] * 12
    into = reader.edge("a", "b")
    for number in range(12):
        with into.take(f"r{number}", timeout=60.0) as taken:
            assert int(taken["key-0"]) == number


def test_what_finds_no_room_on_the_lifeline_goes_when_there_is_some(
    ends: tuple[connector.Node, connector.Node],
) -> None:
    """More than the socket buffers, said while the broker does not read."""
    writer, reader = ends
    out, into = writer.edge("a", "b"), reader.edge("a", "b")
    into.poll()
    out.put("before", payload(0))
    writer.flush()
    broker = int(writer.status()["pid"])
    os.kill(broker, signal.SIGSTOP)
    try:
        for number in range(4000):
            writer.finish(f"{number}-" + "x" * 250)
        out.put("behind", payload(0))
    finally:
        os.kill(broker, signal.SIGCONT)
    writer.flush(timeout=60.0)
    for rid in ("before", "behind"):
        with into.take(rid, timeout=60.0) as taken:
            assert int(taken["key-0"]) == 0
