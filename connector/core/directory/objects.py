"""The directory's nouns. Plain records: rules live in the modules that are named after what happens."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from connector.core.directory.events import Member, Span
from connector.core.directory.party import NOBODY as NOBODY
from connector.core.directory.party import Deferred as Deferred
from connector.core.directory.party import Presence as Presence
from connector.core.directory.party import RoomWaiter as RoomWaiter
from connector.core.directory.party import Session as Session
from connector.core.directory.party import Subscription as Subscription
from connector.core.directory.party import TakeWaiter as TakeWaiter
from connector.core.directory.party import with_one as with_one
from connector.core.directory.party import without as without
from connector.core.directory.transitions import BlockState, ShareState
from connector.core.errors import ConnectorError
from connector.core.names import Edge, Handle

#: What a life's counts are until its first stream is done: lives are many, and this is shared.
NOTHING: Mapping[Edge, int] = MappingProxyType({})


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
    #: From its start to the data that the first payload's manifest counts from, and from each payload's to the next's.
    data_offset: int = 0
    stride: int = 0
    #: Of its first payload, once it is sealed; 0 before.
    serial: int = 0
    #: Its payloads by place, None for those that are gone or in a lot; empty while all are in lots.
    members: list[Chunk | None] = field(default_factory=list)
    #: In the order of their places.
    lots: list[Lot] | tuple[()] = ()
    #: While it is reserved: what readers, who were told directly, have said of it already.
    early: list[Early] | tuple[()] = ()
    #: Its writer died before it said whom it had told: each of these sessions may have its payloads.
    maybe: frozenset[int] = NOBODY
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

    @property
    def data_offset(self) -> int:
        """From its block's start to the data that its manifest counts from."""
        return self.block.data_offset + self.member * self.block.stride


@dataclass(slots=True, eq=False)
class Lot:
    """Payloads of a block, one behind the other, which were sealed alike and stand alike with their one reader: see
    lots.py."""

    block: Block
    #: Place of the first of them.
    first: int
    members: tuple[Member, ...]
    #: One for each of them.
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
    counts: Mapping[Edge, int] = field(default_factory=lambda: NOTHING)
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
