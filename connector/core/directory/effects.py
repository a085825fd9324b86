"""What the broker's shell must do, in this order. The directory itself touches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from connector.core.directory.events import Hold
from connector.core.errors import ConnectorError
from connector.core.names import NOWHERE, Edge, Handle


class Descriptor(NamedTuple):
    """What a reader needs to find one payload."""

    edge: Edge
    reader: int
    rid: str
    life: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    attempt: int
    flags: int
    handle: Handle
    length: int
    data_offset: int
    member: int
    manifest: bytes
    #: The chunk before it, of this life, that the session was told of; -1: it is the first.
    behind: int = -1


class Way(NamedTuple):
    """A stream's chunks may be told to this session directly; 0: not any more. `applied`: as in Notice."""

    edge: Edge
    rid: str
    life: int
    session: int
    applied: int


class Notice(NamedTuple):
    """An abort, numbered. `life`: the last life that is meant, 0 if there was none. `applied`: numbered messages of the
    session that is told that had been applied by then: what it said of the rid later, it said of a later use. `edges`:
    where something was put in what is aborted, or was to be."""

    number: int
    rid: str
    reason: str
    life: int = 0
    applied: int = 0
    edges: tuple[Edge, ...] = ()


@dataclass(slots=True)
class Effect:
    pass


@dataclass(slots=True)
class RaiseCeiling(Effect):
    """Raise the generation ceiling in TABLE, before anything that follows."""


@dataclass(slots=True)
class WriteEntry(Effect):
    """A block was reserved: zero its ready word, write the table entry."""

    entry: int
    handle: Handle
    length: int
    session: int


@dataclass(slots=True)
class FreeEntry(Effect):
    entry: int
    handle: Handle


@dataclass(slots=True)
class ToSession(Effect):
    session: int


@dataclass(slots=True)
class Acked(ToSession):
    """Something numbered was applied; the next envelope carries the count."""


@dataclass(slots=True)
class AskResend(ToSession):
    """A number is missing: send again from `number`."""

    number: int


@dataclass(slots=True)
class Granted(ToSession):
    """Answers Reserve: (handle, length) of each block; empty for `ahead` when there is no room."""

    request: int
    blocks: tuple[tuple[Handle, int], ...]


@dataclass(slots=True)
class Refused(ToSession):
    """Answers any request that cannot be served."""

    request: int
    error: ConnectorError


@dataclass(slots=True)
class Done(ToSession):
    """Answers a request with facts (subscribe, abort, remove)."""

    request: int
    facts: dict[str, Any]


@dataclass(slots=True)
class Shown(ToSession):
    """Answers Inspected; the block is held for the session until it releases reader -1."""

    request: int
    descriptor: Descriptor


@dataclass(slots=True)
class Deliver(ToSession):
    """`ahead`: the block that the chunk behind a single one will probably be in."""

    descriptors: tuple[Descriptor, ...]
    ahead: Handle = NOWHERE


@dataclass(slots=True)
class Ended(ToSession):
    """The stream has `count` chunks; said when no delivered chunk carried the mark."""

    edge: Edge
    reader: int
    rid: str
    life: int
    count: int
    #: The last chunk that the session was told of, -1 for none: it is said behind that.
    behind: int = -1


@dataclass(slots=True)
class StreamFailed(ToSession):
    """Nothing more comes on this stream. `reader` -1: said to the writer."""

    edge: Edge
    reader: int
    rid: str
    life: int
    error: ConnectorError
    #: As in Ended, and, to the writer, as in Notice.
    behind: int = -1
    applied: int = 0


@dataclass(slots=True)
class PutFailed(ToSession):
    """Member `member` of the block sealed as `number` was refused."""

    number: int
    member: int
    error: ConnectorError


@dataclass(slots=True)
class PutNoted(ToSession):
    """Member `member` of the block sealed as `number`: 'replaced' or 'ignored' (attempts)."""

    number: int
    member: int
    outcome: str


@dataclass(slots=True)
class Notices(ToSession):
    """Aborts that the session has not heard of. `lost`: older ones were too many to keep."""

    notices: tuple[Notice, ...]
    lost: bool = False


@dataclass(slots=True)
class DropHolds(ToSession):
    """These payloads are void; release them as soon as no view is alive. `writer`: the number of the session that may
    have told of them, and has died; what its socket brought no word of is to be released, too. 0: none."""

    holds: tuple[Hold, ...]
    writer: int = 0


@dataclass(slots=True)
class Introduce(ToSession):
    """Give the session and `other` a socket between the two."""

    other: int


@dataclass(slots=True)
class Direct(ToSession):
    """The session may tell others of what it puts."""

    ways: tuple[Way, ...]


@dataclass(slots=True)
class Recall(ToSession):
    """Someone waits for room: return reserved blocks that are not in use."""


@dataclass(slots=True)
class Ping(ToSession):
    pass


@dataclass(slots=True)
class StopSession(ToSession):
    """The broker is stopping."""


@dataclass(slots=True)
class Expelled(ToSession):
    """Nothing of the session is left: say the last acknowledgement, forget its address, close its descriptors."""

    #: Numbered events of the session that were applied.
    applied: int


@dataclass(slots=True)
class Log(Effect):
    level: str
    text: str
    facts: dict[str, Any]
