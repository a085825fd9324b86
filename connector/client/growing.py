"""Chunks of several streams that are put one behind the other, before the first of them is said: they share a block and
a Seal, as a step does.

Each is told to its reader at once, as ever; what is saved is a block, a Seal and a release for each at the broker. It
comes about by itself: while a Seal is the last message that waits for company, chunks of other streams join it. Nothing
is decided here about a chunk that again.py has not decided: what does not join goes alone. The session's lock is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from connector.arena import blocks as arena_blocks
from connector.client import telling
from connector.client.blocks import ReservedBlock, size_class
from connector.client.outgoing import OutStream, Ticket
from connector.client.reserving import at_hand
from connector.core.directory.events import Member, Told
from connector.core.layout import align_up
from connector.core.names import NOWHERE
from connector.wire import messages as msg
from connector.wire.alike import Where, tail

if TYPE_CHECKING:
    from connector.client.again import Again
    from connector.client.pairs import Pair
    from connector.client.session import Session

#: Seals that wait when the first step is begun: puts come fast. A step that is sent with fewer members than FEWEST is
#: the last for a while.
BUSY, FEWEST = 8, 4
#: Places of the first step, and of any; bytes of their data; and its part of the pool.
FIRST, MOST, MOST_BYTES, POOL_PART = 8, 64, 128 << 10, 64
#: What another rid's meta may have more than the first one's, in bytes.
SLACK = 32
_NO_TAIL = tail(NOWHERE)


class Step:
    """One block. `pending`: the chunk that is just put, and may be there already, and the bytes of records if it is."""

    __slots__ = (
        "again", "block", "data_offset", "length", "message", "meta_bytes", "pair", "pending", "places", "rids",
        "said", "stride", "tickets",
    )  # fmt: skip

    def __init__(self, session: Session, again: Again, block: ReservedBlock, data_offset: int, places: int) -> None:
        self.again, self.block, self.data_offset, self.places = again, block, data_offset, places
        self.length = block.length
        self.stride = _stride(again)
        assert again.way is not None
        self.pair: Pair = again.way.pair
        self.message = msg.Seal(0, session.seen, again.edge, block.handle, data_offset, (), (), self.stride)
        self.tickets: list[Ticket] = []
        self.rids: set[str] = set()
        self.meta_bytes = 0
        #: Its Seal has left before, and waits to be said again: the broker may apply it as it was then.
        self.said = False
        self.pending: tuple[Member, Ticket, OutStream, int] | None = None

    def waits(self, session: Session) -> bool:
        """Its Seal is the last message that waits: nothing was said behind it."""
        waiting = session.out.waiting
        return bool(waiting) and waiting[-1] is self.message and not self.said

    def takes(self, session: Session, again: Again) -> bool:
        """Whether this stream's next chunk may join."""
        first = self.again
        return (
            len(self.tickets) < self.places
            and again.rid not in self.rids
            and again.laid is first.laid
            and again.edge == first.edge
            and again.readers == first.readers
            and again.way is not None
            and again.way.pair is self.pair
            and self.message.seen == session.seen
            and self.block.arena is session.arena
        )

    def add(self, session: Session, stream: OutStream, again: Again, meta: bytes, found: Sequence[int]) -> Ticket:
        """Copy, count and tell the chunk. What is counted is put, whatever happens then: `settle`."""
        place, index, handle = len(self.tickets), stream.next_index, self.block.handle
        arena, (offset, generation) = self.block.arena, handle
        data = self.data_offset + place * self.stride
        member = (again.rid, index, 0, 0, again.readers, again.laid.packed, again.laid.nbytes)
        ticket = Ticket(again.edge, again.rid, index)
        session.growing.unsettled = True
        meta_bytes = self.meta_bytes + arena_blocks.record_bytes(meta)
        self.pending = (tuple.__new__(Member, member), ticket, stream, meta_bytes)
        again.places.copy(arena.address + offset + data, found)
        if not place:
            arena_blocks.begin_growing(arena, offset, generation, session.number, self.data_offset, self.stride)
        arena_blocks.grow(arena, offset, self.meta_bytes, place, meta)
        if not place:
            arena_blocks.seal(arena, offset, generation)
        where = tuple.__new__(Where, (handle, self.length, data, place))
        assert again.told is not None
        if self.pair.send(again.told.head(index, where) + _NO_TAIL):
            self.message.told = _one_more(self.message.told, place, self.pair.session)
        else:
            # The last of this step: what follows of the stream goes through the broker, and this at once.
            self.places, session.urgent = place, True
            telling.fall_back(session, again.edge, self.pair, [again.rid], [stream])
        self.settle(session)
        return ticket

    def settle(self, session: Session) -> None:
        """The pending chunk is put, if it was counted; else it never was. Done twice it changes nothing."""
        if self.pending is None:
            return
        (member, ticket, stream, meta_bytes), place = self.pending, len(self.rids)
        arena, (offset, generation) = self.block.arena, self.block.handle
        there = arena_blocks.is_ready(arena, offset, generation) and arena_blocks.grown(arena, offset) > place
        if there:
            ticket.stream, self.meta_bytes = stream, meta_bytes
            self.tickets[place:] = [ticket]
            message = self.message
            message.members = (*message.members[:place], member)
            session.outgoing.note_put(message.edge, member.rid, member.index, 0, session.seen)
            if not place and not session.outgoing.has_numbered(message):
                session.post(message, self.tickets)
            self.rids.add(member.rid)
        self.pending = None


