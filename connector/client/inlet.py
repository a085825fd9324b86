"""What a node hears: read by a caller that waits for it (it *leads*), and by the link's own thread while none does.

A thread less that has to wake for a payload is a good part of its way. But Python runs signals' handlers in the main
thread, between any two instructions, and they may raise: what a caller read may be applied by half. So a frame comes
off the socket and into `came` in one call, and leaves it once it is applied; a caller applies nothing but deliveries,
which may be applied again (inbox.py), and leaves the rest to the link's thread, which no handler interrupts.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident

from connector.client.lifeline import ONE_FRAME, Lifeline, Packet, passed
from connector.client.pairs import Pair
from connector.client.session import Session
from connector.core.errors import ProtocolViolation
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.codec import Envelope
from connector.wire.order import InOrder

log = logging.getLogger("connector.client")

#: Looks at the sockets at one go, and frames of one socket when there was one before: to find that there are no more
#: costs as much as a frame.
TURN = 64
MANY_FRAMES = ONE_FRAME * 16
MOST_FRAME = 64 << 20
DELIVERIES = (msg.Deliver, msg.Next)


class Inlet:
    """The receiving side of a link. `wake`, `later`: the link's thread is needed, at once or in a moment."""

    def __init__(
        self, session: Session, wake: Callable[[], None], later: Callable[[], None], spin: float = 0.0
    ) -> None:
        """`spin`: seconds that who leads looks before it sleeps."""
        self._session = session
        self._wake, self._later = wake, later
        self._spin = spin
        self._reading = threading.Lock()
        #: The thread that has `_reading`, soon after it has it.
        self._reader = 0
        #: The link's own.
        self._thread = -1
        #: The last look at the sockets found nothing more.
        self.dry = False
        #: Something came since a caller has last drained.
        self._heard = False
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.epoll()
        self._poller.register(self._nudge, select.EPOLLIN)
        self._lifeline: Lifeline | None = None
        self._came: deque[Packet] = deque()
        #: Sockets to writers and readers, by descriptor.
        self._pairs: dict[int, Pair] = {}
        self._arriving = InOrder()
        #: What comes wakes the link's thread.
        self._listens = False
        self._listener: select.epoll | None = None
        self.ended = False
        #: A pair has ended, and a caller saw it; a caller has led since the link's thread looked.
        self._left_over = self._led = False

    # -- the link's thread ------------------------------------------------------------------------

    def watched_by(self, listener: select.epoll) -> None:
        """The epoll that the link's thread sleeps in."""
        self._listener = listener
        listener.register(self._poller.fileno(), select.EPOLLIN)
        self._listens = True

    def begin(self) -> None:
        """A Hello goes out: the broker numbers what it says from 1."""
        with self._reading:
            self._came.clear()
            self._arriving = InOrder()
            self.ended = False

    def first(self, frame: bytes) -> list[Envelope]:
        """The broker's answer to Hello. ProtocolViolation: it cannot be read."""
        return self._arriving.take(codec.decode(frame, from_broker=True))

    def attach(self, lifeline: Lifeline) -> None:
        with self._reading:
            self._lifeline = lifeline
            self._poller.register(lifeline.stream, select.EPOLLIN)

    def drop_pairs(self, but: Iterable[Pair] = ()) -> None:
        """Nothing comes, or goes, directly any more, but over these."""
        self.nudge()
        kept = {id(pair) for pair in but}
        with self._reading:
            for pair in [pair for pair in self._pairs.values() if id(pair) not in kept]:
                self._drop(pair)

    def detach(self) -> None:
        self.nudge()
        with self._reading:
            if self._lifeline is not None:
                self._poller.unregister(self._lifeline.stream)
                self._lifeline = None

    def close(self) -> None:
        with self._reading:
            # A caller that has just led may be about to say who listens.
            self._listener = None
            self._poller.close()
            os.close(self._nudge)

    @property
    def waits(self) -> bool:
        """Something came that waits for a frame on its way through ZeroMQ."""
        return self._arriving.waits

    def listen(self) -> None:
        """Nobody leads: what comes is for the link's thread again."""
        if self._listens or not self._reading.acquire(blocking=False):
            return
        try:
            if self._led:
                # Not before the next tick.
                self._led = False
                self._later()
            elif self._listener is not None:
                self._listens = True
                self._listener.modify(self._poller.fileno(), select.EPOLLIN)
        finally:
            self._reading.release()

    def read(self) -> None:
        """Everything that is there, in the link's thread."""
        if not self._reading.acquire(blocking=False):
            self._rest()
            return
        try:
            self._reader = self._thread = get_ident()
            self._apply_all()
            for _ in range(TURN):
                ready = self._poller.poll(0)
                if not ready:
                    return
                for fd, _ in ready:
                    if fd == self._nudge:
                        os.eventfd_read(fd)
                    elif not self._receive(fd, MANY_FRAMES):
                        return
                self._apply_all()
        finally:
            self._reader = 0
            self._reading.release()

    def take(self, frame: bytes) -> None:
        """A frame that came through ZeroMQ."""
        self.nudge()
        with self._reading:
            self._reader = get_ident()
            try:
                self._apply(frame)
            finally:
                self._reader = 0

    # -- callers ----------------------------------------------------------------------------------

    def lead(self, answered: Callable[[], object], seconds: float) -> bool:
        """Read in the caller's thread until `answered()`, at most so many seconds. False: it is not answered; another
        thread reads, or has to."""
        if not self._session.up or not self._reading.acquire(blocking=False):
            return False
        try:
            self._reader = get_ident()
            self.dry = False
            self._rest()
            self._open_ahead()
            left, until = seconds, 0.0
            while not answered() and not self._came:
                if not until:
                    until = time.monotonic() + seconds
                elif (left := until - time.monotonic()) <= 0:
                    return False
                if not self._hear(left):
                    break
            return bool(answered())
        finally:
            self._reader = 0
            self._reading.release()
            self._after()

    def drain(self) -> None:
        """Read what is there now, in the caller's thread, unless it has just done so. Another caller that leads reads
        it by itself."""
        if self.dry:
            self.dry = False
            return
        if not self._session.up or not self._reading.acquire(blocking=self._reader == self._thread):
            return
        try:
            self._reader = get_ident()
            for _ in range(TURN):
                if self._came or not self._hear(0) or self.dry:
                    break
            if self._heard:
                # It comes while this thread is at work, and will be read by it: the link's would only be in its way.
                self._heard = False
                self._rest()
                self._led = True
        finally:
            self._reader, self.dry = 0, False
            self._reading.release()
            if not self._pass_on() and not self._listens:
                # Also if the link's thread looked just now, and found this one at it.
                self._later()

    def _after(self) -> None:
        """Nobody leads any more: the link's thread goes on with what is left, and listens, if not soon somebody else
        does: a caller that leads again and again is not to be disturbed."""
        if self._pass_on():
            return
        if self._session.requests.open:
            # Others may wait, too.
            self.listen()
        else:
            self._led = True
            self._later()

    def _pass_on(self) -> bool:
        """What a caller came upon that is not for its thread, the link's goes on with; False: there is nothing."""
        if not (self._left_over or self._came or self.ended):
            return False
        self._left_over = False
        self._wake()
        return True

    def nudge(self) -> None:
        """Whoever leads looks up: something was answered, or has ended, in another thread."""
        if self._reading.locked() and self._reader != get_ident():
            os.eventfd_write(self._nudge, 1)

    def _rest(self) -> None:
        """What comes does not wake the link's thread."""
        if self._listens and self._listener is not None:
            self._listens = False
            self._listener.modify(self._poller.fileno(), 0)

    def _open_ahead(self) -> None:
        """While this thread is about to sleep: what it is woken for goes the faster."""
        if self._session.coming.told.announced:
            self._session.open_ahead(self._session.coming)
        for pair in self._pairs.values():
            if pair.coming.told.announced:
                self._session.open_ahead(pair.coming)

    def _hear(self, seconds: float) -> bool:
        """Wait, and apply what comes; False if the leader must stop."""
        poll = self._poller.poll
        ready = (self._spun(min(self._spin, seconds)) if self._spin and seconds else None) or poll(seconds)
        sizes: Sequence[int] = ONE_FRAME
        for _ in range(TURN):
            if not ready:
                self.dry = True
                return True
            if len(ready) > 1:
                ready.sort(key=self._is_lifeline)
            for fd, _ in ready:
                if fd == self._nudge:
                    os.eventfd_read(fd)
                    return False
                if not self._receive(fd, sizes) or not self._apply_deliveries(fd):
                    return False
            ready, sizes = poll(0), MANY_FRAMES
        return True

    def _spun(self, seconds: float) -> list[tuple[int, int]]:
        """What comes while this thread keeps its processor. Each look lets other threads of the process run."""
        until = time.monotonic() + seconds
        while not (ready := self._poller.poll(0)) and time.monotonic() < until:
            continue
        return ready

    def _is_lifeline(self, ready: tuple[int, int]) -> bool:
        """What was told directly comes first: the broker's word may be the answer to who asks whether it has come."""
        return self._lifeline is not None and ready[0] == self._lifeline.stream.fileno()

    # -- whoever reads ----------------------------------------------------------------------------

    def _receive(self, fd: int, sizes: Sequence[int]) -> bool:
        """Frames of this descriptor into its deque, in one call; of the lifeline one. False at the lifeline's end."""
        self._heard = True
        pair = self._pairs.get(fd)
        if pair is not None:
            pair.receive(sizes)
            return True
        lifeline = self._lifeline
        if lifeline is None or self.ended:
            return False
        lifeline.receive_into(self._came)
        if self._came and not self._came[-1][0]:
            self._came.pop()
            self.ended = True
            return False
        return True

    def _apply_all(self) -> None:
        for pair in list(self._pairs.values()):
            self._apply_told(pair)
            if pair.ended:
                self._drop(pair)
        while self._came:
            packet = self._came[0]
            if packet[1]:
                self._session.passed.extend(passed(packet))
            self._apply(packet[0])
            self._came.popleft()

    def _apply(self, frame: bytes) -> None:
        for envelope in self._arriving.take(self._decode(frame)):
            self._session.receive(envelope)
        while self._session.introduced:
            pair = self._session.introduced.popleft()
            self._pairs[pair.stream.fileno()] = pair
            self._poller.register(pair.stream, select.EPOLLIN)

    def _apply_told(self, pair: Pair) -> None:
        """What a writer told directly: nothing but deliveries."""
        came, coming = pair.came, pair.coming
        while came:
            try:
                self._session.receive_told(coming.read(came[0]))
            except ProtocolViolation as error:
                log.error("what session %s told cannot be read: %s", pair.session, error)
            came.popleft()

    def _apply_deliveries(self, fd: int) -> bool:
        """What came of this descriptor; False if there is something that is not for a caller's thread."""
        pair = self._pairs.get(fd)
        if pair is not None:
            self._apply_told(pair)
            self._left_over = pair.ended
            return not pair.ended
        arriving = self._arriving
        while self._came:
            packet = self._came[0]
            envelope = self._decode(packet[0])
            if packet[1] or not arriving.is_next(envelope):
                return False
            for message in envelope.messages:
                if type(message) not in DELIVERIES:
                    return False
            self._session.receive(envelope)
            arriving.passed(envelope)
            self._came.popleft()
        return True

    def _drop(self, pair: Pair) -> None:
        fd = pair.stream.fileno()
        if fd >= 0 and self._pairs.pop(fd, None) is not None:
            self._poller.unregister(fd)
        pair.close()
        self._session.has_read(pair)

    def _decode(self, frame: bytes) -> Envelope:
        try:
            return codec.decode(frame, from_broker=True, max_frame=MOST_FRAME)
        except ProtocolViolation as error:
            log.error("what came cannot be read: %s", error)
            return Envelope(0, [])
