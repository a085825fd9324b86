"""Lives: one use of a rid, over all edges. Who is in it, and how it ends.

A session is *bound* to a life from its first put or delivery until it finishes, aborts or goes.
Its puts belong to that life, whatever other sessions do with the rid meanwhile.
"""

from __future__ import annotations

from connector.core.directory import delivery, entering, lots, releasing, room, tombs, unclaimed
from connector.core.directory.effects import StreamFailed
from connector.core.directory.events import Began, Finished
from connector.core.directory.objects import Life, Session, Stream, with_one, without
from connector.core.directory.state import State
from connector.core.errors import ConnectorError, StreamGap
from connector.core.names import Edge

# -- who is in it ---------------------------------------------------------------------------------


def life_for_put(state: State, session: Session, edge: Edge, rid: str, seen: int) -> Life:
    """The life that a put of this session belongs to, maybe one that drained; RequestAborted for a late one."""
    tombs.refuse_late(state, session, edge, rid, seen)
    known = session.past.get(rid) or session.bound.get(rid)
    if known is not None:
        return known
    for life in reversed(state.lives.get(rid, ())):
        if session.id not in life.finished_by:
            return life
    return unfinished(state, session, edge, rid) or open_life(state, rid)


def unfinished(state: State, session: Session, edge: Edge, rid: str, *, sends: bool = True) -> Life | None:
    """A life that drained, while others have not finished it: it goes on with this sender, or with this reader.

    One that was read to its end on this very edge, or to which a reader comes, goes on only while a sender of it has
    not finished; readers are done by their last release.
    """
    if rid in state.lives:
        return None
    found = {other.id: other.past[rid] for other in state.sessions.values() if rid in other.past}
    life = max(found.values(), key=lambda past: past.number, default=None)
    if life is None or session.id in life.finished_by:
        return None
    sending = any(past is life and other in life.senders for other, past in found.items())
    return life if sending or (sends and edge not in life.counts) else None


def open_life(state: State, rid: str) -> Life:
    state.life_number += 1
    life = Life(rid, state.life_number)
    # Most are alone: a list of exactly one.
    state.lives[rid] = [*state.lives.get(rid, ()), life]
    return life


def join(state: State, session: Session, life: Life) -> None:
    """The session puts to the life."""
    go_on(state, life)
    life.senders = with_one(life.senders, session.id)
    if life.rid not in session.bound:
        bind(state, session, life)
    touched(session, life)


def go_on(state: State, life: Life) -> None:
    """If it had drained: the same number, the same counts."""
    if life.over:
        life.over = False
        lives = state.lives.setdefault(life.rid, [])
        lives.append(life)
        lives.sort(key=lambda other: other.number)


def stream_of(state: State, life: Life, edge: Edge) -> Stream:
    """The life's stream on the edge, made if it is not there."""
    stream = life.streams.get(edge)
    if stream is None:
        at = state.edge(edge)
        stream = life.streams[edge] = Stream(edge, life.rid, life, at)
        found = [*at.streams.get(life.rid, ()), stream]
        at.streams[life.rid] = sorted(found, key=lambda other: other.life.number) if len(found) > 1 else [stream]
    return stream


def bind(state: State, session: Session, life: Life) -> None:
    """The session is in the life from now on. One that it has only waited in, and that is nobody's, it has left."""
    left = session.bound.get(life.rid)
    if left is life and life.rid not in session.past:
        return
    if left is not life:
        session.bound[life.rid] = life
        life.bound = with_one(life.bound, session.id)
    if left is not None and left is not life:
        left.bound = without(left.bound, session.id)
        end_if_done(state, left)
    if session.past.get(life.rid) is life:
        del session.past[life.rid]


def touched(session: Session, life: Life) -> None:
    """The caller has something of this life: what it puts and finishes next is not of an older one. Of a life that it
    has finished it may have something still; that says nothing."""
    rid = life.rid
    if not session.is_behind(rid) or session.id in life.finished_by:
        return
    past = session.past.get(rid)
    if past is not None and past.number < life.number:
        del session.past[rid]
    if rid in session.thrown_out and session.thrown_out[rid].number < life.number:
        del session.thrown_out[rid]
    if rid in session.owed and session.owed[rid].life < life.number:
        del session.owed[rid]
    tombs.drop_deferred(session, life)


