"""What is remembered of lives that ended: aborts for puts that come late, ends for those who ask."""

from __future__ import annotations

from bisect import insort

from connector.core.directory.effects import Notice
from connector.core.directory.objects import Deferred, Life, Presence, Session, Tombstone
from connector.core.directory.state import State
from connector.core.errors import RequestAborted
from connector.core.names import Edge

#: Aborts of one rid that a session is still to come to.
MOST_DEFERRED = 64


def refuse_late(state: State, session: Session, edge: Edge, rid: str, seen: int) -> None:
    """A put that was made before its session heard of the rid's abort must not go into a newer life.

    Raises RequestAborted, and counts. A session that finished or began the rid after the abort means a new use.
    """
    tomb = state.tombstones.get(rid)
    if is_unheard(session, rid, seen):
        reason = session.owed[rid].reason
    elif (tomb is not None and tomb.aborted) or seen >= state.forgotten or rid in state.lives or rid in session.past:
        return
    else:
        reason = "the session lags: this rid may be an aborted one"
    session.late_puts += 1
    state.counters["late_puts"] += 1
    raise RequestAborted("the request was aborted before this put arrived", rid=rid, edge=str(edge), reason=reason)


def is_unheard(session: Session, rid: str, seen: int | None = None) -> bool:
    """Whether the rid was aborted, and what the session says of it was said before it had heard that: having `seen`
    so much (None: what it has now), and not having finished or begun the rid since."""
    notice = session.owed.get(rid)
    return notice is not None and (session.seen if seen is None else seen) < notice.number


def clear(session: Session, rid: str) -> None:
    """The session finishes or begins the rid: what it puts from now on is no late put of an aborted life, and what it
    was not sent it need not hear."""
    session.owed.pop(rid, None)
    session.notices.pop(rid, None)


def throw_out(state: State, session: Session, life: Life) -> None:
    """The life that the session was in is aborted: its next finish means that one. The oldest are forgotten."""
    session.thrown_out[life.rid] = life
    while len(session.thrown_out) > state.settings.max_past:
        session.thrown_out.popitem(last=False)


def remember_end(state: State, rid: str) -> None:
    """A life ended by itself. An abort that is remembered stays: puts may still come late."""
    state.number += 1
    known = state.tombstones.get(rid)
    if known is not None and known.aborted:
        state.tombstones[rid] = known._replace(ended_since=True)
        return
    _remember(state, rid, Tombstone(state.number, False, "finished"))


def remember_abort(state: State, rid: str, reason: str, out: Life | None) -> Tombstone:
    """The rid was aborted, lives up to `out`: numbered."""
    state.number += 1
    tomb = Tombstone(state.number, True, reason, out=out)
    _remember(state, rid, tomb)
    return tomb


def tell(state: State, session: Session, notice: Notice) -> None:
    """The session is to hear of an abort, by a number of its own if it has none. Kept until it has room to hear. Of too
    many, those that are of no use that it was in are replaced by the word that some are lost."""
    if session.presence is Presence.CLOSING:
        return
    if not notice.number:
        state.number += 1
    rid, number = notice.rid, notice.number or state.number
    session.owed[rid] = notice = notice._replace(number=number, applied=session.applied)
    full = len(session.notices) >= state.settings.max_notices
    if full and rid not in session.thrown_out and rid not in session.notices:
        session.notices_lost = True
        return
    session.notices[rid] = notice
    session.notices.move_to_end(rid)
    state.unheard.add(session.id)


def defer(session: Session, first: int, notice: Notice) -> None:
    """The session is still to come to what was aborted, which is number `first` of the rid and on. Of too many of one
    rid the last are forgotten."""
    waiting = session.deferred.setdefault(notice.rid, [])
    insort(waiting, Deferred(first, notice))
    del waiting[MOST_DEFERRED:]


def tell_deferred(state: State, session: Session, rid: str) -> None:
    """The session is through with the uses before one that was aborted: now it is to hear of that."""
    tell(state, session, session.deferred[rid].pop(0).notice._replace(number=0))
    if not session.deferred[rid]:
        del session.deferred[rid]


def drop_deferred(session: Session, life: Life) -> None:
    """The session is in this life: aborts of those before are nothing to it."""
    later = [one for one in session.deferred.pop(life.rid, ()) if one.notice.life > life.number]
    if later:
        session.deferred[life.rid] = later


def _remember(state: State, rid: str, tomb: Tombstone) -> None:
    state.tombstones[rid] = tomb
    state.graves.append((tomb.number, rid))
    while len(state.graves) > state.settings.max_tombstones:
        number, old = state.graves.popleft()
        gone = _forget(state, number, old)
        if gone is None or not gone.aborted:
            continue
        state.forgotten = number
        for session in state.sessions.values():
            if old in session.owed and session.owed[old].number <= number:
                del session.owed[old]


def forget_passed(state: State) -> None:
    """Tombstones go when every live session has passed them. Ends need no hearing: only aborts are told."""
    for session in state.sessions.values():
        if not session.notices and session.seen >= session.notified:
            session.seen = session.notified = state.number
    seen = [session.seen for session in state.sessions.values() if session.presence is not Presence.CLOSING]
    passed = min(seen, default=state.number)
    while state.graves and state.graves[0][0] <= passed:
        _forget(state, *state.graves.popleft())


def forget_heard(session: Session) -> None:
    """Aborts that the session had heard of at the last heartbeat: what it said before that has come by now."""
    session.owed = {rid: notice for rid, notice in session.owed.items() if notice.number > session.long_seen}
    session.long_seen = session.seen


def _forget(state: State, number: int, rid: str) -> Tombstone | None:
    """The tombstone, if it is still the rid's last one."""
    tomb = state.tombstones.get(rid)
    if tomb is None or tomb.number != number:
        return None
    del state.tombstones[rid]
    return tomb
