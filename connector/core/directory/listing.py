"""What the `connector` command may see: pages of live payloads, sessions, edges, totals. Changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from connector.core.directory import lots
from connector.core.directory.effects import Descriptor
from connector.core.directory.objects import Chunk, Session
from connector.core.directory.state import State
from connector.core.directory.transitions import ShareState
from connector.core.names import Edge


class Filter(NamedTuple):
    """What a page shows; None shows all."""

    edge: Edge | None = None
    rid: str | None = None
    rid_prefix: str | None = None
    state: str | None = None


class PayloadRow(NamedTuple):
    """One live payload."""

    serial: int
    edge: Edge
    rid: str
    life: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    attempt: int
    flags: int
    state: str
    nbytes: int
    age: float
    writer: str
    holders: list[str]
    readers: int
    manifest: bytes
    offset: int
    length: int


def payload_state(chunk: Chunk) -> str:
    """The furthest state of any of its readers that has not released: taken, delivered or sealed."""
    if chunk.void:
        return "void"
    if ShareState.TAKEN in chunk.shares:
        return "taken"
    return "delivered" if ShareState.DELIVERED in chunk.shares else "sealed"


def page(state: State, after: int, last: int, limit: int, chosen: Filter, scan: int) -> tuple[list[PayloadRow], int]:
    """At most `limit` payloads behind serial `after`, and the cursor for the next page (0: no more).

    `scan` bounds the payloads looked at, so that a filter that matches nothing does not stall the loop.
    """
    rows: list[PayloadRow] = []
    seen, last = 0, last or state.serial
    for block in state.shelf.after(after, last):
        for chunk in lots.look(block):
            if not after < chunk.serial <= last:
                continue
            seen += 1
            if _matches(chunk, chosen):
                rows.append(row(state, chunk))
            if len(rows) >= limit or seen >= scan:
                return rows, chunk.serial
    return rows, 0


def _matches(chunk: Chunk, chosen: Filter) -> bool:
    stream = chunk.stream
    return (
        (chosen.edge is None or chosen.edge == stream.edge)
        and (chosen.rid is None or chosen.rid == stream.rid)
        and (chosen.rid_prefix is None or stream.rid.startswith(chosen.rid_prefix))
        and (chosen.state is None or chosen.state == payload_state(chunk))
    )


def row(state: State, chunk: Chunk) -> PayloadRow:
    stream = chunk.stream
    return PayloadRow(
        chunk.serial,
        stream.edge,
        stream.rid,
        stream.life.number,
        chunk.index,
        chunk.attempt,
        chunk.flags,
        payload_state(chunk),
        chunk.nbytes,
        round(state.now - chunk.sealed_at, 3),
        chunk.writer if chunk.session in state.sessions else f"{chunk.writer}, gone",
        [f"{reader}: {who(state, holder)}" for reader, holder in enumerate(chunk.holders) if holder],
        stream.readers,
        chunk.manifest,
        chunk.block.handle.offset,
        chunk.block.length,
    )


def who(state: State, session_id: int) -> str:
    """A session in words; one that is gone by its number."""
    session = state.sessions.get(session_id)
    return session.label if session else f"session {session_id} (gone)"


def find(state: State, edge: Edge, rid: str, index: int | None) -> Chunk | None:
    """A live payload by name; without an index the first of the rid. Void ones are not found."""
    for stream in state.edges[edge].streams.get(rid, ()) if edge in state.edges else ():
        live = [chunk for chunk in lots.chunks(stream) if not chunk.void and index in (None, chunk.index)]
        if live:
            return min(live, key=lambda chunk: chunk.index)
    return None


def describe(chunk: Chunk) -> Descriptor:
    """What an inspecting client needs to read a payload without taking it."""
    stream = chunk.stream
    return Descriptor(
        stream.edge, -1, stream.rid, stream.life.number, chunk.index, chunk.attempt, chunk.flags, chunk.block.handle,
        chunk.block.length, chunk.data_offset, chunk.member, chunk.manifest,
    )  # fmt: skip


def session_row(state: State, session: Session) -> dict[str, object]:
    return {
        "session": session.id,
        "stage": session.stage,
        "pid": session.pid,
        "uid": session.uid,
        "state": session.presence.value,
        "age": round(state.now - session.joined, 3),
        "silent": round(state.now - session.heard, 3),
        "reserved_bytes": session.reserved_bytes,
        "held_payloads": session.held,
        "held_bytes": session.held_bytes,
        "waiting_puts": len(session.rooms),
        "waiting_takes": len(session.takes),
        "reads": [f"{edge} as {i} of {sub.readers}" for (edge, i), sub in session.subscriptions.items()],
        "late_puts": session.late_puts,
    }


def edge_row(state: State, edge_name: Edge) -> dict[str, object]:
    edge = state.edges[edge_name]
    return {
        "edge": str(edge_name),
        "payloads_sealed": edge.payloads_sealed,
        "payloads_released": edge.payloads_released,
        "payloads_live": edge.payloads_sealed - edge.payloads_released,
        "bytes_sealed": edge.bytes_sealed,
        "bytes_used": edge.used,
        "bytes_reserved": edge.reserved,
        "requests": len(edge.streams),
        "waiting_puts": len(edge.waiters),
        "oldest_wait": round(max((state.now - w.since for w in edge.waiters), default=0.0), 3),
        "refused": edge.refused,
        "readers": [who(state, sub.session) for sub in edge.subscriptions.values()],
    }


def totals(state: State) -> dict[str, object]:
    """The pool and the counters, at one moment."""
    allocator = state.allocator
    quarantined = sum(s.held_bytes for s in state.sessions.values() if s.presence.value == "suspect")
    return {
        "pool_bytes": state.settings.pool,
        "used_bytes": allocator.used,
        "free_bytes": allocator.free_bytes,
        "largest_hole": allocator.largest_hole,
        "reserved_bytes": state.reserved_bytes,
        "quarantined_bytes": quarantined,
        "blocks": len(state.blocks),
        "blocks_left": len(state.entries),
        "payloads": state.shelf.payloads,
        "lives": sum(len(lives) for lives in state.lives.values()),
        "tombstones": len(state.tombstones),
        "snapshot": state.serial,
        **state.counters,
    }
