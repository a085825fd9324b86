"""The client's state: one lock, one door for what the broker says (`receive`), one for what goes out (`post`).

Callers' threads change it under the lock and queue messages; whoever comes first frames and sends them (outlet.py).
Finalisers append to a deque and set an alarm, nothing else: the collector may run them inside any lock.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

from connector.arena.arena import Arena
from connector.client import receive
from connector.client.blocks import BlockCache, ReservedBlock
from connector.client.coming import Coming, Opener
from connector.client.copying import Copying
from connector.client.growing import Growing
from connector.client.holds import Holds
from connector.client.inbox import Channel
from connector.client.outgoing import Abort, Numbered, Outgoing, Ticket
from connector.client.pairs import Pair
from connector.client.requests import GRACE, Answer, Request, Requests
from connector.client.rid_queue import Arrived
from connector.core.directory.effects import Descriptor
from connector.core.directory.events import Hold
from connector.core.errors import BrokerLost, ClientClosed, ConnectorError
from connector.core.names import Edge, Handle
from connector.wire import messages as msg
from connector.wire.codec import Envelope

log = logging.getLogger("connector.client")

#: Messages that may wait for company before they are sent at once.
MOST_LAZY = 128
NUMBERED = frozenset(get_args(Numbered))
#: They mean the life that was taken from before them: what was taken is said first, and what is taken later behind.
BEHIND_TAKEN = frozenset((msg.Finish, msg.Begin, msg.Enter, msg.Seal))


class Out(NamedTuple):
    """What goes out: messages that are not framed yet, frames that are not sent yet, and how many were framed since the
    last Hello. Framing replaces all three in one store, which no signal's handler can come between."""

    waiting: deque[msg.Message]
    frames: tuple[bytes, ...] = ()
    order: int = 0


