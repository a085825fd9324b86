"""Sessions as the directory keeps them: who they are, what they wait for, what they are owed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from connector.core.directory.effects import Notice
from connector.core.directory.events import Hold
from connector.core.names import Edge

if TYPE_CHECKING:
    from connector.core.directory.objects import Block, Life

#: Sets of sessions are small, many, and mostly alike: they are shared, and never changed.
NOBODY: frozenset[int] = frozenset()


@lru_cache(4096)
def _alone(number: int) -> frozenset[int]:
    return frozenset((number,))


def with_one(known: frozenset[int], number: int) -> frozenset[int]:
    """The sessions and this one."""
    if number in known:
        return known
    return known | _alone(number) if known else _alone(number)


def without(known: frozenset[int], number: int) -> frozenset[int]:
    """The sessions but this one."""
    return known - _alone(number) or NOBODY if number in known else known


class Presence(Enum):
    """How a session stands. No time-out ever makes it dead."""

    LIVE = "live"
    #: Silent for `suspect_after`: what it may hold is quarantined until its answer or its death.
    SUSPECT = "suspect"
    #: It said good-bye, but views are alive in its process.
    CLOSING = "closing"


class Deferred(NamedTuple):
    """An abort of a use that the session comes to when it is through with the lives before number `first`."""

    first: int
    notice: Notice


@dataclass(slots=True)
class Subscription:
    """A session as reader i of n on an edge."""

    #: (edge, reader).
    place: tuple[Edge, int]
    session: int
    readers: int
    push: bool
    resume: bool
    claims: set[str] = field(default_factory=set)
    #: rids that may have something to send, in the order they became so; claimed ones apart.
    ready: OrderedDict[str, None] = field(default_factory=OrderedDict)
    wanted: OrderedDict[str, None] = field(default_factory=OrderedDict)
    #: rids of which the reader was told directly what is behind something that it is still to be sent.
    parked: OrderedDict[str, None] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class RoomWaiter:
    """A put that waits for a block."""

    order: int
    session: int
    request: int
    edge: Edge
    size: int
    since: float
    deadline: float
    rids: tuple[str, ...]


@dataclass(slots=True)
class TakeWaiter:
    """A caller that waits for the next chunk."""

    session: int
    request: int
    edge: Edge
    reader: int
    rid: str
    since: float
    deadline: float


@dataclass(slots=True)
class Session:
    """One client process's life with the broker."""

    id: int
    stage: str
    pid: int
    uid: int
    joined: float
    heard: float
    #: It can tell others, and be told, directly; and the sessions to which it has a socket.
    direct: bool = False
    peers: frozenset[int] = NOBODY
    presence: Presence = Presence.LIVE
    #: Last numbered event applied.
    applied: int = 0
    #: Last notice that the client has processed.
    seen: int = 0
    #: What that was at the last heartbeat.
    long_seen: int = 0
    #: Last notice that was sent.
    notified: int = 0
    #: Aborts that it was not sent, by rid: one says all that is aborted of its rid.
    notices: OrderedDict[str, Notice] = field(default_factory=OrderedDict)
    notices_lost: bool = False
    pinged: bool = False
    recalled: bool = False
    reserved: dict[int, Block] = field(default_factory=dict)
    reserved_bytes: int = 0
    subscriptions: dict[tuple[Edge, int], Subscription] = field(default_factory=dict)
    bound: dict[str, Life] = field(default_factory=dict)
    #: Lives that drained before the session finished them. One stays beside a newer bound life until the
    #: caller has touched the newer one: until then puts and finish mean the older.
    past: OrderedDict[str, Life] = field(default_factory=OrderedDict)
    #: By rid, the last abort that it was told of, and has not answered by a finish or begin: what it put before it had
    #: heard is late.
    owed: dict[str, Notice] = field(default_factory=dict)
    #: Aborts of uses that it is still to come to, in their order.
    deferred: dict[str, list[Deferred]] = field(default_factory=dict)
    #: Lives that were aborted while it was in them, until it finishes or begins the rid, or touches a newer one.
    thrown_out: OrderedDict[str, Life] = field(default_factory=OrderedDict)
    #: By offset, blocks of which it was delivered something and has not released it, and how much: see holding.py.
    holds_in: dict[int, int] = field(default_factory=dict)
    #: Payloads held in all of them.
    held: int = 0
    #: Blocks kept for a look (`show`), by hold with reader -1.
    inspecting: dict[Hold, Block] = field(default_factory=dict)
    #: What it held, when it said good-bye, of blocks that were not sealed yet.
    early: int = 0
    #: Tensor bytes of what it holds.
    held_bytes: int = 0
    #: Pushed and not yet taken, by (edge, reader): at most `window`, so that what is left lying on one edge
    #: keeps nothing back on another.
    pushed: dict[tuple[Edge, int], int] = field(default_factory=dict)
    #: Claimed and not yet taken, by (edge, reader, rid): at most `claim_window`.
    claimed: dict[tuple[Edge, int, str], int] = field(default_factory=dict)
    takes: dict[int, TakeWaiter] = field(default_factory=dict)
    #: Requests in `takes` by what they wait for.
    taking: dict[tuple[Edge, int, str], list[int]] = field(default_factory=dict)
    rooms: dict[int, RoomWaiter] = field(default_factory=dict)
    late_puts: int = 0
    #: How people are told of it.
    label: str = ""

    def is_behind(self, rid: str) -> bool:
        """Whether there is something of an older life of the rid that the session has still to answer or to finish."""
        return rid in self.past or rid in self.owed or rid in self.thrown_out or rid in self.deferred

    def is_behind_in_any(self) -> bool:
        """Whether there is a rid with something of that kind."""
        return bool(self.past or self.owed or self.thrown_out or self.deferred)

    def __post_init__(self) -> None:
        self.label = f"{self.stage} (pid {self.pid})"
