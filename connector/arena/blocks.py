"""A block's header: written by the writer, sealed by one store, read on a private copy.

     +0   ready word  u64   0 while reserved; the block's generation once sealed (stored last)
     +8   magic       u32   "TCB1"
     +12  flags       u32   GROWS, EVEN
     +16  generation  u64
     +24  session     u64
     +32  meta_bytes  u32   length of the meta that follows the header
     +36  members     u32   payloads in this block
     +40  data_offset u64   from the block's start to the data, a multiple of 64
     +48  data_bytes  u64
     +56  crc32       u32   of bytes +8 ... +56 and the meta
     +60  reserved    u32   0
     +64  meta
     ...  data              the tensors, each aligned to 64

A block whose flags say GROWS gets its payloads one by one, each with `data_bytes` of data behind the last one's. Its
meta are records, one a payload: its length (u32), its crc32 (u32), the payload's meta. The crc at +56 leaves out
`meta_bytes` and `members`, which are stored together, in one store, behind each payload's data and record: that store,
for the first payload the ready word, makes the payload exist. What was counted is never written again.

Offsets count from the segment's start, in bytes. The broker clears the ready word when it
reserves; the writer writes data, header and meta, then seals, and never writes there again, but for what grows.
Order between processes: the stores are in this order on x86-64; elsewhere a reader hears of
the block through a socket, which orders them, and a recovering broker checks the checksum.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from connector.arena.arena import Arena
from connector.core.errors import Broken, InvariantBroken
from connector.core.layout import ALIGN, align_up

HEADER = 64
MAGIC = int.from_bytes(b"TCB1", "little")
#: magic, flags, generation, session, meta_bytes, members, data_offset, data_bytes: at +8 ... +56, and in the checksum.
_FIELDS = struct.Struct("<IIQQIIQQ")
#: crc32, reserved.
_SUM = struct.Struct("<II")
#: Flags: payloads are added after the first was sealed; each payload has an equal part of the data.
GROWS, EVEN = 1, 2
#: What stands before each one's meta in a block that grows: length, crc32.
_RECORD = struct.Struct("<II")
#: The word of meta_bytes and members, from a block's start.
_COUNTS = 32


class BlockHeader(NamedTuple):
    """A checked header: data stands at block + data_offset, data_bytes long, or for each payload if it GROWS; metas are
    private copies, of all payloads together or of one each."""

    generation: int
    flags: int
    session: int
    members: int
    data_offset: int
    data_bytes: int
    metas: tuple[bytes, ...]

    @property
    def stride(self) -> int:
        """From one payload's data to the next's; 0: all manifests count from data_offset."""
        if self.flags & EVEN:
            return self.data_bytes // self.members
        return self.data_bytes if self.flags & GROWS else 0


def header_bytes(meta_len: int) -> int:
    """Where data begins in a block with `meta_len` bytes of meta: a multiple of 64."""
    return align_up(HEADER + meta_len)


def write_header(
    arena: Arena,
    offset: int,
    generation: int,
    session: int,
    flags: int,
    meta: bytes,
    members: int,
    data_offset: int,
    data_bytes: int,
) -> None:
    """Everything but the ready word of the block at `offset`. InvariantBroken: it does not fit the arena."""
    if offset % ALIGN or offset < arena.data_begin or offset + data_offset + data_bytes > arena.end:
        _check_block(arena, offset, data_offset + data_bytes)
    behind = HEADER + len(meta)
    if data_offset % ALIGN or behind > data_offset:
        raise InvariantBroken("a block's meta reaches into its data", size=len(meta), data_offset=data_offset)
    fields = _FIELDS.pack(MAGIC, flags, generation, session, len(meta), members, data_offset, data_bytes)
    crc = _SUM.pack(zlib.crc32(fields + meta), 0)
    arena.segment.buf[offset + 8 : offset + behind] = fields + crc + meta


def begin_growing(arena: Arena, offset: int, generation: int, session: int, data_offset: int, data_bytes: int) -> None:
    """The header of a block that has no payload yet. `data_bytes`: of each. InvariantBroken: it does not fit."""
    write_header(arena, offset, generation, session, GROWS, b"", 0, data_offset, data_bytes)


def grow(arena: Arena, offset: int, meta_bytes: int, members: int, meta: bytes) -> None:
    """Count one payload more, whose data is there, behind so many with so many bytes of records. The caller has seen
    that `record_bytes` more fit."""
    begin = offset + HEADER + meta_bytes
    record = _RECORD.pack(len(meta), zlib.crc32(meta)) + meta
    arena.segment.buf[begin : begin + len(record)] = record
    arena.segment.words[(offset + _COUNTS) >> 3] = (meta_bytes + len(record)) | (members + 1) << 32


def record_bytes(meta: bytes) -> int:
    """What one payload more takes of the room for meta."""
    return _RECORD.size + len(meta)


def grown(arena: Arena, offset: int) -> int:
    """Payloads that are counted in a block of this process's own that grows."""
    return arena.segment.words[(offset + _COUNTS) >> 3] >> 32


