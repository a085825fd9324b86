"""How an abort goes on to those who come late: with a stage that begins what was aborted, to its other session, and to
who waits for what it would have sent."""

from __future__ import annotations

from collections.abc import Iterable

from connector.core.directory import lives, tombs
from connector.core.directory.effects import Notice
from connector.core.directory.objects import Life, Session, with_one, without
from connector.core.directory.state import State
from connector.core.names import Edge


def are_of_one(session: Session, other: Session) -> bool:
    """Whether they are of one stage's process: one for what it reads, one for what it sends."""
    return other.id != session.id and (other.pid, other.stage) == (session.pid, session.stage)


def of_the_process(state: State, session: Session, rid: str) -> Life | None:
    """What the session's process was thrown out of while it began it, and this session has not finished."""
    for other in state.sessions.values():
        out = other.thrown_out.get(rid) if are_of_one(session, other) else None
        if out is not None and other.id in out.entered and session.id not in out.finished_by:
            return out
    return None


def aborted_life(state: State, rid: str, number: int) -> Life:
    """What others were thrown out of; who has finished it is not told again."""
    tomb = state.tombstones.get(rid)
    outs = [session.thrown_out.get(rid) for session in state.sessions.values()]
    known = (out for out in (*outs, tomb.out if tomb is not None else None) if out is not None)
    return next((out for out in known if out.number == number), Life(rid, number, over=True))


def is_waited_in(state: State, session: Session, life: Life) -> bool:
    """Whether nobody has put to the life or will, but for the session's own process."""
    senders = [other for number in life.senders if (other := state.sessions.get(number)) is not None]
    own = all(other is session or are_of_one(session, other) for other in senders)
    return own and not life.streams and not life.counts


def throw_out(state: State, session: Session, out: Life, abort: Notice, sends_on: Iterable[Edge] = ()) -> None:
    """The session is in the use `out`, which was aborted, and hears of it; so do the other of its process, and those
    who wait for what it would send on these edges."""
    out.entered = with_one(out.entered, session.id)
    tombs.throw_out(state, session, out)
    tombs.tell(state, session, abort._replace(number=0))
    for edge in sends_on:
        _tell_readers(state, edge, out, abort)
    for other in list(state.sessions.values()):
        life = other.bound.get(out.rid)
        if life is not None and are_of_one(session, other) and life.number > out.number and _has_nothing(other, life):
            edges = sorted(edge for opener, edge in life.opened if opener == other.id)
            _leave(state, other, life)
            throw_out(state, other, out, abort, edges)


def remembered(state: State, out: Life, edges: tuple[Edge, ...] = ()) -> Notice:
    """The abort of `out`, to be told again."""
    tomb = state.tombstones.get(out.rid)
    return Notice(0, out.rid, tomb.reason if tomb is not None else "", out.number, edges=edges)


def is_sent_to(life: Life, edge: Edge) -> bool:
    """Whether a session that is in the life said that it would put to the edge."""
    return any(opened == edge and opener in life.bound for opener, opened in life.opened)


def _tell_readers(state: State, edge: Edge, out: Life, abort: Notice) -> None:
    """Who is in no use of the rid may come to this one yet; who only waits on this edge, to which nobody of the use
    that it is in would put, waits for what was aborted."""
    told = abort._replace(number=0, edges=(edge,))
    tomb = state.tombstones.get(out.rid)
    for subscription in state.edge(edge).subscriptions.values():
        reader = state.sessions[subscription.session]
        life = reader.bound.get(out.rid)
        if out.rid in reader.thrown_out or out.rid in reader.past or reader.id in out.finished_by:
            continue
        if life is None and tomb is not None and tomb.out is out:
            tombs.tell(state, reader, told)
        elif life is not None and life.number > out.number and _waits_only_on(reader, life, edge):
            _leave(state, reader, life)
            throw_out(state, reader, out, told)


def _has_nothing(session: Session, life: Life) -> bool:
    """It entered the life, and put nothing to it and got nothing of it."""
    got = any(edge in life.streams or edge in life.counts for edge, _ in session.subscriptions)
    put = any(session.id in stream.writers for stream in life.streams.values())
    return session.id in life.entered and not got and not put


def _waits_only_on(session: Session, life: Life, edge: Edge) -> bool:
    return (session.id, edge) in life.expected and not is_sent_to(life, edge) and _has_nothing(session, life)


def _leave(state: State, session: Session, life: Life) -> None:
    life.entered = without(life.entered, session.id)
    life.senders = without(life.senders, session.id)
    life.opened = frozenset(one for one in life.opened if one[0] != session.id)
    life.expected = frozenset(one for one in life.expected if one[0] != session.id)
    lives.unbind(state, session, life.rid)
    lives.end_if_done(state, life)
