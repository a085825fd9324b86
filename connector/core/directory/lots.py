"""Lots: payloads of a block kept as one record, as long as all of them stand alike.

A step is one block, put at once, sent at once, and mostly released at once, or in a few parts. What happens to a part
of a lot makes two of it (`cut`); what happens to one payload alone makes it a record of its own (it is *singled out*).
What is true of a lot is true of each of its payloads.
"""

from __future__ import annotations

from collections.abc import Iterator

from connector.core.directory.events import Span
from connector.core.directory.objects import Block, Chunk, Lot, Stream


def look(block: Block) -> Iterator[Chunk]:
    """The live payloads of a block, in order; those of lots as they would be singled out. Changes nothing."""
    found = [chunk for chunk in block.members if chunk is not None]
    for lot in block.lots:
        found += _chunks(lot)
    yield from sorted(found, key=_place) if block.members and block.lots else found


def cut(block: Block, span: Span, holder: int) -> list[Lot]:
    """The lots that the span is of and this session holds, cut so that they are of nothing else."""
    if span.reader or not block.lots:
        return []
    begin, end = span.first, span.first + span.count
    found: list[Lot] = []
    for lot in list(block.lots):
        count = len(lot.members)
        if lot.first >= end or lot.first + count <= begin or lot.holder != holder:
            continue
        if lot.first < begin:
            lot = _behind(lot, begin - lot.first)
            count = len(lot.members)
        if lot.first + count > end:
            _behind(lot, end - lot.first)
        found.append(lot)
    return found


def _behind(lot: Lot, count: int) -> Lot:
    """The lot keeps so many payloads; the rest is the one that is returned."""
    block, first = lot.block, lot.first + count
    members, streams = lot.members[count:], lot.streams[count:]
    nbytes = sum([member[6] for member in members])
    rest = Lot(
        block, first, members, streams, lot.session, lot.writer, lot.sealed_at, lot.state, lot.holder, nbytes
    )  # fmt: skip
    lot.members, lot.streams = lot.members[:count], lot.streams[:count]
    lot.nbytes -= nbytes
    for member, stream in zip(members, streams, strict=True):
        stream.live[member[1]] = rest
    block.lots = [*block.lots, rest]
    if len(block.lots) > 2:
        block.lots.sort(key=_first)
    return rest


def remove(lot: Lot) -> None:
    """Its payloads are gone, or stand for themselves."""
    block = lot.block
    block.lots = [other for other in block.lots if other is not lot]


def single_out(lot: Lot) -> None:
    """From now on each of the lot's payloads stands for itself."""
    block, begin, end = lot.block, lot.first, lot.first + len(lot.members)
    remove(lot)
    if len(block.members) < end:
        block.members += [None] * (end - len(block.members))
    block.members[begin:end] = found = _chunks(lot)
    for chunk in found:
        chunk.stream.live[chunk.index] = chunk


def members(block: Block) -> list[Chunk | None]:
    """A block's payloads, by place, as records of their own."""
    for lot in block.lots:
        single_out(lot)
    return block.members


def chunk_at(stream: Stream, index: int) -> Chunk | None:
    """The live payload of this index, as a record of its own."""
    found = stream.live.get(index)
    if isinstance(found, Lot):
        single_out(found)
        found = stream.live[index]
        assert isinstance(found, Chunk)
    return found


def chunks(stream: Stream) -> list[Chunk]:
    """The stream's live payloads, as records of their own."""
    found = [chunk_at(stream, index) for index in list(stream.live)]
    return [chunk for chunk in found if chunk is not None]


def _chunks(lot: Lot) -> list[Chunk]:
    return [
        Chunk(
            stream, member.index, member.attempt, member.flags, lot.session, lot.block, place, member.manifest,
            member.nbytes, lot.writer, lot.sealed_at, [lot.state], [lot.holder],
        )
        for place, (member, stream) in enumerate(zip(lot.members, lot.streams, strict=True), lot.first)
    ]  # fmt: skip


def _place(chunk: Chunk) -> int:
    return chunk.member


def _first(lot: Lot) -> int:
    return lot.first