def seal(arena: Arena, offset: int, generation: int) -> None:
    """The one store that makes the payload exist. Data and header come before it."""
    if generation <= 0:
        raise InvariantBroken("a generation is out of range", generation=generation)
    arena.segment.words[offset >> 3] = generation


def clear_ready(arena: Arena, offset: int) -> None:
    """The broker's, at reserve and before the table says so: what stood here is no payload any more."""
    _check_block(arena, offset, HEADER)
    arena.segment.words[offset >> 3] = 0


def is_ready(arena: Arena, offset: int, generation: int) -> bool:
    """True if the block at `offset` was sealed as `generation`. False for an offset outside of the data."""
    if offset % ALIGN or not arena.data_begin <= offset <= arena.end - HEADER or generation <= 0:
        return False
    return bool(arena.segment.words[offset >> 3] == generation)


def read_header(arena: Arena, offset: int, length: int, generation: int) -> BlockHeader:
    """The sealed header of a block of `length` bytes at `offset`, all of it checked on a private copy.

    Raises Broken with offset, generation and `check`: bounds, ready, magic, generation, fields, checksum.
    """
    if offset % ALIGN or offset < arena.data_begin or length < HEADER or offset + length > arena.end:
        raise _broken("bounds", offset, generation, length=length)
    copy = bytes(arena.segment.buf[offset : offset + HEADER])
    if generation <= 0 or int.from_bytes(copy[:8], "little") != generation:
        raise _broken("ready", offset, generation, found=int.from_bytes(copy[:8], "little"))
    fields = copy[8 : 8 + _FIELDS.size]
    magic, flags, named, session, meta_len, members, data_offset, data_bytes = _FIELDS.unpack(fields)
    crc, _ = _SUM.unpack_from(copy, 8 + _FIELDS.size)
    if magic != MAGIC:
        raise _broken("magic", offset, generation, found=magic)
    if named != generation:
        raise _broken("generation", offset, generation, found=named)
    # Bounds before the meta is read: a damaged length must not reach outside of the block.
    grows = bool(flags & GROWS)
    all_bytes = data_bytes * members if grows else data_bytes
    fits = HEADER + meta_len <= data_offset and data_offset + all_bytes <= length
    if not fits or data_offset % ALIGN or (flags & (GROWS | EVEN) and not members):
        raise _broken("fields", offset, generation, length=length, data_offset=data_offset, data_bytes=data_bytes)
    meta = bytes(arena.segment.buf[offset + HEADER : offset + HEADER + meta_len])
    if grows:
        fixed = _FIELDS.pack(magic, flags, named, session, 0, 0, data_offset, data_bytes)
        metas, good = _records(meta), zlib.crc32(fixed) == crc
    else:
        metas, good = (meta,), zlib.crc32(fields + meta) == crc
    if not good or len(metas) != (members if grows else 1):
        raise _broken("checksum", offset, generation, found=crc)
    return BlockHeader(generation, flags, session, members, data_offset, data_bytes, metas)


def _records(meta: bytes) -> tuple[bytes, ...]:
    """Each payload's meta, up to one that is damaged."""
    found: list[bytes] = []
    at = 0
    while at + _RECORD.size <= len(meta):
        size, crc = _RECORD.unpack_from(meta, at)
        at += _RECORD.size
        one = meta[at : at + size]
        if len(one) != size or zlib.crc32(one) != crc:
            break
        found.append(one)
        at += size
    return tuple(found)


def _check_block(arena: Arena, offset: int, length: int) -> None:
    if offset % ALIGN or offset < arena.data_begin or length < HEADER or offset + length > arena.end:
        raise InvariantBroken(
            "a block is not aligned, or not inside the arena", offset=offset, length=length, limit=arena.end
        )


def _broken(check: str, offset: int, generation: int, **facts: int) -> Broken:
    return Broken(
        f"a block's header failed its check: {check}", check=check, offset=offset, generation=generation, **facts
    )
