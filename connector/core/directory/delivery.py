"""Who is told of what, and when: in order, each index once, within the session's credits.

A reader's stream at the front of its rid (oldest life first) is looked at when something touched
it. Pushes of an edge share its `window`; a claimed rid has a window of its own, so that a caller
who waits for one rid is never kept back by payloads that nobody takes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from connector.core.directory import direct, holding, lives, lots, releasing
from connector.core.directory.effects import Deliver, Descriptor, Ended, StreamFailed
from connector.core.directory.events import Claimed, Flags
from connector.core.directory.objects import (
    Chunk,
    EdgeState,
    Life,
    Presence,
    Session,
    Share,
    Stream,
)
from connector.core.directory.state import State
from connector.core.directory.transitions import ShareState, next_share
from connector.core.errors import ReadersMismatch
from connector.core.names import Edge

Key = TypeVar("Key")
#: Chunks of one rid in a row before the next rid gets its turn.
TURN = 8
ALL = 1 << 30


def open_shares(state: State, stream: Stream, readers: int) -> None:
    """The first chunk fixes the readers; sessions that subscribed otherwise learn it now."""
    stream.readers = readers
    stream.shares = [Share() for _ in range(readers)]
    edge = state.edge(stream.edge)
    for reader, subscription in edge.subscriptions.items():
        if subscription.readers != readers:
            error = ReadersMismatch(
                "the stream's first chunk was put for another number of readers",
                rid=stream.rid,
                edge=str(stream.edge),
                readers=subscription.readers,
                opened_for=readers,
            )
            state.emit(StreamFailed(subscription.session, stream.edge, reader, stream.rid, stream.life.number, error))
            answer_takes(state.sessions[subscription.session], stream.edge, reader, stream.rid)
        elif reader < readers and subscription.session in stream.life.finished_by:
            stream.shares[reader].closed = True


def touch(state: State, stream: Stream) -> None:
    """Something of this stream may be sent: note it for every reader that listens."""
    for reader in range(stream.readers):
        touch_rid(state, stream.at, reader, stream.rid)
        subscription = stream.at.subscriptions.get(reader) if stream.shares[reader].ahead else None
        if subscription is not None:
            subscription.parked[stream.rid] = None
            state.touched[subscription.place] = None


def touch_rid(state: State, edge: EdgeState, reader: int, rid: str) -> None:
    subscription = edge.subscriptions.get(reader)
    if subscription is None:
        return
    if rid in subscription.claims:
        subscription.wanted[rid] = None
    elif subscription.push:
        subscription.ready[rid] = None
    else:
        return
    state.touched[subscription.place] = None


def claimed(state: State, event: Claimed) -> None:
    """A caller wants this rid by name."""
    claim(state, event.session, event.edge, event.reader, event.rid)


def claim(state: State, session: int, edge_name: Edge, reader: int, rid: str) -> None:
    """From now on the rid is not pushed, but sent in a window of its own. Only its reader can claim it."""
    edge = state.edge(edge_name)
    subscription = edge.subscriptions.get(reader)
    if subscription is None or subscription.session != session:
        return
    subscription.claims.add(rid)
    subscription.ready.pop(rid, None)
    touch_rid(state, edge, reader, rid)


def pump(state: State) -> None:
    """Send what can be sent. Runs once, after each event."""
    while state.touched:
        touched, state.touched = state.touched, {}
        for edge, reader in touched:
            _pump_reader(state, state.edge(edge), reader)


def _pump_reader(state: State, edge: EdgeState, reader: int) -> None:
    subscription = edge.subscriptions.get(reader)
    if subscription is None:
        return
    session = state.sessions[subscription.session]
    if session.presence is Presence.CLOSING:
        return
    batch: list[Descriptor] = []
    while subscription.parked:
        rid, _ = subscription.parked.popitem(last=False)
        _send_rid(state, session, edge, reader, rid, rid in subscription.claims, batch, ALL)
    while subscription.wanted:
        rid, _ = subscription.wanted.popitem(last=False)
        _send_rid(state, session, edge, reader, rid, True, batch, state.settings.claim_window)
    turns: OrderedDict[str, None] = subscription.ready
    while turns and session.pushed.get(subscription.place, 0) < state.settings.window:
        rid, _ = turns.popitem(last=False)
        if _send_rid(state, session, edge, reader, rid, False, batch, TURN):
            turns[rid] = None
    _flush(state, session, batch)


def _flush(state: State, session: Session, batch: list[Descriptor]) -> None:
    """Say what was gathered: nothing that is said of a stream's end may overtake its chunks."""
    if batch:
        state.emit(Deliver(session.id, tuple(batch)))
        batch.clear()


