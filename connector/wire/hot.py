"""Straight-line checks of the structs that cross the wire once a chunk.

Each says yes to the common value in one look, and asks the field-by-field check of fields.py about any
other: that one accepts what is rare, and says what is wrong with the rest. The two never disagree.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from connector.core.directory.effects import Descriptor
from connector.core.directory.events import Hold, Member, Sealing, Span, Told
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
)
from connector.wire import fields as f
from connector.wire.fields import MAX_WORD

# Values of a wire list have exact types; a subclass, or a bool for an int, goes the long way and is refused there.
# Text that is not ASCII goes the long way, too: its limit counts bytes.


def edge(value: Any) -> Edge:
    """[from_stage, to_stage, replica]."""
    if type(value) is list and len(value) == 3:
        source, target, replica = value
        if (
            type(source) is str
            and type(target) is str
            and type(replica) is int
            and 0 < len(source) <= MAX_STAGE_BYTES
            and 0 < len(target) <= MAX_STAGE_BYTES
            and 0 <= replica <= MAX_INDEX
            and source.isascii()
            and target.isascii()
            and ":" not in source
            and ":" not in target
        ):
            return tuple.__new__(Edge, value)
    found: Edge = f.EDGE(value)
    return found


def handle(value: Any) -> Handle:
    """[offset, generation]."""
    if type(value) is list and len(value) == 2:
        offset, generation = value
        if type(offset) is int and type(generation) is int and 0 <= offset <= MAX_WORD and 0 <= generation <= MAX_WORD:
            return tuple.__new__(Handle, value)
    found: Handle = f.HANDLE(value)
    return found


def block(value: Any) -> tuple[Handle, int]:
    """[handle, length]."""
    if type(value) is list and len(value) == 2:
        where, length = value
        if type(length) is int and 0 <= length <= MAX_WORD:
            return handle(where), length
    found: tuple[Handle, int] = f.BLOCK(value)
    return found


def hold(value: Any) -> Hold:
    """[handle, member, reader]."""
    if type(value) is list and len(value) == 3:
        block, place, reader = value
        if type(block) is list and len(block) == 2:
            offset, generation = block
            if (
                type(offset) is int
                and type(generation) is int
                and type(place) is int
                and type(reader) is int
                and 0 <= offset <= MAX_WORD
                and 0 <= generation <= MAX_WORD
                and 0 <= place <= f.MAX_MEMBER
                and -1 <= reader < MAX_READERS
            ):
                return tuple.__new__(Hold, (tuple.__new__(Handle, block), place, reader))
    found: Hold = f.HOLD(value)
    return found


def span(value: Any) -> Span:
    """[handle, first, count, reader]."""
    if type(value) is list and len(value) == 4:
        block, first, count, reader = value
        if (
            type(first) is int
            and type(count) is int
            and type(reader) is int
            and 0 <= first <= f.MAX_MEMBER
            and 1 <= count <= f.MAX_MEMBER + 1
            and -1 <= reader < MAX_READERS
        ):
            value[0] = handle(block)
            return tuple.__new__(Span, value)
    found: Span = f.SPAN(value)
    return found


#: Of one payload: its rid's place, index, and the block's offset and generation.
SEALING = struct.Struct(">Hiqq")


def sealings(value: Any) -> tuple[Sealing, ...]:
    """[[rid, …], SEALING for each]."""
    if type(value) is list and len(value) == 2:
        rids, packed = value
        if type(rids) is list and type(packed) is bytes and not len(packed) % SEALING.size:
            names = [f.RID(rid) for rid in rids]
            found = []
            for place, index, offset, generation in SEALING.iter_unpack(packed):
                if place >= len(names) or index < 0 or offset < 0 or generation < 0:
                    raise f.BadField("a payload's rid, index or block is out of range")
                handle = tuple.__new__(Handle, (offset, generation))
                found.append(tuple.__new__(Sealing, (names[place], index, handle)))
            return tuple(found)
    raise f.BadField("not rids and payloads")


def pack_sealings(chunks: Sequence[Sealing]) -> tuple[tuple[str, ...], bytes]:
    """What `sealings` reads; of at most 65 536 rids."""
    places: dict[str, int] = {}
    packed = [SEALING.pack(places.setdefault(rid, len(places)), index, *block) for rid, index, block in chunks]
    return tuple(places), b"".join(packed)


def told(value: Any) -> Told:
    """[first, count, session]."""
    if type(value) is list and len(value) == 3:
        first, count, session = value
        if (
            type(first) is int
            and type(count) is int
            and type(session) is int
            and 0 <= first <= f.MAX_MEMBER
            and 1 <= count <= f.MAX_MEMBER + 1
            and 0 <= session <= MAX_WORD
        ):
            return tuple.__new__(Told, value)
    found: Told = f.TOLD(value)
    return found


def member(value: Any) -> Member:
    """[rid, index, attempt, flags, readers, manifest, nbytes]."""
    if type(value) is list and len(value) == 7:
        rid, index, attempt, flags, readers, manifest, nbytes = value
        if (
            type(rid) is str
            and type(index) is int
            and type(attempt) is int
            and type(flags) is int
            and type(readers) is int
            and type(manifest) is bytes
            and type(nbytes) is int
            and 0 < len(rid) <= MAX_RID_BYTES
            and rid.isascii()
            and 0 <= index <= MAX_INDEX
            and 0 <= attempt <= MAX_INDEX
            and 0 <= flags <= f.MAX_MEMBER_FLAGS
            and 1 <= readers <= MAX_READERS
            and len(manifest) <= f.MAX_MANIFEST
            and 0 <= nbytes <= MAX_WORD
        ):
            return tuple.__new__(Member, value)
    found: Member = f.MEMBER(value)
    return found


def descriptor(value: Any) -> Descriptor:
    """[edge, reader, rid, life, index, attempt, flags, handle, length, data_offset, member, manifest, behind]."""
    if type(value) is list and len(value) == 13:
        where, reader, rid, life, index, attempt, flags, block, length, data_offset, place, manifest, behind = value
        if (
            type(reader) is int
            and type(rid) is str
            and type(life) is int
            and type(index) is int
            and type(attempt) is int
            and type(flags) is int
            and type(length) is int
            and type(data_offset) is int
            and type(place) is int
            and type(manifest) is bytes
            and type(behind) is int
            and -1 <= reader < MAX_READERS
            and -1 <= behind <= MAX_INDEX
            and 0 < len(rid) <= MAX_RID_BYTES
            and rid.isascii()
            and 0 <= life <= MAX_WORD
            and 0 <= index <= MAX_INDEX
            and 0 <= attempt <= MAX_INDEX
            and 0 <= flags <= f.MAX_FLAGS
            and 0 <= length <= MAX_WORD
            and 0 <= data_offset <= MAX_WORD
            and 0 <= place <= f.MAX_MEMBER
            and len(manifest) <= f.MAX_MANIFEST
        ):
            # The parts are checked in place: the list is this frame's own, and nobody reads it again.
            value[0], value[7] = edge(where), handle(block)
            return tuple.__new__(Descriptor, value)
    found: Descriptor = f.DESCRIPTOR(value)
    return found


def slot(value: Any) -> Slot:
    """[key, dtype, [dim, …], offset, nbytes]."""
    if type(value) is list and len(value) == 5:
        key, dtype, shape, offset, nbytes = value
        if (
            type(key) is str
            and type(dtype) is str
            and type(shape) is list
            and type(offset) is int
            and type(nbytes) is int
            and len(key) <= MAX_KEY_BYTES
            and key.isascii()
            and 0 < len(dtype) <= f.MAX_DTYPE_BYTES
            and dtype.isascii()
            and len(shape) <= MAX_DIMS
            and 0 <= offset <= MAX_WORD
            and 0 <= nbytes <= MAX_WORD
        ):
            for dim in shape:
                if type(dim) is not int or not 0 <= dim <= MAX_WORD:
                    raise f.BadField(f"not an int from 0 to {MAX_WORD}")
            return tuple.__new__(Slot, (key, dtype, tuple(shape), offset, nbytes))
    found: Slot = f.SLOT(value)
    return found
