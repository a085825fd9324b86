"""What waits to be sent to each session. A stuck session costs its own messages, nothing else.

A full lifeline, and with ROUTER_MANDATORY a full pipe, is an error instead of a silent loss: what did not go stays
here and is tried again. The protocol bounds what a session can be owed (window, one ping, one batch of notices);
only answers to its own requests could pile up, and those are cut at a limit and counted.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Protocol

import zmq

from connector.wire import codec
from connector.wire import messages as msg

#: Answers to requests beyond this many waiting messages of one session are dropped and counted.
MOST_WAITING = 4096
#: Approximate size of one frame; a longer queue is sent as several.
FRAME_MESSAGES = 512

_ANSWERS = (msg.Answer, msg.Failure, msg.Rows, msg.Shown)


class Line(Protocol):
    #: Largest frame that it takes, in bytes.
    most: int

    def send(self, frame: bytes, passed: socket.socket | None = None) -> bool:
        """False if there is no room now."""


class Outbox:
    """Queues by token, flushed once a turn of the loop. `line(token)`: the lifeline, if frames go over it."""

    def __init__(self, router: zmq.Socket[bytes], line: Callable[[bytes], Line | None] = lambda token: None) -> None:
        self._router = router
        self._line = line
        #: Frames sent to those with a line, since they said Hello.
        self._orders: dict[bytes, int] = {}
        self._waiting: dict[bytes, list[msg.Message]] = {}
        #: Tokens whose pipe was full at the last try, and those of them whose lifeline it was.
        self.blocked: set[bytes] = set()
        self.roomless: set[bytes] = set()
        #: Tokens that wait for an acknowledgement, and nothing else.
        self.owed: set[bytes] = set()
        #: Sockets on their way, by what they go with.
        self._passed: dict[int, socket.socket] = {}
        self.dropped = 0
        self.unreachable = 0

    def put(self, token: bytes, message: msg.Message) -> None:
        queue = self._waiting.setdefault(token, [])
        if len(queue) >= MOST_WAITING and isinstance(message, _ANSWERS):
            self.dropped += 1
            return
        queue.append(message)

    def pass_on(self, token: bytes, message: msg.Peer, passed: socket.socket) -> None:
        """Put a message that a socket goes with, which is then closed here. Only to one with a line."""
        self._passed[id(message)] = passed
        self.put(token, message)

    def greet(self, token: bytes) -> None:
        """It said Hello: its frames are numbered from 1."""
        self._orders.pop(token, None)

    def owe(self, token: bytes) -> None:
        """Its acknowledgement may wait for the next message to it, or for the next `pay`."""
        self.owed.add(token)

    def pay(self) -> None:
        """The acknowledgements that are owed go with the next flush."""
        for token in self.owed:
            self.touch(token)

    def touch(self, token: bytes) -> None:
        """An envelope is due although it may hold no message: its counter acknowledges."""
        self._waiting.setdefault(token, [])

    def flush(self, ack_of: Callable[[bytes], int], tokens: Iterable[bytes] | None = None) -> None:
        """Send what is waiting. `ack_of(token)`: its numbered messages that were applied."""
        for token in list(self._waiting if tokens is None else tokens):
            queue = self._waiting.get(token)
            if queue is not None and self._send(token, queue, ack_of(token)):
                del self._waiting[token]
                self.owed.discard(token)

    def _send(self, token: bytes, queue: list[msg.Message], ack: int) -> bool:
        """True if nothing is left to send."""
        sent_any = False
        while queue or not sent_any:
            part = self._part(queue)
            # Only the last frame acknowledges: what was refused must be known before what was applied.
            counter = ack if len(part) == len(queue) else 0
            if not self._send_frame(token, counter, part):
                self.blocked.add(token)
                return False
            sent_any = True
            del queue[: len(part)]
        self.blocked.discard(token)
        return True

    def _part(self, queue: list[msg.Message]) -> list[msg.Message]:
        """What goes into the next frame: a message that a socket goes with has one for itself."""
        part = queue[:FRAME_MESSAGES]
        if self._passed:
            alone = next((place for place, message in enumerate(part) if id(message) in self._passed), len(part))
            part = part[: alone or 1]
        return part

    def _send_frame(self, token: bytes, counter: int, part: list[msg.Message]) -> bool:
        """False if its pipe is full now. To one who is not there the frame counts as sent."""
        line = self._line(token)
        order = 0 if line is None else self._orders.get(token, 0) + 1
        frame = codec.encode(counter, part, order)
        # The answer to Hello is awaited there, and a Welcome shows that ZeroMQ's way is open, too.
        answers = part and (isinstance(part[0], msg.Welcome) or (order == 1 and isinstance(part[0], msg.Failure)))
        if line is not None and len(frame) <= line.most and not answers:
            passed = self._passed.get(id(part[0])) if part and self._passed else None
            if not line.send(frame, passed):
                self.roomless.add(token)
                return False
            self.roomless.discard(token)
            if passed is not None:
                del self._passed[id(part[0])]
                passed.close()
        elif not self._route(token, frame):
            return False
        if order:
            self._orders[token] = order
        return True

    def _route(self, token: bytes, frame: bytes) -> bool:
        try:
            self._router.send_multipart([token, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # No such peer now: it comes back with Hello and says what it has, or it is dead.
            self.unreachable += 1
        return True

    def forget(self, token: bytes) -> None:
        for message in self._waiting.pop(token, ()):
            if id(message) in self._passed:
                self._passed.pop(id(message)).close()
        self._orders.pop(token, None)
        self.owed.discard(token)
        self.roomless.discard(token)
        self.blocked.discard(token)