def _send_rid(
    state: State,
    session: Session,
    edge: EdgeState,
    reader: int,
    rid: str,
    claimed_: bool,
    batch: list[Descriptor],
    most: int,
) -> bool:
    """Send up to `most` chunks of the front stream; True if more of it could be sent now."""
    stream = front(edge, rid, reader)
    if stream is None or not _may_see(state, session, edge, stream, reader):
        return False
    share = stream.shares[reader]
    for _ in range(most):
        if share.ahead:
            # It has used the credits of what waits there for this.
            pass
        elif claimed_:
            if session.claimed.get((edge.edge, reader, rid), 0) >= state.settings.claim_window:
                return False
        elif session.pushed.get((edge.edge, reader), 0) >= state.settings.window:
            return True
        chunk = _next_chunk(stream, reader)
        if chunk is None:
            if stream.end is not None or stream.failure is not None:
                _flush(state, session, batch)
                _tell_rest(state, session, stream, reader)
            return False
        batch.append(_deliver(state, session, chunk, reader, claimed_))
    return True


def front(edge: EdgeState, rid: str, reader: int) -> Stream | None:
    """The oldest life's stream that still owes this reader something."""
    for stream in edge.streams.get(rid, ()):
        if reader < stream.readers and not stream.shares[reader].closed:
            return stream
    return None


def _may_see(state: State, session: Session, edge: EdgeState, stream: Stream, reader: int) -> bool:
    """A session that has not finished an older life of the rid, on whatever edge, is kept from the next one; so is one
    that was not sent the older one's abort."""
    if edge.subscriptions[reader].readers != stream.readers or stream.rid in session.notices:
        return False
    bound = session.bound.get(stream.rid)
    if bound is stream.life:
        return True
    if bound is not None and not _is_nobodys(session, bound, stream.life):
        return False
    out = session.thrown_out.get(stream.rid)
    if out is not None and session.id in out.entered and out.number < stream.life.number:
        # It said that it is in that one, and has not finished it.
        return False
    older = [life for life in state.lives.get(stream.rid, ()) if life.number < stream.life.number]
    return not any(is_owed(session, life) for life in older)


def _is_nobodys(session: Session, bound: Life, later: Life) -> bool:
    """A life that readers entered and to which no sender has come: what they wait for is in the later one."""
    return bound.number < later.number and not bound.streams and not bound.senders - {session.id}


def is_owed(session: Session, life: Life) -> bool:
    """Whether the session is to get something of the life that it has not got."""
    for (edge, reader), subscription in session.subscriptions.items():
        stream = life.streams.get(edge)
        if stream is None or subscription.readers != stream.readers or stream.shares[reader].closed:
            continue
        if subscription.push or life.rid in subscription.claims:
            return True
    return False


def _next_chunk(stream: Stream, reader: int) -> Chunk | None:
    """The next chunk due to the reader, if it is there."""
    share = stream.shares[reader]
    index = share.redo[0] if share.redo else share.cursor
    chunk = lots.chunk_at(stream, index)
    if chunk is not None and chunk.shares[reader] is ShareState.PENDING:
        return chunk
    if share.redo:
        # It was voided before it could be delivered again: a hole, at which the failure is told, and no END.
        share.cursor, share.redo = index, ()
    return None


def _tell_rest(state: State, session: Session, stream: Stream, reader: int) -> None:
    """No chunk is due: tell END or failure, if that is why."""
    share = stream.shares[reader]
    if stream.end is not None and share.cursor >= stream.end:
        _tell_end(state, session, stream, reader)
    elif stream.failure is not None:
        _tell_failure(state, session, stream, reader)


