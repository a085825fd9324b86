"""How sessions are told of payloads: what is said so means what descriptors would."""

from __future__ import annotations

from typing import Any

import pytest

from connector.broker import telling
from connector.broker.telling import FIRST, MOST_KNOWN, Telling
from connector.core.directory.effects import Deliver, Descriptor
from connector.core.names import MAX_INDEX, NOWHERE, Edge, Handle
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.alike import MOST_MANIFEST

PLAIN = Descriptor(Edge("a", "b"), 0, "r", 3, FIRST, 0, 0, Handle(4096, 7), 4608, 256, 0, b"manifest", FIRST - 1)


def told(said: Telling, descriptor: Descriptor, ahead: Handle = NOWHERE) -> tuple[list[Descriptor], Handle | None]:
    """What the one message says, and the block ahead if it can name one."""
    (message,) = said.messages(Deliver(1, (descriptor,), ahead))
    if isinstance(message, msg.Next):
        return codec.decode_told(message.frame)
    return list(message.descriptors), None


@pytest.mark.parametrize("ahead", [NOWHERE, Handle(8192, 9)])
def test_a_stream_s_next_chunk_is_told_with_the_block_ahead(ahead: Handle) -> None:
    said = Telling()
    for index in range(FIRST, FIRST + 3):
        now = PLAIN._replace(index=index, behind=index - 1)
        assert told(said, now, ahead) == ([now], ahead)


@pytest.mark.parametrize(
    "change",
    [
        {"rid": "other"}, {"life": 4}, {"manifest": b"another"}, {"edge": Edge("a", "c")}, {"handle": Handle(64, 1)},
        {"length": 9000}, {"data_offset": 512}, {"member": 5}, {"index": MAX_INDEX, "behind": MAX_INDEX - 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_differs_is_told(change: dict[str, Any]) -> None:
    """In whatever order they come."""
    said, other = Telling(), PLAIN._replace(**change)
    for now in (PLAIN, other, PLAIN, other):
        assert told(said, now) == ([now], NOWHERE)


@pytest.mark.parametrize(
    "change",
    [
        {"reader": 1}, {"attempt": 1}, {"flags": 1}, {"behind": FIRST - 2}, {"index": FIRST - 1, "behind": FIRST - 2},
        {"manifest": b"x" * (MOST_MANIFEST + 1)}, {"data_offset": 1 << 40},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_is_not_plain_goes_as_a_descriptor(change: dict[str, Any]) -> None:
    other = PLAIN._replace(**change)
    assert told(Telling(), other) == ([other], None)


def test_more_than_one_go_as_descriptors() -> None:
    both = (PLAIN, PLAIN._replace(rid="s"))
    assert list(Telling().messages(Deliver(1, both))) == [msg.Deliver(both)]


def test_what_is_known_of_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_KNOWN >= 1024
    monkeypatch.setattr(telling, "MOST_KNOWN", 4)
    said = Telling()
    for number in range(30):
        now = PLAIN._replace(rid=f"r{number}")
        assert told(said, now) == ([now], NOWHERE)
        assert len(said._known) <= 4
