"""The direct path between real processes: in order with what comes through the broker, and nothing is left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import connector
from connector.client import inbox, receive, telling
from connector.client.inbox import Channel
from connector.client.inlet import MANY_FRAMES
from connector.client.lifeline import ONE_FRAME
from connector.client.pairs import Pair
from connector.client.rid_queue import Arrived
from connector.client.session import Session
from connector.core.directory.effects import Descriptor
from connector.core.directory.events import Hold
from connector.core.errors import RequestAborted, WriterDied
from connector.core.names import Edge, Handle
from connector.wire import messages as msg
from tests.client.told import hosting

ROOT = Path(__file__).resolve().parents[2]
HANG = 60.0
EDGE = Edge("a", "b")

#: A writer that dies by its own hand behind the telling, and before its Seal can have been sent.
DYING = """
import os, sys, connector, torch
from connector.client import inbox, telling
node = connector.connect(stage="a", endpoint=sys.argv[1])
edge = node.edge("a", "b")
edge.put("r", {"x": torch.tensor([0])}, last=False)
node.flush()
sys.stdin.readline()
tell = telling.tell
def told_and_gone(*arguments):
    print(len(tell(*arguments)), flush=True)
    os.kill(os.getpid(), 9)
telling.tell = told_and_gone
edge.put("r", {"x": torch.tensor([1])}, last=False)
"""


@pytest.fixture
def host() -> Iterator[connector.Node]:
    with hosting(True) as node:
        yield node


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many payloads each put of this process told directly."""
    counts: list[int] = []
    tell = telling.tell

    def counting(*arguments: object) -> object:
        spans = tell(*arguments)  # type: ignore[arg-type]
        counts.append(sum(span.count for span in spans))
        return spans

    monkeypatch.setattr(telling, "tell", counting)
    return counts


def _flush(node: connector.Node) -> None:
    """Puts that were on their way are refused, and each is told."""
    while True:
        try:
            return node.flush()
        except RequestAborted:
            continue


def _value(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([number])}


@pytest.mark.parametrize("how", ["poll", "stream"])
def test_chunks_told_directly_come_in_order_and_all(host: connector.Node, told: list[int], how: str) -> None:
    with (
        connector.connect(stage="a", endpoint=host.endpoint) as writer,
        connector.connect(stage="b", endpoint=host.endpoint) as reader,
    ):
        out, into = writer.edge("a", "b"), reader.edge("a", "b")
        got: list[int] = []
        if how == "poll":
            into.poll()
        for number in range(700):
            out.put("r", _value(number), last=number == 699)
        if how == "stream":
            got = [int(payload["x"]) for payload in into.stream("r", timeout=HANG)]
        while len(got) < 700:
            assert into.wait(HANG)
            got += [int(payload["x"]) for payload in into.poll().get("r", [])]
        assert got == list(range(700))
        for node in (writer, reader):
            node.finish("r")
            node.flush()
        assert list(host.payloads()) == []
    assert how == "stream" or any(told)


def test_a_step_is_told_as_one(host: connector.Node, told: list[int]) -> None:
    with (
        connector.connect(stage="a", endpoint=host.endpoint) as writer,
        connector.connect(stage="b", endpoint=host.endpoint) as reader,
    ):
        out, into = writer.edge("a", "b"), reader.edge("a", "b")
        into.poll()
        rids = [f"r{number}" for number in range(8)]
        for step in range(4):
            values = {rid: 10 * step + place for place, rid in enumerate(rids)}
            out.put_many({rid: _value(value) for rid, value in values.items()}, last=step == 3)
            writer.flush()
            writer.status()
            came: dict[str, int] = {}
            while len(came) < len(rids):
                assert into.wait(HANG)
                came |= {rid: int(payloads[0]["x"]) for rid, payloads in into.poll().items()}
            assert came == values
    assert told[-3:] == [8, 8, 0]


def test_a_reader_that_has_all_of_a_stream_may_go_at_once(host: connector.Node, told: list[int]) -> None:
    """The broker knows then that it was the end."""
    with connector.connect(stage="a", endpoint=host.endpoint) as writer:
        out = writer.edge("a", "b")
        for turn in range(5):
            rid = f"r{turn}"
            with connector.connect(stage="b", endpoint=host.endpoint) as reader:
                into = reader.edge("a", "b")
                into.poll()
                for number in range(3):
                    out.put(rid, _value(number), last=number == 2)
                    if number == 0:
                        # Its answer comes behind the way.
                        writer.flush()
                        writer.status()
                while rid not in into.poll().ended:
                    assert into.wait(HANG)
            writer.flush()
            writer.finish(rid)
    assert any(told)


