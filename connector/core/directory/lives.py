"""Lives: one use of a rid, over all edges. Who is in it, how it ends, and what is remembered.

A session is *bound* to a life from its first put or delivery until it finishes, aborts or goes.
Its puts belong to that life, whatever other sessions do with the rid meanwhile.
"""

from __future__ import annotations

from connector.core.directory import delivery, releasing
from connector.core.directory.effects import Done, Notice, StreamFailed
from connector.core.directory.events import Aborted, Began, Finished
from connector.core.directory.objects import Life, PastLife, Presence, Session, Stream, Tombstone
from connector.core.directory.state import State
from connector.core.errors import ConnectorError, RequestAborted, StreamGap
from connector.core.names import Edge


def copy_of(error: ConnectorError) -> ConnectorError:
    """The same refusal anew: one exception object must not collect the tracebacks of many puts."""
    return type(error)(error.message, **error.facts)


# -- who is in it ---------------------------------------------------------------------------------


def life_for_put(state: State, session: Session, edge: Edge, rid: str, seen: int) -> Life:
    """The life that a put of this session belongs to; RequestAborted for a late one."""
    bound = session.bound.get(rid)
    if bound is not None:
        return bound
    refuse_late(state, session, edge, rid, seen)
    past = session.past.pop(rid, None)
    if past is not None:
        return _reopen(state, rid, past)
    for life in reversed(state.lives.get(rid, ())):
        if session.id not in life.finished_by:
            return life
    return open_life(state, rid)


def refuse_late(state: State, session: Session, edge: Edge, rid: str, seen: int) -> None:
    """A put that was made before its session heard of the rid's abort must not open a new life."""
    tomb = state.tombstones.get(rid)
    late = tomb is not None and tomb.aborted and seen < tomb.number
    if not late and seen >= state.forgotten:
        return
    if not late and (rid in state.lives or rid in session.past):
        return
    session.late_puts += 1
    state.counters["late_puts"] += 1
    reason = tomb.reason if tomb is not None and late else "the session lags: this rid may be an aborted one"
    raise RequestAborted("the request was aborted before this put arrived", rid=rid, edge=str(edge), reason=reason)


def open_life(state: State, rid: str) -> Life:
    state.life_number += 1
    life = Life(rid, state.life_number)
    state.lives.setdefault(rid, []).append(life)
    return life


def _reopen(state: State, rid: str, past: PastLife) -> Life:
    """A session goes on with a life that had drained: the same number, the same counts."""
    lives = state.lives.setdefault(rid, [])
    for life in lives:
        if life.number == past.number:
            return life
    life = Life(rid, past.number, counts=dict(past.counts))
    lives.append(life)
    lives.sort(key=lambda other: other.number)
    return life


def stream_of(state: State, life: Life, edge: Edge) -> Stream:
    """The life's stream on the edge, made if it is not there."""
    stream = life.streams.get(edge)
    if stream is None:
        stream = life.streams[edge] = Stream(edge, life.rid, life)
        streams = state.edge(edge).streams.setdefault(life.rid, [])
        streams.append(stream)
        streams.sort(key=lambda other: other.life.number)
    return stream


def bind(session: Session, life: Life) -> None:
    if session.bound.get(life.rid) is not life:
        session.bound[life.rid] = life
        life.bound.add(session.id)
        session.past.pop(life.rid, None)


def unbind(state: State, session: Session, rid: str) -> None:
    life = session.bound.pop(rid, None)
    if life is None:
        return
    life.bound.discard(session.id)
    for edge, reader in session.subscriptions:
        if rid in state.edge(edge).streams:
            delivery.touch_rid(state, state.edge(edge), reader, rid)


# -- how streams end ------------------------------------------------------------------------------


def fail_stream(state: State, stream: Stream, error: ConnectorError) -> None:
    """Poison the stream: writers learn it now, readers after what came in order before it."""
    if stream.failure is not None:
        return
    stream.failure = error
    stream.failed_at = state.now
    _open_unread(state, stream)
    state.tell("failed", stream.edge, stream.rid, stream.low, 0, type(error).__name__)
    state.log("warning", "stream failed", edge=str(stream.edge), rid=stream.rid, error=str(error))
    for writer in sorted(stream.writers):
        state.emit(StreamFailed(writer, stream.edge, -1, stream.rid, stream.life.number, error))
    delivery.touch(state, stream)
    delivery.watch(state, stream)