class Session:
    """Everything of one node but its sockets."""

    #: Set by the link. Send what is queued, in this thread; have the thread that reads look up; read in this thread
    #: until the first argument says so, at most so many seconds: False if it cannot; read what is there.
    push: Callable[[], None]
    nudge: Callable[[], None]
    lead: Callable[[Callable[[], object], float], bool]
    drain: Callable[[], None]

    def __init__(self, stage: str, tried: str, wake: Callable[[], None], later: Callable[[], None]) -> None:
        """`wake`, `later`: the link's thread looks up now, or in a moment; any finaliser may call them."""
        self.stage = stage
        #: Where the broker was looked for, for errors.
        self.tried = tried
        self.wake, self.later = wake, later
        #: Monotonic seconds at which the link's thread looks again by itself; infinite while it is awake.
        self.sleeps_until = math.inf
        self.lock = threading.Lock()
        self.out = Out(deque())
        #: A put queued what somebody waits for.
        self.urgent = False
        self.holds = Holds()
        self.copying = Copying(self)
        #: The last block that was sealed (sealing.py), and the one that grows.
        self.sealing: msg.Seal | None = None
        self.growing = Growing()
        self.requests = Requests()
        self.blocks = BlockCache()
        self.outgoing = Outgoing()
        #: Flushes that were asked for while the broker was away.
        self._marks: deque[Request] = deque()
        self.channels: dict[tuple[Edge, int], Channel] = {}
        #: Voided payloads that have not come yet, and the writer, if it died, that may have told of them. Bounded; the
        #: oldest are forgotten.
        self.voided: OrderedDict[Hold, int] = OrderedDict()
        #: Sockets to other sessions, by number; those that are new to the inlet; and those that came just now.
        self.pairs: dict[int, Pair] = {}
        self.introduced: deque[Pair] = deque()
        self.passed: deque[socket.socket] = deque()
        #: What opens payloads before they come, from the first edge on; and those that come through the broker.
        self.opener: Opener | None = None
        self.coming: Coming = Coming()
        self.seen = 0
        self.number = 0
        self.arena: Arena | None = None
        #: The same pages without write access, for takes, if so asked.
        self.read_arena: Arena | None = None
        self.limits: dict[str, Any] = {}
        #: Bytes that a step's keys, shapes and rids may have, and bytes of blocks; 0 while no broker has said so.
        self.most_meta = self.pool = 0
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
        """Queue a message; the lock must be held. The caller pushes, or has it sent later."""
        kind = type(message)
        if kind in BEHIND_TAKEN:
            self.queue_taken()
        if kind in NUMBERED:
            self.outgoing.number_it(message, tickets)  # type: ignore[arg-type]
        self.out.waiting.append(message)

    def push_or_wait(self) -> None:
        """After a put: at once, unless all that is queued may wait for company."""
        if self.urgent or len(self.out.waiting) >= MOST_LAZY:
            self.urgent = False
            self.push()
        else:
            self.later()

    def queue_taken(self, everything: bool = False) -> None:
        """Queue the word of what was taken and released since the last one."""
        if everything or self.holds.has_words():
            self.holds.say(self.post, everything)

    def ask(
        self, make: Callable[[int], msg.Message], timeout: float, rids: tuple[str, ...] = (), grace: float = GRACE
    ) -> Request:
        """Post a request that the broker answers within `timeout` seconds. The lock must be held."""
        number = self.requests.next_number()
        message = make(number)
        now = time.monotonic()
        request = Request(number, Answer(), now + timeout + grace, message, rids, since=now)
        self._await(request)
        self.post(message)
        return request

    def wait_here(self, timeout: float, default: Any) -> Request:
        """A wait that only this process ends; after `timeout` it returns `default`. The lock must be held."""
        now = time.monotonic()
        request = Request(self.requests.next_number(), Answer(), now + timeout, None, (), default, now)
        self._await(request)
        return request

    def _await(self, request: Request) -> None:
        self.requests.add(request)
        if request.give_up < self.sleeps_until:
            # The link's thread is to look up when its time is over.
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

    def give_up(self, unread: Iterable[Arrived]) -> None:
        """Payloads that nobody here will take. The lock must be held."""
        for item in unread:
            self.holds.free(item.arena.uuid, item.hold)

    def give_up_holds(self, holds: Iterable[Hold]) -> None:
        """Payloads that the broker keeps for this session, and that it does not have. The lock must be held."""
        for hold in holds:
            self.holds.free(self.holds.uuid, hold)

    def has_read(self, pair: Pair) -> None:
        """All that came over it was applied, and nothing more will: what its writer may have told, it did not."""
        with self.lock:
            if self.pairs.get(pair.session) is pair:
                del self.pairs[pair.session]
                untold = [hold for hold, writer in self.voided.items() if writer == pair.session]
                self.give_up_holds(untold)
                for hold in untold:
                    del self.voided[hold]

    def free(self, uuid: str, hold: Hold) -> None:
        """A payload's last view died. Called by finalisers: no lock, no send, no log."""
        self.holds.free(uuid, hold)
        self.later()

    # -- the thread that reads --------------------------------------------------------------------

    def receive(self, envelope: Envelope) -> None:
        """All that the broker says, in order; its acknowledgement last."""
        with self.lock:
            for message in envelope.messages:
                receive.HANDLERS[type(message)](self, message)
            self.outgoing.acknowledge(envelope.counter)

    def receive_told(self, came: Sequence[Descriptor | Arrived]) -> None:
        """What a writer tells directly."""
        with self.lock:
            if not self.closed:
                receive.deliver(self, came)

    def open_ahead(self, coming: Coming) -> None:
        """Open what is about to be told."""
        arena = self.arena
        if arena is not None and self.opener is not None:
            coming.open(self.opener, arena, self.mapped(arena))

    def mapped(self, arena: Arena) -> Arena:
        """Where takes have their views of an arena's pages."""
        readonly = self.read_arena
        return readonly if readonly is not None and readonly.uuid == arena.uuid else arena

    def reopened(self, rid: str, applied: int) -> bool:
        """The session finished, began or entered the rid after the first `applied` of its numbered messages: what the
        broker says of the rid as it was then, is of a former use, or it will say it again."""
        return self.outgoing.opened.get(rid, 0) > applied

    def aborted(self, rid: str) -> Abort | None:
        """The rid's abort, if that is the last that this session knows of it: nothing of a later life was read."""
        abort = self.outgoing.aborted.get(rid)
        if abort is None or abort.life is None:
            return abort
        later = any(channel.taken_life.get(rid, 0) > abort.life for channel in self.channels.values())
        return None if later else abort

    def say_again(self, number: int) -> None:
        """Numbered messages from `number` on were lost on the way: in order, before anything newer. Lock held."""
        waiting = self.out.waiting
        queued = {id(message) for message in waiting}
        again = [m for at, m in self.outgoing.unacked.items() if at >= number and id(m) not in queued]
        self.growing.said_again(again)
        waiting.extendleft(reversed(again))

    def collect(self) -> list[msg.Message]:
        """What is to be framed now. The lock must be held."""
        self.queue_taken()
        return list(self.out.waiting)

    def flush(self, mark: Request) -> None:
        """Answer the wait once all that was numbered until now is acknowledged. While the broker is away: what is said
        to the next one, from its Welcome on. The lock must be held."""
        if self.up:
            self.outgoing.when_acked(partial(self._flushed, mark))
        else:
            self._marks.append(mark)

    def _flushed(self, mark: Request, error: ConnectorError | None) -> None:
        if error is None:
            self.requests.answer(mark.number, True)
        else:
            self.requests.fail(mark.number, error)

    def tick(self, now: float) -> None:
        """Requests whose time is over, blocks that are idle."""
        with self.lock:
            for request in self.requests.due(now):
                if request.message is None:
                    request.answer.give(request.default)
                else:
                    request.answer.give(None, self.lost(request))
            self.give_back(self.blocks.take_idle(now))

    def next_deadline(self) -> float | None:
        with self.lock:
            known = (self.requests.next_deadline(), self.blocks.next_idle(), self.holds.next_part())
            due = [when for when in known if when is not None]
        return min(due, default=None)

    # -- the link's ups and downs -----------------------------------------------------------------

    def connected(self, welcome: msg.Welcome, arena: Arena, read_arena: Arena | None) -> None:
        """A broker let us in. Queued first: what must be said again, and subscriptions."""
        with self.lock:
            self.limits = welcome.limits
            self.most_meta = int(welcome.limits.get("max_request_bytes", 0)) // 2
            self.pool = int(welcome.limits.get("pool", 0)) // 64 * 64
            self.blocks.limit = int(welcome.limits.get("ahead_session", 0))
            again: list[msg.Message] = []
            # A broker that answered our first Hello too late knows us, but we do not know it.
            if not welcome.again or self.arena is None:
                again += self._start_anew(welcome, arena, read_arena)
            else:
                applied = int(welcome.limits.get("applied", 0))
                queued = {id(message) for message in self.out.waiting}
                unacked = self.outgoing.unacked.items()
                again += [m for number, m in unacked if number > applied and id(m) not in queued]
                self.growing.said_again(again)
            for channel in self.channels.values():
                if channel.subscribed:
                    again.append(channel.subscription(0))
                    again += [msg.Claim(channel.edge, channel.reader, rid) for rid in sorted(channel.claimed)]
            planned = {id(message) for message in (*self.out.waiting, *again)}
            asked = [r.message for r in self.requests if r.message is not None and id(r.message) not in planned]
            self.out = Out(deque([*again, *asked, *self.out.waiting]))
            self.up, self.stopping, self.lost_reason = True, False, ""
            while self._marks:
                self.flush(self._marks.popleft())

    def _start_anew(self, welcome: msg.Welcome, arena: Arena, read_arena: Arena | None) -> list[msg.Message]:
        """Another broker, or the first: nothing of the old one's handles means anything any more."""
        first = self.arena is None
        error = BrokerLost("the broker was started anew; the payload is lost", path=self.tried)
        if not first:
            self.blocks.take_all()
            self.pairs.clear()
            self.voided.clear()
            # Of the old arena, although the next may name blocks alike.
            self.coming = Coming()
            self.outgoing.lose_ways()
            for channel in self.channels.values():
                channel.start_anew()
        self.arena, self.read_arena = arena, read_arena
        self.number = welcome.session
        self.seen = int(welcome.limits.get("seen", 0))
        self.holds.start_anew(arena.uuid)
        again: list[msg.Message] = list(self.outgoing.lose_all(error))
        for message in again:
            if isinstance(message, msg.Enter):
                # This broker numbers lives from the start: what was heard from the last one is of none of them.
                message.heard, message.reason = 0, ""
        kept = [m for m in self.out.waiting if type(m) not in NUMBERED and not isinstance(m, msg.Took)]
        self.out = Out(deque(kept))
        return again

    def disconnected(self, reason: str) -> None:
        with self.lock:
            self.up = False
            self.lost_reason = reason
            self.out = Out(self.out.waiting)

    def reserved(self) -> tuple[Handle, ...]:
        """Handles that this session knows to be its own, for a resync: cached, being copied to, or unacknowledged."""
        with self.lock:
            sealed = [m.handle for m in self.outgoing.unacked.values() if isinstance(m, msg.Seal)]
            copied = [put.handle for put in self.copying.under_way]
            return (*self.blocks.handles(), *copied, *sealed)

    def orphan(self) -> None:
        """The private broker has ended: whoever waits, waits in vain."""
        if self.orphaned is None:
            self.orphaned = BrokerLost("the private broker has ended", path=self.tried)
            self.fail_everything(self.orphaned)

    def let_go(self) -> None:
        """The node has ended: the mapping ends with the last view."""
        with self.lock:
            self.blocks.take_all()
            self.arena = self.read_arena = None
        # They refer to this, and would keep it, and its descriptors, until the collector runs.
        self.push = self.nudge = self.drain = _nothing
        self.lead = _nobody

    def fail_everything(self, error: ConnectorError) -> None:
        """The node is closed: nobody waits on."""
        with self.lock:
            for request in self.requests:
                self.requests.fail(request.number, error.anew())
            self.outgoing.give_up(error)


def _nothing() -> None:
    """There is no link any more."""


def _nobody(answered: Callable[[], object], seconds: float) -> bool:
    return False
