"""What waits for a session whose pipe is full: kept in order, bounded, and nobody else's trouble."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import zmq

import connector
from connector.broker.outbox import FRAME_MESSAGES, MOST_WAITING, Outbox
from connector.core.names import Edge
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.order import LINE_BYTES

A, B = b"a" * 16, b"b" * 16


class Router:
    """A router whose pipes hold `room` frames each; None: no such peer."""

    def __init__(self, **room: int | None) -> None:
        self.room = {name.encode() * 16: left for name, left in room.items()}
        self.sent: list[tuple[bytes, codec.Envelope]] = []

    def send_multipart(self, parts: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        token, frame = parts
        left = self.room.get(token)
        if left is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if left == 0:
            raise zmq.Again()
        self.room[token] = left - 1
        self.sent.append((token, codec.decode(frame, from_broker=True)))

    def messages(self, token: bytes) -> list[msg.Message]:
        return [message for to, envelope in self.sent if to == token for message in envelope.messages]


def outbox(router: Router) -> Outbox:
    return Outbox(router)  # type: ignore[arg-type]


def acks(counts: dict[bytes, int]) -> Callable[[bytes], int]:
    return lambda token: counts.get(token, 0)


def test_messages_of_a_turn_go_in_one_frame_with_the_acknowledgement() -> None:
    router = Router(a=9, b=9)
    box = outbox(router)
    box.put(A, msg.Ping())
    box.put(B, msg.Recall())
    box.put(A, msg.Resend(4))
    box.flush(acks({A: 7}))
    assert router.sent == [(A, codec.Envelope(7, [msg.Ping(), msg.Resend(4)])), (B, codec.Envelope(0, [msg.Recall()]))]
    box.flush(acks({A: 8}))
    assert len(router.sent) == 2


def test_an_acknowledgement_alone_is_a_frame_without_messages() -> None:
    """Once, however often it fell due."""
    router = Router(a=9)
    box = outbox(router)
    box.touch(A)
    box.touch(A)
    box.flush(acks({A: 3}))
    assert router.sent == [(A, codec.Envelope(3, []))]


def test_a_long_queue_is_cut_and_the_last_frame_acknowledges() -> None:
    """What was refused must be known before what was applied."""
    router = Router(a=9)
    box = outbox(router)
    sent = [msg.Resend(n) for n in range(2 * FRAME_MESSAGES + 1)]
    for message in sent:
        box.put(A, message)
    box.flush(acks({A: 5}))
    assert [envelope.counter for _, envelope in router.sent] == [0, 0, 5]
    assert router.messages(A) == sent


def test_a_full_pipe_keeps_all_in_order_and_stops_nobody_else() -> None:
    router = Router(a=1, b=9)
    box = outbox(router)
    sent = [msg.Resend(n) for n in range(2 * FRAME_MESSAGES)]
    for message in sent:
        box.put(A, message)
    box.put(B, msg.Ping())
    box.flush(acks({A: 1, B: 1}))
    assert box.blocked == {A}
    assert router.messages(B) == [msg.Ping()]
    box.put(A, msg.Ping())
    box.flush(acks({A: 2}))
    assert router.messages(A) == sent[:FRAME_MESSAGES]
    router.room[A] = 9
    box.flush(acks({A: 3}))
    assert router.messages(A) == [*sent, msg.Ping()]
    assert router.sent[-1][1].counter == 3
    assert box.blocked == set()


def test_an_acknowledgement_that_met_a_full_pipe_is_sent_later() -> None:
    router = Router(a=0)
    box = outbox(router)
    box.touch(A)
    box.flush(acks({A: 1}))
    assert box.blocked == {A}
    router.room[A] = 1
    box.flush(acks({A: 2}))
    assert router.sent == [(A, codec.Envelope(2, []))]


def test_answers_beyond_the_limit_are_dropped_and_counted_and_others_are_not() -> None:
    """A session can ask without end, but it cannot be owed without end."""
    router = Router(a=0)
    box = outbox(router)
    for number in range(MOST_WAITING + 10):
        box.put(A, msg.Answer(number, {}))
    box.put(A, msg.Ping())
    assert box.dropped == 10
    router.room[A] = 99
    box.flush(acks({}))
    answers = router.messages(A)
    assert [a.request for a in answers[:-1] if isinstance(a, msg.Answer)] == list(range(MOST_WAITING))
    assert answers[-1] == msg.Ping()


def test_a_peer_that_is_gone_is_counted_and_forgotten() -> None:
    """It comes back with Hello, and says itself what it has."""
    router = Router(a=0)
    box = outbox(router)
    box.put(A, msg.Ping())
    box.put(B, msg.Ping())
    box.flush(acks({}))
    assert (box.unreachable, box.blocked) == (1, {A})
    router.room[A] = None
    box.flush(acks({}))
    assert (box.unreachable, box.blocked) == (2, set())
    router.room = {A: 9, B: 9}
    box.flush(acks({}))
    assert router.sent == []


def test_a_forgotten_session_gets_nothing_more() -> None:
    router = Router(a=0)
    box = outbox(router)
    box.put(A, msg.Ping())
    box.flush(acks({}))
    box.forget(A)
    router.room[A] = 9
    box.flush(acks({}))
    assert (router.sent, box.blocked) == ([], set())


def test_only_the_named_tokens_are_flushed() -> None:
    router = Router(a=9, b=9)
    box = outbox(router)
    box.put(A, msg.Ping())
    box.put(B, msg.Ping())
    box.flush(acks({}), [B, b"unknown"])
    assert [token for token, _ in router.sent] == [B]


def test_another_error_of_the_socket_is_not_swallowed() -> None:
    class Closed(Router):
        def send_multipart(self, parts: list[bytes], flags: int) -> None:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    box = outbox(Closed())
    box.put(A, msg.Ping())
    with pytest.raises(zmq.ZMQError):
        box.flush(acks({}))


#: A broker whose pipes hold four frames.
NARROW = """
import zmq
import connector.broker.loop as loop
bind = loop.Broker._bind
def narrow(self):
    self._router.set(zmq.SNDHWM, 4)
    bind(self)
