"""A stream's next put, when it is like its last: what does not change is kept, and little is left to do for each.

Everything here may say no, and then writing.py does it. Nothing is decided here that is not decided there: what is held
against a put is OutStream.goes_on's to say, and a stream that is dropped (abort, finish, begin) takes this with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from connector.arena import tensors
from connector.arena.arena import Arena
from connector.client import growing, sealing, telling
from connector.client.blocks import ReservedBlock
from connector.client.layouts import Laid
from connector.client.outgoing import OutStream, Ticket
from connector.client.pairs import Way
from connector.client.reserving import ask_ahead, at_hand
from connector.client.session import Session
from connector.core.directory.events import Member, Told
from connector.core.names import MAX_INDEX, NOWHERE, Edge
from connector.wire import messages as msg
from connector.wire.alike import MOST_MANIFEST, MetaAlike, ToldAlike, Where, tail

if TYPE_CHECKING:
    import torch

#: Chunks of a stream after which it is not offered the direct path any more, or not for a while.
FIRST_CHUNKS = 4


class Next:
    """A stream's next chunk but its bytes: the block's header is written, and all is there that is said of it.

    `following`: the block that the reader is told to expect behind it.
    """

    __slots__ = ("block", "following", "frame", "index", "message", "ticket")

    def __init__(
        self, block: ReservedBlock, message: msg.Seal, frame: bytes, following: ReservedBlock | None, ticket: Ticket
    ) -> None:
        self.index: int = ticket.index
        self.block, self.message, self.frame = block, message, frame
        self.following, self.ticket = following, ticket


class Again:
    """One stream's. Made when two chunks that were alike went the same way, one behind the other. `way`: None if its
    reader is not told directly."""

    __slots__ = (
        "arena", "begun", "data", "edge", "laid", "length", "meta", "next", "places", "readers", "rid", "told", "way",
    )  # fmt: skip

    def __init__(
        self,
        arena: Arena,
        edge: Edge,
        member: Member,
        way: Way | None,
        begun: int,
        laid: Laid,
        block: tuple[int, int, int],
    ) -> None:
        """`block`: its length, where data begins, and how many bytes of it."""
        self.arena, self.way, self.begun, self.laid = arena, way, begun, laid
        self.edge, self.rid = edge, member.rid
        self.length, *data = block
        self.data = (data[0], data[1])
        self.readers = member.readers
        self.places = tensors.Places(laid.manifest.slots)
        self.meta = MetaAlike(edge, member.rid, member.readers, laid.packed, laid.nbytes, begun)
        self.told = ToldAlike(edge, member.rid, way.life, laid.packed) if way is not None else None
        self.next: Next | None = None

    def fits(self, session: Session, stream: OutStream, readers: int) -> bool:
        """Whether the next put is of the same kind, as far as the session knows. Lock held."""
        return (
            stream.goes_on()
            and stream.way is self.way
            and self.readers == readers
            and 0 < stream.next_index <= MAX_INDEX
            and session.arena is self.arena
            and session.outgoing.opened.get(self.rid, 0) == self.begun
            and not session.copying.under_way
            and not session.closed
            and session.orphaned is None
        )

    def take_next(self, session: Session, stream: OutStream) -> Next | None:
        """The chunk as it was made ready, or made ready now; None if there is no block at hand. Lock held."""
        ready, self.next = self.next, None
        if ready is not None and ready.index == stream.next_index and session.blocks.redeem(ready.block):
            return ready
        block = at_hand(session, self.edge, self.length)
        return self._made_ready(session, stream.next_index, block) if block is not None else None

    def seal(self, session: Session, stream: OutStream, ready: Next) -> None:
        """The payload's bytes are there. Lock held; sealing.settle if it does not return."""
        message, ticket = ready.message, ready.ticket
        message.seen = session.seen
        sealing.seal(session, ready.block, message, [ticket], partial(_tell, session, stream, ready))
        sealing.note(session, message)
        ticket.stream = stream
        if self.told is not None:
            self.make_next(session, ready)

    def make_next(self, session: Session, ready: Next) -> None:
        """Behind a send: its reader is on its way, and this thread is warm. What it does now it need not do between the
        next put and its reader. Lock held."""
        following = ready.following
        if following is not None and ready.index < MAX_INDEX and session.blocks.is_promised(following):
            self.next = self._made_ready(session, ready.index + 1, following)
        if session.blocks.low:
            ask_ahead(session, self.edge, self.length)

    def _made_ready(self, session: Session, index: int, block: ReservedBlock) -> Next:
        sealing.write_header(session, block, self.data, self.meta.meta(index), 1)
        member = tuple.__new__(Member, (self.rid, index, 0, 0, self.readers, self.laid.packed, self.laid.nbytes))
        following = session.blocks.promise(self.length)
        ahead = following.handle if following is not None else NOWHERE
        message = msg.Seal(0, 0, self.edge, block.handle, self.data[0], (member,), (), 0, ahead)
        frame = b""
        if self.told is not None:
            where = tuple.__new__(Where, (block.handle, self.length, self.data[0], 0))
            frame = self.told.head(index, where) + tail(ahead)
        return Next(block, message, frame, following, Ticket(self.edge, self.rid, index))


