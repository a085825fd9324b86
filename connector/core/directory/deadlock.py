"""Puts that wait for room which only the waiters themselves could make.

A block is *stuck* if each reader that keeps it from being freed waits, itself, for a chunk that a
writer in the room queue would have to put, or if it is reserved by a session in that queue. When every
byte that is in use is stuck, and nothing has moved for `deadlock_after`, the youngest waiter is refused.
"""

from __future__ import annotations

from connector.core.directory import lots, room
from connector.core.directory.effects import Refused
from connector.core.directory.objects import Block, RoomWaiter
from connector.core.directory.state import State
from connector.core.directory.transitions import ShareState
from connector.core.errors import PoolDeadlock


def arm(state: State, due: float) -> None:
    """One look is planned at a time."""
    if not state.deadlock_armed:
        state.deadlock_armed = True
        state.arm(due, "deadlock")


def check(state: State) -> None:
    """Refuse the youngest waiter if the waiters block each other; look again while any waits."""
    state.deadlock_armed = False
    waiters = [waiter for edge in state.edges.values() for waiter in edge.waiters]
    if not waiters:
        return
    due = state.last_progress + state.settings.deadlock_after
    if state.now < due:
        arm(state, due)
        return
    arm(state, state.now + state.settings.deadlock_after)
    if len(waiters) < 2 or not state.blocks or not _all_stuck(state, waiters):
        return
    youngest = max(waiters, key=lambda waiter: waiter.order)
    session = state.sessions[youngest.session]
    room.drop_waiter(state, session, youngest)
    state.counters["deadlocks"] += 1
    state.last_progress = state.now
    error = PoolDeadlock(
        "those who could make room wait for room themselves; the youngest put is refused",
        edge=str(youngest.edge),
        rid=youngest.rids[0] if youngest.rids else None,
        size=youngest.size,
        waiting_too=[_name(state, waiter) for waiter in waiters if waiter is not youngest][:8],
        **room.usage(state),
    )
    state.log("warning", "pool deadlock", error=str(error))
    state.emit(Refused(session.id, youngest.request, error))
    state.room_changed = True


def _all_stuck(state: State, waiters: list[RoomWaiter]) -> bool:
    putters = {waiter.session for waiter in waiters}
    blocked_streams = {(waiter.edge, rid) for waiter in waiters for rid in waiter.rids}
    stuck_readers: set[int] = set()
    for session in state.sessions.values():
        for take in session.takes.values():
            if (take.edge, take.rid) in blocked_streams:
                stuck_readers.add(session.id)
    looked_at = {id(block) for session in state.sessions.values() for block in session.inspecting.values()}
    return all(
        id(block) not in looked_at and _is_stuck(state, block, putters, stuck_readers)
        for block in state.blocks.values()
    )


def _is_stuck(state: State, block: Block, putters: set[int], stuck_readers: set[int]) -> bool:
    if block.edge is None:
        return block.session in putters
    subscriptions = state.edge(block.edge).subscriptions
    for chunk in lots.look(block):
        for reader, share in enumerate(chunk.shares):
            if share is ShareState.RELEASED:
                continue
            if chunk.void:
                return False
            subscription = subscriptions.get(reader)
            holder = chunk.holders[reader] or (subscription.session if subscription else 0)
            if holder not in stuck_readers:
                return False
    return True


def _name(state: State, waiter: RoomWaiter) -> str:
    session = state.sessions[waiter.session]
    rid = waiter.rids[0] if waiter.rids else "?"
    return f"{rid} on {waiter.edge} by {session.label}, {waiter.size} B"
