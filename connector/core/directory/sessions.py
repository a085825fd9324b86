"""Sessions: how they come, subscribe, fall silent, leave and die."""

from __future__ import annotations

import itertools

from connector.core.directory import aborts, delivery, direct, holding, lives, lots, releasing, tombs
from connector.core.directory.effects import Done, Expelled, Notices, Ping, Refused
from connector.core.directory.events import Died, Heard, Hold, Joined, Left, Span, Subscribed
from connector.core.directory.objects import NOBODY, Chunk, Presence, Session, Share, Stream, Subscription, without
from connector.core.directory.state import State
from connector.core.directory.transitions import ShareState, next_share
from connector.core.errors import (
    ConnectorError,
    InvariantBroken,
    ReaderDied,
    ReadersMismatch,
    ReaderTaken,
    WriterDied,
)

#: Notices in one message.
MOST_NOTICES = 256


def joined(state: State, event: Joined) -> None:
    if event.session in state.sessions:
        raise InvariantBroken("a session of this number is here already", session=event.session)
    session = Session(event.session, event.stage, event.pid, event.uid, event.now, event.now, event.direct)
    session.seen = session.notified = state.number
    state.sessions[event.session] = session
    state.counters["sessions_joined"] += 1
    state.log("info", "session joined", session=session.id, stage=session.stage, pid=session.pid)


def heard(state: State, event: Heard) -> None:
    """Any frame shows that the session is alive. `seen` never goes back, nor beyond what was sent."""
    session = state.session(event.session)
    session.heard = event.now
    session.pinged = False
    session.seen = max(session.seen, min(event.seen, session.notified))
    if session.presence is Presence.SUSPECT:
        session.presence = Presence.LIVE
        state.log("info", "silent session answered", session=session.id, stage=session.stage)


def send_notices(state: State) -> None:
    """One batch of notices is under way to a session at a time: a silent one costs no more than that."""
    for number in list(state.unheard):
        session = state.sessions.get(number)
        if session is None or not session.notices:
            state.unheard.discard(number)
        elif session.seen >= session.notified:
            if len(session.notices) <= MOST_NOTICES:
                state.unheard.discard(number)
            batch = tuple(itertools.islice(session.notices.values(), MOST_NOTICES))
            for notice in batch:
                del session.notices[notice.rid]
            session.notified = batch[-1].number
            state.emit(Notices(session.id, batch, session.notices_lost))
            session.notices_lost = False
            for edge, reader in session.subscriptions:
                for notice in batch:
                    delivery.touch_rid(state, state.edge(edge), reader, notice.rid)


def heartbeat(state: State) -> None:
    """Ask the silent; name those who do not answer. Nobody is declared dead here."""
    settings = state.settings
    for session in state.sessions.values():
        silent = state.now - session.heard
        if session.presence is Presence.LIVE and session.pinged and silent >= settings.suspect_after:
            session.presence = Presence.SUSPECT
            state.log(
                "warning",
                "session is silent: what it may hold is quarantined until its answer or its death",
                session=session.id,
                stage=session.stage,
                pid=session.pid,
                silent=round(silent, 1),
                held=session.held_bytes,
            )
        if not session.pinged and silent >= settings.heartbeat:
            session.pinged = True
            state.emit(Ping(session.id))
        tombs.forget_heard(session)
    tombs.forget_passed(state)
    state.arm(state.now + settings.heartbeat, "heartbeat")


# -- subscriptions --------------------------------------------------------------------------------


def subscribed(state: State, event: Subscribed) -> None:
    """The session becomes reader i of n; idempotent for the session that is it already."""
    session = state.session(event.session)
    edge = state.edge(event.edge)
    error = _refusal(state, event)
    if error is not None:
        state.emit(Refused(session.id, event.request, error))
        return
    known = edge.subscriptions.get(event.reader)
    if known is None:
        known = Subscription((event.edge, event.reader), session.id, event.readers, event.push, event.resume)
        edge.subscriptions[event.reader] = known
        session.subscriptions[(event.edge, event.reader)] = known
    known.push = known.push or event.push
    known.resume = event.resume
    for wanted_edge, reader, rid in session.taking:
        if (wanted_edge, reader) == (event.edge, event.reader):
            known.claims.add(rid)
    state.emit(Done(session.id, event.request, {}))
    for rid in edge.streams:
        delivery.touch_rid(state, edge, event.reader, rid)


