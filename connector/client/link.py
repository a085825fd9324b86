"""The one I/O thread of a node: it owns the sockets, connects again, and ends with the last view.

Everybody else reaches it through the session's deques and an eventfd.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from importlib import metadata

import zmq

from connector.arena.arena import Arena, open_arena
from connector.arena.prefault import Prefault
from connector.client.descriptors import check_descriptors
from connector.client.lifeline import Lifeline
from connector.client.session import Session
from connector.core.endpoint import socket_path
from connector.core.errors import BrokerLost, ClientClosed, ConnectorError, ProtocolViolation
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.order import InOrder

log = logging.getLogger("connector.client")

#: Seconds between two tries to reach a broker.
RETRY_FIRST, RETRY_MOST = 0.05, 0.5
#: Milliseconds in which a frame that a broker sent by ZeroMQ before it ended must have come.
LAST_WORDS = 100
#: Longest sleep of the thread.
LONGEST = 5.0
#: Messages and manifest bytes of one frame.
FRAME_MESSAGES, FRAME_BYTES = 256, 1 << 20


class Waker:
    """An eventfd that lives as long as anyone may write it: a view can outlive everything else."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: It was written, and the thread has not looked since.
        self._raised = False

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound early: at the interpreter's end the module may be empty by now.
        close(self.fd)

    def __call__(self) -> None:
        """Any thread, any finaliser: one system call at most, no lock. What it is to find must be there before."""
        if not self._raised:
            self._raised = True
            os.eventfd_write(self.fd, 1)

    def look(self) -> None:
        """The thread is awake, and looks at everything behind this."""
        os.eventfd_read(self.fd)
        # After the read: a call in between would write, be read here, and the next ones would not write.
        self._raised = False


