"""A block's payloads come into being: header, ready word, the reader, the broker, in this order."""

from __future__ import annotations

from collections.abc import Callable

from connector.arena import blocks as arena_blocks
from connector.client.blocks import ReservedBlock
from connector.client.outgoing import OutStream, Ticket
from connector.client.session import Session
from connector.core.directory.events import Told
from connector.wire import messages as msg

Tell = Callable[[], tuple[Told, ...]]


def write_header(
    session: Session, block: ReservedBlock, data: tuple[int, int], meta: bytes, members: int, flags: int = 0
) -> None:
    """All of it but the ready word. `data`: where data begins in the block, and how many bytes of it."""
    offset, generation = block.handle
    arena_blocks.write_header(block.arena, offset, generation, session.number, flags, meta, members, *data)


def seal(session: Session, block: ReservedBlock, message: msg.Seal, tickets: list[Ticket], tell: Tell) -> None:
    """Store the ready word behind data and header, and queue the message. Lock held.

    `tell` tells the reader what may be told directly. Who calls this has `settle` called if it does not return.
    """
    arena_blocks.seal(block.arena, *block.handle)
    session.sealing = message
    message.told = told = tell()
    session.post(message, tickets)
    # Whoever is to have it has it: the broker need not hear of it at once.
    session.urgent = session.urgent or len(told) != 1 or told[0].count < len(message.members)


def note(session: Session, message: msg.Seal) -> list[OutStream]:
    """Its payloads are put, as far as their streams here are concerned; done twice it changes nothing. Lock held."""
    return [
        session.outgoing.note_put(message.edge, member.rid, member.index, member.flags, session.seen)
        for member in message.members
    ]


def settle(session: Session, block: ReservedBlock) -> None:
    """A put did not come to its end; a signal's handler may have raised anywhere in it. What is sealed, and its reader
    may know of, the broker hears of; else the block goes back. Lock held."""
    message = session.sealing
    if message is None or message.handle != block.handle:
        session.give_back([block])
        return
    note(session, message)
    if not session.outgoing.has_numbered(message):
        session.post(message)
    session.later()
