"""Aborts: anyone ends a rid everywhere, or one use of it. Who is in the next one goes on; who is in one before hears of
it when he has finished that."""

from __future__ import annotations

from typing import NamedTuple

from connector.core.directory import entering, lives, onward, releasing, room, tombs
from connector.core.directory.effects import Done, Notice
from connector.core.directory.events import Aborted
from connector.core.directory.objects import NOBODY, Life, Session, Stream
from connector.core.directory.state import State
from connector.core.errors import RequestAborted
from connector.core.names import Edge

#: Edges of a request that an abort names.
MOST_EDGES = 64


class Freed(NamedTuple):
    """Payloads that were freed, their bytes, and payloads that readers still hold."""

    payloads: int = 0
    size: int = 0
    held: int = 0

    def plus(self, other: Freed) -> Freed:
        return Freed(self.payloads + other.payloads, self.size + other.size, self.held + other.held)


def aborted(state: State, event: Aborted) -> None:
    """End the lives that are meant; report what that freed."""
    state.counters["aborts"] += 1
    last = _last_meant(state, event)
    meant = _meant(state, event, last)
    if last is not None and not meant:
        # It is aborted already, and whoever was in it has been told.
        _report(state, event, Freed(), state.number)
        return
    first = min((life.number for life in meant), default=state.life_number + 1) if event.mine else 0
    hit, later = _whom(state, event.rid, meant, first, last)
    edges = {edge for life in meant for edge in _edges(life)}
    got = Freed()
    for life in meant:
        if not life.over:
            got = got.plus(_abort_life(state, life, event.reason, later))
    # Of nothing, if there was nothing: what begins later is not meant.
    newest = meant[-1] if meant else None
    tomb = tombs.remember_abort(state, event.rid, event.reason, newest)
    last_life = newest.number if newest is not None else 0
    notice = Notice(tomb.number, event.rid, event.reason, last_life, edges=tuple(sorted(edges)[:MOST_EDGES]))
    _tell(state, notice, first, meant, hit, later)
    entering.tell_all_due(state, event.rid)
    state.log("info", "request aborted", rid=event.rid, reason=event.reason, payloads=got.payloads, held=got.held)
    _report(state, event, got, tomb.number)


def deserted(state: State, session: Session, life: Life, why: str) -> None:
    """A session goes that is in the life: who waits for the first chunk of what it opened is to hear."""
    reason = f"{why}: {session.label}"
    if life.bound == {session.id} and life.opened and not life.streams and not life.counts:
        # Nobody else is in it yet: those who come are to hear.
        aborted(state, Aborted(state.now, session.id, 0, 0, life.rid, reason, mine=True))
        return
    lives.open_for_end(state, session, life)
    alone = {edge for opener, edge in life.opened if opener == session.id and edge not in life.streams}
    for number, edge in sorted(life.expected):
        reader = state.sessions.get(number)
        if edge not in alone or reader is None or reader.bound.get(life.rid) is not life:
            continue
        if edge not in life.counts and not any(read == edge for read, _ in reader.subscriptions):
            # It has not subscribed yet, so that no stream could tell it.
            lives.unbind(state, reader, life.rid)
            out = Life(life.rid, life.number, over=True)
            onward.throw_out(state, reader, out, Notice(0, life.rid, reason, life.number, edges=(edge,)))


def _whom(state: State, rid: str, meant: list[Life], first: int, last: int | None) -> tuple[set[int], set[int]]:
    """Sessions that are to hear now, and those that are to hear when they are through with the lives before `first`.

    It is nothing to those that had finished all that is aborted, or are in a later life.
    """
    done = frozenset.intersection(*(life.finished_by for life in meant)) if meant else NOBODY
    hit, later = set(), set()
    for session in state.sessions.values():
        life = session.bound.get(rid)
        if entering.is_in_older(state, session, rid, first):
            later.add(session.id)
        elif session.id not in done and (last is None or life is None or life.number <= last):
            hit.add(session.id)
    return hit, later


def _tell(state: State, notice: Notice, first: int, meant: list[Life], hit: set[int], later: set[int]) -> None:
    rid = notice.rid
    for number in hit:
        session = state.sessions[number]
        if rid in session.past and session.past[rid].number <= notice.life:
            tombs.throw_out(state, session, session.past.pop(rid))
        out = session.thrown_out.get(rid)
        told = notice
        if out is not None and out in meant and session.id in out.entered and out.number < notice.life:
            # It comes to the later ones when it has finished the one that it is in.
            tombs.defer(session, out.number + 1, notice)
            told = notice._replace(life=out.number)
        tombs.tell(state, session, told)
    for number in later:
        tombs.defer(state.sessions[number], first, notice)
    error = RequestAborted("the request was aborted", rid=rid, reason=notice.reason)
    for edge in state.edges.values():
        room.refuse_waiters(state, edge, rid, error, hit)


def _last_meant(state: State, event: Aborted) -> int | None:
    """The last life that an abort means; None: each that there is."""
    session = state.sessions.get(event.session)
    if not event.mine or session is None:
        return None
    if tombs.is_unheard(session, event.rid):
        # It is aborted already.
        return session.owed[event.rid].life
    # So is what it was thrown out of; of a newer one it has touched nothing.
    life = session.thrown_out.get(event.rid) or session.past.get(event.rid) or session.bound.get(event.rid)
    return None if life is None else life.number


def _meant(state: State, event: Aborted, last: int | None) -> list[Life]:
    """The lives, drained ones too, oldest first. In its own use a session does not mean those that it has finished."""
    drained = [session.past[event.rid] for session in state.sessions.values() if event.rid in session.past]
    found = {life.number: life for life in [*state.lives.get(event.rid, ()), *drained]}
    if event.mine:
        found = {number: life for number, life in found.items() if event.session not in life.finished_by}
    return [found[number] for number in sorted(found) if last is None or number <= last]


def _abort_life(state: State, life: Life, reason: str, later: set[int]) -> Freed:
    """`later`: sessions that are not in it yet."""
    lives.bury(state, life)
    got = Freed()
    for stream in list(life.streams.values()):
        got = got.plus(_abort_stream(state, stream, reason))
    life.streams.clear()
    for number in sorted(life.bound):
        session = state.sessions.get(number)
        if session is not None:
            if number not in later:
                tombs.throw_out(state, session, life)
            lives.unbind(state, session, life.rid)
    return got


def _abort_stream(state: State, stream: Stream, reason: str) -> Freed:
    stream.failure = RequestAborted("the request was aborted", rid=stream.rid, edge=str(stream.edge), reason=reason)
    for share in stream.shares:
        share.closed = True
    got = Freed(*releasing.void_stream(state, stream))
    state.tell("aborted", stream.edge, stream.rid, stream.high, 0, reason)
    edge = state.edge(stream.edge)
    if stream in edge.streams.get(stream.rid, ()):
        lives.take_out(state, stream)
    for subscription in edge.subscriptions.values():
        subscription.claims.discard(stream.rid)
    return got


def _edges(life: Life) -> set[Edge]:
    """Where something of the life was put, or was to be."""
    return {*life.streams, *life.counts, *(edge for _, edge in life.opened | life.expected)}


def _report(state: State, event: Aborted, got: Freed, number: int) -> None:
    if event.request:
        facts = {"payloads": got.payloads, "bytes": got.size, "held": got.held, "number": number}
        state.emit(Done(event.session, event.request, facts))
