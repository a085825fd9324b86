"""The directory: what is in the pool, whose it is, who is owed what.

One door: `Directory.handle(event) -> effects`. No clock, no I/O: time arrives in events, and what has
to be done is returned in order. Applying an event never leaves half of it behind.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from connector.core.directory import (
    aborts,
    checks,
    deadlock,
    delivery,
    direct,
    entering,
    lives,
    operator,
    releasing,
    room,
    sealing,
    sessions,
    takes,
    unclaimed,
)
from connector.core.directory import events as ev
from connector.core.directory.effects import Acked, AskResend, Effect, StopSession
from connector.core.directory.objects import Presence, Settings, Stream
from connector.core.directory.state import State
from connector.core.directory.story import StoryLine
from connector.core.errors import BrokerStopping
from connector.core.names import Edge

__all__ = ["Directory", "Settings"]

Handler = Callable[[State, ev.Event], None]

HANDLERS: dict[type[ev.Event], Callable[..., None]] = {
    ev.Joined: sessions.joined,
    ev.Left: sessions.left,
    ev.Died: sessions.died,
    ev.Heard: sessions.heard,
    ev.Resynced: room.resynced,
    ev.Reserve: room.reserve,
    ev.Returned: releasing.returned,
    ev.Sealed: sealing.seal,
    ev.Released: releasing.released,
    ev.Taken: releasing.taken,
    ev.Subscribed: sessions.subscribed,
    ev.Claimed: delivery.claimed,
    ev.Awaited: takes.awaited,
    ev.Cancelled: takes.cancelled,
    ev.FellBack: direct.fell_back,
    ev.Began: lives.began,
    ev.Entered: entering.entered,
    ev.Finished: lives.finished,
    ev.Aborted: aborts.aborted,
    ev.Removed: operator.removed,
    ev.Inspected: operator.inspected,
}

#: Events with a number of their session's counter.
NUMBERED = (ev.Returned, ev.Sealed, ev.Released, ev.Began, ev.Entered, ev.Finished, ev.Aborted)


#: What a session may still say after its good-bye.
PARTING = (ev.Left, ev.Died, ev.Heard, ev.Taken, ev.Released)


class Directory:
    """The broker's memory. `state` may be read by anyone and is changed by `handle` alone."""

    def __init__(self, settings: Settings) -> None:
        self.state = State(settings)
        self.state.arm(0.0, "heartbeat")

    def handle(self, event: ev.Event) -> list[Effect]:
        """Apply one event; the effects are to be performed in the order given."""
        state = self.state
        if event.now > state.now:
            state.now = event.now
        state.out = []
        if isinstance(event, ev.Tick):
            self._tick()
        elif isinstance(event, ev.Stopping):
            self._stop()
        elif event.session in state.sessions or isinstance(event, (ev.Joined, ev.Died)):
            if isinstance(event, ev.SealedRun):
                self._run(event)
            elif self._is_next(event) and self._may(event):
                HANDLERS[type(event)](state, event)
        self._follow()
        out, state.out = state.out, []
        return out

    def _run(self, run: ev.SealedRun) -> None:
        """Each of its Seals as if it had come by itself."""
        state, session = self.state, self.state.sessions[run.session]
        if run.number > session.applied + 1:
            state.emit(AskResend(session.id, session.applied + 1))
            return
        state.emit(Acked(session.id))
        may = self._may(run)
        for one in sealing.one_by_one(run, session.applied + 1):
            session.applied = one.number
            if may:
                sealing.seal(state, one)
                self._follow()

    def _follow(self) -> None:
        """What an event has led to."""
        state = self.state
        if state.room_changed:
            room.serve(state)
        # An abort is told before what it lets through.
        if state.unheard:
            sessions.send_notices(state)
        if state.touched:
            delivery.pump(state)
        if state.ways:
            direct.say_ways(state)
        if state.closing:
            for number in list(state.closing):
                sessions.expel_if_done(state, state.sessions[number])

    def next_deadline(self) -> float | None:
        """When a Tick is due next."""
        return self.state.timers[0].due if self.state.timers else None

    def validate(self) -> None:
        """Raise InvariantBroken if the tables contradict each other."""
        checks.validate(self.state)

    def story(self, rid: str, edge: Edge | None = None, index: int | None = None) -> list[StoryLine]:
        """What happened to a payload, oldest first."""
        return self.state.story(rid, edge, index)

    def _may(self, event: ev.Event) -> bool:
        """A session that said good-bye only gives back what it has left."""
        session = self.state.sessions.get(event.session)
        return session is None or session.presence is not Presence.CLOSING or isinstance(event, PARTING)

    def _is_next(self, event: ev.Event) -> bool:
        """A numbered event is applied once, and in order."""
        if not isinstance(event, NUMBERED):
            return True
        session = self.state.sessions[event.session]
        if event.number == session.applied + 1:
            session.applied = event.number
            self.state.emit(Acked(session.id))
            return True
        if event.number <= session.applied:
            self.state.emit(Acked(session.id))
        else:
            self.state.emit(AskResend(session.id, session.applied + 1))
        return False

    def _tick(self) -> None:
        state = self.state
        while state.timers and state.timers[0].due <= state.now:
            timer = heapq.heappop(state.timers)
            if timer.kind == "heartbeat":
                sessions.heartbeat(state)
            elif timer.kind == "deadlock":
                deadlock.check(state)
            elif isinstance(timer.subject, Stream):
                unclaimed.look(state, timer.subject)
            elif timer.subject is not None:
                due = takes.take_due if timer.kind == "take" else room.room_due
                due(state, *timer.subject)

    def _stop(self) -> None:
        self.state.stopping = True
        for session in self.state.sessions.values():
            takes.fail_all(self.state, session, BrokerStopping("the broker is stopping"))
            self.state.emit(StopSession(session.id))
        for edge in self.state.edges.values():
            edge.waiters.clear()
