"""Room in the pool: who gets the next block, who waits, and what is said at the deadline.

Waiting is first come, first served on each edge. Between edges those that use less than their fair
share (the pool divided by the edges in use) come first, and an edge above its share never takes the
last `edge_guard` of the pool: a slow reader's edge fills up alone.
"""

from __future__ import annotations

from connector.core.directory import deadlock, releasing
from connector.core.directory.effects import Granted, RaiseCeiling, Recall, Refused, WriteEntry
from connector.core.directory.events import Reserve, Resynced
from connector.core.directory.objects import Block, EdgeState, RoomWaiter, Session
from connector.core.directory.state import State
from connector.core.errors import BrokerStopping, ConnectorError, PayloadTooLarge, PoolFull
from connector.core.layout import align_up
from connector.core.names import Edge, Handle


def reserve(state: State, event: Reserve) -> None:
    """Grant, queue or refuse. A reservation ahead is never queued and yields to those who wait."""
    session = state.session(event.session)
    if state.stopping:
        error = BrokerStopping("the broker is stopping", edge=str(event.edge))
        state.emit(Refused(session.id, event.request, error))
        return
    if event.ahead:
        _reserve_ahead(state, session, event)
        return
    size = sum(event.sizes)
    if size > state.settings.pool:
        too_large = PayloadTooLarge(
            "the payload can never fit into the pool",
            edge=str(event.edge),
            rid=event.rids[0] if event.rids else None,
            size=size,
            limit=state.settings.pool,
        )
        state.emit(Refused(session.id, event.request, too_large))
        return
    edge = state.edge(event.edge)
    waiter = RoomWaiter(
        state.order(), session.id, event.request, event.edge, size, event.now, event.deadline, event.rids
    )
    edge.waiters.append(waiter)
    session.rooms[event.request] = waiter
    serve(state)
    if event.request in session.rooms:
        state.arm(event.deadline, "room", (session.id, event.request))
        deadlock.arm(state, state.now + state.settings.deadlock_after)
        _recall(state)


def _reserve_ahead(state: State, session: Session, event: Reserve) -> None:
    blocks: list[tuple[Handle, int]] = []
    settings = state.settings
    if not any(edge.waiters for edge in state.edges.values()):
        for size in map(align_up, event.sizes):
            over_session = session.reserved_bytes + size > settings.ahead_session
            over_total = state.reserved_bytes + size > settings.ahead_total * settings.pool
            if over_session or over_total:
                break
            if state.allocator.free_bytes - size < settings.edge_guard * settings.pool:
                break
            block = _take_block(state, session, event.edge, size)
            if block is None:
                break
            blocks.append((block.handle, block.length))
    state.emit(Granted(session.id, event.request, tuple(blocks)))


def serve(state: State) -> None:
    """Give room to those who wait, until nobody can have any."""
    state.room_changed = False
    while any(edge.waiters for edge in state.edges.values()):
        if not _serve_one(state):
            return
    _end_recall(state)


def _serve_one(state: State) -> bool:
    """Serve the first edge that can be: those below their share first, then by age.

    Edges below their share do not wait for each other: what keeps one from its room may be another edge's
    slow reader. An edge above its share waits behind all of them, and behind older ones like it.
    """
    share = fair_share(state)
    heads = [edge for edge in state.edges.values() if edge.waiters]
    heads.sort(key=lambda edge: (_is_over(edge, share), edge.waiters[0].order))
    for place, edge in enumerate(heads):
        if place and _is_over(edge, share):
            return False
        waiter = edge.waiters[0]
        if not _may_have(state, edge, waiter.size, share):
            continue
        block = _take_block(state, state.sessions[waiter.session], edge.edge, waiter.size)
        if block is not None:
            edge.waiters.popleft()
            state.sessions[waiter.session].rooms.pop(waiter.request, None)
            state.emit(Granted(waiter.session, waiter.request, ((block.handle, block.length),)))
            return True
    return False


def _is_over(edge: EdgeState, share: float) -> bool:
    """Whether the next block would bring the edge above its share. Granted blocks count before they are sealed."""
    return edge.used + edge.reserved + edge.waiters[0].size > share


def fair_share(state: State) -> float:
    """The pool divided by the edges in use: those with bytes, waiters or readers."""
    in_use = sum(1 for edge in state.edges.values() if edge.used or edge.reserved or edge.waiters or edge.subscriptions)
    return state.settings.pool / max(in_use, 1)


