"""Frames that no client of ours sends: their sender gets an error, nobody else notices, nothing is kept."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
import zmq

import connector
from connector.core.errors import ProtocolViolation, Refused
from connector.core.names import Edge, Handle
from connector.wire import codec
from connector.wire import messages as msg

MakePeer = Callable[..., Any]

GARBAGE = {
    "empty": b"",
    "zero": b"\0",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "pickle": pickle.dumps({"a": 1}),
    "ext": msgpack.packb(msgpack.ExtType(5, b"x")),
    "nested": b"\x91" * 900 + b"\xc0",
    "nested counter": b"\x93\x02" + b"\x91" * 900 + b"\xc0\x90",
    "another version": msgpack.packb([99, 0, []]),
    "of the broker": codec.encode(0, [msg.Ping()]),
    "cut": codec.encode(0, [msg.Begin(1, "r")])[:-1],
    "two": codec.encode(0, [msg.Pong()]) * 2,
}


@pytest.fixture
def unmoved(served: Any, witness: connector.Node) -> Any:
    """The module's broker, which must end up with the sessions that it had, and serve."""
    before = witness.status()
    yield served
    after = witness.status()
    assert after["violations"] >= before["violations"]
    assert "Traceback" not in served.log()
    edge = witness.edge("a", "b")
    edge.put("witness", {"x": torch.arange(3)})
    assert edge.take("witness", timeout=60)["x"].tolist() == [0, 1, 2]
    witness.finish("witness")


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_gets_an_error_and_the_session_lives_on(unmoved: Any, peer: MakePeer, name: str) -> None:
    """From a session: its own next message is served."""
    client = peer()
    client.hello()
    client.dealer.send(GARBAGE[name])
    failure = client.answer(msg.Failure)
    assert failure.request == 0
    assert type(failure.error) is ProtocolViolation
    client.say(msg.Status(7, "summary"))
    assert client.answer(msg.Answer).request == 7


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_of_a_stranger_gets_an_error(unmoved: Any, peer: MakePeer, name: str) -> None:
    """A peer without a lifeline, with an identity of any length."""
    for identity in (b"x", b"y" * 255):
        stranger = peer(token=identity, lifeline=False)
        stranger.dealer.send(GARBAGE[name])
        assert type(stranger.answer(msg.Failure).error) is ProtocolViolation


def test_every_message_of_a_stranger_is_answered_with_say_hello(unmoved: Any, peer: MakePeer) -> None:
    """Nothing of it is applied."""
    stranger = peer(lifeline=False)
    for message in (
        msg.Pong(),
        msg.Status(1, "summary"),
        msg.Reserve(1, Edge("a", "b"), (64,), 5.0, (), False),
        msg.Seal(1, 0, Edge("a", "b"), Handle(4096, 1), 256, ()),
        msg.Bye(()),
    ):
        stranger.say(message)
        error = stranger.answer(msg.Failure).error
        assert type(error) is Refused
        assert error.facts == {"kind": type(message).__name__}


def test_hello_without_a_lifeline_is_refused(unmoved: Any, peer: MakePeer) -> None:
    """The kernel must vouch for a process, not the process itself."""
    stranger = peer(lifeline=False)
    stranger.say(msg.Hello(stranger.token, "x", "0", False, ()))
    assert "lifeline" in stranger.answer(msg.Failure).error.message


def test_hello_with_another_ones_token_is_refused(unmoved: Any, peer: MakePeer, witness: connector.Node) -> None:
    """A token is the identity of its connection."""
    first, second = peer(), peer()
    second.say(msg.Hello(first.token, "x", "0", False, ()))
    assert type(second.answer(msg.Failure).error) is ProtocolViolation
    assert second.hello().session > 0


@pytest.mark.parametrize("parts", [[b"", b"x"], [b"x"] * 5, [codec.encode(0, [msg.Pong()]), b""]])
def test_a_message_of_several_parts_gets_an_error(unmoved: Any, peer: MakePeer, parts: list[bytes]) -> None:
    """As a REQ socket sends them, with an empty part before."""
    client = peer()
    client.hello()
    client.dealer.send_multipart(parts)
    failure = client.answer(msg.Failure)
    assert failure.error.facts == {"parts": len(parts)}


def test_a_frame_above_the_limit_gets_an_error(unmoved: Any, peer: MakePeer) -> None:
    """Size and limit are told."""
    client = peer()
    client.hello()
    client.dealer.send(b"x" * (64 * 1024 + 1))
    assert client.answer(msg.Failure).error.facts == {"size": 64 * 1024 + 1, "limit": 64 * 1024}
    client.say(msg.Status(7, "summary"))
    assert client.answer(msg.Answer).request == 7


def test_a_frame_far_above_the_limit_costs_its_connection_only(unmoved: Any, peer: MakePeer) -> None:
    """It is never read whole; the sender connects again and is served."""
    client = peer()
    client.hello()
    with client.dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        client.dealer.send(b"x" * (16 << 20))
        assert monitor.poll(60_000)
        client.dealer.disable_monitor()
    client.say(msg.Status(7, "summary"))
    assert client.answer(msg.Answer).request == 7


@pytest.mark.parametrize(
    "message",
    [
        msg.Status(5, "no such status"),
        msg.ListPage(5, 0, 0, 10, {"no such filter": "x"}),
        msg.ListPage(5, 0, 0, 10, {"rid": 3}),
        msg.ListPage(5, 0, 0, 10, {"state": "no such state"}),
        msg.ListPage(5, 0, 0, 10, {"edge": "no edge"}),
        msg.Inspect(5, Edge("no", "edge"), "r", -1),
    ],
    ids=lambda message: repr(message)[:40],
)
def test_a_question_that_cannot_be_answered_gets_its_error(unmoved: Any, peer: MakePeer, message: msg.Message) -> None:
    """By the request's own number, so that its caller is told and no other."""
    client = peer()
    client.hello()
    client.say(message)
    assert client.answer(msg.Failure).request == 5


def test_numbers_of_another_session_free_nothing(unmoved: Any, peer: MakePeer, witness: connector.Node) -> None:
    """Releases, returns and seals of handles that are not the sender's: offsets, lengths and counts out of a hat."""
    edge = witness.edge("p", "q")
    edge.put("kept", {"x": torch.arange(9)})
    witness.flush(60)
    row = next(iter(witness.payloads(rid="kept")))
    client = peer()
    client.hello()
    number = 0
    for generation in (0, 1, 2, 3, 2**63 - 1):
        for offset in (0, 1, row["offset"], 2**63 - 1):
            handle = Handle(offset, generation)
            span = msg.Span(handle, 0, 2**24, 0)
            client.say(
                msg.Release(number + 1, (span, span)),
                msg.Return(number + 2, (handle,)),
                msg.Seal(
                    number + 3, 0, Edge("p", "q"), handle, 2**62, (msg.Member("kept", 5, 0, 0, 1, b"\xc1", 2**62),)
                ),
                msg.Took((span,)),
            )
            number += 3
    client.say(msg.Status(9, "summary"))
    while client.answer(msg.Answer).request != 9:
        pass
    assert edge.take("kept", timeout=60)["x"].tolist() == list(range(9))
    witness.finish("kept")
