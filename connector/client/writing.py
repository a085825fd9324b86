"""How a step's payloads become one sealed block: planned, room got, copied in once, sealed, sent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from connector.arena import blocks as arena_blocks
from connector.arena import cuda, tensors
from connector.client import again, layouts, sealing, telling
from connector.client.blocks import ReservedBlock, size_class
from connector.client.copying import UnderWay
from connector.client.layouts import Laid
from connector.client.outgoing import Ticket
from connector.client.reserving import at_hand, give_up
from connector.client.session import Session
from connector.client.verbs import Verb
from connector.core import layout
from connector.core.directory.events import Member, Told
from connector.core.errors import BrokerLost, ConnectorError, Gone, PayloadTooLarge
from connector.core.names import Edge
from connector.core.specs import TensorSpec
from connector.wire import messages as msg
from connector.wire.manifest import most_meta, pack_meta

if TYPE_CHECKING:
    import torch


class Item(NamedTuple):
    """One member of a step as its caller gave it. `index` None: the stream's next."""

    rid: str
    payload: Mapping[str, torch.Tensor]
    index: int | None = None  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    flags: int = 0
    attempt: int = 0
    readers: int = 1


#: Layouts of steps that are remembered, and the most tensors of one.
PLANS, PLAN_KEYS = 512, 512


class _Plan(NamedTuple):
    """A step's layout: by member, where data begins, and the block's length. `stride`: members are alike, and each
    one's data begins so many bytes behind the last one's; 0: their manifests say where."""

    edge: Edge
    laid: tuple[Laid, ...]
    data_offset: int
    data_bytes: int
    length: int
    stride: int


def put_now(session: Session, edge: Edge, items: Sequence[Item]) -> list[Ticket] | None:
    """Seal all items as one block if there is room at hand; a ticket for each, in order. None: `put_step` waits for it.

    Raises what the client can know: types, sizes, limits, an abort it saw, an earlier refusal on a stream. Then nothing
    of the step was put.
    """
    if len(items) == 1:
        rid, payload, index, flags, attempt, readers = items[0]
        if index is None and not flags and not attempt:
            ticket = again.put(session, edge, rid, payload, readers)
            if ticket is not None:
                return [ticket]
    if session.copying.under_way or _on_device(items):
        return None
    plan = _plan(session, edge, items)
    if plan.data_bytes >= tensors.HELD_BELOW:
        with session.lock:
            _admit(session, edge, items)
            block = at_hand(session, edge, plan.length)
        return _fill(session, edge, items, plan, block) if block is not None else None
    with session.lock:
        # A short copy is made under the lock: to take it twice would cost more.
        indexes = _admit(session, edge, items)
        block = at_hand(session, edge, plan.length)
        if block is None:
            return None
        tickets = None
        try:
            _copy(items, plan, block)
            tickets = _seal(session, edge, items, indexes, plan, block)
        finally:
            if tickets is None:
                sealing.settle(session, block)
    session.push_or_wait()
    return tickets


def put_step(session: Session, edge: Edge, items: Sequence[Item], timeout: float) -> Verb[list[Ticket]]:
    """As put_now, of tensors on a device, too; waits up to `timeout` seconds for room: PoolFull or PoolDeadlock
    meanwhile, BrokerLost if the broker is away, NotYet if a device still copies what was put before on these rids."""
    plan = _plan(session, edge, items)
    until = time.monotonic() + timeout
    yield from session.copying.settled([item.rid for item in items], timeout)
    block = yield from _acquire(session, edge, plan, items, max(until - time.monotonic(), 0.0))
    if _on_device(items):
        return _copy_later(session, edge, items, plan, block)
    return _fill(session, edge, items, plan, block)


def _fill(session: Session, edge: Edge, items: Sequence[Item], plan: _Plan, block: ReservedBlock) -> list[Ticket]:
    tickets: list[Ticket] | None = None
    try:
        _copy(items, plan, block)
        with session.lock:
            # Once more: what was put, or heard, while the copy was made.
            indexes = _admit(session, edge, items)
            tickets = _seal(session, edge, items, indexes, plan, block)
    finally:
        if tickets is None:
            with session.lock:
                sealing.settle(session, block)
        session.push_or_wait()
    return tickets