def _refusal(state: State, event: Subscribed) -> ConnectorError | None:
    edge = state.edge(event.edge)
    facts = {"edge": str(event.edge), "reader": event.reader, "readers": event.readers}
    if event.reader >= event.readers:
        return ReadersMismatch("reader i of n needs 0 <= i < n", **facts)
    known = edge.subscriptions.get(event.reader)
    if known is not None and known.session != event.session:
        other = state.sessions[known.session]
        return ReaderTaken(
            "another live session is this reader of the edge", held_by=other.stage, pid=other.pid, **facts
        )
    others = [sub.readers for sub in edge.subscriptions.values() if sub.readers != event.readers]
    if others:
        return ReadersMismatch("the edge is read by another number of readers", read_by=others[0], **facts)
    for streams in edge.streams.values():
        for stream in streams:
            if stream.readers not in (0, event.readers):
                return ReadersMismatch(
                    "a stream of this edge was opened for another number of readers",
                    rid=stream.rid,
                    opened_for=stream.readers,
                    **facts,
                )
    return None


# -- the end of a session -------------------------------------------------------------------------


def left(state: State, event: Left) -> None:
    """A client closes. What it has not taken goes back; views that are alive are released one by one."""
    session = state.session(event.session)
    held = set(event.held)
    for hold in event.held:
        block = holding.block_of(state, hold.handle)
        if block is not None:
            direct.wait_for_seal(block, session, Span(hold.handle, hold.member, 1, hold.reader), "hold")
    _end_writing(state, session, "the writer closed its session before END")
    _give_back_reserved(state, session, "return")
    _end_reading(state, session, held, "the reader closed its session in the middle of the stream")
    session.presence = Presence.CLOSING
    state.closing.add(session.id)
    session.notices.clear()
    expel_if_done(state, session)


def expel_if_done(state: State, session: Session) -> None:
    """A closing session goes with its last view."""
    holds = bool(session.held or session.inspecting or session.early)
    if session.presence is Presence.CLOSING and not holds and session.id in state.sessions:
        _forget(state, session)


def died(state: State, event: Died) -> None:
    """The process is proven dead: its reservations end, what it held goes as rule 7 says."""
    session = state.sessions.get(event.session)
    if session is None:
        return
    state.counters["sessions_died"] += 1
    state.log("warning", "session died", session=session.id, stage=session.stage, pid=session.pid, how=event.how)
    _end_writing(state, session, "the writer's process died before END")
    _give_back_reserved(state, session, "writer died")
    _end_reading(state, session, set(), "a reader that had released a part of the stream died")
    _forget(state, session)


def _forget(state: State, session: Session) -> None:
    del state.sessions[session.id]
    for number in session.peers:
        if number in state.sessions:
            state.sessions[number].peers = without(state.sessions[number].peers, session.id)
    state.closing.discard(session.id)
    state.unheard.discard(session.id)
    state.emit(Expelled(session.id, session.applied))
    tombs.forget_passed(state)


def _give_back_reserved(state: State, session: Session, verb: str) -> None:
    for waiter in list(session.rooms.values()):
        state.edge(waiter.edge).waiters.remove(waiter)
    session.rooms.clear()
    for block in list(session.reserved.values()):
        releasing.give_back(state, session, block, verb)
    state.room_changed = True


def _end_writing(state: State, session: Session, why: str) -> None:
    """Streams without END fail after what was sealed; finished ones are not touched."""
    for life in list(session.bound.values()):
        aborts.deserted(state, session, life, why)
    for life in [*session.bound.values(), *session.past.values()]:
        for stream in list(life.streams.values()):
            if session.id not in stream.writers:
                continue
            stream.writers = without(stream.writers, session.id)
            if stream.failure is None and (stream.end is None or stream.low < stream.end):
                error = WriterDied(
                    why, rid=stream.rid, edge=str(stream.edge), stage=session.stage, pid=session.pid, chunks=stream.low
                )
                lives.fail_stream(state, stream, error)
            lives.settle(state, stream)


