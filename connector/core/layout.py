"""Where the tensors of a block stand: planned by the writer, checked by whoever reads.

    data  0                64                      192            256
          |<- slot "a" ->|..|<-- slot "b" -->|.......|<- slot "c" ->|....|
          |<------------ member 0 ---------->|       |<- member 1 ->|
          begin                              end     begin          end    data_bytes

Each slot begins at the first multiple of ALIGN where the one before it ended, so a manifest is
decided by its begin and its specs alone: `check` computes the one right manifest and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from connector.core.errors import Broken, InvalidPayload, PayloadTooLarge, UnsupportedTensor
from connector.core.names import MAX_KEYS
from connector.core.specs import MAX_DIM, TensorSpec, measure

#: Alignment of slots, members and blocks, in bytes: a cache line, and all that a vector load wants.
ALIGN = 64


class Slot(NamedTuple):
    """One tensor: its spec, its byte offset from the block's data, and its bytes. Empty tensors have 0."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def spec(self) -> TensorSpec:
        """Key, dtype and shape."""
        return TensorSpec(self.key, self.dtype, self.shape)


class Manifest(NamedTuple):
    """One payload's slots, in the order of its keys, and the byte range [begin, end) of the data they cover."""

    slots: tuple[Slot, ...]
    begin: int
    end: int


def align_up(number: int) -> int:
    """The first multiple of ALIGN that is not below `number`."""
    return (number + ALIGN - 1) & -ALIGN


def plan(members: Sequence[Sequence[TensorSpec]]) -> list[Manifest]:
    """Pack the payloads of one block, in the given order; the same specs give the same layout.

    The specs are taken as checked (`check_specs`); UnsupportedTensor if a dtype is not carried.
    """
    manifests = []
    cursor = 0
    for specs in members:
        manifests.append(place(specs, align_up(cursor)))
        cursor = manifests[-1].end
    return manifests


def place(specs: Sequence[TensorSpec], begin: int) -> Manifest:
    """One payload's layout from `begin`, a multiple of ALIGN; its specs are taken as checked."""
    slots = []
    cursor = begin
    for spec in specs:
        offset, nbytes = align_up(cursor), spec.nbytes
        slots.append(Slot(spec.key, spec.dtype, spec.shape, offset, nbytes))
        cursor = offset + nbytes
    return Manifest(tuple(slots), begin, cursor)


def data_bytes(manifests: Sequence[Manifest]) -> int:
    """Bytes of data that a block with these planned manifests needs: a multiple of ALIGN."""
    return align_up(manifests[-1].end) if manifests else 0


def check(manifest: Manifest, data_bytes: int) -> Manifest:
    """An untrusted manifest, if it is the one that `plan` makes of its specs at its begin.

    `data_bytes` is the size of the block's data. After this every slot is aligned, inside the
    data and apart from the others, and holds exactly its tensor. Broken otherwise, naming key,
    offset, size and limit. One pass, linear in slots and dimensions.
    """
    begin, end = manifest.begin, manifest.end
    if type(begin) is not int or begin % ALIGN or not 0 <= begin <= data_bytes:
        raise Broken("a payload does not begin inside the data, aligned", offset=_fact(begin), limit=data_bytes)
    if len(manifest.slots) > MAX_KEYS:
        raise Broken("too many tensors in one payload", size=len(manifest.slots), limit=MAX_KEYS)
    cursor = begin
    keys: set[str] = set()
    for slot in manifest.slots:
        cursor = _check_slot(slot, align_up(cursor), data_bytes)
        if slot.key in keys:
            raise Broken("a key stands twice in one payload", key=slot.key, offset=slot.offset, size=slot.nbytes)
        keys.add(slot.key)
    # The cursor is inside the data: begin was, and so was each slot's end.
    if type(end) is not int or end != cursor:
        raise Broken(
            "a payload does not end where its last tensor does",
            offset=_fact(begin),
            size=_fact(end),
            expected=cursor,
            limit=data_bytes,
        )
    return manifest


def _check_slot(slot: Slot, expected: int, limit: int) -> int:
    """The end of a slot that stands at `expected`; Broken if it does not, or is not its tensor's size."""
    try:
        nbytes = measure(slot.key, slot.dtype, slot.shape)
    except (InvalidPayload, UnsupportedTensor, PayloadTooLarge) as err:
        raise Broken(f"a manifest holds no valid tensor: {err.message}", **err.facts) from None
    facts = {"key": slot.key, "offset": _fact(slot.offset), "size": _fact(slot.nbytes)}
    if type(slot.offset) is not int or slot.offset != expected:
        raise Broken("a tensor does not stand where the one before it ends", **facts, expected=expected, limit=limit)
    if type(slot.nbytes) is not int or slot.nbytes != nbytes:
        raise Broken("a tensor's bytes are not those of its dtype and shape", **facts, expected=nbytes, limit=limit)
    if expected + nbytes > limit:
        raise Broken("a tensor reaches behind the end of the data", **facts, limit=limit)
    return expected + nbytes


def _fact(value: object) -> int | str:
    """An untrusted number as a fact: one that has 64 bits, or else the name of what came instead."""
    return value if type(value) is int and -MAX_DIM <= value <= MAX_DIM else type(value).__name__