class Link:
    """Connects a session to a broker and keeps it so. `ready` is set at the first Welcome or refusal."""

    def __init__(
        self, stage: str, run_dir: str, source: str, readonly: bool, ended: Callable[[], bool] | None = None
    ) -> None:
        """`ended`: says that a private broker's process has ended, so that none will come back.

        Raises BrokerLost if the process has no file descriptors left.
        """
        self.run_dir = run_dir
        self._ended = ended
        self._source = source
        self._readonly = readonly
        check_descriptors(socket_path(run_dir))
        self.wake = Waker()
        self.session = Session(stage, f"{socket_path(run_dir)} (from {source})", self.wake)
        self.token = secrets.token_bytes(msg.TOKEN_BYTES)
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._lifeline: Lifeline | None = None
        self._prefault: Prefault | None = None
        self._poller = zmq.Poller()
        self._poller.register(self.wake.fd, zmq.POLLIN)
        self._unsent: list[bytes] = []
        #: The thread wakes when there is room on the lifeline.
        self._waits = False
        #: Frames made since the last Hello, and those that have come.
        self._order = 0
        self._arriving = InOrder()
        self._retry_at = 0.0
        self._retry_after = RETRY_FIRST
        self._max_frame = codec.MAX_FRAME
        self.ready = threading.Event()
        self.refusal: ConnectorError | None = None
        self._close_by: float | None = None
        self._bye_sent = False
        self.quiet = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"connector-{stage}", daemon=True)

    def close(self, timeout: float) -> None:
        """Ask the thread to send what is queued, say good-bye and end; `quiet` is set when that is done.

        Takes no lock: the collector may call it, in a thread that holds the session's.
        """
        if not self.session.closed:
            self._close_by = time.monotonic() + timeout
            self.session.closed = True
        self.wake()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._done():
                if not self.session.up:
                    self._try_connect()
                self._poll()
                self.session.tick(time.monotonic())
                if self.session.up:
                    self._send()
        finally:
            self._end()

    def _poll(self) -> None:
        if self._lifeline is not None and self.session.up:
            self._await_room(self._lifeline)
        happened = self._poller.poll(self._patience())
        self.session.sleeps_until = math.inf
        for key, _ in happened:
            if key == self.wake.fd:
                self.wake.look()
            elif self._dealer is not None and key is self._dealer:
                self._receive()
            elif self._lifeline is not None:
                self._listen(self._lifeline)

    def _await_room(self, lifeline: Lifeline) -> None:
        """Wake when the lifeline has room again, if that is what the next frame waits for."""
        waits = bool(self._unsent) and len(self._unsent[0]) <= lifeline.most
        if waits is not self._waits:
            self._waits = waits
            self._poller.modify(lifeline.stream, zmq.POLLIN | (zmq.POLLOUT if waits else 0))

    def _listen(self, lifeline: Lifeline) -> None:
        """What has come over the lifeline."""
        for _ in range(256):
            frame = lifeline.receive()
            if frame is None:
                return
            if not frame:
                self._hear_last_words()
                self._lost("its process has ended")
                return
            self._take(frame)

    def _hear_last_words(self) -> None:
        """What the broker said before it ended the lifeline: ZeroMQ's thread may still be bringing a large frame."""
        while self._dealer is not None and self._dealer.poll(LAST_WORDS if self._arriving.waits else 0):
            self._receive()

    def _said_all(self) -> bool:
        """The good-bye is sent, and the broker has acknowledged everything before it."""
        return self._bye_sent and not self.session.outgoing.unacked and not self._unsent

    def _patience(self) -> int:
        now = time.monotonic()
        due = self.session.next_deadline()
        until = min(due if due is not None else now + LONGEST, now + LONGEST)
        if not self.session.up:
            until = min(until, self._retry_at)
        if self._close_by is not None:
            until = min(until, max(self._close_by, now + 0.005))
        if self._unsent:
            until = min(until, now + 0.02)
        self.session.sleeps_until = until
        return max(int((until - now) * 1000) + 1, 0)

    def _receive(self) -> None:
        assert self._dealer is not None
        for _ in range(256):
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frame)

    def _take(self, frame: bytes) -> None:
        try:
            envelopes = self._arriving.take(codec.decode(frame, from_broker=True, max_frame=64 << 20))
        except ProtocolViolation as error:
            log.error("the broker sent what cannot be read: %s", error)
            return
        for envelope in envelopes:
            self.session.receive(envelope)

    def _send(self) -> None:
        closing = self.session.closed
        messages = self.session.collect()
        if closing and not self._bye_sent:
            # Nothing but releases is queued after `closed`, so this is the last word of all callers.
            self._bye_sent = True
            with self.session.lock:
                messages.append(msg.Bye(tuple(self.session.held)))
        self._unsent += self._frames(messages)
        self._push()

    def _frames(self, messages: list[msg.Message]) -> list[bytes]:
        frames: list[bytes] = []
        part: list[msg.Message] = []
        size = 0
        for message in messages:
            weight = sum(len(m.manifest) for m in message.members) if isinstance(message, msg.Seal) else 0
            if part and (size + weight > FRAME_BYTES or len(part) >= FRAME_MESSAGES):
                frames.append(self._frame(part))
                part, size = [], 0
            part.append(message)
            size += weight
        return [*frames, self._frame(part)] if part else frames

    def _frame(self, messages: list[msg.Message]) -> bytes:
        self._order += 1
        return codec.encode(self.session.seen, messages, self._order)

    def _push(self) -> None:
        while self._unsent and self._dealer is not None and self._lifeline is not None:
            frame = self._unsent[0]
            if len(frame) <= self._lifeline.most:
                if not self._lifeline.send(frame):
                    return
            else:
                try:
                    self._dealer.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    return
            del self._unsent[0]

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
                self.ready.set()
        else:
            self.refusal = None
            self._retry_after = RETRY_FIRST
            self.ready.set()

    def _connect(self) -> None:
        check_descriptors(self.session.tried)
        self._order, self._arriving = 0, InOrder()
        self._lifeline = Lifeline(self.run_dir, self.token, timeout=2.0)
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.set(zmq.ROUTING_ID, self.token)
        dealer.set(zmq.SNDHWM, 0)
        dealer.set(zmq.LINGER, 0)
        dealer.connect(f"ipc://{socket_path(self.run_dir)}")
        again = self.session.arena is not None
        hello = msg.Hello(self.token, self.session.stage, _version(), again, self.session.reserved())
        dealer.send(codec.encode(self.session.seen, [hello]))
        welcome, rest = self._await_welcome(dealer)
        arena, read_arena = self._map(welcome)
        first = self.session.connected(welcome, arena, read_arena)
        self._max_frame = int(welcome.limits.get("max_request_bytes", codec.MAX_FRAME))
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(self._lifeline.stream, zmq.POLLIN)
        self._waits = False
        self._unsent = self._frames(first)
        self._push()
        # What callers queued meanwhile is to be sent, too: their own wake-ups may have been read before.
        self.wake()
        for envelope in rest:
            self.session.receive(envelope)

    def _await_welcome(self, dealer: zmq.Socket[bytes]) -> tuple[msg.Welcome, list[codec.Envelope]]:
        """The broker's answer to Hello, and what came after it in the same frame or behind."""
        if not dealer.poll(5000):
            raise BrokerLost("the broker took the lifeline but does not answer", path=self.session.tried)
        (envelope,) = self._arriving.take(codec.decode(dealer.recv(), from_broker=True))
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
        read_arena = open_arena(uuid, welcome.arena_size, readonly=True) if self._readonly else None
        if self._prefault is not None:
            self._prefault.stop()
        self._prefault = Prefault(arena.segment).start()
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
        if self._dealer is not None:
            if self._dealer in self._poller:
                self._poller.unregister(self._dealer)
            self._dealer.close(linger=0)
            self._dealer = None
        if self._lifeline is not None:
            if self._lifeline.stream in self._poller:
                self._poller.unregister(self._lifeline.stream)
            self._lifeline.close()
            self._lifeline = None
        self._unsent = []

    # -- the end ----------------------------------------------------------------------------------

    def _done(self) -> bool:
        """Closed, and the broker has let go of the session; it does so after the last view's release.

        While views are alive the lifeline stays: the broker would take its end for the end of the views.
        """
        if self._close_by is None:
            return False
        session = self.session
        over = time.monotonic() >= self._close_by
        if over or self._said_all():
            self._release_callers()
        return not session.up or (over and not session.held and not session.freed)

    def _release_callers(self) -> None:
        if not self.quiet.is_set():
            self.session.fail_everything(ClientClosed("the node was closed", stage=self.session.stage))
            self.quiet.set()

    def _end(self) -> None:
        self._disconnect()
        self._context.term()
        if self._prefault is not None:
            self._prefault.stop()
        self._release_callers()
        self.ready.set()


def _version() -> str:
    try:
        return metadata.version("tensor-connector")
    except metadata.PackageNotFoundError:
        return "0"
