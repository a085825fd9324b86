"""Answers to questions that change nothing: status, pages of live payloads, a payload's story."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from connector.core.directory import listing
from connector.core.errors import ProtocolViolation, UsageError
from connector.core.names import Edge
from connector.wire import messages as msg
from connector.wire.manifest import unpack_manifest

if TYPE_CHECKING:
    from connector.broker.service import Service

#: Payloads found at once, payloads looked at for these, and how often for one page: whatever a filter matches,
#: a page costs the loop at most 10 000 looks and 1000 rows.
BATCH, BATCH_SCAN, BATCHES = 50, 500, 20
#: Tensor keys of one page, those that a filter hides included; a payload is never cut: one with more is a page alone.
PAGE_KEYS = 1000
FILTERS = ("edge", "rid", "rid_prefix", "state", "key_prefix")
STATES = ("sealed", "delivered", "taken", "void")


def answer(service: Service, message: msg.Message) -> msg.Message:
    """The answer to a query; raises ConnectorError for one that cannot be answered."""
    if isinstance(message, msg.Status):
        return msg.Answer(message.request, _status(service, message.what))
    if isinstance(message, msg.ListPage):
        return _page(service, message)
    if isinstance(message, msg.Story):
        lines = service.directory.story(message.rid)[-1000:]
        rows: list[Any] = [
            [line.at, line.what, str(line.edge), line.index, line.session, line.detail] for line in lines
        ]
        return msg.Rows(message.request, rows, 0)
    raise ProtocolViolation("a message that a session may not send now", kind=type(message).__name__)


def _status(service: Service, what: str) -> dict[str, Any]:
    state = service.directory.state
    if what == "all":
        # In one answer, so that no sum contradicts another.
        return {"summary": _status(service, "summary"), **_status(service, "sessions"), **_status(service, "edges")}
    if what == "sessions":
        return {"sessions": [listing.session_row(state, session) for session in state.sessions.values()]}
    if what == "edges":
        return {"edges": [listing.edge_row(state, edge) for edge in state.edges]}
    if what == "counters":
        edges = {str(edge): listing.edge_row(state, edge) for edge in state.edges}
        return {
            **state.counters,
            "payloads_live": state.counters["payloads_sealed"] - state.counters["payloads_released"],
            "edges": edges,
        }
    if what == "summary":
        return {"pid": os.getpid(), **service.statistics(), **listing.totals(state)}
    raise UsageError("no such status", what=what, known=["summary", "sessions", "edges", "counters", "all"])


def _page(service: Service, message: msg.ListPage) -> msg.Rows:
    state = service.directory.state
    chosen = _filter(message.filters)
    prefix = message.filters.get("key_prefix")
    limit = min(message.limit, PAGE_KEYS)
    rows: list[Any] = []
    cursor, keys = message.after, 0
    for _ in range(BATCHES):
        found, after = listing.page(state, cursor, message.last, BATCH, chosen, BATCH_SCAN)
        for row in found:
            if keys >= limit:
                return msg.Rows(message.request, rows, cursor)
            told, looked = _row(row, prefix)
            if keys and keys + looked > limit:
                return msg.Rows(message.request, rows, cursor)
            keys, cursor = keys + looked, row.serial
            if told is not None:
                rows.append(told)
        cursor = after
        if not after:
            break
    return msg.Rows(message.request, rows, cursor)


def _filter(filters: dict[str, Any]) -> listing.Filter:
    unknown = sorted(set(filters) - set(FILTERS))
    if unknown:
        raise UsageError("no such filter", filter=unknown[0], known=list(FILTERS))
    for name, value in filters.items():
        if type(value) is not str:
            raise UsageError("a filter must be text", filter=name)
    state = filters.get("state")
    if state is not None and state not in STATES:
        raise UsageError("no such state", state=state, known=list(STATES))
    edge = filters.get("edge")
    return listing.Filter(Edge.parse(edge) if edge else None, filters.get("rid"), filters.get("rid_prefix"), state)


def _row(row: listing.PayloadRow, prefix: str | None) -> tuple[dict[str, Any] | None, int]:
    """A payload with its tensors, None if the key filter leaves nothing of it; and what that cost in keys."""
    try:
        slots = unpack_manifest(row.manifest).slots
        damage = None
    except ProtocolViolation as error:
        slots, damage = (), error.message
    tensors = [[s.key, s.dtype, list(s.shape), s.nbytes] for s in slots if prefix is None or s.key.startswith(prefix)]
    if prefix is not None and not tensors:
        return None, max(len(slots), 1)
    told = {
        "serial": row.serial,
        "edge": str(row.edge),
        "rid": row.rid,
        "life": row.life,
        "index": row.index,
        "attempt": row.attempt,
        "last": bool(row.flags & 1),
        "end_only": bool(row.flags & 2),
        "state": row.state,
        "nbytes": row.nbytes,
        "age": row.age,
        "writer": row.writer,
        "holders": row.holders,
        "readers": row.readers,
        "offset": row.offset,
        "length": row.length,
        "tensors": tensors,
    }
    if damage:
        told["damage"] = damage
    return told, max(len(slots), 1)
