"""What a node says: framed and sent by whichever thread comes first, in one order.

A caller's thread may be ended anywhere in here by a signal's handler. So each step is one store: messages leave the
queue as their frame enters it, and a frame that was sent and is still here is sent again (wire/order.py drops it).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from connector.client.session import Out, Session
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.runs import joined

if TYPE_CHECKING:
    from connector.client.lifeline import Lifeline

#: Messages and manifest bytes of one frame.
FRAME_MESSAGES, FRAME_BYTES = 256, 1 << 20


class Outlet:
    """The sending side of a link. `wake`: the link's thread is needed."""

    def __init__(self, session: Session, wake: Callable[[], None]) -> None:
        self._session = session
        self._wake = wake
        self._sending = threading.Lock()
        #: Somebody wants sent what is queued.
        self._wanted = False
        self._lifeline: Lifeline | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        #: The lifeline was full for the frame that is next. Not while one is being sent: there is room then, and who
        #: waits for it would not sleep.
        self.waits_for_room = False

    def attach(self, lifeline: Lifeline, dealer: zmq.Socket[bytes]) -> None:
        """There is a broker to speak to."""
        with self._sending:
            self._lifeline, self._dealer = lifeline, dealer

    def detach(self) -> None:
        """Nobody sends any more once this returns."""
        with self._sending:
            self._lifeline = self._dealer = None
            self.waits_for_room = False

    def push(self, own: bool = False) -> None:
        """Send what is queued, as far as there is room. `own`: this is the link's thread, which has ZeroMQ's socket."""
        session = self._session
        self._wanted = True
        while self._wanted and (session.out.waiting or session.out.frames or session.holds.has_words()):
            if not self._sending.acquire(blocking=False):
                # Who has it looks again when he has given it back.
                return
            try:
                # What is queued from now on, and nobody wants sent, waits for company.
                self._wanted = False
                if not self._send(own):
                    return
            finally:
                self._sending.release()

    def _send(self, own: bool) -> bool:
        """False if the rest has to wait."""
        lifeline, session = self._lifeline, self._session
        if lifeline is None:
            return False
        with session.lock:
            messages = session.collect()
            if messages:
                self._frame(messages)
            frames = session.out.frames
        if not frames:
            return False
        for frame in frames:
            if len(frame) <= lifeline.most:
                sent = lifeline.send(frame)
                self.waits_for_room = not sent
            else:
                sent = own and self._send_large(frame)
            if not sent:
                if not own:
                    self._wake()
                return False
            with session.lock:
                out = session.out
                session.out = Out(out.waiting, out.frames[1:], out.order)
        return True

    def _send_large(self, frame: bytes) -> bool:
        assert self._dealer is not None
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _frame(self, messages: list[msg.Message]) -> None:
        session, out = self._session, self._session.out
        frames, order = out.frames, out.order
        for part in _parts(messages) if len(messages) > 1 else (messages,):
            order += 1
            frames += (codec.encode(session.seen, joined(part), order),)
        session.out = Out(deque(), frames, order)


def _parts(messages: list[msg.Message]) -> list[list[msg.Message]]:
    """Messages of one frame each: so many, or of so many bytes."""
    parts: list[list[msg.Message]] = []
    part: list[msg.Message] = []
    size = 0
    for message in messages:
        weight = sum(len(m.manifest) for m in message.members) if isinstance(message, msg.Seal) else 0
        if part and (size + weight > FRAME_BYTES or len(part) >= FRAME_MESSAGES):
            parts.append(part)
            part, size = [], 0
        part.append(message)
        size += weight
    return [*parts, part]
