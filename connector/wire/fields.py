"""Checks for one field of a message: a value of the wire in, a value for the core out, or BadField."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from connector.core.directory.effects import Descriptor, Notice, Way
from connector.core.directory.events import Hold, Member, Span, Told
from connector.core.errors import ConnectorError, InvalidPayload, from_code
from connector.core.layout import Slot
from connector.core.names import (
    MAX_DIMS,
    MAX_INDEX,
    MAX_KEY_BYTES,
    MAX_READERS,
    MAX_RID_BYTES,
    MAX_STAGE_BYTES,
    Edge,
    Handle,
    check_edge,
)

Check = Callable[[Any], Any]

#: Offsets, sizes, numbers: what a signed 64-bit word holds.
MAX_WORD = 2**63 - 1
#: Longest free text (reasons, messages), in characters.
MAX_TEXT = 65_536
#: Deepest nesting of a facts map.
MAX_DEPTH = 6
#: Place of a payload in its block.
MAX_MEMBER = 2**24
#: Largest value of a member's flags, and of a descriptor's.
MAX_MEMBER_FLAGS, MAX_FLAGS = 3, 7
#: Longest manifest, in bytes.
MAX_MANIFEST = 2**26
#: Longest name of a dtype.
MAX_DTYPE_BYTES = 32


class BadField(Exception):
    """The value is not of the field's kind. Never leaves this room."""


class Wire(NamedTuple):
    """A struct field list: how many, and a check for each."""

    make: Callable[..., Any]
    checks: tuple[Check, ...]


def number(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is int and low <= value <= high:
            return value
        raise BadField(f"not an int from {low} to {high}")

    return check


def text(limit: int) -> Check:
    def check(value: Any) -> str:
        if type(value) is str and len(value) <= limit and len(value.encode()) <= 4 * limit:
            return value
        raise BadField(f"not a str of at most {limit} characters")

    return check


def short(limit: int) -> Check:
    """A name: non-empty, at most `limit` bytes of UTF-8."""

    def check(value: Any) -> str:
        if type(value) is str and value and len(value.encode()) <= limit:
            return value
        raise BadField(f"not a non-empty str of at most {limit} bytes")

    return check


def octets(limit: int, low: int = 0) -> Check:
    def check(value: Any) -> bytes:
        if type(value) is bytes and low <= len(value) <= limit:
            return value
        raise BadField(f"not {low} to {limit} bytes")

    return check


def flag(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise BadField("not a bool")


def seconds(value: Any) -> float:
    if type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1e9:
        return float(value)
    raise BadField("not a finite number of seconds")


def many(check: Check, limit: int) -> Check:
    def check_all(value: Any) -> tuple[Any, ...]:
        if type(value) is list and len(value) <= limit:
            return tuple([check(item) for item in value])
        raise BadField(f"not a list of at most {limit}")

    return check_all


def struct(make: Callable[..., Any], *checks: Check) -> Check:
    count = len(checks)

    def check_struct(value: Any) -> Any:
        if type(value) is list and len(value) == count:
            return make(*[check(item) for check, item in zip(checks, value, strict=True)])
        raise BadField(f"not a list of {count}")

    return check_struct


def plain(value: Any, depth: int = 0) -> Any:
    """Facts: scalars, lists and str-keyed maps, a few levels deep."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth < MAX_DEPTH and type(value) is list:
        return [plain(item, depth + 1) for item in value]
    if depth < MAX_DEPTH and type(value) is dict and all(type(key) is str for key in value):
        return {key: plain(item, depth + 1) for key, item in value.items()}
    raise BadField("not plain facts")


def facts(value: Any) -> dict[str, Any]:
    if type(value) is dict:
        result: dict[str, Any] = plain(value)
        return result
    raise BadField("not a map")


def plain_list(value: Any) -> list[Any]:
    """A list of facts."""
    if type(value) is list:
        result: list[Any] = plain(value)
        return result
    raise BadField("not a list")


def _edge(*parts: Any) -> Edge:
    try:
        return check_edge(Edge(*parts))
    except InvalidPayload as error:
        raise BadField(error.message) from None


def _error(code: str, message: str, told: dict[str, Any]) -> ConnectorError:
    return from_code(code, message, told)


def error_fields(error: ConnectorError) -> list[Any]:
    """An error as it travels: code, message, facts. Cut where the peer's checks would refuse it: it must arrive."""
    told = {_text(name): _plain_fact(value, 1) for name, value in error.facts.items()}
    return [type(error).__name__, _text(error.message), told]


def _plain_fact(value: Any, depth: int) -> Any:
    if value is None or type(value) in (float, bool):
        return value
    # What msgpack has of negative numbers ends one behind -MAX_WORD.
    if type(value) is int and -MAX_WORD - 1 <= value <= MAX_WORD:
        return value
    if depth < MAX_DEPTH and isinstance(value, (list, tuple)):
        return [_plain_fact(item, depth + 1) for item in value]
    if depth < MAX_DEPTH and isinstance(value, dict):
        return {_text(str(key)): _plain_fact(item, depth + 1) for key, item in value.items()}
    return _text(str(value))


def _text(value: str) -> str:
    """Text with a UTF-8 form and an end: a lone surrogate (of a path, say) is written out."""
    return value[:MAX_TEXT].encode(errors="backslashreplace").decode()[:MAX_TEXT]


WORD = number(0, MAX_WORD)
INDEX = number(0, MAX_INDEX)
BEHIND = number(-1, MAX_INDEX)
READER = number(0, MAX_READERS - 1)
RID = short(MAX_RID_BYTES)
EDGE = struct(_edge, short(MAX_STAGE_BYTES), short(MAX_STAGE_BYTES), INDEX)
HANDLE = struct(Handle, WORD, WORD)
SPAN = struct(Span, HANDLE, number(0, MAX_MEMBER), number(1, MAX_MEMBER + 1), number(-1, MAX_READERS - 1))
HOLD = struct(Hold, HANDLE, number(0, MAX_MEMBER), number(-1, MAX_READERS - 1))
MANIFEST = octets(MAX_MANIFEST)
MEMBER = struct(Member, RID, INDEX, INDEX, number(0, MAX_MEMBER_FLAGS), number(1, MAX_READERS), MANIFEST, WORD)
DESCRIPTOR = struct(
    Descriptor,
    EDGE,
    number(-1, MAX_READERS - 1),
    RID,
    WORD,
    INDEX,
    INDEX,
    number(0, MAX_FLAGS),
    HANDLE,
    WORD,
    WORD,
    number(0, MAX_MEMBER),
    MANIFEST,
    BEHIND,
)
WAY = struct(Way, EDGE, RID, WORD, WORD, WORD)
TOLD = struct(Told, number(0, MAX_MEMBER), number(1, MAX_MEMBER + 1), WORD)
SLOT = struct(Slot, text(MAX_KEY_BYTES), short(MAX_DTYPE_BYTES), many(WORD, MAX_DIMS), WORD, WORD)
NOTICE = struct(Notice, WORD, RID, text(MAX_TEXT), WORD, WORD, many(EDGE, 64))
ERROR = struct(_error, short(64), text(MAX_TEXT), facts)
BLOCK = struct(lambda handle, length: (handle, length), HANDLE, WORD)
