"""Bytes from anyone: an envelope, or ProtocolViolation, and never anything else."""

from __future__ import annotations

import datetime
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.core.errors import ProtocolViolation
from connector.wire import codec
from connector.wire import messages as msg

Opens = Callable[..., codec.Envelope | None]
Frames = list[tuple[bytes, bool]]

#: How an envelope of this version begins.
FRAME = b"\x93" + bytes([msg.VERSION])


def pack(value: Any) -> bytes:
    packed = msgpack.packb(value, use_bin_type=True, datetime=True)
    assert isinstance(packed, bytes)
    return packed


def nested(levels: int) -> bytes:
    """A list in a list in a list …"""
    return b"\x91" * levels + b"\xc0"


def test_a_whole_frame_opens_and_a_part_of_it_does_not(frames: Frames, opens: Opens) -> None:
    """Every length, so that a cut at any byte is seen."""
    for frame, from_broker in frames:
        assert opens(frame, from_broker) is not None
        assert [n for n in range(len(frame)) if opens(frame[:n], from_broker) is not None] == []


@pytest.mark.parametrize("tail", [b"\0", b"\xc0", b"\x90", b"\xc1", b"x" * 100])
def test_bytes_behind_the_envelope_are_refused(tail: bytes, frames: Frames, opens: Opens) -> None:
    """Whatever they are: a frame is one envelope."""
    for frame, from_broker in frames:
        assert opens(frame + tail, from_broker) is None
        assert opens(frame + frame, from_broker) is None


def test_a_flipped_bit_gives_an_envelope_or_a_refusal(frames: Frames, opens: Opens) -> None:
    """Every bit of every frame. In both directions: the direction, too, is one bit of a code."""
    refused = 0
    for frame, from_broker in frames:
        for bit in range(8 * len(frame)):
            flipped = bytearray(frame)
            flipped[bit // 8] ^= 1 << bit % 8
            refused += opens(bytes(flipped), from_broker) is None
            opens(bytes(flipped), not from_broker)
    assert refused > 1000


@settings(max_examples=5000, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_garbage(opens: Opens, data: bytes, from_broker: bool) -> None:
    """Bytes without a thought behind them."""
    opens(data, from_broker)


class Odd:
    """Values that msgpack can hold, by chance from a seed: Hypothesis' own would take minutes for as many."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def scalar(self) -> Any:
        chance = self.chance
        bounds = [0, 1, -1, 2, 255, 2**24, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
        text = "".join(chance.choice("a:é𝄞\n\0") for _ in range(chance.randrange(5)))
        ext = msgpack.ExtType(chance.randrange(128), chance.randbytes(chance.randrange(9)))
        floats = [0.0, -1.5, 1e300, float("nan"), float("inf")]
        return chance.choice([None, True, False, chance.choice(bounds), chance.choice(floats), text, b"b" * 16, ext])

    def value(self, depth: int = 0) -> Any:
        kind = self.chance.randrange(4)
        if depth > 3 or kind < 2:
            return self.scalar()
        parts = [self.value(depth + 1) for _ in range(self.chance.randrange(5))]
        return parts if kind == 2 else {str(place): part for place, part in enumerate(parts)}

    def spoil(self, value: Any) -> Any:
        """The value with one part of it, at any depth, something else, gone or twice."""
        if not isinstance(value, list) or not value or self.chance.random() < 0.15:
            return self.value(2)
        at = self.chance.randrange(len(value))
        put = self.chance.choice([[], [value[at]] * 2, [self.spoil(value[at])], [self.spoil(value[at])]])
        return [*value[:at], *put, *value[at + 1 :]]


SEED = st.integers(0, 2**64 - 1)


@settings(max_examples=2000, deadline=None)
@given(SEED, st.booleans())
def test_well_formed_msgpack_of_anything(opens: Opens, seed: int, from_broker: bool) -> None:
    """It is msgpack, but not ours."""
    opens(pack(Odd(seed).value()), from_broker)


@settings(max_examples=3000, deadline=None)
@given(st.sampled_from([*msg.BY_CODE, 0, 22, 63, 65, 82, 2**40, -1]), SEED, st.booleans())
def test_an_envelope_of_anything(opens: Opens, code: int, seed: int, from_broker: bool) -> None:
    """The envelope is right and the message's fields are anything."""
    odd = Odd(seed)
    opens(pack([msg.VERSION, 1, [[code, *[odd.value() for _ in range(odd.chance.randrange(7))]]]]), from_broker)


@settings(max_examples=6000, deadline=None)
@given(st.integers(0, 14), SEED)
def test_a_good_envelope_with_one_odd_part(frames: Frames, opens: Opens, which: int, seed: int) -> None:
    """Wherever it is: what is still well formed opens, the rest is refused."""
    frame, from_broker = frames[which]
    opens(pack(Odd(seed).spoil(msgpack.unpackb(frame))), from_broker)


@settings(max_examples=3000, deadline=None)
@given(st.integers(0, 14), st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), min_size=1, max_size=4))
def test_spliced_frames(frames: Frames, opens: Opens, which: int, cuts: list[tuple[int, bytes]]) -> None:
    """Some bytes of a good frame replaced, grown or removed."""
    frame, from_broker = frames[which]
    changed = bytearray(frame)
    for at, put in cuts:
        place = at % (len(changed) + 1)
        changed[place : place + at % 3] = put
    opens(bytes(changed), from_broker)


