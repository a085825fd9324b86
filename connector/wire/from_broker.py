"""What the broker says to clients; codes from 64 on. See messages.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from connector.core.directory.effects import Descriptor, Notice, Way
from connector.core.directory.events import Hold
from connector.core.errors import ConnectorError
from connector.core.names import MAX_READERS, Edge, Handle
from connector.wire import columns, hot
from connector.wire import fields as f
from connector.wire.message import MANY, Message


@dataclass(slots=True)
class Welcome(Message):
    """`again`: the broker still knows the session. `limits`: what the client must respect."""

    code = 64
    checks = (f.WORD, f.WORD, f.octets(16, 16), f.WORD, f.flag, f.facts)
    session: int
    epoch: int
    arena: bytes
    arena_size: int
    again: bool
    limits: dict[str, Any]


@dataclass(slots=True)
class Grant(Message):
    code = 66
    checks = (f.WORD, f.many(hot.block, 4096))
    request: int
    blocks: tuple[tuple[Handle, int], ...]


@dataclass(slots=True)
class Failure(Message):
    """Answers a request that cannot be served; request 0: the session itself is refused."""

    code = 67
    checks = (f.WORD, f.ERROR)
    request: int
    error: ConnectorError


@dataclass(slots=True)
class Answer(Message):
    code = 68
    checks = (f.WORD, f.facts)
    request: int
    facts: dict[str, Any]


@dataclass(slots=True)
class Deliver(Message):
    code = 69
    checks = (columns.descriptors,)
    descriptors: tuple[Descriptor, ...]


@dataclass(slots=True)
class Next(Message):
    """Deliver, of a stream's next chunk alone, in the form in which a writer tells it by itself (alike.py)."""

    code = 84
    checks = (f.octets(65_536),)
    frame: bytes


@dataclass(slots=True)
class Ended(Message):
    code = 70
    checks = (hot.edge, f.READER, f.RID, f.WORD, f.INDEX, f.BEHIND)
    edge: Edge
    reader: int
    rid: str
    life: int
    count: int
    behind: int = -1


@dataclass(slots=True)
class StreamFailed(Message):
    """`reader` -1: said to the writer."""

    code = 71
    checks = (hot.edge, f.number(-1, MAX_READERS - 1), f.RID, f.WORD, f.ERROR, f.BEHIND, f.WORD)
    edge: Edge
    reader: int
    rid: str
    life: int
    error: ConnectorError
    behind: int = -1
    applied: int = 0


@dataclass(slots=True)
class PutFailed(Message):
    code = 72
    checks = (f.WORD, f.number(0, MANY), f.ERROR)
    number: int
    member: int
    error: ConnectorError


@dataclass(slots=True)
class PutNoted(Message):
    code = 73
    checks = (f.WORD, f.number(0, MANY), f.short(32))
    number: int
    member: int
    outcome: str


@dataclass(slots=True)
class Notices(Message):
    code = 74
    checks = (f.many(f.NOTICE, MANY), f.flag)
    notices: tuple[Notice, ...]
    lost: bool


@dataclass(slots=True)
class Drop(Message):
    """`writer`: a session that may have told of them, and has died; 0 for none."""

    code = 75
    checks = (f.many(hot.hold, 1_000_000), f.WORD)
    holds: tuple[Hold, ...]
    writer: int = 0


@dataclass(slots=True)
class Recall(Message):
    code = 76
    checks = ()


@dataclass(slots=True)
class Ping(Message):
    code = 77
    checks = ()


@dataclass(slots=True)
class Resend(Message):
    """Numbered messages from `number` on are missing."""

    code = 78
    checks = (f.WORD,)
    number: int


@dataclass(slots=True)
class Stopping(Message):
    code = 79
    checks = ()


@dataclass(slots=True)
class Rows(Message):
    """A page; `cursor` 0: no more."""

    code = 80
    checks = (f.WORD, f.plain_list, f.WORD)
    request: int
    rows: list[Any]
    cursor: int


@dataclass(slots=True)
class Shown(Message):
    code = 81
    checks = (f.WORD, hot.descriptor)
    request: int
    descriptor: Descriptor


@dataclass(slots=True)
class Peer(Message):
    """Its frame carries a descriptor: a socket to the session of this number, for what is told directly."""

    code = 82
    checks = (f.WORD,)
    session: int


@dataclass(slots=True)
class Direct(Message):
    """Streams whose chunks the writer may tell their reader itself."""

    code = 83
    checks = (f.many(f.WAY, MANY),)
    ways: tuple[Way, ...]
