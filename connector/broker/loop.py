"""The broker's one thread: poll, take frames in, apply, flush. Signals and deaths wake the same poller."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable

import zmq

from connector.broker.config_schema import BrokerConfig
from connector.broker.lifeline import Lifeline, Lifelines
from connector.broker.outbox import Outbox
from connector.broker.rundir import RunDir
from connector.broker.service import Service
from connector.broker.store import Store, reclaim
from connector.core.endpoint import socket_path
from connector.core.errors import BrokerLost, ProtocolViolation
from connector.wire import messages as msg

log = logging.getLogger("connector.broker")

#: Frames taken in before answers are flushed.
TURN = 256
#: Times the largest request that is read whole, to be refused with an answer.
OVERSIZE = 4
#: Seconds that an acknowledgement which nobody waits for may wait for other words to the same session.
ACK_AFTER = 0.02
#: Seconds between two looks at a full pipe.
RETRY = 0.02
#: Longest sleep; a doubtful death is looked at again after it.
LONGEST = 1.0


class Broker:
    """A running broker. `serve()` returns after SIGTERM, SIGINT or `stop()`."""

    def __init__(self, config: BrokerConfig) -> None:
        """Raises BrokerRunning, BrokerLost, NoSpace; what was made until then is removed."""
        self.config = config
        with contextlib.ExitStack() as undo:
            self.run_dir = RunDir(config.run_dir, config.group)
            undo.callback(self.run_dir.remove_contents, started=False)
            for path, size in reclaim(config.run_dir):
                log.warning("removed what a dead broker left", extra={"facts": {"path": path, "bytes": size}})
            self.store = Store(self.run_dir, config.pool, config.block_limit)
            undo.callback(self.store.remove)
            self._context = zmq.Context()
            undo.callback(self._context.destroy, 0)
            self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            self._bind()
            self.lifelines = Lifelines(self.run_dir, frozenset({0, os.geteuid()}), self._hear)
            undo.pop_all()
        self.outbox = Outbox(self._router, self._line)
        self.service = Service(
            config,
            self.store,
            self._queue,
            self.outbox.owe,
            self.outbox.greet,
            self._forget,
            self.outbox.pass_on,
            self.lifelines.find,
            time.monotonic,
        )
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.lifelines.watch(self._wake_r)
        self.lifelines.watch(self._router.FD)
        #: When acknowledgements that wait for company go alone.
        self._pay_at: float | None = None
        self.service.shell = self._statistics
        self._stopping = False
        #: Nothing was heard since the loop slept.
        self._woken = False
        #: Times that the loop woke.
        self.turns = 0

    def _bind(self) -> None:
        router = self._router
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.ROUTER_HANDOVER, 1)
        router.set(zmq.LINGER, 0)
        # A larger part ends its sender's connection without a word; up to here it gets an answer.
        router.set(zmq.MAXMSGSIZE, OVERSIZE * self.config.max_request_bytes)
        path = socket_path(self.config.run_dir)
        try:
            router.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise BrokerLost(f"the broker's socket cannot be bound: {error}", path=path) from error
        self.run_dir.own(path)

    # -- the loop -------------------------------------------------------------------------------

    def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until told to stop; then tell everybody, and remove arena and run directory."""
        log.info(
            "serving", extra={"facts": {"run_dir": self.config.run_dir, "pool": self.config.pool, "pid": os.getpid()}}
        )
        if ready is not None:
            ready()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def _patience(self) -> float:
        """Seconds to the next thing that is due."""
        if self._has_frames():
            # Its descriptor speaks once: what came while something was sent is here already.
            return 0.0
        deadline = self.service.directory.next_deadline()
        wait = LONGEST if deadline is None else min(deadline - time.monotonic(), LONGEST)
        if self.outbox.blocked:
            wait = min(wait, RETRY)
        if self._pay_at is not None:
            wait = min(wait, self._pay_at - time.monotonic())
        return max(wait, 0.0)

    def _statistics(self) -> dict[str, int]:
        """What is counted beside the directory and the service."""
        return {
            "turns": self.turns,
            "answers_dropped": self.outbox.dropped,
            "unreachable": self.outbox.unreachable,
            "blocked": len(self.outbox.blocked),
            "lifelines_refused": self.lifelines.refused,
        }

    def _turn(self) -> None:
        self.turns += 1
        try:
            self._woken = True
            dead = list(self.lifelines.poll(self._patience()))
            self._take_frames()
            if self._wake_r in self.lifelines.woken:
                self._drain_wake()
            for token, how in dead:
                self.service.died(token, how)
            self.service.tick()
            self._pay()
            self.outbox.flush(self.service.ack_of)
            self.lifelines.await_room(self.outbox.roomless)
        except Exception:
            # The loop's door: a bug must not take the node down, and must not be quiet.
            log.exception("the broker's loop met a bug and goes on")

    def _pay(self) -> None:
        """Acknowledgements that nobody asked for wait a while for company."""
        if not self.outbox.owed:
            self._pay_at = None
        elif self._pay_at is None:
            self._pay_at = time.monotonic() + ACK_AFTER
        elif self._pay_at <= time.monotonic():
            self._pay_at = None
            self.outbox.pay()

    def _has_frames(self) -> bool:
        return bool(int(self._router.get(zmq.EVENTS)) & zmq.POLLIN)

    def _take_frames(self) -> None:
        for _ in range(TURN):
            if not self._has_frames():
                return
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                self.service.frame(parts[0], parts[1])
            else:
                self.service.violation(
                    parts[0], ProtocolViolation("a message is one frame of one part", parts=len(parts) - 1)
                )

    def _hear(self, token: bytes, frame: bytes) -> None:
        self.service.frame(token, frame)
        if self._woken:
            # The first since the loop slept: whoever is to hear of it waits. What comes behind it goes together.
            self._woken = False
            self.outbox.flush(self.service.ack_of)

    def _line(self, token: bytes) -> Lifeline | None:
        line = self.lifelines.find(token)
        return line if line is not None and line.speaks and not line.ended else None

    def _queue(self, token: bytes, message: msg.Message | None) -> None:
        if message is None:
            self.outbox.touch(token)
        else:
            self.outbox.put(token, message)

    def _forget(self, token: bytes, applied: int) -> None:
        if token in self.outbox.owed:
            self.outbox.touch(token)
        self.outbox.flush(lambda _: applied, [token])
        self.outbox.forget(token)
        self.lifelines.forget(token)

    # -- the end --------------------------------------------------------------------------------

    def install_signals(self) -> None:
        """SIGTERM and SIGINT stop cleanly; they wake the poller through a pipe."""
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())

    def stop(self) -> None:
        """Leave the loop after this turn. Any thread; call `wake` from another one."""
        self._stopping = True

    def wake(self) -> None:
        os.write(self._wake_w, b"!")

    def _drain_wake(self) -> None:
        try:
            os.read(self._wake_r, 512)
        except BlockingIOError:
            return

    def _close(self) -> None:
        log.info("stopping", extra={"facts": {"sessions": self.service.statistics()["sessions"]}})
        self.service.stop()
        self._flush_for(self.config.stop_grace)
        self._router.close(linger=int(self.config.stop_grace * 1000))
        self._context.term()
        self.lifelines.close()
        self.store.remove()
        self.run_dir.remove_contents()
        signal.set_wakeup_fd(-1)
        os.close(self._wake_r)
        os.close(self._wake_w)
        log.info("stopped")

    def _flush_for(self, seconds: float) -> None:
        """Give full pipes that long to drain; a stopped reader does not keep the broker."""
        until = time.monotonic() + seconds
        self.outbox.flush(self.service.ack_of)
        while self.outbox.blocked and time.monotonic() < until:
            self._router.poll(int(RETRY * 1000), zmq.POLLOUT)
            self.outbox.flush(self.service.ack_of)
