"""Which use of a rid a session is in that has put or got nothing of it yet, and which it is still to come to.

A stage takes part in the uses of a rid in their order: what it has not finished, it is still to come to.
"""

from __future__ import annotations

from connector.core.directory import delivery, lives, onward, tombs
from connector.core.directory.effects import Notice
from connector.core.directory.events import Entered
from connector.core.directory.objects import Life, Session, with_one
from connector.core.directory.state import State


def entered(state: State, event: Entered) -> None:
    """The session is in a use of the rid from now on: its finish means that one, and nothing of the next is sent to it
    before. If all that is known of its use is that it was aborted, it is told again: what was told before it said this,
    it takes for a former use's."""
    session, rid = state.session(event.session), event.rid
    abort = _unanswered(state, session, event)
    sends_on = [event.edge] if event.sends else []
    is_in = rid in session.past or rid in session.bound
    out = None if abort is not None or is_in else onward.of_the_process(state, session, rid)
    if out is not None:
        onward.throw_out(state, session, out, onward.remembered(state, out), sends_on)
        return
    life = session.past.get(rid) or session.bound.get(rid) or _to_enter(state, session, event)
    if life is not None and abort is not None and life.number > abort.life:
        # Unless others have begun the rid since.
        life = None if onward.is_waited_in(state, session, life) else life
    heard = not tombs.is_unheard(session, rid)
    if rid in session.thrown_out or (life is not None and not heard and life.number > session.owed[rid].life):
        # The use that it means was aborted; this one others have begun since.
        life = None
    if life is None and abort is not None:
        # It is in that use, and thrown out of it.
        out = onward.aborted_life(state, rid, abort.life)
        onward.throw_out(state, session, out, abort, sends_on)
        return
    tombs.clear(session, rid)
    life = life or lives.open_life(state, rid)
    lives.go_on(state, life)
    lives.bind(state, session, life)
    tombs.drop_deferred(session, life)
    if abort is not None and life.number < abort.life:
        # That was of a use behind this one.
        tombs.defer(session, abort.life, abort)
    life.entered = with_one(life.entered, session.id)
    if event.sends:
        life.senders = with_one(life.senders, session.id)
        life.opened |= {(session.id, event.edge)}
    else:
        life.expected |= {(session.id, event.edge)}
    for edge, reader in session.subscriptions:
        delivery.touch_rid(state, state.edge(edge), reader, rid)


def _unanswered(state: State, session: Session, event: Entered) -> Notice | None:
    """The abort that the session has not heard, or not answered by a finish before it said this."""
    rid = event.rid
    if tombs.is_unheard(session, rid):
        return session.owed[rid]._replace(number=0)
    out = session.thrown_out.get(rid)
    if out is not None:
        return onward.remembered(state, out, (event.edge,))
    return Notice(0, rid, event.reason, event.heard, edges=(event.edge,)) if event.heard else None


def _to_enter(state: State, session: Session, event: Entered) -> Life | None:
    """Of those that the session has not finished, the oldest life that owes it something; or in which another is to
    send to it on this edge; or in which another session of its process is; or the oldest."""
    found = [life for life in state.lives.get(event.rid, ()) if session.id not in life.finished_by]
    owed = [life for life in found if delivery.is_owed(session, life)]
    from_another = [life for life in found if not event.sends and onward.is_sent_to(life, event.edge)]
    of_the_process = [life for life in found if _has_sibling(state, session, life)]
    drained = lives.unfinished(state, session, event.edge, event.rid, sends=event.sends)
    return next(iter([*owed, *from_another, *of_the_process, *found]), drained)


def _has_sibling(state: State, session: Session, life: Life) -> bool:
    """A stage may have a session for what it reads and one for what it sends: both are in one use."""
    others = (state.sessions.get(number) for number in life.bound)
    return any(one is not None and onward.are_of_one(session, one) for one in others)


def is_in_older(state: State, session: Session, rid: str, first: int) -> bool:
    """Whether the session is in a life before number `first`, not having finished it, or is still to come to one."""
    out = session.thrown_out.get(rid)
    if out is not None and session.id in out.entered:
        return out.number < first
    abort = session.owed.get(rid)
    if abort is not None and 0 < abort.life < first and any(edge in abort.edges for edge, _ in session.subscriptions):
        # It has not answered the abort of one.
        return True
    life = session.past.get(rid) or session.bound.get(rid)
    if life is not None:
        return life.number < first
    older = (life for life in state.lives.get(rid, ()) if life.number < first)
    return any(_is_to_come(state, session, life) for life in older)


def _is_to_come(state: State, session: Session, life: Life) -> bool:
    if session.id in life.finished_by:
        return False
    edges = {*life.streams, *(edge for _, edge in life.opened)}
    return any(edge in edges for edge, _ in session.subscriptions) or _has_sibling(state, session, life)


def tell_due(state: State, session: Session, rid: str) -> None:
    """The session is through with a use: if the next one that it comes to was aborted, it is to hear of that."""
    deferred = session.deferred.get(rid)
    if deferred and not is_in_older(state, session, rid, deferred[0].first):
        tombs.tell_deferred(state, session, rid)


def tell_all_due(state: State, rid: str) -> None:
    """A life is over: nobody comes to it any more. Who has another abort to answer hears after that."""
    for session in state.sessions.values():
        if rid in session.deferred and rid not in session.owed:
            tell_due(state, session, rid)
