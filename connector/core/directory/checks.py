"""The directory's own audit. Tests run it after every event; nothing calls it in production."""

from __future__ import annotations

from collections import Counter

from connector.core.directory import holding, lots
from connector.core.directory.objects import Block, Chunk, Session
from connector.core.directory.state import State
from connector.core.directory.transitions import BlockState, ShareState
from connector.core.errors import InvariantBroken


def validate(state: State) -> None:
    """Raise InvariantBroken if any two tables contradict each other."""
    state.allocator.validate()
    _check({extent.offset for extent in state.allocator.live()} == set(state.blocks), "live extents are the blocks")
    _check(len(state.entries) + len(state.blocks) == state.settings.max_blocks, "entries are conserved")
    _check(state.generation <= state.ceiling, "no generation above the ceiling")
    chunks = 0
    for block in state.blocks.values():
        chunks += _check_block(state, block)
    _check(chunks == state.shelf.payloads, "the shelf counts the live payloads")
    for session in state.sessions.values():
        _check_session(state, session)
    reserved = sum(s.reserved_bytes for s in state.sessions.values())
    _check(reserved == state.reserved_bytes, "reserved bytes add up")
    _check_edges(state)
    _check_lives(state)


def _check(true: bool, what: str, **facts: object) -> None:
    if not true:
        raise InvariantBroken(f"broken: {what}", **facts)


def _check_block(state: State, block: Block) -> int:
    facts = {"offset": block.handle.offset, "state": block.state.value}
    if block.state is BlockState.RESERVED:
        owner = state.sessions.get(block.session)
        _check(
            owner is not None and owner.reserved.get(block.handle.offset) is block,
            "a reserved block has its owner",
            **facts,
        )
        return 0
    _check(block.state is BlockState.SEALED, "no free block is kept", **facts)
    live = list(lots.look(block))
    due = sum(share is not ShareState.RELEASED for chunk in live for share in chunk.shares)
    looks = sum(1 for s in state.sessions.values() for b in s.inspecting.values() if b is block)
    _check(due + looks == block.outstanding > 0, "outstanding pairs", due=due, looks=looks, **facts)
    for chunk in live:
        _check_chunk(state, chunk)
    return len(live)


def _check_chunk(state: State, chunk: Chunk) -> None:
    facts = {"rid": chunk.stream.rid, "edge": str(chunk.stream.edge), "index": chunk.index}
    for reader, share in enumerate(chunk.shares):
        held = share in (ShareState.DELIVERED, ShareState.TAKEN)
        _check(held == bool(chunk.holders[reader]), "a delivered share has a holder", **facts)
        if held:
            session = state.sessions.get(chunk.holders[reader])
            known = session is not None and chunk.block.handle.offset in session.holds_in
            _check(known, "the holder knows its hold", **facts)
    if not chunk.stream.life.over:
        record = next((lot for lot in chunk.block.lots if 0 <= chunk.member - lot.first < len(lot.members)), chunk)
        _check(chunk.stream.live.get(chunk.index) is record, "a live payload is in its stream", **facts)


def _check_session(state: State, session: Session) -> None:
    facts = {"session": session.id, "stage": session.stage}
    _check(sum(b.length for b in session.reserved.values()) == session.reserved_bytes, "reserved bytes", **facts)
    held = holding.seen(state, session)
    _check(sum(chunk.nbytes for chunk, _ in held) == session.held_bytes, "held bytes", **facts)
    _check(len(held) == session.held, "held payloads", **facts)
    by_block = Counter(chunk.block.handle.offset for chunk, _ in held)
    _check(by_block == session.holds_in, "held payloads by block", **facts)
    untaken = [chunk.claimed >> reader & 1 for chunk, reader in held if chunk.shares[reader] is ShareState.DELIVERED]
    _check(untaken.count(0) == sum(session.pushed.values()), "pushed credits", **facts)
    # Writers that tell it directly hear of a full window when it is.
    holds = session.direct or all(n <= state.settings.window for n in session.pushed.values())
    _check(holds, "the windows hold", **facts)
    _check(sum(untaken) == sum(session.claimed.values()), "claimed credits", **facts)
    holds = session.direct or all(n <= state.settings.claim_window for n in session.claimed.values())
    _check(holds, "claim windows hold", **facts)
    for rid, life in session.bound.items():
        _check(session.id in life.bound and not life.over, "a bound life knows its session", rid=rid, **facts)
    _check(sorted(r for rs in session.taking.values() for r in rs) == sorted(session.takes), "takes agree", **facts)


def _check_edges(state: State) -> None:
    used, reserved = dict.fromkeys(state.edges, 0), dict.fromkeys(state.edges, 0)
    for block in state.blocks.values():
        if block.edge is not None:
            used[block.edge] += block.length
        elif block.meant is not None:
            reserved[block.meant] += block.length
    for name, edge in state.edges.items():
        _check(edge.used == used[name], "an edge's bytes", edge=str(name), told=edge.used, real=used[name])
        _check(edge.reserved == reserved[name], "an edge's reserved bytes", edge=str(name), real=reserved[name])
        for waiter in edge.waiters:
            session = state.sessions.get(waiter.session)
            _check(
                session is not None and session.rooms.get(waiter.request) is waiter, "a room waiter is its session's"
            )
        for reader, sub in edge.subscriptions.items():
            session = state.sessions.get(sub.session)
            known = session is not None and session.subscriptions.get((name, reader)) is sub
            _check(known, "one live session per reader", edge=str(name), reader=reader)
        for rid, streams in edge.streams.items():
            _check(bool(streams), "no empty list of streams", rid=rid)
            numbers = [stream.life.number for stream in streams]
            _check(numbers == sorted(set(numbers)), "streams in the order of their lives", rid=rid)


def _check_lives(state: State) -> None:
    for rid, lives in state.lives.items():
        _check(bool(lives), "no empty list of lives", rid=rid)
        numbers = [life.number for life in lives]
        _check(numbers == sorted(set(numbers)), "lives in their order", rid=rid)
        for life in lives:
            _check(not life.over, "an open life is not over", rid=rid)
            _check(
                bool(life.streams or life.bound), "an open life has a stream or a session", rid=rid, life=life.number
            )
            for edge, stream in life.streams.items():
                _check(stream in state.edges[edge].streams.get(rid, []), "a stream is on its edge", rid=rid)
                held = sum(
                    share in (ShareState.DELIVERED, ShareState.TAKEN)
                    for found in stream.live.values()
                    for share in (found.shares if isinstance(found, Chunk) else [found.state])
                )
                _check(held == sum(share.held for share in stream.shares), "held shares", rid=rid, edge=str(edge))
                _check(stream.low <= stream.high, "low <= high", rid=rid)
                ahead = all(index > share.cursor for share in stream.shares for index in share.ahead)
                _check(ahead, "ahead is above the cursor", rid=rid)
                _check(all(index > stream.low for index in stream.above), "above is above low", rid=rid)
