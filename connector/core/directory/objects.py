"""The directory's nouns. Plain records: rules live in the modules that are named after what happens."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from connector.core.directory.effects import Notice
from connector.core.directory.events import Hold, Member, Span
from connector.core.directory.transitions import BlockState, ShareState
from connector.core.errors import ConnectorError
from connector.core.names import Edge, Handle

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


@dataclass(slots=True)
class Settings:
    """Limits, from the configuration. Sizes in bytes, times in seconds."""

    begin: int = 4096
    end: int = 4096 + (1 << 30)
    max_blocks: int = 262_144
    window: int = 256
    claim_window: int = 32
    ahead_session: int = 64 << 20
    ahead_total: float = 0.25
    edge_guard: float = 0.125
    unclaimed_after: float = 600.0
    unclaimed_edges: dict[Edge, float] = field(default_factory=dict)
    suspect_after: float = 10.0
    heartbeat: float = 5.0
    deadlock_after: float = 1.0
    max_tombstones: int = 65_536
    max_notices: int = 4_096
    max_past: int = 4_096
    story: int = 20_000
    #: A grown generation ceiling allows so many reservations.
    generation_step: int = 1024

    @property
    def pool(self) -> int:
        return self.end - self.begin


class Early(NamedTuple):
    """A word that came before the Seal: `take`, `release`, or `hold` of one who has said good-bye."""

    session: int
    span: Span
    verb: str


@dataclass(slots=True, eq=False)
class Block:
    """An extent of the arena while it is not free."""

    handle: Handle
    length: int
    entry: int
    session: int
    state: BlockState = BlockState.RESERVED
    #: Where its bytes count: the edge it was sealed on.
    edge: Edge | None = None
    #: Where its bytes count until then: the edge it was reserved for.
    meant: Edge | None = None
    data_offset: int = 0
    #: Of its first payload, once it is sealed; 0 before.
    serial: int = 0
    #: Its payloads by place, None for those that are gone; empty while they are a lot.
    members: list[Chunk | None] = field(default_factory=list)
    lot: Lot | None = None
    #: While it is reserved: what readers, who were told directly, have said of it already.
    early: list[Early] | tuple[()] = ()
    #: (payload, reader) pairs not yet released; 0 frees a sealed block.
    outstanding: int = 0


@dataclass(slots=True, eq=False)
class Chunk:
    """One payload of a stream, or a bare END mark."""

    stream: Stream
    index: int
    attempt: int
    flags: int
    #: The session that put it.
    session: int
    block: Block
    member: int
    manifest: bytes
    nbytes: int
    #: The writing session's label: it is shown when the session is long gone.
    writer: str
    sealed_at: float
    shares: list[ShareState]
    #: Session that holds share i, 0 while none does.
    holders: list[int]
    #: Nobody is to get it any more: whoever holds it was told to drop it.
    void: bool = False
    #: Bit i: the credit of reader i is one of a claimed rid.
    claimed: int = 0

    @property
    def serial(self) -> int:
        """Its place among all payloads that were ever sealed."""
        return self.block.serial + self.member


@dataclass(slots=True, eq=False)
class Lot:
    """All payloads of a block, which were sealed alike and stand alike with their one reader: see lots.py."""

    block: Block
    members: tuple[Member, ...]
    #: By place.
    streams: list[Stream]
    #: The session that put them, and its label.
    session: int
    writer: str
    sealed_at: float
    #: PENDING, DELIVERED or TAKEN.
    state: ShareState
    #: Session that holds them, 0 while none does.
    holder: int
    #: Tensor bytes of all of them.
    nbytes: int


@dataclass(slots=True, eq=False)
class Share:
    """Where reader i of a stream stands."""

    #: Next index never delivered to this reader.
    cursor: int = 0
    #: Last index that its session was told of, in order; -1: none.
    told: int = -1
    #: Told by the writer before what is before them came through the broker; above the cursor.
    ahead: set[int] | frozenset[int] = NOBODY
    #: Delivered once to a reader that died, to be delivered again; ascending.
    redo: list[int] | tuple[()] = ()
    #: Delivered and not released now.
    held: int = 0
    released_any: bool = False
    #: Indices below were delivered before, to a reader that died.
    redelivered_below: int = 0
    #: When the last reader went without having read all.
    left_at: float = 0.0
    #: Nothing more is wanted or due: all released, or finished, or the failure was told.
    closed: bool = False
    #: The reader knows the stream's END.
    told_end: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """Chunks of one rid on one edge in one life."""

    edge: Edge
    rid: str
    life: Life
    at: EdgeState
    #: 0 until the first chunk fixes it.
    readers: int = 0
    #: By index, what is sealed and not gone.
    live: dict[int, Chunk | Lot] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    #: Number of chunks, once known.
    end: int | None = None
    #: Highest index seen + 1; an END mark alone has the index of the count.
    high: int = 0
    #: Every index in [0, low) was put; `above` holds those put out of order. low < end means a gap.
    low: int = 0
    above: set[int] | frozenset[int] = NOBODY
    failure: ConnectorError | None = None
    failed_at: float = 0.0
    #: Sessions that put to it and have neither finished nor gone.
    writers: frozenset[int] = NOBODY
    #: Attempt of each index that was put with one above 0.
    attempts: dict[int, int] | None = None
    #: A timer looks after payloads that nobody claims.
    watched: bool = False
    #: Reader's session that its writer may tell directly, 0 for none.
    direct: int = 0

    def was_put(self, index: int) -> bool:
        return index < self.low or index in self.above

    def note_put(self, index: int) -> None:
        self.high = max(self.high, index + 1)
        if index == self.low and not self.above:
            self.low += 1
            return
        above = set(self.above) if isinstance(self.above, frozenset) else self.above
        if index >= self.low:
            above.add(index)
        while self.low in above:
            above.remove(self.low)
            self.low += 1
        self.above = above or NOBODY


@dataclass(slots=True, eq=False)
class Life:
    """One use of a rid, over all edges."""

    rid: str
    number: int
    streams: dict[Edge, Stream] = field(default_factory=dict)
    #: Chunks of each stream that is done: an index below is never handed over again.
    counts: dict[Edge, int] = field(default_factory=dict)
    #: Sessions that put or were delivered something of it and have not finished.
    bound: frozenset[int] = NOBODY
    finished_by: frozenset[int] = NOBODY
    #: Sessions that put something of it, or said that they would.
    senders: frozenset[int] = NOBODY
    #: Sessions that said that they are in it: it goes on until they have finished it.
    entered: frozenset[int] = NOBODY
    #: What they said that they would put to: (session, edge).
    opened: frozenset[tuple[int, Edge]] = frozenset()
    #: What those who entered it would read: (session, edge).
    expected: frozenset[tuple[int, Edge]] = frozenset()
    #: Nothing of it is left. A session that has not finished it may open it again by a put.
    over: bool = False


class Tombstone(NamedTuple):
    """A rid's last end. `number` is compared with what a session has seen."""

    number: int
    aborted: bool
    reason: str
    #: A later life of an aborted rid has ended since.
    ended_since: bool = False
    #: The last that was aborted, and who has finished it.
    out: Life | None = None


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


@dataclass(slots=True)
class EdgeState:
    """What happens on one edge."""

    edge: Edge
    #: Streams by rid, oldest life first.
    streams: dict[str, list[Stream]] = field(default_factory=dict)
    #: Number of the last life whose stream is gone, by rid: readers never go back to an older one.
    gone: OrderedDict[str, int] = field(default_factory=OrderedDict)
    subscriptions: dict[int, Subscription] = field(default_factory=dict)
    waiters: deque[RoomWaiter] = field(default_factory=deque)
    #: Bytes of sealed blocks.
    used: int = 0
    #: Bytes of blocks reserved for it and not yet sealed.
    reserved: int = 0
    payloads_sealed: int = 0
    payloads_released: int = 0
    bytes_sealed: int = 0
    refused: int = 0


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

    def __post_init__(self) -> None:
        self.label = f"{self.stage} (pid {self.pid})"
