"""Names that several rooms share: edges, handles and the limits on what a client may name."""

from __future__ import annotations

from typing import NamedTuple

from connector.core.errors import InvalidPayload

#: Longest stage name, in UTF-8 bytes.
MAX_STAGE_BYTES = 128
#: Longest rid, in UTF-8 bytes. A rid never becomes a path or a segment name.
MAX_RID_BYTES = 1024
#: Longest reason of an abort, in UTF-8 bytes.
MAX_REASON_BYTES = 4096
#: Longest tensor key, in UTF-8 bytes.
MAX_KEY_BYTES = 1024
#: Most tensors in one payload.
MAX_KEYS = 65_536
#: Most dimensions of one tensor (torch's own limit is 64).
MAX_DIMS = 64
#: Highest chunk index, attempt and replica number.
MAX_INDEX = 2**31 - 1
#: Most readers of one stream.
MAX_READERS = 1024


class Edge(NamedTuple):
    """(from_stage, to_stage, replica): one directed connection between two stages."""

    from_stage: str
    to_stage: str
    replica: int = 0

    def __str__(self) -> str:
        return f"{self.from_stage}:{self.to_stage}:{self.replica}"

    @classmethod
    def parse(cls, text: str) -> Edge:
        """`thinker:talker` or `thinker:talker:1`; InvalidPayload on anything else."""
        parts = text.split(":")
        if len(parts) == 2:
            return check_edge(cls(parts[0], parts[1]))
        if len(parts) == 3 and parts[2].isascii() and parts[2].isdecimal():
            return check_edge(cls(parts[0], parts[1], int(parts[2])))
        raise InvalidPayload("an edge is written FROM:TO or FROM:TO:REPLICA", edge=text)


class Handle(NamedTuple):
    """An extent of the arena: byte offset in the segment and its generation.

    The arena's uuid is the session's; a handle of another arena is never compared.
    """

    offset: int
    generation: int


#: No block.
NOWHERE = Handle(0, 0)


def check_text(text: object, what: str, limit: int) -> str:
    """`text` if it is a str of at most `limit` UTF-8 bytes and encodable; InvalidPayload otherwise."""
    if not isinstance(text, str):
        raise InvalidPayload(f"{what} must be a str, not {type(text).__name__}", **{what: repr(text)[:80]})
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        told = {what: ascii(text)[:80]}
        raise InvalidPayload(f"{what} holds a lone surrogate: it has no UTF-8 form", **told) from None
    if size > limit:
        raise InvalidPayload(f"{what} is too long", size=size, limit=limit, **{what: text[:40] + "…"})
    return text


def check_reason(text: object) -> str:
    """Why something was done, in words: what has no UTF-8 form is escaped. InvalidPayload as `check_text`."""
    return check_text(_encodable(text), "reason", MAX_REASON_BYTES)


def _encodable(text: object) -> object:
    return text.encode(errors="backslashreplace").decode() if isinstance(text, str) else text


def check_rid(rid: object) -> str:
    """A rid: any non-empty str up to MAX_RID_BYTES."""
    if check_text(rid, "rid", MAX_RID_BYTES) == "":
        raise InvalidPayload("a rid must not be empty")
    return rid  # type: ignore[return-value]


def check_number(value: object, what: str, high: int, low: int = 0) -> int:
    """`value` if it is an int (no bool) in [low, high]; InvalidPayload otherwise."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidPayload(f"{what} must be an int from {low} to {high}", **{what: repr(value)[:80]})
    return value


def check_edge(edge: Edge) -> Edge:
    """An edge with two non-empty stage names without ':' and a replica number."""
    for stage in (edge.from_stage, edge.to_stage):
        if check_text(stage, "stage", MAX_STAGE_BYTES) == "" or ":" in stage:
            raise InvalidPayload("a stage name must be non-empty and without ':'", stage=stage)
    check_number(edge.replica, "replica", MAX_INDEX)
    return edge
