"""Who holds what: each delivered and not yet released payload has one session as each of its readers.

The payload names its holder; the session knows the blocks in which it holds something. So a step, which is one block,
is one entry, whatever the number of its payloads.
"""

from __future__ import annotations

from connector.core.directory import lots
from connector.core.directory.events import Hold
from connector.core.directory.objects import Block, Chunk, Session
from connector.core.directory.state import State
from connector.core.names import Handle


def begin(session: Session, block: Block, count: int, nbytes: int) -> None:
    """The session holds so many more payloads of the block; their `holders` say so, too."""
    offset = block.handle.offset
    session.holds_in[offset] = session.holds_in.get(offset, 0) + count
    session.held += count
    session.held_bytes += nbytes


def end(session: Session, block: Block, count: int, nbytes: int) -> None:
    """It has let go of so many."""
    offset = block.handle.offset
    left = session.holds_in[offset] - count
    if left:
        session.holds_in[offset] = left
    else:
        del session.holds_in[offset]
    session.held -= count
    session.held_bytes -= nbytes


def block_of(state: State, handle: Handle) -> Block | None:
    """The block that the handle names, if it is that one still."""
    block = state.blocks.get(handle.offset)
    return block if block is not None and block.handle == handle else None


def all_of(state: State, session: Session) -> list[tuple[Chunk, int]]:
    """Every payload that the session holds, each a record of its own, and as which reader."""
    for offset in session.holds_in:
        lots.members(state.blocks[offset])
    return seen(state, session)


def seen(state: State, session: Session) -> list[tuple[Chunk, int]]:
    """The same, to be looked at: lots stay lots."""
    return [
        (chunk, reader)
        for offset in session.holds_in
        for chunk in lots.look(state.blocks[offset])
        for reader, holder in enumerate(chunk.holders)
        if holder == session.id
    ]


def hold_of(chunk: Chunk, reader: int) -> Hold:
    return Hold(chunk.block.handle, chunk.member, reader)
