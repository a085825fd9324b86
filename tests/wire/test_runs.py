"""Seals that are alike travel as one message: what comes is what was said, in its order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.core.directory.events import Member, Told
from connector.core.names import Edge, Handle
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.runs import joined

EDGE = Edge("a", "b", 0)


def seal(number: int, rid: str = "r", index: int = 3, **other: Any) -> msg.Seal:
    fields = {"attempt": 0, "flags": 0, "readers": 1, "manifest": b"m", "nbytes": 80, "count": 1} | other
    member = Member(rid, index, *[fields[name] for name in ("attempt", "flags", "readers", "manifest", "nbytes")])
    told = fields.get("told", (Told(0, fields["count"], 7),))
    handle = Handle(4096 * number, number)
    members = (member,) * fields["count"]
    return msg.Seal(
        number, fields.get("seen", 5), fields.get("edge", EDGE), handle, fields.get("at", 256), members, told
    )


def apart(message: msg.Message) -> list[msg.Message]:
    """The Seals of a run, each by itself."""
    if not isinstance(message, msg.Seals):
        return [message]
    return [
        msg.Seal(
            message.number + place, message.seen, message.edge, one.handle, message.data_offset,
            (Member(one.rid, one.index, 0, 0, message.readers, message.manifest, message.nbytes),),
            (Told(0, 1, message.told),),
        )
        for place, one in enumerate(message.chunks)
    ]  # fmt: skip


OTHERS: list[dict[str, Any]] = [
    {"attempt": 1},
    {"flags": 1},
    {"readers": 2},
    {"manifest": b"n"},
    {"nbytes": 8},
    {"count": 2},
    {"told": ()},
    {"told": (Told(0, 1, 8),)},
    {"told": (Told(1, 1, 7),)},
    {"seen": 6},
    {"edge": Edge("a", "c", 0)},
    {"at": 320},
]
PARTS = st.one_of(
    st.tuples(st.sampled_from(["r", "q", "é"]), st.integers(0, 9), st.sampled_from([{}, {}, {}, *OTHERS])),
    st.sampled_from(["begin", "gap"]),
)


@given(st.lists(PARTS, max_size=12))
def test_what_is_joined_is_what_was_said(parts: list[Any]) -> None:
    messages: list[msg.Message] = []
    number = 0
    for part in parts:
        number += 2 if part == "gap" else 1
        if part == "begin":
            messages.append(msg.Begin(number, "r"))
        elif part != "gap":
            rid, index, other = part
            messages.append(seal(number, rid, index, **other))
    envelope = codec.decode(codec.encode(0, joined(messages)), from_broker=False)
    assert [one for message in envelope.messages for one in apart(message)] == messages


def test_many_are_one_and_short() -> None:
    messages = [seal(number, f"r{number % 16}", number, manifest=b"m" * 60) for number in range(1, 65)]
    (one,) = joined(messages)
    assert isinstance(one, msg.Seals)
    assert (one.number, len(one.chunks)) == (1, 64)
    assert len(codec.encode(0, [one])) < len(codec.encode(0, messages)) / 2


@pytest.mark.parametrize("other", OTHERS, ids=[next(iter(other)) for other in OTHERS])
def test_one_that_differs_is_said_by_itself(other: dict[str, Any]) -> None:
    messages = [seal(1), seal(2), seal(3, **other), seal(4), seal(5)]
    assert [type(message).__name__ for message in joined(messages)] == ["Seals", "Seal", "Seals"]
