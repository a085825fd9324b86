"""How payloads and blocks go: taken, released, dropped, withdrawn; the one place that frees."""

from __future__ import annotations

from connector.core.directory import alike, delivery, direct, holding, lives, lots
from connector.core.directory.effects import DropHolds, FreeEntry
from connector.core.directory.events import Flags, Hold, Released, Returned, Span, Taken
from connector.core.directory.objects import Block, Chunk, Session, Stream
from connector.core.directory.state import State
from connector.core.directory.transitions import BlockState, ShareState, next_block, next_share


def taken(state: State, event: Taken) -> None:
    """The caller has the payloads: their credits return. What is not known was released already."""
    session = state.session(event.session)
    for span in event.spans:
        take_span(state, session, span)


def take_span(state: State, session: Session, span: Span) -> None:
    block = holding.block_of(state, span.handle)
    if block is None or direct.wait_for_seal(block, session, span, "take"):
        return
    for lot in lots.cut(block, span, session.id):
        alike.take(state, session, lot)
    for chunk in _held(block, session, span):
        if chunk.shares[span.reader] is not ShareState.DELIVERED:
            continue
        chunk.shares[span.reader] = next_share(ShareState.DELIVERED, "take")
        stream = chunk.stream
        lives.touched(session, stream.life)
        state.tell("taken", stream.edge, stream.rid, chunk.index, session.id)
        delivery.return_credit(state, session, chunk, span.reader)


def released(state: State, event: Released) -> None:
    """Idempotent: what is not known was released before."""
    session = state.session(event.session)
    for span in event.spans:
        release_span(state, session, span)


def release_span(state: State, session: Session, span: Span) -> None:
    block = holding.block_of(state, span.handle)
    if block is None or direct.wait_for_seal(block, session, span, "release"):
        return
    for lot in lots.cut(block, span, session.id):
        alike.release(state, session, lot)
    for chunk in _held(block, session, span):
        release(state, session, chunk, span.reader)
    if session.inspecting:
        direct.end_looks(state, session, block, span)


def _held(block: Block, session: Session, span: Span) -> list[Chunk]:
    """What the session holds of the span, but for what is in lots."""
    if span.reader < 0 or not block.members:
        return []
    reader, number = span.reader, session.id
    return [
        chunk
        for chunk in block.members[span.first : span.first + span.count]
        if chunk is not None and reader < len(chunk.holders) and chunk.holders[reader] == number
    ]


def end_look(state: State, session: Session, hold: Hold) -> None:
    """An inspector is done with a block."""
    block = session.inspecting.pop(hold, None)
    if block is not None:
        block.outstanding -= 1
        free_if_done(state, block)


def release(state: State, session: Session, chunk: Chunk, reader: int) -> None:
    """The session lets go of a payload that it holds."""
    stream = chunk.stream
    lives.touched(session, stream.life)
    holding.end(session, chunk.block, 1, chunk.nbytes)
    if chunk.shares[reader] is ShareState.DELIVERED:
        delivery.return_credit(state, session, chunk, reader)
    state.tell("released", stream.edge, stream.rid, chunk.index, session.id)
    share = stream.shares[reader]
    share.held -= 1
    share.released_any = True
    _pair_done(state, chunk, reader, "release")


def drop_pending(state: State, chunk: Chunk, reader: int) -> bool:
    """Release a share whose reader was never told; True if it was one."""
    if chunk.shares[reader] is not ShareState.PENDING:
        return False
    direct.keep_for_all(state, chunk.block, chunk.member)
    _pair_done(state, chunk, reader, "drop")
    return True


def _pair_done(state: State, chunk: Chunk, reader: int, verb: str) -> None:
    shares, stream, block = chunk.shares, chunk.stream, chunk.block
    shares[reader] = next_share(shares[reader], verb)
    chunk.holders[reader] = 0
    block.outstanding -= 1
    state.last_progress = state.now
    if len(shares) == 1 or all(share is ShareState.RELEASED for share in shares):
        _forget(state, chunk)
        count_gone(state, chunk)
        free_if_done(state, block)
    share = stream.shares[reader]
    if share.told_end or share.closed:
        # Before that nothing is settled by it.
        lives.settle(state, stream)


def _forget(state: State, chunk: Chunk) -> None:
    chunk.block.members[chunk.member] = None
    state.shelf.payloads -= 1
    if chunk.stream.live.get(chunk.index) is chunk:
        del chunk.stream.live[chunk.index]


def count_gone(state: State, chunk: Chunk) -> None:
    if not chunk.flags & Flags.END_ONLY:
        state.count_released(chunk.stream.at, 1)


def withdraw(state: State, chunk: Chunk) -> None:
    """A chunk that no reader was told of makes way for a higher attempt."""
    if chunk.flags & (Flags.LAST | Flags.END_ONLY):
        chunk.stream.end = None
    chunk.block.outstanding -= sum(share is ShareState.PENDING for share in chunk.shares)
    chunk.shares = [ShareState.RELEASED] * len(chunk.shares)
    direct.keep_for_all(state, chunk.block, chunk.member)
    state.tell("replaced", chunk.stream.edge, chunk.stream.rid, chunk.index, 0)
    _forget(state, chunk)
    count_gone(state, chunk)
    free_if_done(state, chunk.block)


def void_stream(state: State, stream: Stream) -> tuple[int, int, int]:
    """Drop all that is left of a stream: (payloads freed, their bytes, payloads still held).

    What a reader was told of stays until its answer: it gets DropHolds.
    """
    freed = size = held = 0
    drops: dict[int, list[Hold]] = {}
    for chunk in lots.chunks(stream):
        chunk.void = True
        for reader in range(len(chunk.shares)):
            drop_pending(state, chunk, reader)
            if chunk.holders[reader]:
                hold = Hold(chunk.block.handle, chunk.member, reader)
                drops.setdefault(chunk.holders[reader], []).append(hold)
        if all(share is ShareState.RELEASED for share in chunk.shares):
            freed += 1
            size += chunk.nbytes
        else:
            held += 1
    for session, holds in sorted(drops.items()):
        state.emit(DropHolds(session, tuple(holds)))
    return freed, size, held


def returned(state: State, event: Returned) -> None:
    """A session gives reserved blocks back unwritten. One that is not its own is ignored."""
    session = state.session(event.session)
    for handle in event.handles:
        block = session.reserved.get(handle.offset)
        if block is not None and block.handle == handle:
            give_back(state, session, block, "return")


def give_back(state: State, session: Session, block: Block, verb: str) -> None:
    del session.reserved[block.handle.offset]
    session.reserved_bytes -= block.length
    state.reserved_bytes -= block.length
    _free(state, block, verb)


def free_if_done(state: State, block: Block) -> None:
    """The only way a sealed block is freed."""
    if block.state is BlockState.SEALED and block.outstanding == 0:
        _free(state, block, "last release")


def _free(state: State, block: Block, verb: str) -> None:
    block.state = next_block(block.state, verb)
    state.allocator.free(block.handle)
    if block.early:
        direct.drop_early(state, block)
    del state.blocks[block.handle.offset]
    state.entries.append(block.entry)
    if block.edge is not None:
        state.shelf.remove(block)
        state.edge(block.edge).used -= block.length
    elif block.meant is not None:
        state.edge(block.meant).reserved -= block.length
    state.counters["blocks_freed"] += 1
    state.room_changed = True
    state.last_progress = state.now
    state.emit(FreeEntry(block.entry, block.handle))
