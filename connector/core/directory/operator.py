"""What the operator does by hand: look at a payload, remove one."""

from __future__ import annotations

from connector.core.directory import lives, lots, releasing
from connector.core.directory.effects import Done, DropHolds, Refused, Shown
from connector.core.directory.events import Flags, Hold, Inspected, Removed
from connector.core.directory.listing import describe, find
from connector.core.directory.objects import Chunk
from connector.core.directory.state import State
from connector.core.errors import StreamPoisoned, UnknownRequest


def inspected(state: State, event: Inspected) -> None:
    """Hold a live payload for a look. It stays what it is to its readers."""
    session = state.session(event.session)
    chunk = find(state, event.edge, event.rid, event.index if event.index >= 0 else None)
    if chunk is None or chunk.flags & Flags.END_ONLY:
        state.emit(Refused(session.id, event.request, _unknown(event)))
        return
    hold = Hold(chunk.block.handle, chunk.member, -1)
    if hold not in session.inspecting:
        session.inspecting[hold] = chunk.block
        chunk.block.outstanding += 1
    state.emit(Shown(session.id, event.request, describe(chunk)))


def _unknown(event: Inspected | Removed) -> UnknownRequest:
    return UnknownRequest(
        "no such live payload", rid=event.rid, edge=str(event.edge), index=event.index if event.index >= 0 else None
    )


def removed(state: State, event: Removed) -> None:
    """Drop a payload, or all of a rid on an edge. Its stream fails: a hole is never skipped.

    What a live reader may hold gets DropHolds and stays; `force` frees it at once, and the reader may
    then see bytes of another payload: the command prints that risk.
    """
    edge = state.edges.get(event.edge)
    streams = edge.streams.get(event.rid, []) if edge is not None else []
    chunks = [chunk for stream in streams for chunk in lots.chunks(stream) if event.index in (-1, chunk.index)]
    if not chunks:
        state.emit(Refused(event.session, event.request, _unknown(event)))
        return
    for stream in {id(chunk.stream): chunk.stream for chunk in chunks}.values():
        error = StreamPoisoned("removed by the operator", rid=stream.rid, edge=str(stream.edge), cause="connector rm")
        lives.fail_stream(state, stream, error)
    freed = sum([_remove(state, chunk, event.force) for chunk in chunks])
    state.log(
        "warning", "payloads removed by hand", rid=event.rid, edge=str(event.edge), freed=freed, forced=event.force
    )
    state.emit(Done(event.session, event.request, {"payloads": freed, "held": len(chunks) - freed}))


def _remove(state: State, chunk: Chunk, force: bool) -> bool:
    chunk.void = True
    for reader in range(len(chunk.shares)):
        releasing.drop_pending(state, chunk, reader)
        holder = state.sessions.get(chunk.holders[reader])
        if holder is None:
            continue
        hold = Hold(chunk.block.handle, chunk.member, reader)
        state.emit(DropHolds(holder.id, (hold,)))
        if force:
            releasing.release(state, holder, chunk, reader)
    return not any(chunk.holders)
