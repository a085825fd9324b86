"""The direct path: a writer tells the reader by itself, and the broker stands beside.

A reader that has all of a stream so far may be told of what follows by the writer, over a socket between the two; the
writer's Seal then says whom it told. Whom it told may hold the payload, whatever has become of the stream meanwhile:
the block stays until that session has released it. The reader's word may come before the Seal; it waits at the block.
"""

from __future__ import annotations

from connector.core.directory import delivery, releasing
from connector.core.directory.effects import Direct, DropHolds, Introduce, Way
from connector.core.directory.events import FellBack, Flags, Hold, Span, Told
from connector.core.directory.objects import NOBODY, Block, Chunk, Early, Presence, Session, Share, Stream, with_one
from connector.core.directory.state import State
from connector.core.directory.transitions import BlockState, ShareState

#: Words that may wait at one block: twice for each payload of a long step.
MOST_EARLY = 8192


def offer(state: State, stream: Stream, reader: Session) -> None:
    """The reader has all of the stream: from now on its writer may tell it directly."""
    if stream.readers != 1 or stream.end is not None or stream.failure is not None or len(stream.writers) != 1:
        return
    (number,) = stream.writers
    writer = state.sessions.get(number)
    if writer is None or writer is reader or not (writer.direct and reader.direct):
        return
    if writer.presence is Presence.CLOSING or stream.shares[0].cursor < stream.high:
        return
    stream.direct = reader.id
    if reader.id not in writer.peers:
        writer.peers = with_one(writer.peers, reader.id)
        reader.peers = with_one(reader.peers, writer.id)
        state.emit(Introduce(writer.id, reader.id))
    state.ways.setdefault(writer.id, []).append(_way(stream, writer, reader.id))


def withdraw(state: State, stream: Stream) -> None:
    """The reader has more than its window: what follows waits here, until it has taken that."""
    if stream.direct:
        stream.direct = 0
        for number in stream.writers:
            state.ways.setdefault(number, []).append(_way(stream, state.session(number), 0))


def _way(stream: Stream, writer: Session, reader: int) -> Way:
    return Way(stream.edge, stream.rid, stream.life.number, reader, writer.applied)


def say_ways(state: State) -> None:
    """What was offered in this event, each writer at once."""
    ways, state.ways = state.ways, {}
    for number, found in ways.items():
        if number in state.sessions:
            state.emit(Direct(number, tuple(found)))


def fell_back(state: State, event: FellBack) -> None:
    """A reader's socket was full: its writer puts through the broker until it is offered the way again."""
    session = state.session(event.session)
    for rid in event.rids:
        life = session.bound.get(rid)
        stream = life.streams.get(event.edge) if life is not None else None
        if stream is not None:
            stream.direct = 0


# -- words that come before the Seal --------------------------------------------------------------


def wait_for_seal(block: Block, session: Session, span: Span, verb: str) -> bool:
    """Keep a reader's word of a block that is not sealed yet; False if there is no need."""
    if block.state is not BlockState.RESERVED or span.reader or block.session == session.id:
        return False
    if len(block.early) < MOST_EARLY:
        block.early = block.early or []
        block.early.append(Early(session.id, span, verb))
        session.early += verb == "hold"
    return True


def apply_early(state: State, block: Block) -> None:
    """The block was sealed: what its readers said of it before counts now."""
    words, block.early = block.early, ()
    for number, span, verb in words:
        session = state.sessions.get(number)
        if session is None:
            continue
        if verb == "take":
            releasing.take_span(state, session, span)
        elif verb == "release":
            releasing.release_span(state, session, span)
        else:
            session.early -= 1


def drop_early(state: State, block: Block) -> None:
    """The block goes unsealed: nobody can hold what was never there."""
    for number, _, verb in block.early:
        session = state.sessions.get(number)
        if session is not None and verb == "hold":
            session.early -= 1
    block.early = ()


# -- the Seal -------------------------------------------------------------------------------------


