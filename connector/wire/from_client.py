"""What clients say to the broker; codes below 64. See messages.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from connector.core.directory.events import Hold, Member, Sealing, Span, Told
from connector.core.names import (
    MAX_INDEX,
    MAX_READERS,
    MAX_REASON_BYTES,
    MAX_RID_BYTES,
    MAX_STAGE_BYTES,
    NOWHERE,
    Edge,
    Handle,
)
from connector.wire import columns, hot
from connector.wire import fields as f
from connector.wire.message import MANY, TOKEN_BYTES, Message


@dataclass(slots=True)
class Hello(Message):
    """First message: the token that the lifeline gave, the stage, what a lost link left behind, and whether it can tell
    others, and be told, directly."""

    code = 1
    checks = (
        f.octets(TOKEN_BYTES, TOKEN_BYTES),
        f.short(MAX_STAGE_BYTES),
        f.text(64),
        f.flag,
        f.many(hot.handle, MANY),
        f.flag,
    )
    token: bytes
    stage: str
    library: str
    again: bool
    reserved: tuple[Handle, ...]
    direct: bool = False


@dataclass(slots=True)
class Reserve(Message):
    code = 2
    checks = (f.WORD, hot.edge, f.many(f.WORD, 4096), f.seconds, f.many(f.RID, 4096), f.flag)
    request: int
    edge: Edge
    sizes: tuple[int, ...]
    timeout: float
    rids: tuple[str, ...]
    ahead: bool


@dataclass(slots=True)
class Return(Message):
    code = 3
    checks = (f.WORD, f.many(hot.handle, MANY))
    number: int
    handles: tuple[Handle, ...]


@dataclass(slots=True)
class Seal(Message):
    code = 4
    checks = (f.WORD, f.WORD, hot.edge, hot.handle, f.WORD, columns.members, f.many(hot.told, MANY), f.WORD, hot.handle)
    number: int
    seen: int
    edge: Edge
    handle: Handle
    data_offset: int
    members: tuple[Member, ...]
    told: tuple[Told, ...] = ()
    #: Bytes from one member's data to the next's; 0: all manifests count from `data_offset`.
    stride: int = 0
    #: The block that the stream's next chunk will probably be in.
    ahead: Handle = NOWHERE


@dataclass(slots=True)
class Seals(Message):
    """Seals of single payloads, numbered from `number` on, that differ in rid, index and block (runs.py). `told`: the
    session that has been told of each."""

    code = 23
    checks = (
        f.WORD, f.WORD, hot.edge, f.WORD, f.number(1, MAX_READERS), f.MANIFEST, f.WORD, f.WORD, hot.sealings,
    )  # fmt: skip
    number: int
    seen: int
    edge: Edge
    data_offset: int
    readers: int
    manifest: bytes
    nbytes: int
    told: int
    #: On the wire as hot.pack_sealings has them.
    chunks: tuple[Sealing, ...]


@dataclass(slots=True)
class Release(Message):
    code = 5
    checks = (f.WORD, f.many(hot.span, MANY))
    number: int
    spans: tuple[Span, ...]


@dataclass(slots=True)
class Took(Message):
    code = 6
    checks = (f.many(hot.span, MANY),)
    spans: tuple[Span, ...]


@dataclass(slots=True)
class Subscribe(Message):
    code = 7
    checks = (f.WORD, hot.edge, f.READER, f.number(1, MAX_READERS), f.flag, f.flag)
    request: int
    edge: Edge
    reader: int
    readers: int
    push: bool
    resume: bool


@dataclass(slots=True)
class Claim(Message):
    code = 8
    checks = (hot.edge, f.READER, f.RID)
    edge: Edge
    reader: int
    rid: str


@dataclass(slots=True)
class Await(Message):
    code = 9
    checks = (f.WORD, hot.edge, f.READER, f.RID, f.seconds)
    request: int
    edge: Edge
    reader: int
    rid: str
    timeout: float


@dataclass(slots=True)
class Cancel(Message):
    code = 10
    checks = (f.WORD,)
    request: int


@dataclass(slots=True)
class Begin(Message):
    code = 11
    checks = (f.WORD, f.RID)
    number: int
    rid: str


@dataclass(slots=True)
class Finish(Message):
    """`aborted`: the sender had heard of the rid's abort, and had nothing of a later life: it means the aborted one."""

    code = 12
    checks = (f.WORD, f.RID, f.flag)
    number: int
    rid: str
    aborted: bool = False


@dataclass(slots=True)
class Abort(Message):
    """`mine`: lives after the one that the session is in are not meant."""

    code = 13
    checks = (f.WORD, f.WORD, f.RID, f.text(MAX_REASON_BYTES), f.flag)
    number: int
    request: int
    rid: str
    reason: str
    mine: bool = False


@dataclass(slots=True)
class Bye(Message):
    code = 14
    checks = (f.many(hot.hold, 1_000_000),)
    held: tuple[Hold, ...]


@dataclass(slots=True)
class Pong(Message):
    code = 15
    checks = ()


@dataclass(slots=True)
class Status(Message):
    """`what`: summary, sessions, edges, counters, all (the first three at one moment)."""

    code = 16
    checks = (f.WORD, f.short(32))
    request: int
    what: str


@dataclass(slots=True)
class ListPage(Message):
    """A page of live payloads behind serial `after`, up to serial `last` (0: now)."""

    code = 17
    checks = (f.WORD, f.WORD, f.WORD, f.number(1, 1000), f.facts)
    request: int
    after: int
    last: int
    limit: int
    filters: dict[str, Any]


@dataclass(slots=True)
class Inspect(Message):
    code = 18
    checks = (f.WORD, hot.edge, f.RID, f.number(-1, MAX_INDEX))
    request: int
    edge: Edge
    rid: str
    index: int


@dataclass(slots=True)
class Remove(Message):
    code = 19
    checks = (f.WORD, hot.edge, f.RID, f.number(-1, MAX_INDEX), f.flag)
    request: int
    edge: Edge
    rid: str
    index: int
    force: bool


@dataclass(slots=True)
class Story(Message):
    code = 20
    checks = (f.WORD, f.text(MAX_RID_BYTES))
    request: int
    rid: str


@dataclass(slots=True)
class Enter(Message):
    code = 21
    checks = (f.WORD, f.EDGE, f.RID, f.flag, f.WORD, f.text(MAX_REASON_BYTES))
    number: int
    edge: Edge
    rid: str
    sends: bool
    heard: int
    reason: str


@dataclass(slots=True)
class FellBack(Message):
    """A reader's socket was full: these rids go through the broker, until it offers the direct way again."""

    code = 22
    checks = (hot.edge, f.many(f.RID, MANY))
    edge: Edge
    rids: tuple[str, ...]
