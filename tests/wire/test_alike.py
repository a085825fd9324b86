"""Messages that are joined, not packed: both ends cannot tell them from those that are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.core.directory.effects import Descriptor
from connector.core.directory.events import Member
from connector.core.errors import ProtocolViolation
from connector.core.names import MAX_INDEX, NOWHERE, Edge, Handle
from connector.wire import codec, manifest
from connector.wire.alike import MOST_KNOWN, MetaAlike, Told, ToldAlike, Where, tail
from connector.wire.fields import MAX_MEMBER, MAX_WORD

TEXT = st.text("abé", min_size=1, max_size=9)
WORD = st.integers(0, MAX_WORD)
HANDLE = st.builds(Handle, WORD, WORD)
INDEX = st.integers(1, MAX_INDEX)
EDGE = Edge("a", "b", 0)
STREAMS = st.tuples(st.builds(Edge, TEXT, TEXT, st.integers(0, 300)), TEXT, WORD, st.binary(max_size=40))
WHERE = st.builds(Where, HANDLE, WORD, st.integers(0, MAX_INDEX), st.integers(0, MAX_MEMBER))


def alike(rid: str = "r", life: int = 1) -> ToldAlike:
    return ToldAlike(EDGE, rid, life, b"manifest")


def frame_of(told: ToldAlike, index: int, handle: Handle, ahead: Handle = NOWHERE) -> bytes:
    return told.head(index, Where(handle, 4608, 256, 0)) + tail(ahead)


@given(STREAMS, INDEX, WHERE, HANDLE)
def test_what_is_told_is_what_was_meant(stream: Any, index: int, where: Where, ahead: Handle) -> None:
    edge, rid, life, packed = stream
    frame = ToldAlike(*stream).head(index, where) + tail(ahead)
    meant = Descriptor(edge, 0, rid, life, index, 0, 0, *where, packed, index - 1)
    assert codec.decode_told(frame) == ([meant], ahead)
    reader = Told()
    # The first is decoded, and the second compared with it.
    for _ in range(2):
        assert reader.read(frame) == [meant]
        there = ahead.generation and index < MAX_INDEX
        announced = [(index + 1, where._replace(handle=ahead))] if there else []
        assert list(reader.announced.values()) == announced
        reader.announced.clear()
    assert ToldAlike(*stream).read(frame) == meant
    assert ToldAlike(*stream).descriptor(index, where) == meant


@given(STREAMS, INDEX, st.integers(1, 8), st.integers(0, MAX_INDEX))
def test_a_block_s_meta_is_what_was_meant(stream: Any, index: int, readers: int, begun: int) -> None:
    edge, rid, nbytes, packed = stream
    meta = MetaAlike(edge, rid, readers, packed, nbytes, begun).meta(index)
    meant = (edge, (Member(rid, index, 0, 0, readers, packed, nbytes),), begun)
    assert manifest.unpack_meta(meta) == meant
    assert manifest.unpack_meta(manifest.pack_meta(*meant)) == meant
    assert len(meta) <= manifest.most_meta(edge, len(rid), [packed])


def decoded(frame: bytes) -> Any:
    try:
        return codec.decode_told(frame)[0]
    except ProtocolViolation as error:
        return str(error)


def read(reader: Told, frame: bytes) -> Any:
    try:
        return reader.read(frame)
    except ProtocolViolation as error:
        return str(error)


@given(
    st.integers(1, 70_000),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
    st.integers(-3, 3),
)
def test_a_damaged_frame_is_read_as_it_would_be_without_any_before_it(
    index: int, damage: list[tuple[int, int]], longer: int
) -> None:
    reader, frame = Told(), bytearray(frame_of(alike(), index, Handle(4096, 7), Handle(64, 9)))
    reader.read(bytes(frame))
    for place, byte in damage:
        frame[place % len(frame)] = byte
    found = bytes(frame[:longer]) if longer < 0 else bytes(frame) + b"\xc0" * longer
    assert read(reader, found) == decoded(found)


def test_no_byte_of_a_frame_is_passed_over() -> None:
    frame = frame_of(alike(), 5, Handle(4096, 7), Handle(64, 9))
    for place in range(len(frame)):
        for byte in (0, frame[place] ^ 1, 0xCE, 0xFF):
            reader = Told()
            reader.read(frame)
            found = frame[:place] + bytes((byte,)) + frame[place + 1 :]
            assert read(reader, found) == decoded(found), (place, byte)


def test_streams_of_one_socket_are_kept_apart() -> None:
    """Of one length and of others, with lives of theirs; more than are remembered."""
    reader = Told()
    rids = [*(f"r{number}" for number in range(MOST_KNOWN + 20)), "another-length", "a", "of-a-fifth-length"]
    for index in (1, 2, 3):
        for rid in rids:
            frame = frame_of(alike(rid, life=len(rid)), index, Handle(64 * index, index))
            assert reader.read(frame) == decoded(frame)
    assert len(reader._known) <= MOST_KNOWN


@pytest.mark.parametrize("number", [2, 70_000])
def test_what_is_packed_is_read_by_who_compares(number: int) -> None:
    """A step, and a chunk of a stream of which some were joined."""
    reader = Told()
    reader.read(frame_of(alike(), 1, Handle(64, 1)))
    one = Descriptor(EDGE, 0, "r", 1, number, 0, 0, Handle(64, 2), 4608, 256, 0, b"manifest", number - 1)
    for told in ([one], [one, one._replace(rid="s", member=1)]):
        assert reader.read(codec.encode_told(told)) == told