@pytest.mark.parametrize("levels", [1, 7, 100, 400, 511, 512, 513, 900, 1023, 1024, 1025, 10_000, 1_000_000])
@pytest.mark.parametrize("where", ["alone", "version", "counter", "messages", "message", "code", "field"])
def test_deep_nesting_is_refused(levels: int, where: str, opens: Opens) -> None:
    """At any depth and place; the refusal itself must not go down the whole depth."""
    head = {
        "alone": b"",
        "version": b"\x93",
        "counter": FRAME,
        "messages": FRAME + b"\x00",
        "message": FRAME + b"\x00\x91",
        "code": FRAME + b"\x00\x91\x91",
        "field": FRAME + b"\x00\x91\x93" + bytes([msg.Answer.code]) + b"\x01",
    }[where]
    tail = {"version": b"\x00\x90", "counter": b"\x90"}.get(where, b"")
    assert opens(head + nested(levels) + tail, True) is None
    deep_map = b"\x81\xa1k" * levels + b"\xc0"
    found = opens(head + deep_map + tail, True)
    # A facts map of a few levels is what an answer may hold.
    assert (found is not None) is (where == "field" and levels <= 6)


HUGE = 2**32 - 1


@pytest.mark.parametrize(
    "head",
    [
        b"\xdd" + struct.pack(">I", HUGE),
        b"\xdf" + struct.pack(">I", HUGE),
        b"\xdb" + struct.pack(">I", HUGE),
        b"\xc6" + struct.pack(">I", HUGE),
        b"\xc9" + struct.pack(">I", HUGE) + b"\x05",
        b"\xdc\xff\xff",
        b"\xde\xff\xff",
        b"\xda\xff\xff",
        b"\xc5\xff\xff",
    ],
    ids=["array", "map", "str", "bin", "ext", "array16", "map16", "str16", "bin16"],
)
def test_a_length_that_is_not_there_allocates_nothing(head: bytes, opens: Opens) -> None:
    """The length is a peer's word: the frame's own size bounds what is believed."""
    for frame in (head, head + b"x" * 50, FRAME + b"\x00" + head, FRAME + b"\x00\x91" + head, FRAME + head):
        assert opens(frame) is None


@pytest.mark.parametrize(
    "value",
    [
        msgpack.ExtType(5, b"x"),
        msgpack.ExtType(0, b""),
        msgpack.Timestamp(1, 5),
        msgpack.Timestamp(2**34, 5),
        datetime.datetime.fromtimestamp(5, datetime.UTC),
        float("nan"),
        2**64 - 1,
        -(2**63),
        b"\xff\xfe",
        None,
    ],
    ids=repr,
)
def test_a_value_of_a_foreign_type_is_refused_in_every_place(value: Any, opens: Opens) -> None:
    """Extensions and timestamps are objects after unpacking; none of our fields is one."""
    assert opens(pack(value)) is None
    for frame in ([value, 0, []], [1, value, []], [1, 0, value], [1, 0, [value]], [1, 0, [[value]]]):
        assert opens(pack(frame)) is None
    for fields in ([value, "r"], [1, value]):
        assert opens(pack([msg.VERSION, 0, [[msg.Begin.code, *fields]]])) is None
    if value is not None and value == value and not isinstance(value, int):
        assert opens(pack([msg.VERSION, 0, [[msg.Answer.code, 1, {"a": value}]]]), True) is None


@pytest.mark.parametrize("raw", [b"\xd6\xff" + b"\0" * 4, b"\xd7\xff" + b"\xff" * 8, b"\xc7\x0c\xff" + b"\xff" * 12])
def test_a_timestamp_out_of_its_range_is_refused(raw: bytes, opens: Opens) -> None:
    """Its three forms, by their bytes: more nanoseconds than a second has."""
    assert opens(FRAME + raw + b"\x90") is None
    assert opens(b"\xc7\x05\xff" + b"\0" * 5) is None