def _copy_later(session: Session, edge: Edge, items: Sequence[Item], plan: _Plan, block: ReservedBlock) -> list[Ticket]:
    """Copy what is on the host, and launch what is on devices; the block is sealed when that is there."""
    tickets: list[Ticket] = []
    with session.lock:
        begun = session.outgoing.begun(item.rid for item in items)

    def settle(error: ConnectorError | None) -> None:
        # Without tickets its copies were not all launched, and the caller knows.
        if error is None and tickets:
            try:
                if session.outgoing.begun(item.rid for item in items) > begun:
                    raise Gone("this node finished or began the request while the payload was copied")
                indexes = _indexes(session, edge, items)
                _seal(session, edge, items, indexes, plan, block, tickets)
                return
            except ConnectorError as refused:
                error = refused
        session.give_back([block])
        if error is not None:
            for ticket in tickets:
                session.outgoing.refuse(ticket, _of_ticket(error, ticket))

    put = UnderWay(frozenset(item.rid for item in items), block.handle, settle)
    try:
        later: list[cuda.Job] = []
        _copy(items, plan, block, later)
        cuda.begin(block.arena, later, put.begun)
        with session.lock:
            indexes = _admit(session, edge, items)
            tickets += [Ticket(edge, item.rid, index) for item, index in zip(items, indexes, strict=True)]
    finally:
        # After an error, too: the block goes back when the copies that were launched are over.
        with session.lock:
            session.copying.add(put)
    return tickets


def _on_device(items: Sequence[Item]) -> bool:
    return cuda.CALLS.in_use() and cuda.any_on_device(item.payload for item in items)


def _of_ticket(error: ConnectorError, ticket: Ticket) -> ConnectorError:
    facts = {"rid": ticket.rid, "edge": str(ticket.edge), "index": ticket.index, **error.facts}
    return type(error)(error.message, **facts)


def _copy(items: Sequence[Item], plan: _Plan, block: ReservedBlock, later: list[cuda.Job] | None = None) -> None:
    """Copy all in; what is on a device is appended to `later`, if that is given."""
    arena, base = block.arena, block.handle.offset + plan.data_offset
    for item, laid in zip(items, plan.laid, strict=True):
        try:
            tensors.copy_payload(arena, base, laid.manifest.slots, item.payload.values(), later)
        except ConnectorError as error:
            raise _of_item(error, item, plan.edge) from error
        base += plan.stride


def _plan(session: Session, edge: Edge, items: Sequence[Item]) -> _Plan:
    specs: list[tuple[TensorSpec, ...]] = []
    chars = keys = 0
    for item in items:
        try:
            one = tensors.described(item.payload)
        except ConnectorError as error:
            raise _of_item(error, item, edge) from error
        specs.append(one)
        chars += len(item.rid)
        keys += len(one)
    try:
        lay = _lay_out_remembered if keys <= PLAN_KEYS and session.pool else _lay_out
        return lay(edge, tuple(specs), chars, session.most_meta, session.pool)
    except TypeError:
        # A key, or a dimension, that has no hash: its layout says what is wrong with it.
        _culprit(items, specs, edge)
        raise
    except ConnectorError as error:
        _culprit(items, specs, edge)
        raise _of_item(error, items[0] if len(items) == 1 else None, edge) from error


def _culprit(items: Sequence[Item], specs: list[tuple[TensorSpec, ...]], edge: Edge) -> None:
    """Raises the error of the first item that cannot be laid out by itself."""
    for item, one in zip(items, specs, strict=True):
        try:
            layouts.lay(one, 0)
        except ConnectorError as error:
            raise _of_item(error, item, edge) from error


def _of_item(error: ConnectorError, item: Item | None, edge: Edge) -> ConnectorError:
    return type(error)(error.message, **{"rid": item.rid if item else None, "edge": str(edge), **error.facts})