def test_no_chunk_is_told_directly_where_the_broker_does_not_let_it(told: list[int]) -> None:
    with connector.connect(stage="host", embedded=True, pool="8MiB", direct=False) as host:
        with (
            connector.connect(stage="a", endpoint=host.endpoint) as writer,
            connector.connect(stage="b", endpoint=host.endpoint) as reader,
        ):
            out, into = writer.edge("a", "b"), reader.edge("a", "b")
            into.poll()
            for number in range(20):
                out.put("r", _value(number), last=number == 19)
            got = [int(payload["x"]) for payload in into.stream("r", timeout=HANG)]
            assert got == list(range(20)) and told == []


@pytest.mark.parametrize(
    ("env", "keyword", "direct"), [("false", None, False), ("false", True, True), ("true", None, True)]
)
def test_the_environment_is_a_switch_for_private_brokers_too(
    monkeypatch: pytest.MonkeyPatch, told: list[int], env: str, keyword: bool | None, direct: bool
) -> None:
    """Or tests without it would be tests with it; all else of the environment is a node's broker's."""
    monkeypatch.setenv("CONNECTOR_DIRECT", env)
    monkeypatch.setenv("CONNECTOR_POOL", "nonsense")
    more = {} if keyword is None else {"direct": keyword}
    with (
        connector.connect(stage="host", embedded=True, pool="8MiB", log_level="error", **more) as host,
        connector.connect(stage="a", endpoint=host.endpoint) as writer,
        connector.connect(stage="b", endpoint=host.endpoint) as reader,
    ):
        out, into = writer.edge("a", "b"), reader.edge("a", "b")
        into.poll()
        # Until it is told directly, which begins a while after the stream; or so often that it would have been.
        for at in range(500):
            out.put("r", {"x": torch.tensor([at])}, last=False)
            assert into.wait(HANG)
            into.poll()
            if any(told):
                break
        assert any(told) is direct
        assert bool(writer.session.pairs) is direct


def test_what_a_writer_told_and_did_not_seal_is_read_once_and_its_block_stays(host: connector.Node) -> None:
    """Killed in between: the ready word made it a payload, and the reader's views are on it."""
    with ExitStack() as nodes:
        reader = nodes.enter_context(connector.connect(stage="b", endpoint=host.endpoint))
        into = reader.edge("a", "b")
        into.poll()
        process = nodes.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", DYING, host.endpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )
        assert process.stdin is not None and process.stdout is not None
        held = []
        while not held:
            assert into.wait(HANG)
            held += into.poll().get("r", [])
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stdout.read() == "1\n" and process.wait(HANG) == -signal.SIGKILL
        failed: dict[str, Exception] = {}
        while not failed:
            assert into.wait(HANG)
            found = into.poll()
            held += found.get("r", [])
            failed |= found.failed
        assert [int(payload["x"]) for payload in held] == [0, 1]
        assert isinstance(failed["r"], WriterDied)
        assert len(list(host.payloads())) == 2
        del held, found
        reader.finish("r")
        reader.flush()
        assert list(host.payloads()) == []


def test_an_abort_reaches_a_stream_that_is_told_directly(host: connector.Node) -> None:
    with (
        connector.connect(stage="a", endpoint=host.endpoint) as writer,
        connector.connect(stage="b", endpoint=host.endpoint) as reader,
    ):
        out, into = writer.edge("a", "b"), reader.edge("a", "b")
        into.poll()
        for number in range(3):
            out.put("r", _value(number), last=False)
            writer.flush()
        host.abort("r", "stop")
        with pytest.raises(RequestAborted):
            while True:
                out.put("r", _value(9), last=False)
        found = into.poll()
        while "r" not in found.failed:
            assert into.wait(HANG)
            found = into.poll()
        assert isinstance(found.failed["r"], RequestAborted)
        del found
        for node in (writer, reader):
            node.finish("r")
            _flush(node)
        assert list(host.payloads()) == []


# -- order at the reader ----------------------------------------------------------------------------


def _arrived(index: int, behind: int, flags: int = 0, rid: str = "r") -> Arrived:
    told = Descriptor(EDGE, 0, rid, 1, index, 0, flags, Handle(4096 + 64 * index, index + 1), 64, 64, 0, b"", behind)
    return Arrived.of(told, None)  # type: ignore[arg-type]  # nobody opens it


def _taken(channel: Channel) -> list[object]:
    got: list[object] = []
    while (taken := channel.pop("r")) is not None:
        got += [taken.arrived.descriptor.index] if taken.arrived is not None else []
        got += ["end"] if taken.ends else []
    return got


