"""The broker without its sockets: frames in, messages out, shared memory kept in step.

Everything that happens goes through `Directory.handle`; this file says who a frame is from, performs
effects in order and answers questions that change nothing.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

from connector.broker import queries, translate, unsent
from connector.broker.config_schema import BrokerConfig
from connector.broker.lifeline import Lifeline
from connector.broker.store import Store
from connector.broker.telling import Telling
from connector.core.directory import Directory, Settings
from connector.core.directory import effects as ef
from connector.core.directory import events as ev
from connector.core.errors import ConnectorError, ProtocolViolation, Refused
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.order import InOrder

log = logging.getLogger("connector.broker")


def settings_of(config: BrokerConfig, store: Store) -> Settings:
    """The directory's limits from the configuration and the arena that was made."""
    return Settings(
        begin=store.arena.data_begin,
        end=store.arena.end - store.arena.size % 64,
        max_blocks=config.block_limit,
        window=config.window,
        ahead_session=config.ahead_limit,
        ahead_total=config.ahead_total,
        edge_guard=config.edge_guard,
        unclaimed_after=config.unclaimed_after,
        unclaimed_edges={
            entry.edge: entry.unclaimed_after for entry in config.edges if entry.unclaimed_after is not None
        },
        suspect_after=config.suspect_after,
        heartbeat=config.heartbeat,
        deadlock_after=config.deadlock_after,
    )