def _end_reading(state: State, session: Session, held: set[Hold], why: str) -> None:
    session.takes.clear()
    session.taking.clear()
    shares: dict[tuple[int, int], tuple[Stream, int, list[Chunk]]] = {}
    for chunk, reader in holding.all_of(state, session):
        if holding.hold_of(chunk, reader) in held:
            continue
        stream = chunk.stream
        entry = shares.setdefault((id(stream), reader), (stream, reader, []))
        entry[2].append(chunk)
    for (edge_name, reader), subscription in session.subscriptions.items():
        edge = state.edge(edge_name)
        for rid, streams in edge.streams.items():
            for stream in streams:
                if reader < stream.readers:
                    stream.shares[reader].left_at = state.now
            front = delivery.front(edge, rid, reader)
            if front is not None and (front.shares[reader].cursor or front.shares[reader].released_any):
                shares.setdefault((id(front), reader), (front, reader, []))
        del edge.subscriptions[reader]
        for stream, number, chunks in [s for s in shares.values() if s[0].edge == edge_name and s[1] == reader]:
            _end_share(state, session, stream, number, chunks, subscription, why)
    session.subscriptions.clear()
    for chunk, reader in holding.all_of(state, session):
        if holding.hold_of(chunk, reader) not in held:
            releasing.release(state, session, chunk, reader)
    for look in [look for look in session.inspecting if look not in held]:
        releasing.end_look(state, session, look)
    for rid in list(session.bound):
        life = session.bound[rid]
        lives.unbind(state, session, rid)
        lives.end_if_done(state, life)


def _end_share(
    state: State,
    session: Session,
    stream: Stream,
    reader: int,
    chunks: list[Chunk],
    subscription: Subscription,
    why: str,
) -> None:
    """Rule 7: deliver all of it again, or what is left (`resume`), or fail the stream at both ends."""
    share = stream.shares[reader]
    lasting = share.held - len(chunks)
    if share.closed or stream.life.over:
        return
    if lasting and not chunks and share.told_end and not share.redo:
        # It has all of the stream: views of it are alive, and released one by one.
        return
    hole = min((chunk.index for chunk in chunks if chunk.void), default=share.cursor)
    # What was told ahead of the cursor is sent again when its turn comes.
    again = [chunk for chunk in chunks if chunk.index < hole or hole == share.cursor]
    if (share.released_any or lasting) and not subscription.resume:
        error = ReaderDied(
            why, rid=stream.rid, edge=str(stream.edge), reader=reader, stage=session.stage, pid=session.pid
        )
        lives.fail_stream(state, stream, error)
        _start_over(state, stream, reader)
        return
    for chunk in again:
        holding.end(session, chunk.block, 1, chunk.nbytes)
        if chunk.shares[reader] is ShareState.DELIVERED:
            delivery.return_credit(state, session, chunk, reader)
        chunk.shares[reader] = next_share(chunk.shares[reader], "reader died")
        chunk.holders[reader] = 0
        share.held -= 1
        state.tell("given back", stream.edge, stream.rid, chunk.index, session.id)
    share.redelivered_below = max(share.redelivered_below, share.cursor)
    # What was voided is a hole: whoever comes next is told the failure there, and no END.
    share.cursor = hole
    share.redo = sorted({chunk.index for chunk in again if chunk.index < hole} | set(share.redo))
    direct.forget_reader(stream, share)
    share.told_end = False


def _start_over(state: State, stream: Stream, reader: int) -> None:
    """Nothing is left for this reader but the failure, which whoever comes as it next is told."""
    share: Share = stream.shares[reader]
    share.cursor, share.redo, share.told_end = 0, (), False
    share.told, share.ahead = -1, NOBODY
    for chunk in lots.chunks(stream):
        releasing.drop_pending(state, chunk, reader)