def _lay_out(edge: Edge, specs: tuple[tuple[TensorSpec, ...], ...], rid_chars: int, most: int, pool: int) -> _Plan:
    """A step's layout. `most`: bytes that its keys, shapes and rids may have; `pool`: bytes of blocks; 0: no limit."""
    laid: list[Laid] = []
    cursor = stride = 0
    if len(specs) > 1 and specs.count(specs[0]) == len(specs):
        laid = [layouts.lay(specs[0], 0)] * len(specs)
        stride = layout.align_up(laid[0].manifest.end)
        cursor = stride * len(specs)
    else:
        for one in specs:
            laid.append(layouts.lay(one, layout.align_up(cursor)))
            cursor = laid[-1].manifest.end
    meta_bytes = most_meta(edge, rid_chars, [one.packed for one in laid])
    if most and meta_bytes > most:
        raise PayloadTooLarge("the payload's keys and shapes do not fit into a message", size=meta_bytes, limit=most)
    data_offset = arena_blocks.header_bytes(meta_bytes)
    size = layout.align_up(cursor)
    need = layout.align_up(data_offset + size)
    if pool and need > pool:
        raise PayloadTooLarge("the payload can never fit into the pool", size=need, limit=pool)
    length = size_class(need)
    return _Plan(edge, tuple(laid), data_offset, size, min(length, pool) if pool else length, stride)


_lay_out_remembered = lru_cache(PLANS)(_lay_out)


def _admit(session: Session, edge: Edge, items: Sequence[Item]) -> list[int]:
    """The index of each item, if all of them may be put. Lock held."""
    session.must_be_open()
    return _indexes(session, edge, items)


def _indexes(session: Session, edge: Edge, items: Sequence[Item]) -> list[int]:
    if len(items) == 1:
        rid, _, index, _, attempt, _ = items[0]
        return [session.outgoing.admit(edge, rid, index, attempt)]
    indexes: list[int] = []
    placed: dict[str, int] = {}
    for item in items:
        index = session.outgoing.admit(edge, item.rid, item.index, item.attempt)
        if item.index is None and item.rid in placed:
            index = placed[item.rid]
        placed[item.rid] = index + 1
        indexes.append(index)
    return indexes


def _acquire(session: Session, edge: Edge, plan: _Plan, items: Sequence[Item], timeout: float) -> Verb[ReservedBlock]:
    """A block from the shelf, or the broker's next free one, if the items may be put. What it yields for is its
    waiting."""
    with session.lock:
        _admit(session, edge, items)
        block = at_hand(session, edge, plan.length)
        if block is not None:
            return block
        rids = tuple([item.rid for item in items])
        request = session.ask(lambda n: msg.Reserve(n, edge, (plan.length,), timeout, rids[:64], False), timeout, rids)
    session.push()
    granted: list[ReservedBlock] | None = None
    try:
        granted = yield request.answer
    finally:
        if granted is None:
            give_up(session, request)
    return granted[0]


def _seal(
    session: Session,
    edge: Edge,
    items: Sequence[Item],
    indexes: list[int],
    plan: _Plan,
    block: ReservedBlock,
    tickets: list[Ticket] | None = None,
) -> list[Ticket]:
    """Write the header, store the ready word, queue the message; `tickets`: those that were given out already. Lock
    held."""
    if block.arena is not session.arena:
        raise BrokerLost("the broker was started anew while the payload was copied", path=session.tried)
    members: list[Member] = []
    given: list[Ticket] = []
    for (rid, _, _, flags, attempt, readers), index, laid in zip(items, indexes, plan.laid, strict=True):
        member = (rid, index, attempt, flags, readers, laid.packed, laid.nbytes)
        members.append(tuple.__new__(Member, member))
        given.append(Ticket(edge, rid, index))
    if tickets is None:
        tickets = given
    begun = session.outgoing.begun(item.rid for item in items)
    data = (plan.data_offset, plan.data_bytes)

    message = msg.Seal(0, session.seen, edge, block.handle, data[0], tuple(members), (), plan.stride)

    def tell() -> tuple[Told, ...]:
        streams = sealing.note(session, message)
        for ticket, member, stream in zip(tickets, members, streams, strict=True):
            ticket.index, ticket.stream = member.index, stream
            if session.outgoing.unsure and stream.unsure:
                # After lost notices it means what was known when the stream was opened.
                message.seen = min(message.seen, stream.seen)
        return telling.tell(session, edge, block, data[0], plan.stride, members, streams) if session.pairs else ()

    flags = arena_blocks.EVEN if plan.stride else 0
    sealing.write_header(session, block, data, pack_meta(edge, members, begun), len(members), flags)
    sealing.seal(session, block, message, tickets, tell)
    if len(members) == 1 and not (members[0].attempt or members[0].flags):
        again.note(session, edge, members[0], tickets[0], plan.laid[0], (plan.length, *data), begun)
    return tickets