class Service:
    """One broker's mind.

    `send(token, message)` queues, None an acknowledgement; `owe(token)` says that one may come later;
    `greeted(token)` hears of a Hello before it is answered; `gone(token, applied)` says the last acknowledgement to a
    peer and forgets it; `pass_on` queues a message with a socket that goes with it.
    """

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        send: Callable[[bytes, msg.Message | None], None],
        owe: Callable[[bytes], None],
        greeted: Callable[[bytes], None],
        gone: Callable[[bytes, int], None],
        pass_on: Callable[[bytes, msg.Peer, socket.socket], None],
        lifeline: Callable[[bytes], Lifeline | None],
        now: Callable[[], float],
    ) -> None:
        self.config = config
        self.store = store
        self.directory = Directory(settings_of(config, store))
        self._send = send
        self._owe = owe
        self._greeted = greeted
        self._gone = gone
        self._pass_on = pass_on
        self._lifeline = lifeline
        self._now = now
        self._session_of: dict[bytes, int] = {}
        self._arriving: dict[bytes, InOrder] = {}
        self._telling = Telling()
        self._token_of: dict[int, bytes] = {}
        self._next_session = 0
        self.violations = 0
        #: Figures of the shell around this service, by name.
        self.shell: Callable[[], dict[str, int]] = dict
        self.started = now()

    # -- frames ---------------------------------------------------------------------------------

    def frame(self, token: bytes, data: bytes) -> None:
        """One frame of a client. A bad one costs its sender an error reply, nobody else anything."""
        try:
            envelope = codec.decode(data, from_broker=False, max_frame=self.config.max_request_bytes)
            arriving = self._arriving.get(token)
            envelopes = [envelope] if arriving is None else arriving.take(envelope)
        except ProtocolViolation as error:
            self.violation(token, error)
            return
        for ready in envelopes:
            self._envelope(token, ready)

    def _envelope(self, token: bytes, envelope: codec.Envelope) -> None:
        session = self._session_of.get(token)
        if session is not None:
            self.apply(ev.Heard(self._now(), session, envelope.counter))
        for message in envelope.messages:
            if isinstance(message, msg.Hello):
                self._hello(token, message)
            elif token in self._session_of:
                self._message(token, self._session_of[token], message)
            else:
                # A session that the broker does not know: it must say Hello again.
                self._send(
                    token, msg.Failure(0, Refused("no session of this token; say Hello", kind=type(message).__name__))
                )
                return

    def violation(self, token: bytes, error: ProtocolViolation) -> None:
        """Something malformed came from `token`: it is counted, logged, and answered."""
        self.violations += 1
        log.warning("malformed message", extra={"facts": {"peer": self._who(token), "error": str(error)}})
        self._send(token, msg.Failure(0, error))

    def _who(self, token: bytes) -> str:
        line = self._lifeline(token)
        return f"pid {line.pid}" if line else "unknown peer"

    def _message(self, token: bytes, session: int, message: msg.Message) -> None:
        make = translate.TO_EVENT.get(type(message))
        if make is not None:
            self.apply(make(self._now(), session, message))
        elif isinstance(message, msg.Pong):
            # Who asks for it, waits for it.
            self._send(token, None)
        else:
            self._send(token, self._answer(message))

    def _answer(self, message: msg.Message) -> msg.Message:
        request: int = getattr(message, "request", 0)
        try:
            return queries.answer(self, message)
        except ConnectorError as error:
            return msg.Failure(request, error)

    # -- sessions -------------------------------------------------------------------------------

    def _hello(self, token: bytes, hello: msg.Hello) -> None:
        line = self._lifeline(token)
        known = self._session_of.get(token)
        if hello.token != token or line is None:
            self._send(token, msg.Failure(0, ProtocolViolation("Hello without a lifeline of this token")))
            return
        self._greeted(token)
        if line.speaks:
            self._arriving[token] = InOrder()
        if known is None:
            if len(self._session_of) >= self.config.max_sessions:
                limit = self.config.max_sessions
                self._send(token, msg.Failure(0, Refused("too many sessions", limit=limit, stage=hello.stage)))
                return
            self._next_session += 1
            known = self._next_session
            self._session_of[token], self._token_of[known] = known, token
            direct = hello.direct and line.speaks and self.config.direct
            self.apply(ev.Joined(self._now(), known, hello.stage, line.pid, line.uid, direct))
            self._send(token, self._welcome(known, again=False))
            return
        self._send(token, self._welcome(known, again=True))
        self.apply(ev.Resynced(self._now(), known, hello.reserved))

    def _welcome(self, session: int, again: bool) -> msg.Welcome:
        config = self.config
        limits = {
            "max_request_bytes": config.max_request_bytes,
            "pool": self.store.arena.size,
            "put_timeout": config.put_timeout,
            "heartbeat": config.heartbeat,
            "ahead_session": config.ahead_limit,
            "window": config.window,
            "applied": self.directory.state.sessions[session].applied,
            "seen": self.directory.state.sessions[session].seen,
        }
        arena = bytes.fromhex(self.store.uuid)
        return msg.Welcome(session, self.store.epoch, arena, self.store.arena.size, again, limits)

    def died(self, token: bytes, how: str) -> None:
        """The process behind a token is proven dead."""
        session = self._session_of.get(token)
        if session is None:
            self._gone(token, 0)
            return
        known = self.directory.state.sessions.get(session)
        for sealed in unsent.seals(self.store.arena, known, self._now()) if known is not None else ():
            self.apply(sealed)
        self.apply(ev.Died(self._now(), session, how))

    # -- events and effects ---------------------------------------------------------------------

    def tick(self) -> None:
        deadline = self.directory.next_deadline()
        if deadline is not None and deadline <= self._now():
            self.apply(ev.Tick(self._now(), 0))

    def stop(self) -> None:
        self.apply(ev.Stopping(self._now(), 0))

    def ack_of(self, token: bytes) -> int:
        """Numbered messages of this peer's session that were applied; 0 without a session."""
        session = self.directory.state.sessions.get(self._session_of.get(token, 0))
        return session.applied if session is not None else 0

    def apply(self, event: ev.Event) -> None:
        for effect in self.directory.handle(event):
            self._perform(effect)

    def _perform(self, effect: ef.Effect) -> None:
        if self.store.perform(effect):
            return
        if isinstance(effect, ef.Log):
            log.log(getattr(logging, effect.level.upper()), effect.text, extra={"facts": effect.facts})
        elif isinstance(effect, ef.Expelled):
            token = self._token_of.pop(effect.session, None)
            if token is not None:
                del self._session_of[token]
                self._arriving.pop(token, None)
                self._gone(token, effect.applied)
        elif isinstance(effect, ef.ToSession):
            token = self._token_of.get(effect.session)
            if token is not None:
                self._emit(token, effect)

    def _emit(self, token: bytes, effect: ef.ToSession) -> None:
        if isinstance(effect, ef.Acked):
            self._owe(token)
        elif isinstance(effect, ef.Introduce):
            self._introduce(effect)
        elif isinstance(effect, ef.Deliver):
            for message in self._telling.messages(effect):
                self._send(token, message)
        else:
            self._send(token, translate.TO_MESSAGE[type(effect)](effect))

    def _introduce(self, effect: ef.Introduce) -> None:
        """A socket between two sessions: a packet is a frame, and each end sees when the other is closed."""
        other = self._token_of.get(effect.other)
        if other is None:
            return
        try:
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except OSError as error:
            facts = {"sessions": [effect.session, effect.other], "error": error.strerror}
            log.error("no direct path: raise the limit of open files", extra={"facts": facts})
            return
        self._pass_on(self._token_of[effect.session], msg.Peer(effect.other), ends[0])
        self._pass_on(other, msg.Peer(effect.session), ends[1])

    def statistics(self) -> dict[str, Any]:
        """What the shell knows beside the directory."""
        store = self.store
        return {
            "arena": store.uuid,
            "epoch": store.epoch,
            "run_dir": self.config.run_dir,
            "uptime": round(self._now() - self.started, 3),
            "prefaulted_bytes": store.prefault.progress,
            "sessions": len(self._session_of),
            "violations": self.violations,
            **self.shell(),
        }