def test_text_that_is_not_utf8_is_refused(opens: Opens) -> None:
    """Overlong forms, lone surrogates, and a cut character."""
    for bad in (b"\xc0\x80", b"\xed\xa0\x80", b"\xe2\x82", b"\xff", b"\xf4\x90\x80\x80"):
        text = bytes([0xA0 + len(bad)]) + bad
        assert opens(FRAME + b"\x00\x91\x93" + bytes([msg.Begin.code]) + b"\x01" + text) is None


def test_a_key_that_stands_twice_in_a_map_gives_one_value(opens: Opens) -> None:
    """Facts are told to people: the last one stands, as in every reader of msgpack."""
    facts = b"\x82\xa1a\x01\xa1a\x02"
    envelope = opens(FRAME + b"\x00\x91\x93" + bytes([msg.Answer.code]) + b"\x01" + facts, True)
    assert envelope is not None
    assert envelope.messages == [msg.Answer(1, {"a": 2})]


@pytest.mark.parametrize("key", [1, None, 1.5, True, b"k", ["k"]])
def test_a_map_key_that_is_no_text_is_refused(key: Any, opens: Opens) -> None:
    """Unhashable ones, too."""
    body = pack(key) + b"\x01"
    assert opens(FRAME + b"\x00\x91\x93" + bytes([msg.Answer.code]) + b"\x01\x81" + body, True) is None


@pytest.mark.parametrize("version", [0, 1, -1, 2**63, True, "1", 1.0, None])
def test_another_version_is_refused_before_anything_else(version: Any) -> None:
    """Also when the rest would not be understood."""
    with pytest.raises(ProtocolViolation) as caught:
        codec.decode(pack([version, "new", {"layout": 2}]), False)
    if type(version) is int:
        assert caught.value.facts == {"version": version, "expected": msg.VERSION}


@pytest.mark.parametrize("counter", [-1, 2**63, True, 1.0, "1", None, [], {}])
def test_a_counter_that_is_no_count_is_refused(counter: Any, opens: Opens) -> None:
    assert opens(pack([msg.VERSION, counter, []])) is None


def test_counters_at_their_bounds_pass(opens: Opens) -> None:
    for counter in (0, 2**63 - 1):
        envelope = opens(codec.encode(counter, []))
        assert envelope is not None
        assert envelope.counter == counter


class Bomb:
    """What unpickling would run."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(protocol: int, opens: Opens, tmp_path: Path) -> None:
    """Alone, and inside of a field that takes text."""
    target = tmp_path / "exploded"
    data = pickle.dumps(Bomb(str(target)), protocol=protocol)
    assert opens(data) is None
    assert opens(pack([msg.VERSION, 0, [[msg.Begin.code, 1, data]]])) is None
    assert not target.exists()
    pickle.loads(data)
    assert target.exists()


def test_a_frame_above_the_limit_is_refused_unread() -> None:
    """The limit is counted before a byte is looked at."""
    frame = codec.encode(0, [msg.Begin(1, "r" * 1000)])
    assert codec.decode(frame, False, max_frame=len(frame)).messages == [msg.Begin(1, "r" * 1000)]
    with pytest.raises(ProtocolViolation) as caught:
        codec.decode(frame, False, max_frame=len(frame) - 1)
    assert caught.value.facts == {"size": len(frame), "limit": len(frame) - 1}
    with pytest.raises(ProtocolViolation, match="too large"):
        codec.decode(b"\xc1" * 5, False, max_frame=4)


def test_too_many_messages_in_a_frame_are_refused(opens: Opens) -> None:
    most = pack([msg.VERSION, 0, [[msg.Pong.code]] * codec.MAX_MESSAGES])
    envelope = opens(most)
    assert envelope is not None
    assert len(envelope.messages) == codec.MAX_MESSAGES
    assert opens(pack([msg.VERSION, 0, [[msg.Pong.code]] * (codec.MAX_MESSAGES + 1)])) is None


def test_a_batch_keeps_its_order(frames: Frames, opens: Opens) -> None:
    """What was said first is heard first."""
    sent: list[msg.Message] = [msg.Begin(n, f"r{n}") for n in range(500)]
    envelope = opens(codec.encode(5, sent))
    assert envelope is not None
    assert envelope.messages == sent


def test_a_field_of_ours_that_does_not_pack_is_a_bug() -> None:
    """encode is for our own messages: it raises, and sends nothing wrong."""
    with pytest.raises(TypeError, match="object does not travel"):
        codec.encode(0, [msg.Begin(1, object())])  # type: ignore[arg-type]
