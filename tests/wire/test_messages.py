"""Every message, field by field: what a correct peer sends arrives as it was, anything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.core.directory.effects import Descriptor, Notice, Way
from connector.core.directory.events import Hold, Member, Sealing, Span, Told
from connector.core.errors import BY_CODE as ERRORS
from connector.core.errors import ConnectorError, PoolFull, ProtocolViolation
from connector.core.names import MAX_INDEX, MAX_READERS, MAX_RID_BYTES, MAX_STAGE_BYTES, Edge, Handle
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.hot import SEALING

WORD_MAX = 2**63 - 1
NOT_INTS = [True, 1.0, "1", b"1", None, [], {}]
NOT_TEXT = [1, b"r", None, ["r"], {}, True]


class Kind(NamedTuple):
    """Values of one kind of field: generated, at the bounds, and wrong as they would stand in a frame."""

    good: st.SearchStrategy[Any]
    bounds: list[Any]
    wrong: list[Any]


def number(low: int, high: int) -> Kind:
    return Kind(st.integers(low, high), [low, high], [low - 1, high + 1, *NOT_INTS])


def characters() -> st.SearchStrategy[str]:
    return st.characters(exclude_categories=["Cs"])


def text(limit: int) -> Kind:
    good = st.text(characters(), max_size=min(limit, 40))
    return Kind(good, ["", "é" * limit, "x" * limit], ["x" * (limit + 1), *NOT_TEXT])


def short(limit: int) -> Kind:
    good = st.text(characters(), min_size=1, max_size=limit // 4)
    wrong = ["", "x" * (limit + 1), "é" * (limit // 2) + "xx", *NOT_TEXT]
    return Kind(good, ["a", "x" * limit, "é" * (limit // 2), "𝄞" * (limit // 4)], wrong)


def octets(low: int, high: int) -> Kind:
    bounds = [b"\xff" * low, b"\0" * min(high, 70_000)]
    good = st.binary(min_size=low, max_size=min(high, 60))
    return Kind(good, bounds, ["x" * low, None, 1, [], *([b"x" * (low - 1)] if low else [])])


def struct(make: Any, *parts: Kind) -> Kind:
    good = st.builds(make, *[part.good for part in parts])
    bounds = [make(*[part.bounds[at] for part in parts]) for at in (0, -1)]
    base = [part.bounds[0] for part in parts]
    wrong: list[Any] = [None, {}, 1, "x", base[:-1], [*base, 0]]
    for place, part in enumerate(parts):
        wrong += [[*base[:place], bad, *base[place + 1 :]] for bad in part.wrong]
    return Kind(good, bounds, wrong)


def many(one: Kind, limit: int) -> Kind:
    good = st.lists(one.good, max_size=4).map(tuple)
    bounds: list[Any] = [(), tuple(one.bounds)]
    over = [] if limit > 5000 else [[one.bounds[0]] * (limit + 1)]
    return Kind(good, bounds, [None, {}, "xx", 3, *over, *[[bad] for bad in one.wrong]])


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(characters())
)
NESTED = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


def _deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


FLAG = Kind(st.booleans(), [False, True], [0, 1, None, "true", b"\1", []])
SECONDS = Kind(
    st.floats(0, 1e9), [0.0, 1e9, 5], [-1, -0.001, float("nan"), float("inf"), -float("inf"), 1e10, True, "1", None]
)
FACTS = Kind(
    st.dictionaries(st.text(characters(), max_size=9), NESTED, max_size=4),
    [{}, {"a": _deep(5)}, {"a": {"b": [None, True, 1.5, "x"]}}],
    [None, [], 1, "x", {"a": b"bytes"}, {"a": _deep(6)}, {b"a": 1}],
)
LIST = Kind(st.lists(NESTED, max_size=4), [[], [{"a": [1]}], _deep(6)], [None, {}, "x", 3, [b"b"], _deep(7)])
WORD, INDEX, READER = number(0, WORD_MAX), number(0, MAX_INDEX), number(0, MAX_READERS - 1)
ANY_READER, RID, TOKEN = number(-1, MAX_READERS - 1), short(MAX_RID_BYTES), octets(16, 16)
STAGE = Kind(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters=":"), min_size=1, max_size=30),
    ["a", "x" * MAX_STAGE_BYTES],
    ["", "a:b", ":", "x" * (MAX_STAGE_BYTES + 1), *NOT_TEXT],
)
EDGE = struct(Edge, STAGE, STAGE, INDEX)
HANDLE = struct(Handle, WORD, WORD)
PLACE, MANIFEST = number(0, 2**24), octets(0, 2**26)
HOLD = struct(Hold, HANDLE, PLACE, ANY_READER)
SPAN = struct(Span, HANDLE, PLACE, number(1, 2**24 + 1), ANY_READER)
MEMBER = struct(Member, RID, INDEX, INDEX, number(0, 3), number(1, MAX_READERS), MANIFEST, WORD)
BEHIND = number(-1, MAX_INDEX)
DESCRIPTOR = struct(
    Descriptor, EDGE, ANY_READER, RID, WORD, INDEX, INDEX, number(0, 7), HANDLE, WORD, WORD, PLACE, MANIFEST, BEHIND
)
NOTICE = struct(Notice, WORD, RID, text(65_536), WORD, WORD, many(EDGE, 64))
WAY = struct(Way, EDGE, RID, WORD, WORD, WORD)
TOLD = struct(Told, PLACE, number(1, 2**24 + 1), WORD)
BLOCK = struct(lambda handle, length: (handle, length), HANDLE, WORD)
SEALINGS = Kind(
    st.lists(st.builds(Sealing, RID.good, INDEX.good, HANDLE.good), max_size=5).map(tuple),
    [(), (Sealing("x" * MAX_RID_BYTES, MAX_INDEX, Handle(WORD_MAX, WORD_MAX)), Sealing("r", 0, Handle(0, 0)))],
    [
        None, {}, 1, "x", [], [[]], [["r"], b"", 0], ["r", b""], [["r"], "x"], [["r"], b"x" * 21],
        [[1], b""], [[""], b""],
        *[[["r"], SEALING.pack(*bad)] for bad in ((1, 0, 0, 0), (0, -1, 0, 0), (0, 0, -1, 0), (0, 0, 0, -1))],
    ],
)  # fmt: skip
SESSION_FACTS = st.dictionaries(st.sampled_from(["rid", "key", "size", "age"]), SCALARS, max_size=3)
ERROR = Kind(
    st.builds(
        lambda cls, told, facts: cls(told, **facts), st.sampled_from(list(ERRORS.values())), st.text(), SESSION_FACTS
    ),
    [ConnectorError("x"), PoolFull("full", rid="r", holders=["a", "b"])],
    [None, {}, [], ["PoolFull", "x"], ["", "x", {}], [1, "x", {}], ["PoolFull", 1, {}], ["PoolFull", "x", []]],
)

FIELDS: dict[type[msg.Message], list[Kind]] = {
    msg.Hello: [TOKEN, short(MAX_STAGE_BYTES), text(64), FLAG, many(HANDLE, 100_000), FLAG],
    msg.Reserve: [WORD, EDGE, many(WORD, 4096), SECONDS, many(RID, 4096), FLAG],
    msg.Return: [WORD, many(HANDLE, 100_000)],
    msg.Seal: [WORD, WORD, EDGE, HANDLE, WORD, many(MEMBER, 100_000), many(TOLD, 100_000), WORD, HANDLE],
    msg.Seals: [WORD, WORD, EDGE, WORD, number(1, MAX_READERS), MANIFEST, WORD, WORD, SEALINGS],
    msg.Release: [WORD, many(SPAN, 100_000)],
    msg.Took: [many(SPAN, 100_000)],
    msg.Subscribe: [WORD, EDGE, READER, number(1, MAX_READERS), FLAG, FLAG],
    msg.Claim: [EDGE, READER, RID],
    msg.Await: [WORD, EDGE, READER, RID, SECONDS],
    msg.Cancel: [WORD],
    msg.Begin: [WORD, RID],
    msg.Finish: [WORD, RID, FLAG],
    msg.Abort: [WORD, WORD, RID, text(4096), FLAG],
    msg.Enter: [WORD, EDGE, RID, FLAG, WORD, text(4096)],
    msg.Bye: [many(HOLD, 1_000_000)],
    msg.Pong: [],
    msg.Status: [WORD, short(32)],
    msg.ListPage: [WORD, WORD, WORD, number(1, 1000), FACTS],
    msg.Inspect: [WORD, EDGE, RID, number(-1, MAX_INDEX)],
    msg.Remove: [WORD, EDGE, RID, number(-1, MAX_INDEX), FLAG],
    msg.Story: [WORD, text(MAX_RID_BYTES)],
    msg.FellBack: [EDGE, many(RID, 100_000)],
    msg.Welcome: [WORD, WORD, TOKEN, WORD, FLAG, FACTS],
    msg.Grant: [WORD, many(BLOCK, 4096)],
    msg.Failure: [WORD, ERROR],
    msg.Answer: [WORD, FACTS],
    msg.Deliver: [many(DESCRIPTOR, 100_000)],
    msg.Ended: [EDGE, READER, RID, WORD, INDEX, BEHIND],
    msg.StreamFailed: [EDGE, ANY_READER, RID, WORD, ERROR, BEHIND, WORD],
    msg.PutFailed: [WORD, number(0, 100_000), ERROR],
    msg.PutNoted: [WORD, number(0, 100_000), short(32)],
    msg.Notices: [many(NOTICE, 100_000), FLAG],
    msg.Drop: [many(HOLD, 1_000_000), WORD],
    msg.Recall: [],
    msg.Ping: [],
    msg.Resend: [WORD],
    msg.Stopping: [],
    msg.Rows: [WORD, LIST, WORD],
    msg.Shown: [WORD, DESCRIPTOR],
    msg.Peer: [WORD],
    msg.Direct: [many(WAY, 100_000)],
    msg.Next: [octets(0, 65_536)],
}

#: Names and numbers on the wire: they never change, and a new one is added at the end of its direction.
CODES = {
    1: "Hello", 2: "Reserve", 3: "Return", 4: "Seal", 5: "Release", 6: "Took", 7: "Subscribe", 8: "Claim", 9: "Await",
    10: "Cancel", 11: "Begin", 12: "Finish", 13: "Abort", 14: "Bye", 15: "Pong", 16: "Status", 17: "ListPage",
    18: "Inspect", 19: "Remove", 20: "Story", 21: "Enter", 22: "FellBack", 23: "Seals",
    64: "Welcome", 66: "Grant", 67: "Failure",
    68: "Answer",
    69: "Deliver", 70: "Ended", 71: "StreamFailed", 72: "PutFailed", 73: "PutNoted", 74: "Notices", 75: "Drop",
    76: "Recall", 77: "Ping", 78: "Resend", 79: "Stopping", 80: "Rows", 81: "Shown", 82: "Peer", 83: "Direct",
    84: "Next",
}  # fmt: skip
BY_CLASS = [pytest.param(cls, id=cls.__name__) for cls in FIELDS]


def comparable(value: Any) -> Any:
    """A message as plain values, errors by what they tell."""
    if isinstance(value, msg.Message):
        return [type(value), *[comparable(getattr(value, name)) for name in value.__slots__]]
    if isinstance(value, ConnectorError):
        return [type(value), value.message, value.facts]
    return value


def through(message: msg.Message, counter: int = 7) -> msg.Message:
    """The message after a trip over the wire, in its own direction."""
    envelope = codec.decode(codec.encode(counter, [message]), from_broker=message.code >= msg.FIRST_BROKER_CODE)
    assert envelope.counter == counter
    (came,) = envelope.messages
    return came


def exactly(value: Any) -> Any:
    """Value and types: True is no 1, a list is no tuple."""
    if isinstance(value, (list, tuple)):
        return (type(value), [exactly(part) for part in value])
    if isinstance(value, dict):
        return (dict, {key: exactly(part) for key, part in value.items()})
    return (type(value), value)


def test_every_message_stands_in_the_table_with_all_its_fields() -> None:
    """Else a message would travel untested."""
    assert set(FIELDS) == set(msg.MESSAGES)
    assert {cls: len(kinds) for cls, kinds in FIELDS.items()} == {cls: len(cls.__slots__) for cls in msg.MESSAGES}


def test_no_code_is_used_twice_and_none_ever_changes() -> None:
    """A peer of another build must mean the same by the same number."""
    codes = [cls.code for cls in msg.MESSAGES]
    assert len(codes) == len(set(codes))
    assert {code: cls.__name__ for code, cls in msg.BY_CODE.items()} == CODES


@pytest.mark.parametrize("cls", BY_CLASS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_message_arrives_as_it_was_sent(cls: type[msg.Message], data: st.DataObject) -> None:
    """Generated values of every field kind."""
    sent = cls(*[data.draw(kind.good) for kind in FIELDS[cls]])
    assert exactly(comparable(through(sent))) == exactly(comparable(sent))


@pytest.mark.parametrize("cls", BY_CLASS)
def test_values_at_the_bounds_pass(cls: type[msg.Message]) -> None:
    """Each bound of each field, the others at their lowest."""
    for place, kind in enumerate(FIELDS[cls]):
        for bound in kind.bounds:
            values = [other.bounds[0] for other in FIELDS[cls]]
            values[place] = bound
            assert comparable(through(cls(*values))) == comparable(cls(*values))


def _wrong(cls: type[msg.Message]) -> Iterator[tuple[str, list[Any]]]:
    """The field and the fields of each message with one wrong value, as a frame has them."""
    for place, kind in enumerate(FIELDS[cls]):
        for bad in kind.wrong:
            values = [other.bounds[0] for other in FIELDS[cls]]
            values[place] = bad
            yield cls.__slots__[place], values


@pytest.mark.parametrize("cls", [case for case in BY_CLASS if FIELDS[case.values[0]]])
def test_a_wrong_field_is_refused_with_kind_and_field(cls: type[msg.Message]) -> None:
    """Wrong types and ranges, one at a time, inside of structs and lists, too."""
    from_broker = cls.code >= msg.FIRST_BROKER_CODE
    for field, values in _wrong(cls):
        # By hand: encode is for correct messages, and would turn a wrong error into a right one.
        raw = [[error_list(v) if isinstance(v, ConnectorError) else v for v in values]]
        frame = msgpack.packb([msg.VERSION, 0, [[cls.code, *raw[0]]]], use_bin_type=True)
        with pytest.raises(ProtocolViolation) as caught:
            codec.decode(frame, from_broker)
        assert caught.value.facts == {"kind": cls.__name__, "field": field}, values


def error_list(error: ConnectorError) -> list[Any]:
    return [type(error).__name__, error.message, error.facts]


@pytest.mark.parametrize("cls", BY_CLASS)
def test_one_field_less_or_more_is_refused(cls: type[msg.Message]) -> None:
    """A message of another build, or a part of one."""
    values = [error_list(k.bounds[0]) if k is ERROR else k.bounds[0] for k in FIELDS[cls]]
    for fields in ([*values, 0], values[:-1] if values else [0, 0]):
        frame = msgpack.packb([msg.VERSION, 0, [[cls.code, *fields]]], use_bin_type=True)
        with pytest.raises(ProtocolViolation) as caught:
            codec.decode(frame, cls.code >= msg.FIRST_BROKER_CODE)
        assert caught.value.facts == {"kind": cls.__name__, "fields": len(fields)}


@pytest.mark.parametrize("cls", BY_CLASS)
def test_a_message_in_the_wrong_direction_is_refused(cls: type[msg.Message]) -> None:
    """A client must not give itself blocks, nor a broker abort."""
    frame = codec.encode(0, [cls(*[kind.bounds[0] for kind in FIELDS[cls]])])
    with pytest.raises(ProtocolViolation) as caught:
        codec.decode(frame, from_broker=cls.code < msg.FIRST_BROKER_CODE)
    assert caught.value.facts == {"code": cls.code}
