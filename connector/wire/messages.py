"""The messages, one class each. A class's `code` is its number on the wire and never changes meaning.

Client to broker below 64, broker to client from 64. `request` numbers are the client's own and come back in the answer;
`number` counts what changes state (see the directory's events): a retry is applied once. Pong answers Ping and Notices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from connector.core.directory.effects import Descriptor, Notice
from connector.core.directory.events import Hold, Member, Span
from connector.core.errors import ConnectorError
from connector.core.names import MAX_INDEX, MAX_READERS, MAX_REASON_BYTES, MAX_RID_BYTES, MAX_STAGE_BYTES, Edge, Handle
from connector.wire import fields as f
from connector.wire import hot
from connector.wire.message import MANY
from connector.wire.message import TOKEN_BYTES as TOKEN_BYTES
from connector.wire.message import VERSION as VERSION
from connector.wire.message import Message as Message


@dataclass(slots=True)
class Hello(Message):
    """First message: the token that the lifeline gave, the stage, and what a lost link left behind."""

    code = 1
    checks = (
        f.octets(TOKEN_BYTES, TOKEN_BYTES),
        f.short(MAX_STAGE_BYTES),
        f.text(64),
        f.flag,
        f.many(hot.handle, MANY),
    )
    token: bytes
    stage: str
    library: str
    again: bool
    reserved: tuple[Handle, ...]


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
    checks = (f.WORD, f.WORD, hot.edge, hot.handle, f.WORD, f.many(hot.member, MANY))
    number: int
    seen: int
    edge: Edge
    handle: Handle
    data_offset: int
    members: tuple[Member, ...]


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


# -- broker to client -----------------------------------------------------------------------------


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
    checks = (f.WORD, f.many(f.BLOCK, 4096))
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
    checks = (f.many(hot.descriptor, MANY),)
    descriptors: tuple[Descriptor, ...]


@dataclass(slots=True)
class Ended(Message):
    code = 70
    checks = (hot.edge, f.READER, f.RID, f.WORD, f.INDEX)
    edge: Edge
    reader: int
    rid: str
    life: int
    count: int


@dataclass(slots=True)
class StreamFailed(Message):
    """`reader` -1: said to the writer."""

    code = 71
    checks = (hot.edge, f.number(-1, MAX_READERS - 1), f.RID, f.WORD, f.ERROR)
    edge: Edge
    reader: int
    rid: str
    life: int
    error: ConnectorError


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
    code = 75
    checks = (f.many(hot.hold, 1_000_000),)
    holds: tuple[Hold, ...]


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


def _all() -> list[type[Message]]:
    """By name, not by `__subclasses__`: a slotted dataclass leaves its first draft there until it is collected."""
    return [c for c in list(globals().values()) if isinstance(c, type) and issubclass(c, Message) and c is not Message]


MESSAGES = tuple(_all())
BY_CODE: dict[int, type[Message]] = {cls.code: cls for cls in MESSAGES}
#: Codes below are sent by clients, from here on by the broker.
FIRST_BROKER_CODE = 64
