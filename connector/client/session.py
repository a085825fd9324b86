"""The client's state: one lock, one door for what the broker says (`receive`), one for what goes out (`collect`).

Callers' threads change it under the lock and leave messages in `outbound`; the link's thread numbers and
sends them. Finalisers append to `freed` and write an eventfd, nothing else: the collector may run them
inside any lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from connector.arena.arena import Arena
from connector.client import receive
from connector.client.blocks import BlockCache, ReservedBlock
from connector.client.inbox import Channel
from connector.client.outgoing import Abort, Numbered, Outgoing, Ticket
from connector.client.requests import GRACE, Request, Requests, new_future
from connector.core.directory.events import Hold
from connector.core.errors import BrokerLost, ClientClosed, ConnectorError
from connector.core.names import Edge, Handle
from connector.wire import messages as msg
from connector.wire.codec import Envelope

log = logging.getLogger("connector.client")

#: Holds in one Release or Took.
BATCH = 2000


class Session:
    """Everything of one node but its sockets."""

    def __init__(self, stage: str, tried: str, wake: Callable[[], None]) -> None:
        self.stage = stage
        #: Where the broker was looked for, for errors.
        self.tried = tried
        self.wake = wake
        #: Monotonic seconds at which the link's thread looks again by itself; infinite while it is awake.
        self.sleeps_until = math.inf
        self.lock = threading.Lock()
        self.outbound: deque[tuple[msg.Message, list[Ticket]]] = deque()
        #: Numbered messages to send once more, before anything newer.
        self.resend: deque[msg.Message] = deque()
        self.freed: deque[tuple[str, Hold]] = deque()
        self.just_taken: deque[tuple[str, Hold]] = deque()
        #: Taken and not yet released, in this arena's epoch.
        self.held: set[Hold] = set()
        self.requests = Requests()
        self.blocks = BlockCache()
        self.outgoing = Outgoing()
        #: Flushes that wait for what is in `outbound` to be numbered.
        self.flush_marks: deque[Request] = deque()
        self.channels: dict[tuple[Edge, int], Channel] = {}
        self.seen = 0
        #: Numbered messages that the broker had applied when it sent what is being received.
        self.applied = 0
        self.number = 0
        self.arena: Arena | None = None
        #: The same pages without write access, for takes, if so asked.
        self.read_arena: Arena | None = None
        self.limits: dict[str, Any] = {}
        self.up = False
        self.stopping = False
        self.closed = False
        self.lost_reason = ""
        #: No broker can ever come back (a private one has ended): every call raises this.
        self.orphaned: ConnectorError | None = None

    # -- callers ----------------------------------------------------------------------------------

    def must_be_open(self) -> None:
        if self.closed:
            raise ClientClosed("the node was closed", stage=self.stage)
        if self.orphaned is not None:
            raise self.orphaned.anew()

    def post(self, message: msg.Message, tickets: list[Ticket] | None = None) -> None:
        """Queue a message; the lock must be held. The caller wakes the link.

        A finish or a put means the life that was taken from before it: what was taken goes first, and what is taken
        later goes behind it.
        """
        if isinstance(message, (msg.Finish, msg.Begin, msg.Enter, msg.Seal)):
            self._queue_taken()
        self.outbound.append((message, tickets or []))

    def _queue_taken(self) -> None:
        """Queue the word of what was taken and released since the last one."""
        if not self.freed and not self.just_taken:
            return
        uuid = self.arena.uuid if self.arena is not None else ""
        freed = [hold for owner, hold in _drain(self.freed) if owner == uuid]
        self.held.difference_update(freed)
        gone = set(freed)
        took = [hold for owner, hold in _drain(self.just_taken) if owner == uuid and hold not in gone]
        for start in range(0, len(took), BATCH):
            self.outbound.append((msg.Took(tuple(took[start : start + BATCH])), []))
        for start in range(0, len(freed), BATCH):
            self.outbound.append((msg.Release(0, tuple(freed[start : start + BATCH])), []))

    def ask(
        self, make: Callable[[int], msg.Message], timeout: float, rids: tuple[str, ...] = (), grace: float = GRACE
    ) -> Request:
        """Post a request that the broker answers within `timeout` seconds. The lock must be held."""
        number = self.requests.next_number()
        message = make(number)
        now = time.monotonic()
        request = Request(number, new_future(), now + timeout + grace, message, rids, since=now)
        self.requests.add(request)
        self.post(message)
        return request

    def wait_here(self, timeout: float, default: Any) -> Request:
        """A wait that only this process ends; after `timeout` it returns `default`. The lock must be held."""
        now = time.monotonic()
        request = Request(self.requests.next_number(), new_future(), now + timeout, None, (), default, now)
        return self.requests.add(request)

    def wake_for(self, request: Request) -> None:
        """A wait of this process alone: the link need not wake for it before its time is over."""
        if request.give_up < self.sleeps_until:
            self.wake()

    def cancel(self, request: Request) -> None:
        """The caller went away. The lock must be held."""
        if self.requests.drop(request.number) and request.message is not None:
            self.post(msg.Cancel(request.number))

    def lost(self, request: Request) -> ConnectorError:
        """The broker did not answer."""
        waited = round(time.monotonic() - request.since, 3)
        kind = type(request.message).__name__ if request.message is not None else "wait"
        why = self.lost_reason or "it does not answer"
        return BrokerLost(f"the broker is away: {why}", path=self.tried, request=kind, waited=waited)

    def give_back(self, blocks: Iterable[ReservedBlock]) -> None:
        """Reserved blocks that will not be written. The lock must be held. A good-bye gives all of them back itself."""
        if self.closed:
            return
        handles = tuple(block.handle for block in blocks if block.arena is self.arena)
        if handles:
            self.post(msg.Return(0, handles))

    def free(self, uuid: str, hold: Hold) -> None:
        """A payload's last view died. Called by finalisers: no lock, no send, no log."""
        self.freed.append((uuid, hold))
        self.wake()

    def note_taken(self, uuid: str, hold: Hold) -> None:
        self.held.add(hold)
        self.just_taken.append((uuid, hold))

    # -- the link's thread ------------------------------------------------------------------------

    def receive(self, envelope: Envelope) -> None:
        """All that the broker says, in order; its acknowledgement last."""
        with self.lock:
            self.applied = envelope.counter
            for message in envelope.messages:
                receive.HANDLERS[type(message)](self, message)
            self.outgoing.acknowledge(envelope.counter)

    def reopened(self, rid: str, applied: int) -> bool:
        """The session finished, began or entered the rid after the first `applied` of its numbered messages: what the
        broker says of the rid as it was then, is of a former use, or it will say it again."""
        words = (msg.Begin, msg.Enter, msg.Finish)
        queued = any(isinstance(m, words) and m.rid == rid for m, _ in self.outbound)
        return queued or self.outgoing.opened.get(rid, 0) > applied

    def aborted(self, rid: str) -> Abort | None:
        """The rid's abort, if that is the last that this session knows of it: nothing of a later life was read."""
        abort = self.outgoing.aborted.get(rid)
        if abort is None or abort.life is None:
            return abort
        later = any(channel.taken_life.get(rid, 0) > abort.life for channel in self.channels.values())
        return None if later else abort

    def collect(self) -> list[msg.Message]:
        """What is to be sent now, numbered."""
        with self.lock:
            self._queue_taken()
            out = [self.resend.popleft() for _ in range(len(self.resend))]
            while self.outbound:
                message, tickets = self.outbound.popleft()
                self._number(message, tickets)
                out.append(message)
            while self.flush_marks:
                mark = self.flush_marks.popleft()
                self.outgoing.when_acked(partial(self._flushed, mark))
            return out

    def _flushed(self, mark: Request, error: ConnectorError | None) -> None:
        if error is None:
            self.requests.answer(mark.number, True)
        else:
            self.requests.fail(mark.number, error)

    def _number(self, message: msg.Message, tickets: list[Ticket]) -> None:
        if isinstance(message, Numbered):
            self.outgoing.number_it(message)
            if tickets:
                self.outgoing.tickets[message.number] = tickets

    def tick(self, now: float) -> None:
        """Requests whose time is over, blocks that are idle."""
        with self.lock:
            for request in self.requests.due(now):
                if request.message is None:
                    request.future.set_result(request.default)
                else:
                    request.future.set_exception(self.lost(request))
            self.give_back(self.blocks.take_idle(now))

    def next_deadline(self) -> float | None:
        with self.lock:
            due = [when for when in (self.requests.next_deadline(), self.blocks.next_idle()) if when is not None]
        return min(due, default=None)

    # -- the link's ups and downs -----------------------------------------------------------------

    def connected(self, welcome: msg.Welcome, arena: Arena, read_arena: Arena | None) -> list[msg.Message]:
        """A broker let us in. The messages to send first: subscriptions, and what must be said again."""
        with self.lock:
            self.limits = welcome.limits
            self.blocks.limit = int(welcome.limits.get("ahead_session", 0))
            self.up, self.stopping, self.lost_reason = True, False, ""
            again: list[msg.Message] = []
            # A broker that answered our first Hello too late knows us, but we do not know it.
            if not welcome.again or self.arena is None:
                again += self._start_anew(welcome, arena, read_arena)
            else:
                applied = int(welcome.limits.get("applied", 0))
                again += [m for number, m in self.outgoing.unacked.items() if number > applied]
            for channel in self.channels.values():
                if channel.subscribed:
                    again.append(channel.subscription(0))
                    again += [msg.Claim(channel.edge, channel.reader, rid) for rid in sorted(channel.claimed)]
            planned = {id(message) for message, _ in self.outbound} | {id(message) for message in again}
            again += [r.message for r in self.requests if r.message is not None and id(r.message) not in planned]
            return again

    def _start_anew(self, welcome: msg.Welcome, arena: Arena, read_arena: Arena | None) -> list[msg.Message]:
        """Another broker, or the first: nothing of the old one's handles means anything any more."""
        first = self.arena is None
        error = BrokerLost("the broker was started anew; the payload is lost", path=self.tried)
        if not first:
            self.blocks.take_all()
            self.outbound = deque((m, t) for m, t in self.outbound if not self._bound_to_arena(m, t, error))
            for channel in self.channels.values():
                channel.start_anew()
        self.arena, self.read_arena = arena, read_arena
        self.number = welcome.session
        self.seen = int(welcome.limits.get("seen", 0))
        self.held.clear()
        again: list[msg.Message] = []
        for message in self.outgoing.lose_all(error):
            self.outgoing.number_it(message)
            again.append(message)
        for said in (*again, *(queued for queued, _ in self.outbound)):
            if isinstance(said, msg.Enter):
                # This broker numbers lives from the start: what was heard from the last one is of none of them.
                said.heard, said.reason = 0, ""
        return again

    def _bound_to_arena(self, message: msg.Message, tickets: list[Ticket], error: ConnectorError) -> bool:
        """True for a queued message that names handles of the old arena; its puts are lost."""
        if not isinstance(message, (msg.Seal, msg.Return, msg.Release, msg.Took)):
            return False
        for ticket in tickets:
            self.outgoing.refuse(ticket, error)
        return True

    def disconnected(self, reason: str) -> None:
        with self.lock:
            self.up = False
            self.lost_reason = reason

    def reserved(self) -> tuple[Handle, ...]:
        """Handles that this session knows to be its own, for a resync: cached, and sealed but unacknowledged."""
        with self.lock:
            sealed = [m.handle for m in self.outgoing.unacked.values() if isinstance(m, msg.Seal)]
            queued = [m.handle for m, _ in self.outbound if isinstance(m, msg.Seal)]
            return (*self.blocks.handles(), *sealed, *queued)

    def orphan(self) -> None:
        """The private broker has ended: whoever waits, waits in vain."""
        if self.orphaned is None:
            self.orphaned = BrokerLost("the private broker has ended", path=self.tried)
            self.fail_everything(self.orphaned)

    def fail_everything(self, error: ConnectorError) -> None:
        """The node is closed: nobody waits on."""
        with self.lock:
            for request in self.requests:
                self.requests.fail(request.number, error.anew())
            for message, tickets in self.outbound:
                if isinstance(message, msg.Seal):
                    for ticket in tickets:
                        ticket.resolve(None, error)
            self.outgoing.give_up(error)


def _drain(queue: deque[tuple[str, Hold]]) -> list[tuple[str, Hold]]:
    """All that is there now; finalisers may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
