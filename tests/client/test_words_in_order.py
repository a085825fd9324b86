"""Words that cross on their way: each is of the use of the rid in which it was said, whichever has begun since."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import connector
from connector import Edge, Node, errors
from connector.core.directory.effects import Notice
from connector.testing.contracts.samples import number, values
from connector.wire import messages as msg
from connector.wire.codec import Envelope
from tests.client.held import deaf, mute

PATIENCE = 60.0


@pytest.fixture
def writer(host: connector.Node) -> Iterator[Node]:
    with connector.connect(stage="writer", endpoint=host.endpoint) as node:
        yield node


@pytest.fixture
def reader(host: connector.Node) -> Iterator[Node]:
    with connector.connect(stage="reader", endpoint=host.endpoint) as node:
        yield node
        node.abort("r")


@pytest.fixture
def out(writer: Node) -> Edge:
    return writer.edge("writer", "reader")


@pytest.fixture
def into(reader: Node) -> Edge:
    return reader.edge("writer", "reader")


def settle(*nodes: Node) -> None:
    """What each has said has come to the broker, and what that says to each."""
    for node in (*nodes, *nodes):
        node.status()


@pytest.fixture
def stocked(writer: Node, out: Edge, into: Edge) -> None:
    """The writer has blocks: a deaf one gets none."""
    for index in range(4):
        out.put("stock", number(0), last=index == 3)
    settle(writer)
    assert values(into.stream("stock", timeout=PATIENCE)) == [0] * 4
    settle(writer)


def test_what_is_taken_after_a_finish_is_told_after_it(writer: Node, reader: Node, out: Edge, into: Edge) -> None:
    """Else the finish would mean what was taken last: the next use."""
    into.poll()
    out.put("r", number(1))
    writer.finish("r")
    settle(writer, reader)
    into.poll().clear()
    out.put("r", number(2), last=False)
    settle(writer, reader, writer, reader)
    with mute(reader):
        reader.finish("r")
        polled = into.poll()
        assert values(polled["r"]) == [2]
        polled.clear()
    settle(reader)
    out.put("r", number(3), last=True)
    settle(writer, reader)
    assert values(into.poll()["r"]) == [3]


@pytest.mark.usefixtures("stocked")
def test_an_abort_that_is_told_late_is_not_the_next_uses(writer: Node, reader: Node, out: Edge, into: Edge) -> None:
    """A batch of notices waits until the one before it was heard: the writer has finished the rid meanwhile."""
    with deaf(writer):
        reader.abort("another")
        reader.abort("r", "of the former use")
        reader.finish("r")
        writer.finish("r")
        out.put("r", number(1), last=False)
        assert values([into.take("r", timeout=PATIENCE)]) == [1]
    settle(writer)
    out.put("r", number(2), last=True)
    assert values(into.stream("r", timeout=PATIENCE)) == [2]


def test_a_notice_that_travels_with_a_later_word_is_of_the_use_that_it_was_made_in(writer: Node, out: Edge) -> None:
    """The broker says in one frame that the rid is aborted, and that it has the finish that came behind."""
    out.put("r", number(1), last=False)
    writer.finish("r")
    writer.flush()
    session = writer.session
    said = session.outgoing.number
    notice = Notice(session.seen + 1, "r", "of the former use", 1, said - 1)
    session.receive(Envelope(said, [msg.Notices((notice,), False)]))
    assert writer.aborted("r") is None
    session.receive(Envelope(said, [msg.Notices((notice._replace(applied=said),), False)]))
    assert writer.aborted("r") == "of the former use"
    writer.finish("r")


@pytest.mark.usefixtures("stocked")
def test_a_late_refusal_is_not_the_next_uses(writer: Node, reader: Node, out: Edge, into: Edge) -> None:
    with deaf(writer):
        reader.abort("r", "before the put")
        reader.finish("r")
        refused = out.put("r", number(1), last=False)
        writer.finish("r")
        out.put("r", number(2), last=False)
        assert values([into.take("r", timeout=PATIENCE)]) == [2]
    settle(writer)
    out.put("r", number(3), last=True)
    assert values(into.stream("r", timeout=PATIENCE)) == [3]
    assert isinstance(refused.error, errors.RequestAborted)
    writer.flush()


def test_poll_keeps_what_is_behind_a_failure(writer: Node, reader: Node, out: Edge, into: Edge) -> None:
    """A stream with a hole fails; the next use of its rid has come before anybody looks."""
    into.poll()
    out.put("r", number(9), index=1)
    writer.finish("r")
    out.put("r", number(1))
    settle(writer, reader)
    first, second = into.poll(), into.poll()
    assert isinstance(first.failed["r"], errors.StreamGap) and not first.keys()
    assert values(second["r"]) == [1] and second.ended == {"r"} and not second.failed


def test_an_open_use_that_hands_nothing_over_is_a_use(writer: Node, reader: Node, out: Edge, into: Edge) -> None:
    """The reader, still in it, gets nothing of the next."""
    into.poll()
    out.open("r")
    settle(writer)
    into.expect("r")
    settle(reader)
    writer.finish("r")
    out.open("r")
    out.put("r", number(2))
    settle(writer, reader)
    assert not into.poll()
    reader.finish("r")
    into.expect("r")
    settle(reader)
    assert values(into.poll()["r"]) == [2]


def test_an_abort_of_ones_own_use_spares_the_next(writer: Node, reader: Node, out: Edge, into: Edge) -> None:
    into.poll()
    out.put("r", number(1))
    writer.finish("r")
    settle(writer, reader)
    polled = into.poll()
    out.put("r", number(2), last=False)
    settle(writer)
    reader.abort("r", "of what was polled", mine=True)
    polled.clear()
    settle(writer, reader)
    out.put("r", number(3), last=True)
    reader.finish("r")
    settle(writer, reader)
    assert values(into.poll()["r"]) == [2, 3]


def test_an_idle_node_hears_one_abort_after_the_other() -> None:
    """Each is told when the one before was heard, and a node that only waits says nothing else for an hour."""
    settings = {"heartbeat": 3600, "suspect_after": 7200}
    with (
        connector.connect(stage="writer", embedded=True, pool="1MiB", **settings) as writer,
        connector.connect(stage="reader", endpoint=writer.endpoint) as reader,
    ):
        into = reader.edge("writer", "reader")
        into.poll()
        for rid in "abc":
            into.expect(rid)
        reader.flush()
        for rid in "abc":
            writer.abort(rid)
        failed: set[str] = set()
        while failed != set("abc"):
            assert into.wait(20.0), failed
            failed |= into.poll().failed.keys()


def test_no_end_is_told_behind_what_the_broker_took_back(writer: Node, reader: Node, out: Edge, into: Edge) -> None:
    """Why comes later: the node has not answered another abort yet."""
    said, heard = writer.edge("writer", "marks"), reader.edge("writer", "marks")
    for edge in (into, heard):
        edge.poll()
    out.open("r")
    settle(writer, reader)
    with mute(reader):
        writer.abort("another")
        for index in (0, 1):
            out.put("r", number(index), last=index == 1)
        writer.abort("r", "too late", mine=True)
        said.put("all is said", number(0))
        assert heard.wait(PATIENCE)
        early = into.poll()
    assert not early
    settle(reader)
    late = into.poll()
    assert not late.keys() and not late.ended and late.failed["r"].facts["reason"] == "too late"
    heard.poll().clear()