def whom(told: tuple[Told, ...], block: Block, count: int) -> dict[int, int]:
    """By place, the session that has the payload already: because the writer says so, or because it spoke of it."""
    found: dict[int, int] = {}
    for number, span, _ in block.early:
        found |= dict.fromkeys(range(span.first, min(span.first + span.count, count)), number)
    for first, size, number in told:
        found |= dict.fromkeys(range(first, min(first + size, count)), number)
    return found


def has_it(state: State, number: int, block: Block, place: int) -> None:
    """A payload that was just placed, or refused, was told to this session directly."""
    reader, chunk = state.sessions.get(number), block.members[place]
    if reader is None or (reader.presence is Presence.CLOSING and not _spoke_of(block, number, place)):
        # It has gone, and what it did not hold then it never will.
        _was_seen(chunk)
        return
    if chunk is None or len(chunk.shares) != 1 or chunk.shares[0] is not ShareState.PENDING:
        _keep(state, reader, block, place)
        return
    subscription = chunk.stream.at.subscriptions.get(0)
    if subscription is None or subscription.session != number:
        _keep(state, reader, block, place)
        _was_seen(chunk)
        return
    _hand_over(state, reader, chunk)


def _spoke_of(block: Block, number: int, place: int) -> bool:
    return any(who == number and span.first <= place < span.first + span.count for who, span, _ in block.early)


def _was_seen(chunk: Chunk | None) -> None:
    """Whoever gets it next may not be the first."""
    if chunk is not None:
        for share in chunk.stream.shares:
            share.redelivered_below = max(share.redelivered_below, chunk.index + 1)


def keep_for_all(state: State, block: Block, place: int) -> None:
    """The payload goes without having been sent; but if its writer has died, it may have told these sessions of it."""
    for number in sorted(block.maybe):
        reader = state.sessions.get(number)
        if reader is not None and reader.presence is not Presence.CLOSING:
            _keep(state, reader, block, place, writer=block.session)


def _keep(state: State, reader: Session, block: Block, place: int, writer: int = 0) -> None:
    """It is no payload that the session is to have; but it may have it: the block stays until it lets go."""
    hold = Hold(block.handle, place, 0)
    if hold not in reader.inspecting:
        reader.inspecting[hold] = block
        block.outstanding += 1
        state.emit(DropHolds(reader.id, (hold,), writer))


def _hand_over(state: State, reader: Session, chunk: Chunk) -> None:
    stream, index = chunk.stream, chunk.index
    share = stream.shares[0]
    claimed = stream.rid in stream.at.subscriptions[0].claims
    delivery.hand_over(state, reader, chunk, 0, chunk.flags, claimed)
    if claimed:
        full = reader.claimed[(stream.edge, 0, stream.rid)] > state.settings.claim_window
    else:
        full = reader.pushed[(stream.edge, 0)] > state.settings.window
    if full:
        withdraw(state, stream)
    if chunk.flags & Flags.LAST:
        share.told_end = True
    if index == share.cursor and not share.redo:
        share.told = index
        share.cursor = index + 1
        pass_ahead(share)
    elif index > share.cursor:
        share.ahead = {*share.ahead, index}
        delivery.touch(state, stream)


def pass_ahead(share: Share) -> None:
    """What the writer told before what came through the broker is behind the cursor now."""
    while share.cursor in share.ahead:
        share.ahead = {index for index in share.ahead if index != share.cursor} or NOBODY
        share.told = share.cursor
        share.cursor += 1


def forget_reader(stream: Stream, share: Share) -> None:
    """Another session is to be the reader. What was told ahead and is gone is not to be sent again."""
    share.told = -1
    share.ahead = {index for index in share.ahead if index not in stream.live} or NOBODY


def end_looks(state: State, session: Session, block: Block, span: Span) -> None:
    """Payloads that the session was told of, but was not to have."""
    end = span.first + span.count
    for hold in [hold for hold, looked_at in session.inspecting.items() if looked_at is block]:
        if hold.reader == span.reader and span.first <= hold.member < end:
            releasing.end_look(state, session, hold)
