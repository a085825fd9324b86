"""What happens to the directory. Each event carries its time (`now`, seconds of a monotonic clock).

Events are batch-shaped: a step of 64 chunks is one `Sealed`. Numbered events (`number`) come from
one counter of the session; a number that was applied already is a retry and changes nothing.

Nobody changes an event or an effect once it is made; `frozen` would say so, at several times the cost of making one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from connector.core.names import NOWHERE, Edge, Handle


class Hold(NamedTuple):
    """One payload as one reader holds it: its block, its place in the block, the reader's number."""

    handle: Handle
    member: int
    reader: int


class Span(NamedTuple):
    """So many payloads that stand one behind the other in a block, from `first` on, as one reader holds them."""

    handle: Handle
    first: int
    #: At least 1.
    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody calls
    reader: int


class Told(NamedTuple):
    """So many members of a sealed block, from `first` on, were told to this session by the writer itself."""

    first: int
    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody calls
    session: int


class Flags:
    """Bits of a member's flags."""

    #: The stream ends with this chunk.
    LAST = 1
    #: A header-only member: no payload, only the END mark; its index is the stream's count.
    END_ONLY = 2
    #: Descriptor only: the payload was delivered before, to a reader that died.
    REDELIVERED = 4


class Member(NamedTuple):
    """One payload of a sealed block."""

    rid: str
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    attempt: int
    flags: int
    readers: int
    #: wire/manifest.py bytes; opaque here.
    manifest: bytes
    #: Tensor bytes, without padding.
    nbytes: int


@dataclass(slots=True)
class Event:
    now: float
    session: int


@dataclass(slots=True)
class Joined(Event):
    """A client process was let in."""

    stage: str
    pid: int
    uid: int
    #: It can tell others, and be told, directly.
    direct: bool = False


@dataclass(slots=True)
class Left(Event):
    """A client says good-bye; `held` are views still alive, released one by one later."""

    held: tuple[Hold, ...] = ()


@dataclass(slots=True)
class Died(Event):
    """The process is proven dead."""

    how: str = "died"


@dataclass(slots=True)
class Heard(Event):
    """A frame came: the session is alive and has processed notices up to `seen`."""

    seen: int = 0


@dataclass(slots=True)
class Resynced(Event):
    """A client connected again to the same broker: the reserved handles that it knows."""

    reserved: tuple[Handle, ...] = ()


@dataclass(slots=True)
class Reserve(Event):
    """Room for one block of all `sizes` is asked for.

    `ahead`: no payload waits for it; a block of each size is given while that is free, never queued.
    """

    request: int
    edge: Edge
    sizes: tuple[int, ...]
    deadline: float
    rids: tuple[str, ...] = ()
    ahead: bool = False


@dataclass(slots=True)
class Returned(Event):
    """Reserved blocks that the session does not need."""

    number: int
    handles: tuple[Handle, ...]


@dataclass(slots=True)
class Sealed(Event):
    """A block was written and its ready word stored. `seen`: the last notice the putting thread knew."""

    number: int
    seen: int
    edge: Edge
    handle: Handle
    data_offset: int
    members: tuple[Member, ...]
    told: tuple[Told, ...] = ()
    #: Bytes from one member's data to the next's; 0: all manifests count from `data_offset`.
    stride: int = 0
    #: The block that the stream's next chunk will probably be in; a guess, for its reader alone.
    ahead: Handle = NOWHERE
    #: Found in a block of a writer that has died: whom it told is not known. And the payloads are of a use that it had
    #: begun, and not said.
    unsaid: bool = False
    strange: bool = False


class Sealing(NamedTuple):
    """One payload of a run, alone in its block."""

    rid: str
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    handle: Handle


@dataclass(slots=True)
class SealedRun(Event):
    """So many blocks, each as Sealed: its number is the last one's and one more; one payload, without attempt and
    flags, which its reader `told` has."""

    number: int
    seen: int
    edge: Edge
    data_offset: int
    readers: int
    manifest: bytes
    nbytes: int
    told: int
    chunks: tuple[Sealing, ...]


@dataclass(slots=True)
class Released(Event):
    number: int
    spans: tuple[Span, ...]


@dataclass(slots=True)
class Taken(Event):
    """The caller has these payloads: their credits return."""

    spans: tuple[Span, ...]


@dataclass(slots=True)
class Subscribed(Event):
    """The session is reader `reader` of `readers` on the edge. `push`: send what nobody claimed, too."""

    request: int
    edge: Edge
    reader: int
    readers: int
    push: bool
    resume: bool


@dataclass(slots=True)
class Claimed(Event):
    """Chunks of this rid are wanted by name (take, stream): sent outside the window of pushes."""

    edge: Edge
    reader: int
    rid: str


@dataclass(slots=True)
class Awaited(Event):
    """A caller waits for the next chunk until `deadline`."""

    request: int
    edge: Edge
    reader: int
    rid: str
    deadline: float


@dataclass(slots=True)
class Cancelled(Event):
    """A waiting request is no longer wanted."""

    request: int


@dataclass(slots=True)
class FellBack(Event):
    """The reader's socket was full: the writer does not tell it of these rids directly any more."""

    edge: Edge
    rids: tuple[str, ...]


@dataclass(slots=True)
class Began(Event):
    number: int
    rid: str


@dataclass(slots=True)
class Entered(Event):
    """The session is in the rid's use, of which it has put (`sends`) or got nothing yet on the edge. `heard`: the last
    life of which it has heard the abort, and `reason` why; 0 if it has finished since."""

    number: int
    edge: Edge
    rid: str
    sends: bool
    heard: int = 0
    reason: str = ""


@dataclass(slots=True)
class Finished(Event):
    """`aborted`: the session means the life that it has heard the abort of."""

    number: int
    rid: str
    aborted: bool = False


@dataclass(slots=True)
class Aborted(Event):
    """Anyone ends a rid everywhere. `request` 0: nobody waits for the report. `mine`: lives after the one that the
    session is in are not meant."""

    number: int
    request: int
    rid: str
    reason: str
    mine: bool = False


@dataclass(slots=True)
class Removed(Event):
    """The operator removes one payload, or all of the rid (index -1).

    `force` frees it although a live reader may hold it.
    """

    request: int
    edge: Edge
    rid: str
    index: int
    force: bool


@dataclass(slots=True)
class Inspected(Event):
    """Someone looks at a payload without taking it: the block stays until `Released(reader=-1)`."""

    request: int
    edge: Edge
    rid: str
    index: int


@dataclass(slots=True)
class Tick(Event):
    """Time passed. `session` is 0."""


@dataclass(slots=True)
class Stopping(Event):
    """The broker stops: every waiter is told. `session` is 0."""