def unbind(state: State, session: Session, rid: str) -> None:
    life = session.bound.pop(rid, None)
    if life is None:
        return
    life.bound = without(life.bound, session.id)
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
    state.tell("failed", stream.edge, stream.rid, stream.low, 0, type(error).__name__)
    state.log("warning", "stream failed", edge=str(stream.edge), rid=stream.rid, error=str(error))
    for writer in sorted(stream.writers):
        applied = state.session(writer).applied
        state.emit(StreamFailed(writer, stream.edge, -1, stream.rid, stream.life.number, error, applied=applied))
    room.refuse_waiters(state, state.edge(stream.edge), stream.rid, error, stream.writers)
    delivery.touch(state, stream)
    unclaimed.watch(state, stream)


def open_for_end(state: State, session: Session, life: Life) -> None:
    """A session goes that is in the life: the streams that it said it would put to are its own, so that who waits for
    them, in this use, is told. What nobody in the use waits for is left alone."""
    for edge in sorted(edge for opener, edge in life.opened if opener == session.id):
        stream = life.streams.get(edge)
        if stream is None and edge not in life.counts:
            subscriptions = state.edge(edge).subscriptions
            waiting = {reader for reader, known in subscriptions.items() if known.session in life.bound}
            if not waiting:
                continue
            stream = stream_of(state, life, edge)
            delivery.open_shares(state, stream, next(iter(subscriptions.values())).readers)
            for reader, share in enumerate(stream.shares):
                share.closed = share.closed or reader not in waiting
        if stream is not None:
            stream.writers = with_one(stream.writers, session.id)


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
    delivery.touch(state, stream)
    unclaimed.watch(state, stream)
    settle(state, stream)


def close_share(state: State, stream: Stream, reader: int) -> None:
    """The reader wants no more: its unread share is dropped; what it was told of, it releases itself."""
    stream.shares[reader].closed = True
    for chunk in lots.chunks(stream):
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
    if not stream.readers or stream.live or not all(share.closed for share in stream.shares):
        return
    if stream.failure is not None and stream.writers:
        return
    if stream.failure is None and stream.end is None:
        return
    _remove_stream(state, stream)
    end_if_done(state, life)


def _remove_stream(state: State, stream: Stream) -> None:
    life = stream.life
    del life.streams[stream.edge]
    count = stream.end if stream.end is not None else stream.high
    life.counts = {**life.counts, stream.edge: count}
    edge = state.edge(stream.edge)
    if not take_out(state, stream):
        for reader, subscription in edge.subscriptions.items():
            session = state.sessions[subscription.session]
            if (edge.edge, reader, stream.rid) not in session.taking:
                subscription.claims.discard(stream.rid)
    delivery.touch(state, stream)


def take_out(state: State, stream: Stream) -> bool:
    """The stream is gone from its edge; whether there are others of its rid."""
    edge, rid = state.edge(stream.edge), stream.rid
    edge.gone[rid] = max(stream.life.number, edge.gone.pop(rid, 0))
    while len(edge.gone) > state.settings.max_past:
        edge.gone.popitem(last=False)
    edge.streams[rid].remove(stream)
    if not edge.streams[rid]:
        del edge.streams[rid]
    return rid in edge.streams


# -- how lives end --------------------------------------------------------------------------------


def end_if_done(state: State, life: Life) -> None:
    """A life ends with its last stream, or if there was none with its last session; but not while one that entered it
    has not finished it: more may be put, on other edges."""
    waited_for = life.entered & life.bound if life.counts else life.bound
    if not life.over and not life.streams and not waited_for:
        end_life(state, life)