def end_stream(state: State, stream: Stream) -> None:
    """The writer has finished: END is after the last chunk; a hole before it is a failure."""
    if stream.failure is None and stream.end is None:
        stream.end = stream.high
        state.tell("ended", stream.edge, stream.rid, stream.end, 0)
    if stream.failure is None and stream.low < (stream.end or 0):
        missing = [i for i in range(stream.low, stream.end or 0) if not stream.was_put(i)]
        error = StreamGap(
            "the writer ended the stream, but chunks in the middle never came",
            rid=stream.rid,
            edge=str(stream.edge),
            missing=[str(i) for i in missing[:8]],
            end=stream.end,
        )
        fail_stream(state, stream, error)
    _open_unread(state, stream)
    delivery.touch(state, stream)
    delivery.watch(state, stream)
    settle(state, stream)


def _open_unread(state: State, stream: Stream) -> None:
    """A stream that ends before its first chunk: whoever subscribed must hear of it."""
    if not stream.readers:
        subscriptions = state.edge(stream.edge).subscriptions.values()
        delivery.open_shares(state, stream, max((sub.readers for sub in subscriptions), default=1))


def close_share(state: State, stream: Stream, reader: int) -> None:
    """The reader wants no more: its unread share is dropped; what it was told of, it releases itself."""
    stream.shares[reader].closed = True
    for chunk in list(stream.chunks.values()):
        releasing.drop_pending(state, chunk, reader)
    settle(state, stream)


def settle(state: State, stream: Stream) -> None:
    """After any change: forget a stream that owes nobody anything, and its life with the last one."""
    life = stream.life
    if life.over or life.streams.get(stream.edge) is not stream:
        return
    for share in stream.shares:
        complete = share.told_end and stream.end is not None and share.cursor >= stream.end
        if complete and not share.redo and not share.held and not share.closed:
            share.closed = True
            delivery.touch(state, stream)
    if not stream.readers or stream.chunks or not all(share.closed for share in stream.shares):
        return
    if stream.failure is not None and stream.writers:
        return
    if stream.failure is None and stream.end is None:
        return
    _remove_stream(state, stream)
    if not life.streams:
        end_life(state, life)


def _remove_stream(state: State, stream: Stream) -> None:
    life = stream.life
    del life.streams[stream.edge]
    life.counts[stream.edge] = stream.end if stream.end is not None else stream.high
    edge = state.edge(stream.edge)
    streams = edge.streams[stream.rid]
    streams.remove(stream)
    if not streams:
        del edge.streams[stream.rid]
        for reader, subscription in edge.subscriptions.items():
            session = state.sessions[subscription.session]
            if (edge.edge, reader, stream.rid) not in session.taking:
                subscription.claims.discard(stream.rid)
    delivery.touch(state, stream)


# -- how lives end --------------------------------------------------------------------------------


def end_life(state: State, life: Life) -> None:
    """All senders ended, all readers released: numbered, remembered until every session has passed."""
    _bury(state, life, aborted=False, reason="finished")
    for number in sorted(life.bound):
        session = state.sessions.get(number)
        if session is None:
            continue
        session.past[life.rid] = PastLife(life.number, dict(life.counts))
        while len(session.past) > state.settings.max_past:
            session.past.popitem(last=False)
        unbind(state, session, life.rid)


def _bury(state: State, life: Life, aborted: bool, reason: str) -> None:
    life.over = True
    lives = state.lives.get(life.rid, [])
    if life in lives:
        lives.remove(life)
    if not lives:
        state.lives.pop(life.rid, None)
    if not aborted:
        state.number += 1
        known = state.tombstones.get(life.rid)
        if known is None or not known.aborted:
            _remember(state, life.rid, Tombstone(state.number, False, reason))


