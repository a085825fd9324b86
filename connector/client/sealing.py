"""A block's payloads come into being: header, ready word, the reader, the broker, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connector.arena import blocks as arena_blocks
from connector.client.blocks import ReservedBlock
from connector.client.outgoing import OutStream, Ticket
from connector.client.session import Session
from connector.core.directory.events import Member, Told
from connector.core.names import Edge
from connector.wire import messages as msg


def seal(
    session: Session,
    edge: Edge,
    block: ReservedBlock,
    data: tuple[int, int],
    meta: bytes,
    members: Sequence[Member],
    tickets: list[Ticket],
    tell: Callable[[list[OutStream]], tuple[Told, ...]],
) -> tuple[Told, ...]:
    """Write the header, store the ready word, queue the message; what was told. Lock held.

    `data`: where data begins in the block, and how many bytes of it. `tell`: given the members' streams, tells the
    reader what may be told directly.
    """
    offset, generation = block.handle
    arena_blocks.write_header(block.arena, offset, generation, session.number, 0, meta, len(members), *data)
    arena_blocks.seal(block.arena, offset, generation)
    outgoing, seen = session.outgoing, session.seen
    streams = []
    for member, ticket in zip(members, tickets, strict=True):
        ticket.index = member.index
        stream = ticket.stream = outgoing.note_put(edge, member.rid, member.index, member.flags, session.seen)
        streams.append(stream)
        if outgoing.unsure and stream.unsure:
            # After lost notices it means what was known when the stream was opened.
            seen = min(seen, stream.seen)
    told = tell(streams)
    session.post(msg.Seal(0, seen, edge, block.handle, data[0], tuple(members), told), tickets)
    # Whoever is to have it has it: the broker need not hear of it at once.
    session.urgent = session.urgent or len(told) != 1 or told[0].count < len(members)
    return told
