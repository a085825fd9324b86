"""Block headers: what is written is read back, and any other byte is Broken, by name."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.arena import blocks
from connector.arena.arena import DATA_BEGIN, Arena
from connector.core.errors import Broken, InvariantBroken

AT = DATA_BEGIN + 640
LENGTH = 1024
GENERATION = 77
META = b"what the payload is"


def write(arena: Arena, meta: bytes = META, generation: int = GENERATION, sealed: bool = True) -> int:
    data_offset = blocks.header_bytes(len(meta))
    blocks.clear_ready(arena, AT)
    blocks.write_header(arena, AT, generation, 2**63, 4, meta, 3, data_offset, 256)
    if sealed:
        blocks.seal(arena, AT, generation)
    return data_offset


@pytest.mark.parametrize(("meta", "expected"), [(0, 64), (1, 128), (64, 128), (65, 192)])
def test_data_begins_behind_the_meta_on_a_multiple_of_64(meta: int, expected: int) -> None:
    assert blocks.header_bytes(meta) == expected


def test_a_sealed_header_reads_back(arena: Arena) -> None:
    data_offset = write(arena)
    found = blocks.read_header(arena, AT, LENGTH, GENERATION)
    assert found == blocks.BlockHeader(GENERATION, 4, 2**63, 3, data_offset, 256, (META,))
    assert blocks.is_ready(arena, AT, GENERATION) and not blocks.is_ready(arena, AT, GENERATION + 1)


def test_the_bytes_are_the_documented_ones(arena: Arena) -> None:
    write(arena)
    raw = bytes(arena.segment.buf[AT : AT + 64])
    assert raw[:8] == GENERATION.to_bytes(8, "little") == raw[16:24]
    assert raw[8:12] == b"TCB1" and raw[12:16] == (4).to_bytes(4, "little")
    assert raw[24:32] == (2**63).to_bytes(8, "little")
    assert [int.from_bytes(raw[at : at + 4], "little") for at in (32, 36, 40, 48)] == [len(META), 3, 128, 256]
    assert int.from_bytes(raw[56:60], "little") == zlib.crc32(raw[8:56] + META)
    assert bytes(arena.segment.buf[AT + 64 : AT + 64 + len(META)]) == META


def test_before_its_seal_a_block_is_no_payload(arena: Arena) -> None:
    """The ready word alone says sealed: writing the header does not touch it."""
    write(arena, sealed=False)
    assert arena.segment.words[AT // 8] == 0 and not blocks.is_ready(arena, AT, GENERATION)
    with pytest.raises(Broken) as caught:
        blocks.read_header(arena, AT, LENGTH, GENERATION)
    assert caught.value.facts == {"check": "ready", "offset": AT, "generation": GENERATION, "found": 0}


def test_a_reserved_again_block_is_not_ready_as_what_it_was(arena: Arena) -> None:
    write(arena)
    blocks.clear_ready(arena, AT)
    assert not blocks.is_ready(arena, AT, GENERATION)


@pytest.mark.parametrize("byte", [*range(64), *range(64, 64 + len(META))])
def test_every_flipped_byte_is_broken(arena: Arena, byte: int) -> None:
    write(arena)
    arena.segment.buf[AT + byte] ^= 0x10
    if 60 <= byte < 64:  # reserved, not summed
        assert blocks.read_header(arena, AT, LENGTH, GENERATION).metas == (META,)
        return
    with pytest.raises(Broken) as caught:
        blocks.read_header(arena, AT, LENGTH, GENERATION)
    facts = caught.value.facts
    assert (facts["offset"], facts["generation"]) == (AT, GENERATION)
    expected = {range(8): "ready", range(8, 12): "magic", range(16, 24): "generation", range(56, 60): "checksum"}
    for where, check in expected.items():
        assert byte not in where or facts["check"] == check


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, LENGTH), (AT + 8, LENGTH), (AT, 63), (AT, 1 << 30), (1 << 40, LENGTH), (-64, LENGTH), (AT, 320)],
)
def test_extents_outside_of_the_arena_or_too_short_are_broken(arena: Arena, offset: int, length: int) -> None:
    write(arena)
    with pytest.raises(Broken):
        blocks.read_header(arena, offset, length, GENERATION)


def test_ready_is_false_outside_of_the_arena(arena: Arena) -> None:
    assert not any(blocks.is_ready(arena, offset, GENERATION) for offset in (-64, 0, 8, AT + 1, arena.end, 1 << 50))
    assert not blocks.is_ready(arena, AT, 0)


def test_a_writer_cannot_write_outside_of_the_arena_or_into_its_data(arena: Arena) -> None:
    for offset, data_offset, data_bytes in [(0, 64, 0), (AT + 8, 64, 0), (AT, 64, 1 << 30), (AT, 100, 0), (AT, 64, 0)]:
        meta = META if (offset, data_bytes) == (AT, 0) else b""
        with pytest.raises(InvariantBroken):
            blocks.write_header(arena, offset, 1, 1, 0, meta, 1, data_offset, data_bytes)
    with pytest.raises(InvariantBroken):
        blocks.clear_ready(arena, 8)
    with pytest.raises(InvariantBroken):
        blocks.seal(arena, AT, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.binary(min_size=64, max_size=200), st.booleans())
def test_garbage_is_broken_and_nothing_else(arena: Arena, garbage: bytes, plausible: bool) -> None:
    if plausible:
        garbage = (
            GENERATION.to_bytes(8, "little")
            + b"TCB1"
            + garbage[12:16]
            + GENERATION.to_bytes(8, "little")
            + garbage[24:]
        )
    arena.segment.buf[AT : AT + len(garbage)] = garbage
    with pytest.raises(Broken):
        blocks.read_header(arena, AT, LENGTH, GENERATION)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.binary(max_size=600), st.integers(1, 2**62 - 1), st.integers(0, 2**31 - 1).map(lambda half: 2 * half))
def test_any_meta_reads_back(arena: Arena, meta: bytes, generation: int, flags: int) -> None:
    data_offset = blocks.header_bytes(len(meta))
    blocks.write_header(arena, AT, generation, 1, flags, meta, 1, data_offset, 64)
    blocks.seal(arena, AT, generation)
    found = blocks.read_header(arena, AT, LENGTH, generation)
    assert (found.metas, found.flags, found.data_offset) == ((meta,), flags, data_offset)


def grow(arena: Arena, metas: list[bytes], data_bytes: int = 64) -> int:
    """A block that has got these payloads one by one; where its data begins."""
    data_offset = blocks.header_bytes(sum(map(blocks.record_bytes, metas)))
    blocks.begin_growing(arena, AT, GENERATION, 5, data_offset, data_bytes)
    used = 0
    for count, meta in enumerate(metas):
        blocks.grow(arena, AT, used, count, meta)
        used += blocks.record_bytes(meta)
        assert blocks.grown(arena, AT) == count + 1
    blocks.seal(arena, AT, GENERATION)
    return data_offset


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=8))
def test_what_grew_reads_back_as_it_stood_after_each_payload(arena: Arena, metas: list[bytes]) -> None:
    data_offset = blocks.header_bytes(sum(map(blocks.record_bytes, metas)))
    blocks.begin_growing(arena, AT, GENERATION, 5, data_offset, 64)
    used = 0
    for count, meta in enumerate(metas):
        blocks.grow(arena, AT, used, count, meta)
        used += blocks.record_bytes(meta)
        blocks.seal(arena, AT, GENERATION)
        found = blocks.read_header(arena, AT, LENGTH, GENERATION)
        assert (found.metas, found.members, found.stride) == (tuple(metas[: count + 1]), count + 1, 64)
        # What was begun of the next one and not counted is none.
        begin = AT + blocks.HEADER + used
        arena.segment.buf[begin : AT + data_offset] = b"\xff" * (AT + data_offset - begin)
        assert blocks.read_header(arena, AT, LENGTH, GENERATION) == found


@pytest.mark.parametrize("at", range(8, 64))
def test_a_damaged_header_of_what_grew_is_refused(arena: Arena, at: int) -> None:
    grow(arena, [b"one", b"two"])
    good = blocks.read_header(arena, AT, LENGTH, GENERATION)
    arena.segment.buf[AT + at] ^= 0x41
    if at >= 60:
        assert blocks.read_header(arena, AT, LENGTH, GENERATION) == good
        return
    with pytest.raises(Broken):
        blocks.read_header(arena, AT, LENGTH, GENERATION)


@pytest.mark.parametrize("at", range(2 * blocks.record_bytes(b"one")))
def test_a_damaged_record_is_refused(arena: Arena, at: int) -> None:
    grow(arena, [b"one", b"two"])
    arena.segment.buf[AT + blocks.HEADER + at] ^= 0x41
    with pytest.raises(Broken):
        blocks.read_header(arena, AT, LENGTH, GENERATION)


def test_what_grew_beyond_its_block_or_has_nothing_is_refused(arena: Arena) -> None:
    grow(arena, [b"one", b"two"], data_bytes=LENGTH // 2)
    with pytest.raises(Broken, match="fields"):
        blocks.read_header(arena, AT, LENGTH, GENERATION)
    blocks.begin_growing(arena, AT, GENERATION, 5, 128, 64)
    blocks.seal(arena, AT, GENERATION)
    with pytest.raises(Broken, match="fields"):
        blocks.read_header(arena, AT, LENGTH, GENERATION)