def note(
    session: Session, edge: Edge, member: Member, ticket: Ticket, laid: Laid, block: tuple[int, int, int], begun: int
) -> None:
    """A chunk alone in its block went its way: the stream's next may be like it. Lock held."""
    stream = ticket.stream
    assert stream is not None
    known = stream.again
    if known is not None and known.laid is laid and known.fits(session, stream, member.readers):
        return
    arena, way, stream.again = session.arena, stream.way, None
    # What is told of it is little more than its manifest. A stream's first chunks go through the broker: soon its
    # writer may tell it directly.
    early = way is None and member.index < FIRST_CHUNKS
    if stream.laid is laid and len(laid.packed) < MOST_MANIFEST and not early and arena is not None:
        stream.again = Again(arena, edge, member, way, begun, laid, block)
    stream.laid = laid


def put(session: Session, edge: Edge, rid: str, payload: Mapping[str, torch.Tensor], readers: int) -> Ticket | None:
    """Seal and tell the stream's next chunk; None, with nothing put, if it is not like the last."""
    streams = session.outgoing.streams
    ready: Next | None = None
    sealed = False
    try:
        with session.lock:
            stream = streams.get((edge, rid))
            again = stream.again if stream is not None else None
            if stream is None or again is None or not again.fits(session, stream, readers):
                return None
            found = again.places.find(payload)
            if found is None:
                return None
            ticket = None
            shared = session.growing
            # Looked at here: of a chunk that comes by itself no more is run than must be.
            if shared.places or shared.step is not None or len(session.out.waiting) >= growing.BUSY:
                ticket = growing.put(session, stream, again, found)
            if ticket is None:
                ready = again.take_next(session, stream)
                if ready is None:
                    return None
                ticket = ready.ticket
                address = ready.block.arena.address + ready.block.handle.offset + again.data[0]
                if again.places.short:
                    again.places.copy(address, found)
                    again.seal(session, stream, ready)
                    sealed = True
        if ready is not None and not sealed:
            again.places.copy(address, found)
            with session.lock:
                # Once more: what was put, or heard, while the copy was made.
                goes_on = streams.get((edge, rid)) is stream and stream.next_index == ready.index
                if not (goes_on and again.fits(session, stream, readers)):
                    return None
                again.seal(session, stream, ready)
                sealed = True
    finally:
        if (ready is not None and not sealed) or session.growing.unsettled:
            with session.lock:
                growing.settle(session)
                if ready is not None and not sealed:
                    sealing.settle(session, ready.block)
    session.push_or_wait()
    if ready is not None and again.told is None:
        with session.lock:
            if again.next is None and stream.again is again:
                again.make_next(session, ready)
        if session.out.waiting:
            session.later()
    return ticket


def _tell(session: Session, stream: OutStream, ready: Next) -> tuple[Told, ...]:
    way = stream.way
    if way is None:
        return ()
    if way.pair.send(ready.frame):
        return (tuple.__new__(Told, (0, 1, way.pair.session)),)
    telling.fall_back(session, ready.message.edge, way.pair, [ready.ticket.rid], [stream])
    return ()