def _remember(state: State, rid: str, tomb: Tombstone) -> None:
    state.tombstones[rid] = tomb
    state.graves.append((tomb.number, rid))
    while len(state.graves) > state.settings.max_tombstones:
        number, old = state.graves.popleft()
        gone = state.tombstones.get(old)
        if gone is not None and gone.number == number:
            del state.tombstones[old]
            if gone.aborted:
                state.forgotten = number


def forget_passed(state: State) -> None:
    """Tombstones go when every live session has passed them."""
    passed = min((session.seen for session in state.sessions.values()), default=state.number)
    while state.graves and state.graves[0][0] <= passed:
        number, rid = state.graves.popleft()
        tomb = state.tombstones.get(rid)
        if tomb is not None and tomb.number == number:
            del state.tombstones[rid]


def began(state: State, event: Began) -> None:
    """The session starts a new life of the rid, whatever it did with it before."""
    session = state.session(event.session)
    finish_for(state, session, event.rid)
    bind(session, open_life(state, event.rid))


def finished(state: State, event: Finished) -> None:
    finish_for(state, state.session(event.session), event.rid)


def finish_for(state: State, session: Session, rid: str) -> None:
    """End what the session sends of the rid; drop what it has not read. Unread payloads of others stay."""
    life = session.bound.get(rid)
    if life is None and session.past.pop(rid, None) is None:
        life = next((life for life in state.lives.get(rid, ()) if session.id not in life.finished_by), None)
    if life is None:
        return
    life.finished_by.add(session.id)
    for stream in list(life.streams.values()):
        if session.id in stream.writers:
            stream.writers.discard(session.id)
            end_stream(state, stream)
        for (edge, reader), subscription in session.subscriptions.items():
            if edge == stream.edge and subscription.readers == stream.readers:
                close_share(state, stream, reader)
    unbind(state, session, rid)
    for subscription in session.subscriptions.values():
        subscription.claims.discard(rid)
    if not life.over and not life.streams and not life.bound:
        end_life(state, life)


def aborted(state: State, event: Aborted) -> None:
    """Anyone ends the rid everywhere; reports what it freed."""
    freed = size = held = 0
    state.counters["aborts"] += 1
    state.number += 1
    tomb = Tombstone(state.number, True, event.reason)
    for life in list(state.lives.get(event.rid, ())):
        _bury(state, life, aborted=True, reason=event.reason)
        for stream in list(life.streams.values()):
            got = _abort_stream(state, stream, event.reason)
            freed, size, held = freed + got[0], size + got[1], held + got[2]
        life.streams.clear()
        for number in sorted(life.bound):
            if number in state.sessions:
                unbind(state, state.sessions[number], event.rid)
    for session in state.sessions.values():
        session.past.pop(event.rid, None)
        _queue_notice(state, session, Notice(tomb.number, event.rid, event.reason))
    _remember(state, event.rid, tomb)
    state.log("info", "request aborted", rid=event.rid, reason=event.reason, payloads=freed, held=held)
    if event.request:
        facts = {"payloads": freed, "bytes": size, "held": held, "number": tomb.number}
        state.emit(Done(event.session, event.request, facts))


def _abort_stream(state: State, stream: Stream, reason: str) -> tuple[int, int, int]:
    stream.failure = RequestAborted("the request was aborted", rid=stream.rid, edge=str(stream.edge), reason=reason)
    for share in stream.shares:
        share.closed = True
    got = releasing.void_stream(state, stream)
    state.tell("aborted", stream.edge, stream.rid, stream.high, 0, reason)
    edge = state.edge(stream.edge)
    streams = edge.streams.get(stream.rid, [])
    if stream in streams:
        streams.remove(stream)
    if not streams:
        edge.streams.pop(stream.rid, None)
    for subscription in edge.subscriptions.values():
        subscription.claims.discard(stream.rid)
        session = state.sessions[subscription.session]
        for reader in range(stream.readers):
            delivery.forget_takes(session, stream.edge, reader, stream.rid)
    return got


def _queue_notice(state: State, session: Session, notice: Notice) -> None:
    """Kept until the session has room to hear; too many are replaced by the word that some are lost."""
    if session.presence is Presence.CLOSING:
        return
    session.notices.append(notice)
    if len(session.notices) > state.settings.max_notices:
        session.notices.popleft()
        session.notices_lost = True