class Growing:
    """The session's step that grows, if one does; and what is known of how many join."""

    __slots__ = ("places", "step", "unsettled")

    def __init__(self) -> None:
        self.step: Step | None = None
        #: Of the next step; 0: chunks go alone.
        self.places = 0
        #: A put was interrupted, or is under way.
        self.unsettled = False

    def said_again(self, messages: Iterable[msg.Message]) -> None:
        """These may have left, and are queued again: none of them takes more."""
        if self.step is not None and any(message is self.step.message for message in messages):
            self.step.said = True


def put(session: Session, stream: OutStream, again: Again, found: Sequence[int]) -> Ticket | None:
    """Put the stream's next chunk, which is like its last, together with others; None, with nothing put: alone."""
    growing = session.growing
    if growing.unsettled:
        settle(session)
    # What is not told directly, or copied without the lock, goes alone.
    if again.told is None or not again.places.short:
        return None
    # What was taken before this put is said before it; and a use that the broker may not know of is no step's.
    if session.holds.has_words() or again.begun > session.outgoing.acked:
        return None
    meta, step = again.meta.meta(stream.next_index), growing.step
    if step is not None and step.waits(session) and step.takes(session, again):
        if arena_blocks.HEADER + step.meta_bytes + arena_blocks.record_bytes(meta) <= step.data_offset:
            return _added(session, step, stream, again, meta, found)
    step = _begun(session, again, meta)
    return _added(session, step, stream, again, meta, found) if step is not None else None


def settle(session: Session) -> None:
    """A put may have been interrupted in the middle. What was counted the broker hears of; a block that got nothing
    goes back."""
    growing = session.growing
    step = growing.step
    if step is not None:
        step.settle(session)
        if not step.rids:
            session.give_back([step.block])
            growing.step = None
    growing.unsettled = False
    session.later()


def _added(session: Session, step: Step, stream: OutStream, again: Again, meta: bytes, found: Sequence[int]) -> Ticket:
    ticket = step.add(session, stream, again, meta, found)
    session.growing.unsettled = False
    return ticket


def _begun(session: Session, again: Again, meta: bytes) -> Step | None:
    """A step for this chunk and those that will join it, if they will."""
    growing = session.growing
    _learn(growing, session)
    if not growing.places and _are_many(session, again):
        growing.places = FIRST
    stride, record = _stride(again), arena_blocks.record_bytes(meta) + SLACK
    # A quarter less than may be had: the block's class is so much larger than what it is asked for.
    most = min(MOST_BYTES, 3 * session.pool // (4 * POOL_PART) - 2 * arena_blocks.HEADER)
    places = min(growing.places, most // (stride + record)) if stride else 0
    if places < 2:
        return None
    data_offset = arena_blocks.header_bytes(places * record)
    length = size_class(align_up(data_offset + places * stride))
    block = at_hand(session, again.edge, length)
    if block is None:
        return None
    growing.unsettled = True
    growing.step = Step(session, again, block, data_offset, places)
    return growing.step


def _learn(growing: Growing, session: Session) -> None:
    """From what became of the last step."""
    step, growing.step = growing.step, None
    if step is None:
        return
    count = len(step.rids)
    if count >= step.places:
        growing.places = min(2 * growing.places, MOST)
    elif count < 2 or (count < FEWEST and not step.waits(session)):
        growing.places = 0


def _are_many(session: Session, again: Again) -> bool:
    """Puts come fast, and of more than one stream."""
    waiting = session.out.waiting
    last = waiting[-1] if len(waiting) >= BUSY else None
    return type(last) is msg.Seal and last.members[0].rid != again.rid


def _stride(again: Again) -> int:
    return align_up(again.laid.manifest.end)


def _one_more(told: tuple[Told, ...], place: int, number: int) -> tuple[Told, ...]:
    if told and told[-1].first + told[-1].count == place:
        return (*told[:-1], tuple.__new__(Told, (told[-1].first, place + 1 - told[-1].first, number)))
    return (*told, tuple.__new__(Told, (place, 1, number)))
