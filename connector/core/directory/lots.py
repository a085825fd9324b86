"""Lots: a block's payloads kept as one record, as long as all of them stand alike.

A step is one block, put at once, sent at once, and mostly released at once. Its payloads become records of their own
(*are singled out*) when something happens to one of them. What is true of a lot is true of each of its payloads.
"""

from __future__ import annotations

from collections.abc import Iterator

from connector.core.directory.objects import Block, Chunk, Lot, Stream


def look(block: Block) -> Iterator[Chunk]:
    """The live payloads of a block, in order; of a lot as they would be singled out. Changes nothing."""
    if block.lot is None:
        yield from (chunk for chunk in block.members if chunk is not None)
        return
    for place in range(len(block.lot.members)):
        yield _chunk(block.lot, place)


def single_out(lot: Lot) -> None:
    """From now on each of the lot's payloads stands for itself."""
    block = lot.block
    block.members = list(look(block))
    block.lot = None
    for chunk in block.members:
        assert chunk is not None
        chunk.stream.live[chunk.index] = chunk


def members(block: Block) -> list[Chunk | None]:
    """A block's payloads, by place, as records of their own."""
    if block.lot is not None:
        single_out(block.lot)
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


def _chunk(lot: Lot, place: int) -> Chunk:
    member, stream = lot.members[place], lot.streams[place]
    return Chunk(
        stream, member.index, member.attempt, member.flags, lot.session, lot.block, place, member.manifest,
        member.nbytes, lot.writer, lot.sealed_at, [lot.state], [lot.holder],
    )  # fmt: skip
