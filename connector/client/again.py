"""A stream's next put, when it is like its last: what does not change is kept, and little is left to do for each.

Everything here may say no, and then writing.py does it. Nothing is decided here that is not decided there: what is held
against a put is OutStream.goes_on's to say, and a stream that is dropped (abort, finish, begin) takes this with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from connector.arena import tensors
from connector.arena.arena import Arena
from connector.client import sealing, telling
from connector.client.blocks import ReservedBlock
from connector.client.layouts import Laid
from connector.client.outgoing import OutStream, Ticket
from connector.client.pairs import Way
from connector.client.reserving import at_hand
from connector.client.session import Session
from connector.core.directory.events import Member, Told
from connector.core.names import MAX_INDEX, Edge
from connector.wire.alike import MetaAlike, ToldAlike

if TYPE_CHECKING:
    from connector.client.writing import Item

#: Bytes of a manifest that is kept; with texts and numbers at their longest it goes in one packet.
MOST_MANIFEST = 8192


class Again:
    """One stream's. Made when two chunks that were alike went directly, one behind the other."""

    __slots__ = (
        "arena", "begun", "data", "laid", "length", "meta", "places", "readers", "told", "way",
    )  # fmt: skip

    def __init__(
        self, arena: Arena, edge: Edge, member: Member, way: Way, begun: int, laid: Laid, block: tuple[int, int, int]
    ) -> None:
        """`block`: its length, where data begins, and how many bytes of it."""
        self.arena, self.way, self.begun, self.laid = arena, way, begun, laid
        self.length, *data = block
        self.data = (data[0], data[1])
        self.readers = member.readers
        self.places = tensors.Places(laid.manifest.slots, block[1])
        self.meta = MetaAlike(edge, member.rid, member.readers, laid.packed, laid.nbytes, begun)
        self.told = ToldAlike(edge, member.rid, way.life, self.length, block[1], laid.packed)

    def fits(self, session: Session, stream: OutStream, rid: str, readers: int) -> bool:
        """Whether the next put is of the same kind, as far as the session knows. Lock held."""
        return (
            stream.goes_on()
            and stream.way is self.way
            and self.readers == readers
            and 0 < stream.next_index <= MAX_INDEX
            and session.arena is self.arena
            and session.outgoing.opened.get(rid, 0) == self.begun
            and not session.copying.under_way
            and not session.closed
            and session.orphaned is None
        )

    def seal(self, session: Session, edge: Edge, rid: str, index: int, block: ReservedBlock) -> Ticket:
        """The payload's bytes are there. Lock held."""
        laid, pair, ticket = self.laid, self.way.pair, Ticket(edge, rid, index)
        member = tuple.__new__(Member, (rid, index, 0, 0, self.readers, laid.packed, laid.nbytes))

        def tell(streams: list[OutStream]) -> tuple[Told, ...]:
            if pair.send(self.told.frame(index, block.handle)):
                return (tuple.__new__(Told, (0, 1, pair.session)),)
            telling.fall_back(session, edge, pair, [rid], streams)
            return ()

        sealing.seal(session, edge, block, self.data, self.meta.meta(index), (member,), [ticket], tell)
        return ticket


def note(
    session: Session, edge: Edge, member: Member, ticket: Ticket, laid: Laid, block: tuple[int, int, int], begun: int
) -> None:
    """A chunk alone in its block was told directly: the stream's next may be like it. Lock held."""
    stream = ticket.stream
    assert stream is not None
    known = stream.again
    if known is not None and known.laid is laid and known.fits(session, stream, member.rid, member.readers):
        return
    arena, way, stream.again = session.arena, stream.way, None
    # What is told of it is little more than its manifest.
    short = block[2] < tensors.HELD_BELOW and len(laid.packed) < MOST_MANIFEST
    if stream.laid is laid and short and way is not None and arena is not None:
        stream.again = Again(arena, edge, member, way, begun, laid, block)
    stream.laid = laid


def put(session: Session, edge: Edge, item: Item) -> Ticket | None:
    """Seal and tell the stream's next chunk; None, with nothing done, if it is not like the last."""
    rid, payload, index, flags, attempt, readers = item
    if index is not None or flags or attempt:
        return None
    with session.lock:
        stream = session.outgoing.streams.get((edge, rid))
        if stream is None or stream.again is None:
            return None
        again = stream.again
        if not again.fits(session, stream, rid, readers):
            return None
        found = again.places.find(payload)
        block = at_hand(session, edge, again.length) if found is not None else None
        if block is None or found is None:
            return None
        ticket: Ticket | None = None
        try:
            again.places.copy(block.arena.address + block.handle.offset, found)
            ticket = again.seal(session, edge, rid, stream.next_index, block)
        finally:
            if ticket is None:
                session.give_back([block])
    session.push_or_wait()
    return ticket