loop.Broker._bind = narrow
"""
#: Its refusal carries the rid: a large answer to a small question.
QUESTION_RID = "r" * 1000


def ask(client: Any, number: int) -> None:
    client.say(msg.Inspect(number, Edge("no", "edge"), QUESTION_RID, -1))


def test_a_peer_that_does_not_read_gets_all_in_order_later(start: Callable[..., Any], peer: Callable[..., Any]) -> None:
    """ROUTER_MANDATORY makes the full pipe an error, not a loss; a witness is served meanwhile."""
    running = start(prelude=NARROW)
    with connector.connect(stage="witness", endpoint=running.run_dir, timeout=60) as witness:
        client = peer(running.run_dir)
        client.hello()
        asked = 0
        while not witness.status()["blocked"] or asked < 50:
            asked += 1
            ask(client, asked)
        for _ in range(50):
            asked += 1
            ask(client, asked)
            witness.status()
        answers: list[int] = []
        while len(answers) < asked:
            answers += [m.request for m in client.hear() if isinstance(m, msg.Failure)]
        assert answers == list(range(1, asked + 1))
        assert witness.status()["answers_dropped"] == 0
        while witness.status()["blocked"]:
            pass


def test_answers_that_a_peer_does_not_read_are_cut_and_counted(
    start: Callable[..., Any], peer: Callable[..., Any]
) -> None:
    """Those that went are in order, and the count says how many did not."""
    running = start(prelude=NARROW)
    with connector.connect(stage="witness", endpoint=running.run_dir, timeout=60) as witness:
        client = peer(running.run_dir)
        client.hello()
        asked = 0
        while not witness.status()["answers_dropped"]:
            client.say(*[msg.Inspect(asked + n, Edge("no", "edge"), QUESTION_RID, -1) for n in range(1, 1001)])
            asked += 1000
        # The last question is behind all others, and its answer may be the one that is cut.
        dropped = -1
        while dropped != (now := witness.status()["answers_dropped"]):
            dropped = now
        answers: list[int] = []
        while len(answers) < asked - dropped:
            answers += [m.request for m in client.hear() if isinstance(m, msg.Failure)]
        assert answers == sorted(set(answers))
        assert len(answers) + witness.status()["answers_dropped"] == asked


class Line:
    """A lifeline that takes `room` frames."""

    most = LINE_BYTES

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[codec.Envelope] = []

    def send(self, frame: bytes, passed: socket.socket | None = None) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.sent.append(codec.decode(frame, from_broker=True))
        return True


def lined(router: Router, line: Line) -> Outbox:
    return Outbox(router, lambda token: line if token == A else None)  # type: ignore[arg-type]


def large(number: int) -> msg.Message:
    return msg.Answer(number, {"text": "x" * LINE_BYTES})


def test_small_frames_go_over_the_line_and_large_ones_by_the_router_numbered_together() -> None:
    router, line = Router(a=9, b=9), Line(9)
    box = lined(router, line)
    for message in (msg.Ping(), large(1), msg.Recall()):
        box.put(A, message)
        box.put(B, message)
        box.flush(acks({}))
    assert [(envelope.order, type(envelope.messages[0])) for envelope in line.sent] == [(1, msg.Ping), (3, msg.Recall)]
    assert [(to, envelope.order) for to, envelope in router.sent] == [(B, 0), (A, 2), (B, 0), (B, 0)]


def test_a_full_line_keeps_its_frames_in_order_for_the_next_flush() -> None:
    router, line = Router(a=9), Line(1)
    box = lined(router, line)
    for message in (msg.Ping(), msg.Resend(1), msg.Resend(2)):
        box.put(A, message)
        box.flush(acks({A: 5}))
    assert box.blocked == box.roomless == {A} and not router.sent
    line.room = 9
    box.flush(acks({A: 5}))
    assert [(envelope.order, envelope.messages) for envelope in line.sent] == [
        (1, [msg.Ping()]),
        (2, [msg.Resend(1), msg.Resend(2)]),
    ]
    assert not box.blocked and not box.roomless


def test_a_hello_begins_the_numbers_anew() -> None:
    line = Line(9)
    box = lined(Router(a=9), line)
    for _ in range(2):
        box.put(A, msg.Ping())
        box.flush(acks({}))
    box.greet(A)
    box.put(A, msg.Ping())
    box.flush(acks({}))
    assert [envelope.order for envelope in line.sent] == [1, 2, 1]


def test_an_owed_acknowledgement_goes_with_the_next_message_or_when_it_is_paid() -> None:
    router = Router(a=9, b=9)
    box = outbox(router)
    box.owe(A)
    box.owe(B)
    box.flush(acks({A: 1, B: 1}))
    assert not router.sent and box.owed == {A, B}
    box.put(A, msg.Ping())
    box.flush(acks({A: 2, B: 2}))
    assert router.sent == [(A, codec.Envelope(2, [msg.Ping()]))] and box.owed == {B}
    box.pay()
    box.flush(acks({A: 3, B: 3}))
    assert router.sent[1:] == [(B, codec.Envelope(3, []))] and not box.owed
