"""Callers that wait for the next chunk, and what they are told at their deadline."""

from __future__ import annotations

import difflib

from connector.core.directory import delivery, tombs
from connector.core.directory.effects import Refused
from connector.core.directory.events import Awaited, Cancelled
from connector.core.directory.objects import EdgeState, Session, Stream, TakeWaiter
from connector.core.directory.state import State
from connector.core.errors import (
    BrokerStopping,
    ConnectorError,
    Gone,
    NotYet,
    ReadersMismatch,
    RequestAborted,
    UnknownRequest,
)

#: Rids looked at for near matches: an error must not cost a walk over all.
NEAR_LIMIT = 500


def awaited(state: State, event: Awaited) -> None:
    """Wait for the next chunk, which claims the rid; what can never come is refused at once."""
    session = state.session(event.session)
    error = _refusal(state, session, event)
    if error is not None:
        state.emit(Refused(session.id, event.request, error))
        return
    if event.request in session.takes:
        return
    waiter = TakeWaiter(session.id, event.request, event.edge, event.reader, event.rid, event.now, event.deadline)
    session.takes[event.request] = waiter
    session.taking.setdefault((event.edge, event.reader, event.rid), []).append(event.request)
    state.arm(event.deadline, "take", (session.id, event.request))
    delivery.claim(state, session.id, event.edge, event.reader, event.rid)


def _refusal(state: State, session: Session, event: Awaited) -> ConnectorError | None:
    facts = {"rid": event.rid, "edge": str(event.edge)}
    if state.stopping:
        return BrokerStopping("the broker is stopping", **facts)
    if event.rid not in state.lives and tombs.is_unheard(session, event.rid):
        # Nor has it gone on to a new use of the rid.
        reason = session.owed[event.rid].reason
        return RequestAborted("the request was aborted", reason=reason, **facts)
    edge = state.edge(event.edge)
    subscription = edge.subscriptions.get(event.reader)
    stream = delivery.front(edge, event.rid, event.reader)
    if stream is not None and subscription is not None and subscription.session == session.id:
        if subscription.readers != stream.readers:
            return ReadersMismatch(
                "the stream was opened for another number of readers",
                readers=subscription.readers,
                opened_for=stream.readers,
                **facts,
            )
    return None


def cancelled(state: State, event: Cancelled) -> None:
    """The caller went away, or was answered by something else. Unknown requests are answered ones."""
    session = state.session(event.session)
    waiter = session.takes.get(event.request)
    if waiter is not None:
        _drop(state, session, waiter)
    room = session.rooms.pop(event.request, None)
    if room is not None:
        state.edge(room.edge).waiters.remove(room)
        state.room_changed = True


def take_due(state: State, session_id: int, request: int) -> None:
    """The deadline's timer fired."""
    session = state.sessions.get(session_id)
    waiter = session.takes.get(request) if session else None
    if session is None or waiter is None:
        return
    if waiter.deadline > state.now:
        state.arm(waiter.deadline, "take", (session_id, request))
        return
    error = why_nothing(state, session, waiter)
    _drop(state, session, waiter)
    state.emit(Refused(session.id, request, error))


def _drop(state: State, session: Session, waiter: TakeWaiter) -> None:
    del session.takes[waiter.request]
    key = (waiter.edge, waiter.reader, waiter.rid)
    requests = session.taking.get(key, [])
    if waiter.request in requests:
        requests.remove(waiter.request)
    if not requests:
        session.taking.pop(key, None)
        edge = state.edge(waiter.edge)
        subscription = edge.subscriptions.get(waiter.reader)
        if subscription is not None and waiter.rid not in edge.streams:
            subscription.claims.discard(waiter.rid)


def why_nothing(state: State, session: Session, waiter: TakeWaiter) -> ConnectorError:
    """Rule 3: no life known, life open but nothing there, or all of it gone."""
    edge = state.edge(waiter.edge)
    facts = {"rid": waiter.rid, "edge": str(waiter.edge), "waited": round(state.now - waiter.since, 3)}
    stream = delivery.front(edge, waiter.rid, waiter.reader)
    if stream is not None and not _all_told(stream, waiter.reader):
        return _not_yet(state, stream, waiter.reader, facts)
    past = session.past.get(waiter.rid)
    if waiter.rid in edge.streams or (past is not None and waiter.edge in past.counts):
        return Gone("the stream ended and all of it was taken", **facts)
    if waiter.rid in state.lives or past is not None:
        where = sorted(str(e) for life in state.lives.get(waiter.rid, ()) for e in life.streams)
        return NotYet("the request is open, but nothing was put on this edge", seen_on=where or None, **facts)
    tomb = state.tombstones.get(waiter.rid)
    if tomb is not None and tomb.aborted and not tomb.ended_since:
        return RequestAborted("the request was aborted", reason=tomb.reason, **facts)
    if tomb is not None:
        return Gone("the request has ended", **facts)
    near = _near(edge, waiter.rid)
    return UnknownRequest("no life of this rid is known", near=near or None, **facts)


def _all_told(stream: Stream, reader: int) -> bool:
    """The stream ended, and the reader was sent all of it; it may still have views of it."""
    share = stream.shares[reader]
    return stream.end is not None and share.cursor >= stream.end and not share.redo


def _not_yet(state: State, stream: Stream, reader: int, facts: dict[str, object]) -> ConnectorError:
    share = stream.shares[reader]
    behind = sorted(index for index in stream.live if index > share.cursor)
    writers = [state.sessions[w].label for w in sorted(stream.writers)]
    return NotYet(
        "the next chunk was not put before the deadline",
        waiting_for=share.cursor,
        there_already=[str(i) for i in behind[:8]] or None,
        writers=writers or None,
        **facts,
    )


def _near(edge: EdgeState, rid: str) -> list[str]:
    some = [known for known, _ in zip(edge.streams, range(NEAR_LIMIT), strict=False)]
    return difflib.get_close_matches(rid, some, n=3, cutoff=0.6)


def fail_all(state: State, session: Session, error: ConnectorError) -> None:
    """The broker stops: whoever waits is told."""
    waiting = [(take.request, take.edge, take.rid) for take in session.takes.values()]
    waiting += [(put.request, put.edge, put.rids[0] if put.rids else "") for put in session.rooms.values()]
    for request, edge, rid in waiting:
        facts = {"rid": rid or None, "edge": str(edge), **error.facts}
        state.emit(Refused(session.id, request, type(error)(error.message, **facts)))
    session.takes.clear()
    session.taking.clear()
    session.rooms.clear()
