"""The one I/O thread of a node: it connects, and connects again, and ends with the last view.

Everybody else reaches it through the session's deques and a waker. Callers send (outlet.py) and hear (inlet.py) by
themselves where they can; what is left is done here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import select
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata

import zmq

from connector.arena.arena import Arena, open_arena
from connector.arena.prefault import Prefault
from connector.client.descriptors import check_descriptors
from connector.client.inlet import Inlet
from connector.client.lifeline import Lifeline
from connector.client.options import Options
from connector.client.outlet import Outlet
from connector.client.session import Session
from connector.client.wakers import Gate, Ticker, Waker
from connector.core.endpoint import socket_path
from connector.core.errors import BrokerLost, ClientClosed, ConnectorError, NoSpace, ProtocolViolation
from connector.wire import codec
from connector.wire import messages as msg

log = logging.getLogger("connector.client")

#: Seconds between two tries to reach a broker.
RETRY_FIRST, RETRY_MOST = 0.05, 0.5
#: Milliseconds in which a frame that a broker sent by ZeroMQ before it ended must have come.
LAST_WORDS = 100
#: Longest sleep of the thread, and the longest while something waits for room.
LONGEST, FULL = 5.0, 0.02


class Link:
    """Connects a session to a broker and keeps it so. `ready` opens at the first Welcome or refusal."""

    def __init__(
        self,
        stage: str,
        run_dir: str,
        source: str,
        options: Options,
        ended: Callable[[], bool] | None = None,
    ) -> None:
        """`ended`: says that a private broker's process has ended, so that none will come back.

        Raises BrokerLost if the process has no file descriptors left.
        """
        self.run_dir = run_dir
        self._ended = ended
        self._source = source
        self._options = options
        check_descriptors(socket_path(run_dir))
        self.wake = Waker()
        self._ticker = Ticker(self.wake)
        self.session = Session(stage, f"{socket_path(run_dir)} (from {source})", self.wake, self._ticker)
        self._outlet = Outlet(self.session, self.wake)
        self._inlet = Inlet(self.session, self.wake, self._ticker, options.spin)
        self.session.push, self.session.nudge = self._outlet.push, self._inlet.nudge
        self.session.lead, self.session.drain = self._inlet.lead, self._inlet.drain
        self.token = secrets.token_bytes(msg.TOKEN_BYTES)
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._lifeline: Lifeline | None = None
        self._prefault: Prefault | None = None
        self._poller = select.epoll()
        self._poller.register(self.wake.fd, select.EPOLLIN)
        self._inlet.watched_by(self._poller)
        #: The thread wakes when there is room on the lifeline.
        self._waits = False
        self._retry_at = 0.0
        self._retry_after = RETRY_FIRST
        self.ready = Gate()
        self.refusal: ConnectorError | None = None
        self._close_by: float | None = None
        self._bye_sent = False
        self.quiet = Gate()
        self.thread = threading.Thread(target=self._run, name=f"connector-{stage}", daemon=True)

    def close(self, timeout: float) -> None:
        """Ask the thread to send what is queued, say good-bye and end; `quiet` opens when that is done.

        Takes no lock: the collector may call it, in a thread that holds the session's.
        """
        if not self.session.closed:
            self._close_by = time.monotonic() + timeout
            self.session.closed = True
        self.wake()

    @property
    def page_locked(self) -> bool:
        """All mappings of the arena are page-locked."""
        mapped = (self.session.arena, self.session.read_arena)
        return self.session.arena is not None and all(one is None or one.page_locked for one in mapped)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._done():
                if not self.session.up:
                    self._try_connect()
                self._sleep()
                self.session.tick(time.monotonic())
                if self.session.up:
                    self._hear()
                    self._send()
        finally:
            self._end()

    def _sleep(self) -> None:
        self._await_room()
        happened = self._poller.poll(self._patience())
        self.session.sleeps_until = math.inf
        if any(fd == self.wake.fd for fd, _ in happened):
            self.wake.look()
        self._ticker.look()

    def _await_room(self) -> None:
        """Wake when the lifeline has room again, if that is what the next frame waits for."""
        waits = self._outlet.waits_for_room
        if self._lifeline is not None and waits is not self._waits:
            self._waits = waits
            self._poller.modify(self._lifeline.stream, select.EPOLLOUT if waits else 0)

    def _hear(self) -> None:
        self._inlet.read()
        self._receive()
        if self._inlet.ended:
            self._hear_last_words()
            self._lost("its process has ended")
        self._inlet.listen()

    def _receive(self) -> None:
        """Large frames. ZeroMQ's descriptor speaks once: what came while something was sent is here already."""
        while self._dealer is not None:
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._inlet.take(frame)

    def _hear_last_words(self) -> None:
        """What the broker said before it ended the lifeline: ZeroMQ's thread may still be bringing a large frame."""
        while self._dealer is not None and self._dealer.poll(LAST_WORDS if self._inlet.waits else 0):
            self._receive()

    def _said_all(self) -> bool:
        """The good-bye is sent, and the broker has acknowledged everything before it."""
        session = self.session
        return self._bye_sent and not session.outgoing.unacked and not session.out.waiting and not session.out.frames

    def _patience(self) -> float:
        """Seconds to sleep."""
        now = time.monotonic()
        due = self.session.next_deadline()
        until = min(due if due is not None else now + LONGEST, now + LONGEST)
        if not self.session.up:
            until = min(until, self._retry_at)
        elif self.session.out.frames:
            until = min(until, now + FULL)
        if self._close_by is not None:
            until = min(until, max(self._close_by, now + 0.005))
        tick = self._ticker.patience()
        if tick is not None:
            until = min(until, now + tick)
        self.session.sleeps_until = until
        return max(until - now, 0.0)

    def _send(self) -> None:
        # The good-bye gives back what is reserved: not while a device copies into it.
        if self.session.closed and not self._bye_sent and not self.session.copying.under_way:
            # Nothing but releases is queued after `closed`, so this is the last word of all callers.
            self._bye_sent = True
            # What comes directly from now on, nobody here will have.
            self._inlet.drop_pairs()
            with self.session.lock:
                self.session.queue_taken(everything=True)
                self.session.post(msg.Bye(tuple(self.session.holds.held)))
        self._outlet.push(own=True)

    # -- up and down ------------------------------------------------------------------------------

    def _try_connect(self) -> None:
        now = time.monotonic()
        if now < self._retry_at or self.session.closed:
            return
        try:
            self._connect()
        except ConnectorError as error:
            self.refusal = error
            self.session.disconnected(error.message)
            self._disconnect()
            self._retry_at = time.monotonic() + self._retry_after
            self._retry_after = min(2 * self._retry_after, RETRY_MOST)
            if self._ended is not None and self._ended():
                self.session.orphan()
            if not isinstance(error, BrokerLost):
                self.ready.open()
        else:
            self.refusal = None
            self._retry_after = RETRY_FIRST
            self.ready.open()

    def _connect(self) -> None:
        check_descriptors(self.session.tried)
        self._inlet.begin()
        lifeline = self._lifeline = Lifeline(self.run_dir, self.token, timeout=2.0)
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.set(zmq.ROUTING_ID, self.token)
        dealer.set(zmq.SNDHWM, 0)
        dealer.set(zmq.LINGER, 0)
        dealer.connect(f"ipc://{socket_path(self.run_dir)}")
        again = self.session.arena is not None
        hello = msg.Hello(self.token, self.session.stage, _version(), again, self.session.reserved(), direct=True)
        dealer.send(codec.encode(self.session.seen, [hello]))
        welcome, rest = self._await_welcome(dealer)
        arena, read_arena = self._map(welcome)
        self.session.connected(welcome, arena, read_arena)
        self._inlet.drop_pairs(but=self.session.pairs.values())
        self._poller.register(dealer.FD, select.EPOLLIN)
        self._poller.register(lifeline.stream, 0)
        self._waits = False
        for envelope in rest:
            self.session.receive(envelope)
        self._outlet.attach(lifeline, dealer)
        self._inlet.attach(lifeline)
        # What callers queued meanwhile is to be sent, too: their own wake-ups may have been read before.
        self.wake()

    def _await_welcome(self, dealer: zmq.Socket[bytes]) -> tuple[msg.Welcome, list[codec.Envelope]]:
        """The broker's answer to Hello, and what came after it in the same frame or behind."""
        if not dealer.poll(5000):
            raise BrokerLost("the broker took the lifeline but does not answer", path=self.session.tried)
        (envelope,) = self._inlet.first(dealer.recv())
        for place, message in enumerate(envelope.messages):
            if isinstance(message, msg.Welcome):
                return message, [codec.Envelope(envelope.counter, envelope.messages[place + 1 :])]
            if isinstance(message, msg.Failure):
                raise message.error
        raise ProtocolViolation("the broker's first message is no Welcome", path=self.session.tried)

    def _map(self, welcome: msg.Welcome) -> tuple[Arena, Arena | None]:
        """Map the broker's arena, unless it is mapped already. BrokerLost says what hides it."""
        uuid = welcome.arena.hex()
        known = self.session.arena
        if known is not None and known.uuid == uuid:
            return known, self.session.read_arena
        arena = open_arena(uuid, welcome.arena_size)
        read_arena = open_arena(uuid, welcome.arena_size, readonly=True) if self._options.readonly else None
        if self._prefault is not None:
            self._prefault.stop()
        then = partial(_lock_pages, [one for one in (arena, read_arena) if one]) if self._options.page_lock else None
        self._prefault = Prefault(arena.segment, then=then).start()
        return arena, read_arena

    def _lost(self, reason: str) -> None:
        """The broker is away: keep what callers wait for, and look for it again."""
        if self.session.stopping:
            # It has said so, and whoever waited was told.
            log.info("the broker has stopped path=%s", self.session.tried)
        elif not self._bye_sent:
            log.warning("lost the broker: %s path=%s", reason, self.session.tried)
        self.session.disconnected(reason)
        self._disconnect()
        self._retry_at = time.monotonic() + self._retry_after

    def _disconnect(self) -> None:
        self._outlet.detach()
        self._inlet.detach()
        if self._dealer is not None:
            self._unwatch(self._dealer.FD)
            self._dealer.close(linger=0)
            self._dealer = None
        if self._lifeline is not None:
            self._unwatch(self._lifeline.stream.fileno())
            self._lifeline.close()
            self._lifeline = None

    def _unwatch(self, fd: int) -> None:
        # Not there: the connection ended before it was complete.
        with contextlib.suppress(OSError):
            self._poller.unregister(fd)

    # -- the end ----------------------------------------------------------------------------------

    def _done(self) -> bool:
        """Closed, and the broker has let go of the session; it does so after the last view's release.

        While views are alive, or a device copies into a block, the lifeline stays: the broker would take its end for
        theirs.
        """
        if self._close_by is None:
            return False
        session = self.session
        over = time.monotonic() >= self._close_by
        if over or self._said_all():
            self._release_callers()
        return not session.up or (over and session.holds.is_empty() and not session.copying.under_way)

    def _release_callers(self) -> None:
        if not self.quiet.is_open():
            self.session.fail_everything(ClientClosed("the node was closed", stage=self.session.stage))
            self.quiet.open()

    def _end(self) -> None:
        self.session.disconnected("the node was closed")
        self._disconnect()
        self._inlet.drop_pairs()
        self._inlet.close()
        self._poller.close()
        self._context.term()
        if self._prefault is not None:
            self._prefault.stop()
            self._prefault = None
        self._release_callers()
        self.session.copying.end()
        self.session.let_go()
        self.ready.open()


def _lock_pages(arenas: list[Arena]) -> None:
    from connector.arena import cuda

    for arena in arenas:
        try:
            cuda.lock_pages(arena.segment.mapping)
        except NoSpace as error:
            log.warning("copies from and to a GPU will be slow: %s", error)


def _version() -> str:
    try:
        return metadata.version("tensor-connector")
    except metadata.PackageNotFoundError:
        return "0"
