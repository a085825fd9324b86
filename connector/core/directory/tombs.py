"""What is remembered of lives that ended: aborts for puts that come late, ends for those who ask."""

from __future__ import annotations

from connector.core.directory.effects import Notice
from connector.core.directory.objects import Life, Presence, Session, Tombstone
from connector.core.directory.state import State
from connector.core.errors import RequestAborted
from connector.core.names import Edge


def refuse_late(state: State, session: Session, edge: Edge, rid: str, seen: int) -> None:
    """A put that was made before its session heard of the rid's abort must not go into a newer life.

    Raises RequestAborted, and counts. A session that finished or began the rid after the abort means a new use.
    """
    tomb = state.tombstones.get(rid)
    if tomb is not None and is_unheard(state, session, rid, seen):
        reason = tomb.reason
    elif (tomb is not None and tomb.aborted) or seen >= state.forgotten or rid in state.lives or rid in session.past:
        return
    else:
        reason = "the session lags: this rid may be an aborted one"
    session.late_puts += 1
    state.counters["late_puts"] += 1
    raise RequestAborted("the request was aborted before this put arrived", rid=rid, edge=str(edge), reason=reason)


def is_unheard(state: State, session: Session, rid: str, seen: int | None = None) -> bool:
    """Whether the rid was aborted, and what the session says of it was said before it had heard that: having `seen`
    so much (None: what it has now), and not having finished or begun the rid since."""
    tomb = state.tombstones.get(rid)
    if tomb is None or not tomb.aborted or (session.seen if seen is None else seen) >= tomb.number:
        return False
    return session.cleared.get(rid) != tomb.number and not _is_others(session, tomb, rid)


def _is_others(session: Session, tomb: Tombstone, rid: str) -> bool:
    """Whether the abort is of a use that the session is through with."""
    life = session.bound.get(rid)
    later = tomb.life is not None and life is not None and life.number > tomb.life
    return later or session.id in tomb.done


def clear(state: State, session: Session, rid: str) -> None:
    """The session finishes or begins the rid: what it puts from now on is no late put of an aborted life."""
    tomb = state.tombstones.get(rid)
    if tomb is not None and tomb.aborted:
        session.cleared[rid] = tomb.number


def throw_out(state: State, session: Session, life: Life) -> None:
    """The life that the session was in is aborted: its next finish means that one. The oldest are forgotten."""
    session.thrown_out[life.rid] = life.number
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


def remember_abort(
    state: State, rid: str, reason: str, life: int | None = None, done: frozenset[int] = frozenset()
) -> Tombstone:
    """The rid was aborted, lives after `life` are not meant: numbered, and every session will be told that is not
    through with what was."""
    state.number += 1
    tomb = Tombstone(state.number, True, reason, False, life, done)
    last = state.life_number if life is None else life
    for session in state.sessions.values():
        past = session.past.get(rid)
        if past is not None and past.number <= last:
            throw_out(state, session, session.past.pop(rid))
        if not _is_others(session, tomb, rid):
            _queue_notice(state, session, Notice(tomb.number, rid, reason, last, session.applied))
    _remember(state, rid, tomb)
    return tomb


def _remember(state: State, rid: str, tomb: Tombstone) -> None:
    state.tombstones[rid] = tomb
    state.graves.append((tomb.number, rid))
    while len(state.graves) > state.settings.max_tombstones:
        number, old = state.graves.popleft()
        gone = _forget(state, number, old)
        if gone is not None and gone.aborted:
            state.forgotten = number


def forget_passed(state: State) -> None:
    """Tombstones go when every live session has passed them. Ends need no hearing: only aborts are told."""
    for session in state.sessions.values():
        if not session.notices and session.seen >= session.notified:
            session.seen = session.notified = state.number
    seen = [session.seen for session in state.sessions.values() if session.presence is not Presence.CLOSING]
    passed = min(seen, default=state.number)
    while state.graves and state.graves[0][0] <= passed:
        _forget(state, *state.graves.popleft())


def _forget(state: State, number: int, rid: str) -> Tombstone | None:
    """The tombstone, if it is still the rid's last one."""
    tomb = state.tombstones.get(rid)
    if tomb is None or tomb.number != number:
        return None
    del state.tombstones[rid]
    for session in state.sessions.values():
        session.cleared.pop(rid, None)
    return tomb


def _queue_notice(state: State, session: Session, notice: Notice) -> None:
    """Kept until the session has room to hear; too many are replaced by the word that some are lost."""
    if session.presence is Presence.CLOSING:
        return
    session.notices.append(notice)
    state.unheard.add(session.id)
    if len(session.notices) > state.settings.max_notices:
        session.notices.popleft()
        session.notices_lost = True
