"""Frames of one direction that come by two ways, put in the order in which they were sent.

Small frames go over the lifeline, a socket that takes one system call and wakes nobody in between; large ones over
ZeroMQ. Neither loses a frame while it is connected, so what is missing is on its way.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from connector.core.errors import ProtocolViolation
from connector.wire.codec import Envelope

#: Largest frame that a lifeline carries, in bytes: a third of what a socket buffers by default.
LINE_BYTES = 64 << 10
#: Frames that may wait for one before them.
MOST_EARLY = 4096


def most_bytes(buffered: int) -> int:
    """Largest frame to send over a lifeline whose socket buffers so many bytes."""
    return min(LINE_BYTES, buffered // 3)


def send_over(send: Callable[[bytes], object], frame: bytes) -> bool:
    """Send a frame by a lifeline's `send`; False if there is no room now. To a peer that is gone everything counts as
    sent: the lifeline's end says so next. OSError: anything else."""
    try:
        send(frame)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM):
            return False
        if error.errno not in (errno.EPIPE, errno.ECONNRESET):
            raise
    return True


class InOrder:
    """One direction of one connection."""

    def __init__(self) -> None:
        self._next = 1
        self._early: dict[int, Envelope] = {}

    @property
    def waits(self) -> bool:
        """Whether something came that waits for what was sent before it."""
        return bool(self._early)

    def take(self, envelope: Envelope) -> list[Envelope]:
        """What can be read now. A frame without an order is read as it comes; one that came before is no news: its
        sender was interrupted behind the sending. ProtocolViolation: too many that wait for one before them."""
        order = envelope.order
        if not order:
            return [envelope]
        if order == self._next and not self._early:
            self._next += 1
            return [envelope]
        if order < self._next:
            return []
        self._early[order] = envelope
        ready: list[Envelope] = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        if len(self._early) > MOST_EARLY:
            raise ProtocolViolation("a frame is missing", expected=self._next, size=len(self._early), limit=MOST_EARLY)
        return ready

    def is_next(self, envelope: Envelope) -> bool:
        """Whether nothing is missing before it. Who has read it says so by `passed`."""
        return envelope.order == self._next and not self._early

    def passed(self, envelope: Envelope) -> None:
        self._next = envelope.order + 1