def _deliver(state: State, session: Session, chunk: Chunk, reader: int, claimed_: bool) -> Descriptor:
    stream, block, index = chunk.stream, chunk.block, chunk.index
    share = stream.shares[reader]
    flags = chunk.flags
    if index < share.redelivered_below:
        flags |= Flags.REDELIVERED
        state.counters["redelivered"] += 1
    if share.redo and share.redo[0] == index:
        share.redo = share.redo[1:]
    else:
        share.cursor = index + 1
    behind, share.told = share.told, index
    if share.ahead:
        direct.pass_ahead(share)
    if flags & (Flags.LAST | Flags.END_ONLY):
        share.told_end = True
        share.cursor = max(share.cursor, stream.end or 0)
    hand_over(state, session, chunk, reader, flags, claimed_)
    if session.direct and stream.direct != session.id:
        direct.offer(state, stream, session)
    told = (
        stream.edge, reader, stream.rid, stream.life.number, index, chunk.attempt, flags, block.handle, block.length,
        chunk.data_offset, chunk.member, chunk.manifest, behind,
    )  # fmt: skip
    # As Descriptor(...) makes it, without the call.
    return tuple.__new__(Descriptor, told)


def hand_over(state: State, session: Session, chunk: Chunk, reader: int, flags: int, claimed_: bool) -> None:
    """The session has the payload, or will have it, as this reader. It uses a credit."""
    stream = chunk.stream
    if claimed_:
        chunk.claimed |= 1 << reader
        key = (stream.edge, reader, stream.rid)
        session.claimed[key] = session.claimed.get(key, 0) + 1
    else:
        chunk.claimed &= ~(1 << reader)
        place = (stream.edge, reader)
        session.pushed[place] = session.pushed.get(place, 0) + 1
    chunk.shares[reader] = next_share(ShareState.PENDING, "deliver")
    chunk.holders[reader] = session.id
    stream.shares[reader].held += 1
    holding.begin(session, chunk.block, 1, chunk.nbytes)
    lives.bind(state, session, stream.life)
    if session.taking and not flags & Flags.END_ONLY:
        answer_takes(session, stream.edge, reader, stream.rid, 1)
    state.tell("delivered", stream.edge, stream.rid, chunk.index, session.id)


def return_credit(state: State, session: Session, chunk: Chunk, reader: int) -> None:
    """The caller has a payload: one more may be sent."""
    stream = chunk.stream
    if not chunk.claimed >> reader & 1:
        place = (stream.edge, reader)
        less(session.pushed, place)
        state.touched[place] = None
        return
    less(session.claimed, (stream.edge, reader, stream.rid))
    touch_rid(state, stream.at, reader, stream.rid)


def less(counts: dict[Key, int], key: Key, by: int = 1) -> None:
    """So many less; what comes to 0 is not there."""
    counts[key] -= by
    if not counts[key]:
        del counts[key]


def _tell_end(state: State, session: Session, stream: Stream, reader: int) -> None:
    share = stream.shares[reader]
    if not share.told_end:
        share.told_end = True
        count = stream.end or 0
        state.emit(Ended(session.id, stream.edge, reader, stream.rid, stream.life.number, count, share.told))
    lives.settle(state, stream)


def _tell_failure(state: State, session: Session, stream: Stream, reader: int) -> None:
    """The reader has had all that came in order; the rest, behind a hole, is dropped."""
    assert stream.failure is not None
    share = stream.shares[reader]
    share.closed = True
    life = stream.life.number
    state.emit(StreamFailed(session.id, stream.edge, reader, stream.rid, life, stream.failure, share.told))
    answer_takes(session, stream.edge, reader, stream.rid)
    for chunk in lots.chunks(stream):
        releasing.drop_pending(state, chunk, reader)
    lives.settle(state, stream)
    for edge, other in session.subscriptions:
        # The next life may have been kept back by this one on other edges.
        touch_rid(state, state.edge(edge), other, stream.rid)


def answer_takes(session: Session, edge: Edge, reader: int, rid: str, most: int | None = None) -> None:
    """Those who waited first, `most` of them, are answered by what was just sent; None: all of them."""
    key = (edge, reader, rid)
    requests = session.taking.get(key, [])
    for request in requests[:most]:
        del session.takes[request]
    del requests[:most]
    if not requests:
        session.taking.pop(key, None)