def end_life(state: State, life: Life) -> None:
    """All senders ended, all readers released: numbered, remembered until every session has passed."""
    bury(state, life)
    tombs.remember_end(state, life.rid)
    for number in sorted(life.bound):
        session = state.sessions.get(number)
        if session is None:
            continue
        session.past[life.rid] = life
        while len(session.past) > state.settings.max_past:
            session.past.popitem(last=False)
        unbind(state, session, life.rid)
    entering.tell_all_due(state, life.rid)


def bury(state: State, life: Life) -> None:
    life.over = True
    lives = state.lives.get(life.rid, [])
    if life in lives:
        lives.remove(life)
    if not lives:
        state.lives.pop(life.rid, None)


def began(state: State, event: Began) -> None:
    """The session starts a new life of the rid, whatever it did with it before."""
    session = state.session(event.session)
    session.deferred.pop(event.rid, None)
    tombs.clear(session, event.rid)
    session.thrown_out.pop(event.rid, None)
    session.past.pop(event.rid, None)
    fresh = _untouched(state, session, event.rid)
    for life in list(state.lives.get(event.rid, ())):
        if life is not fresh:
            _finish_life(state, session, life)
    bind(state, session, fresh or open_life(state, event.rid))
    for edge, reader in session.subscriptions:
        delivery.touch_rid(state, state.edge(edge), reader, event.rid)


def _untouched(state: State, session: Session, rid: str) -> Life | None:
    """The newest life, if others have entered it, and wait: nothing was put to it, and the session never was in it."""
    life = next(reversed(state.lives.get(rid, ())), None)
    if life is None or life.streams or life.counts or session.id in life.bound | life.senders | life.finished_by:
        return None
    return life


def finished(state: State, event: Finished) -> None:
    """End what the session sends of the rid; drop what it has not read. Unread payloads of others stay.

    It means the life that the session is in, and all before it; a newer one whose payloads it was sent,
    but did not touch, is not meant. Nor is one that came after an abort, if the session had not heard of that, or says
    that it means the aborted one, of which it may have had nothing.
    """
    session, rid = state.session(event.session), event.rid
    of_the_aborted = event.aborted or tombs.is_unheard(session, rid)
    tombs.clear(session, rid)
    for subscription in session.subscriptions.values():
        subscription.claims.discard(rid)
    thrown_out = session.thrown_out.pop(rid, None)
    if thrown_out is not None:
        thrown_out.finished_by = with_one(thrown_out.finished_by, session.id)
    if not of_the_aborted:
        _finish_lives(state, session, rid, thrown_out is not None)
    entering.tell_due(state, session, rid)
    for edge, reader in session.subscriptions:
        delivery.touch_rid(state, state.edge(edge), reader, rid)


def _finish_lives(state: State, session: Session, rid: str, thrown_out: bool) -> None:
    lives = state.lives.get(rid, ())
    life = session.past.pop(rid, None)
    if life is None and thrown_out:
        # It means the aborted life that it was in; a newer one, of which it has touched nothing, is not meant.
        return
    life = life or session.bound.get(rid)
    if life is None:
        life = next((life for life in lives if session.id not in life.finished_by), None)
    if life is None:
        return
    life.finished_by = with_one(life.finished_by, session.id)
    for drained in (other.past.get(rid) for other in state.sessions.values()):
        # It may go on with somebody else.
        if drained is not None and drained.number < life.number:
            drained.finished_by = with_one(drained.finished_by, session.id)
    for older in [other for other in lives if other.number <= life.number]:
        _finish_life(state, session, older)


def _finish_life(state: State, session: Session, life: Life) -> None:
    life.finished_by = with_one(life.finished_by, session.id)
    if session.bound.get(life.rid) is life:
        # First, so that the life, should it end below, is no past one of this session.
        unbind(state, session, life.rid)
    for stream in list(life.streams.values()):
        if session.id in stream.writers:
            stream.writers = without(stream.writers, session.id)
            end_stream(state, stream)
        for (edge, reader), subscription in session.subscriptions.items():
            if edge == stream.edge and subscription.readers == stream.readers:
                close_share(state, stream, reader)
    end_if_done(state, life)