def test_what_comes_early_by_either_way_waits_for_what_it_is_behind() -> None:
    channel = Channel(EDGE, 0, 1, False)
    channel.deliver(_arrived(2, 1))
    channel.end("r", 1, behind=3)
    channel.deliver(_arrived(3, 2))
    assert _taken(channel) == []
    channel.deliver(_arrived(0, -1))
    assert _taken(channel) == [0]
    channel.deliver(_arrived(1, 0))
    assert _taken(channel) == [1, 2, 3, "end"]


def test_a_rid_that_is_polled_now_and_again_is_not_the_one_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MOST_TAKEN", 2)
    channel = Channel(EDGE, 0, 1, False)
    for index, other in enumerate(("x", "y")):
        channel.deliver(_arrived(index, index - 1))
        assert len(channel.poll_all()) == 1
        channel.deliver(_arrived(0, -1, rid=other))
        assert len(channel.poll_all()) == 1
    channel.forget("r")
    late = _arrived(2, 1)
    assert channel.deliver(late) == ([late.hold], [])


def test_a_failure_is_told_behind_what_came_before_it_and_nothing_behind_it() -> None:
    channel = Channel(EDGE, 0, 1, False)
    channel.deliver(_arrived(0, -1))
    channel.fail("r", 1, RequestAborted("stop"), behind=1)
    channel.deliver(_arrived(2, 1))
    assert _taken(channel) == [0]
    back, _ = channel.deliver(_arrived(1, 0))
    with pytest.raises(RequestAborted):
        _taken(channel)
    assert back == [_arrived(2, 1).hold]


def test_what_is_voided_while_it_waits_for_what_it_is_behind_never_comes() -> None:
    channel = Channel(EDGE, 0, 1, False)
    early = _arrived(1, 0)
    channel.deliver(early)
    assert channel.discard(early.hold) == [early]
    channel.deliver(_arrived(0, -1))
    assert _taken(channel) == [0]


def test_what_was_voided_and_comes_early_is_given_back_at_once() -> None:
    """Once its writer's socket was read to its end, the broker is told that it is not here."""
    early, voided = _arrived(1, 0), OrderedDict({_arrived(1, 0).hold: 7})
    channel = Channel(EDGE, 0, 1, False, voided)
    assert channel.deliver(early) == ([early.hold], []) and not voided
    channel.deliver(_arrived(0, -1))
    assert _taken(channel) == [0]


def _released(session: Session) -> list[Hold]:
    said: list[msg.Message] = []
    session.holds.say(said.append, everything=True)
    return [Hold(span.handle, span.first, span.reader) for word in said for span in word.spans]  # type: ignore[attr-defined]


def test_of_what_a_dead_writer_may_have_told_a_reader_says_when_it_cannot_come_any_more() -> None:
    """Until then the broker keeps the block."""
    session = Session("b", "nowhere", lambda: None, lambda: None)
    session.holds.start_anew("arena")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pair = session.pairs[7] = Pair(7, ours)
        coming, past = _arrived(1, 0).hold, _arrived(2, 1).hold
        receive.HANDLERS[msg.Drop](session, msg.Drop((coming,), 7))
        assert _released(session) == []
        session.has_read(pair)
        assert _released(session) == [coming]
        receive.HANDLERS[msg.Drop](session, msg.Drop((past,), 7))
        assert _released(session) == [past]


def test_what_a_writer_told_before_it_went_is_read_although_nothing_more_goes_to_it() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pair = Pair(7, ours)
        theirs.send(b"told")
        theirs.close()
        assert not pair.send(b"heard by nobody") and pair.deaf and not pair.ended
        pair.receive(ONE_FRAME)
        assert list(pair.came) == [b"told"] and not pair.ended
        pair.receive(ONE_FRAME)
        assert pair.ended


def test_many_packets_are_read_at_one_go_and_the_end_behind_them() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pair = Pair(7, ours)
        told = [b"%d" % place for place in range(2 * len(MANY_FRAMES) + 3)]
        for packet in told:
            theirs.send(packet)
        for count in (1, 1 + len(MANY_FRAMES)):
            pair.receive(ONE_FRAME if count == 1 else MANY_FRAMES)
            assert list(pair.came) == told[:count] and not pair.ended
        pair.receive(MANY_FRAMES)
        pair.receive(MANY_FRAMES)
        assert list(pair.came) == told and not pair.ended
        theirs.close()
        pair.receive(MANY_FRAMES)
        assert list(pair.came) == told and pair.ended


def test_what_the_broker_voided_before_it_came_is_a_hole() -> None:
    void = _arrived(1, 0)
    channel = Channel(EDGE, 0, 1, False, OrderedDict({void.hold: 0}))
    channel.deliver(_arrived(0, -1))
    assert channel.deliver(void)[0] == [void.hold]
    behind = _arrived(2, 1)
    assert channel.deliver(behind)[0] == [behind.hold]
    assert _taken(channel) == [0]