def _may_have(state: State, edge: EdgeState, size: int, share: float) -> bool:
    left = state.allocator.free_bytes - size
    if left < 0:
        return False
    if edge.used + edge.reserved + size <= share or left >= state.settings.edge_guard * state.settings.pool:
        return True
    # Nothing else is in the pool: a payload larger than its edge's share still gets through.
    return state.allocator.used == 0


def _take_block(state: State, session: Session, edge: Edge, size: int) -> Block | None:
    if not state.entries:
        return None
    if state.generation + 1 > state.ceiling:
        state.ceiling += state.settings.generation_step
        state.emit(RaiseCeiling())
    extent = state.allocator.reserve(size, state.generation + 1)
    if extent is None:
        return None
    state.generation += 1
    handle = Handle(extent.offset, extent.generation)
    block = Block(handle, extent.length, state.entries.pop(), session.id, meant=edge)
    state.edge(edge).reserved += extent.length
    state.blocks[extent.offset] = block
    session.reserved[extent.offset] = block
    session.reserved_bytes += extent.length
    state.reserved_bytes += extent.length
    state.counters["blocks_reserved"] += 1
    state.last_progress = state.now
    state.emit(WriteEntry(block.entry, handle, extent.length, session.id))
    return block


def _end_recall(state: State) -> None:
    if state.recalling:
        state.recalling = False
        for session in state.sessions.values():
            session.recalled = False


def _recall(state: State) -> None:
    """Blocks reserved ahead go back as soon as someone waits; each session is asked once a wait."""
    state.recalling = True
    for session in state.sessions.values():
        if session.reserved and not session.recalled:
            session.recalled = True
            state.emit(Recall(session.id))


def room_due(state: State, session_id: int, request: int) -> None:
    """The deadline's timer fired."""
    session = state.sessions.get(session_id)
    waiter = session.rooms.get(request) if session else None
    if session is None or waiter is None:
        return
    if waiter.deadline > state.now:
        state.arm(waiter.deadline, "room", (session_id, request))
        return
    drop_waiter(state, session, waiter)
    error = PoolFull(
        "no room before the deadline",
        edge=str(waiter.edge),
        rid=waiter.rids[0] if waiter.rids else None,
        size=waiter.size,
        waited=round(state.now - waiter.since, 3),
        **usage(state),
    )
    state.emit(Refused(session.id, request, error))
    state.room_changed = True


def drop_waiter(state: State, session: Session, waiter: RoomWaiter) -> None:
    session.rooms.pop(waiter.request, None)
    state.edge(waiter.edge).waiters.remove(waiter)


def refuse_waiters(
    state: State, edge: EdgeState, rid: str, error: ConnectorError, sessions: frozenset[int] | set[int] | None = None
) -> None:
    """Puts of this rid alone (of these sessions) can only be refused later: they need not wait for room."""
    for waiter in list(edge.waiters):
        if waiter.rids == (rid,) and (sessions is None or waiter.session in sessions):
            session = state.sessions[waiter.session]
            drop_waiter(state, session, waiter)
            facts = {"edge": str(edge.edge), **error.facts}
            state.emit(Refused(session.id, waiter.request, type(error)(error.message, **facts)))
            state.room_changed = True


def usage(state: State) -> dict[str, object]:
    """The pool in a few facts: who holds what."""
    holders = [session for session in state.sessions.values() if session.held_bytes]
    by_edge = {str(edge.edge): edge.used for edge in state.edges.values() if edge.used}
    return {
        "limit": state.settings.pool,
        "free": state.allocator.free_bytes,
        "largest_hole": state.allocator.largest_hole,
        "reserved": state.reserved_bytes,
        "blocks_left": len(state.entries),
        "by_edge": [f"{name} {size} B" for name, size in sorted(by_edge.items(), key=lambda row: -row[1])][:16],
        "held_by": [f"{s.stage} (pid {s.pid}, {s.presence.value}) {s.held_bytes} B" for s in holders][:16],
    }


def resynced(state: State, event: Resynced) -> None:
    """After a reconnect: reserved blocks that the client does not name were lost with a reply."""
    session = state.session(event.session)
    named = set(event.reserved)
    for block in list(session.reserved.values()):
        if block.handle not in named:
            releasing.give_back(state, session, block, "return")
