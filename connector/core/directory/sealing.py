"""A block was sealed: each member becomes a chunk of its stream, or its putter is told why not."""

from __future__ import annotations

from connector.core.directory import delivery, lives, releasing, unclaimed
from connector.core.directory.effects import PutFailed, PutNoted
from connector.core.directory.events import Flags, Member, Sealed
from connector.core.directory.objects import Block, Chunk, EdgeState, Life, Session, Stream
from connector.core.directory.state import State
from connector.core.directory.transitions import ShareState, next_block
from connector.core.errors import (
    AlreadyPut,
    ConnectorError,
    InvalidPayload,
    ProtocolViolation,
    ReadersMismatch,
    StreamEnded,
)
from connector.core.names import Edge


def seal(state: State, event: Sealed) -> None:
    """Apply a step's payloads. A refused member never keeps another one back."""
    session = state.session(event.session)
    edge = state.edge(event.edge)
    block = _own_block(session, event)
    if block is None:
        error = ProtocolViolation(
            "the sealed block is not reserved by this session", edge=str(event.edge), offset=event.handle.offset
        )
        for place, member in enumerate(event.members):
            _refuse(state, session, edge, event, place, error)
            life = session.bound.get(member.rid)
            stream = life.streams.get(event.edge) if life else None
            if stream is not None and session.id in stream.writers:
                _poison(state, stream, member, error)
        return
    del session.reserved[block.handle.offset]
    session.reserved_bytes -= block.length
    state.reserved_bytes -= block.length
    block.state = next_block(block.state, "seal")
    if block.meant is not None:
        state.edge(block.meant).reserved -= block.length
    block.edge = event.edge
    block.data_offset = event.data_offset
    edge.used += block.length
    # One pair more, so that the block is not freed before its last member has come.
    block.outstanding += 1
    for place in range(len(event.members)):
        block.members.append(None)
        try:
            _place(state, session, event, block, place)
        except ConnectorError as error:
            _refuse(state, session, edge, event, place, error)
    block.outstanding -= 1
    releasing.free_if_done(state, block)


def _own_block(session: Session, event: Sealed) -> Block | None:
    block = session.reserved.get(event.handle.offset)
    if block is None or block.handle != event.handle:
        return None
    if event.data_offset % 64 or not 64 <= event.data_offset <= block.length:
        return None
    return block


def _place(state: State, session: Session, event: Sealed, block: Block, place: int) -> None:
    member = event.members[place]
    life = lives.life_for_put(state, session, event.edge, member.rid, event.seen)
    message = (session.id, event.number, place)
    if event.edge in life.counts:
        _admit_done(life.counts[event.edge], event.edge, member)
        state.emit(PutNoted(session.id, event.number, place, "ignored"))
        return
    _refuse_behind(state.edge(event.edge), life, member)
    lives.join(state, session, life)
    stream = lives.stream_of(state, life, event.edge)
    try:
        outcome = _admit(stream, member, message)
    except ConnectorError as error:
        _poison(state, stream, member, error)
        raise
    stream.writers.add(session.id)
    if outcome == "ignored":
        state.emit(PutNoted(session.id, event.number, place, outcome))
        return
    if outcome == "replaced":
        releasing.withdraw(state, stream.chunks[member.index])
        state.emit(PutNoted(session.id, event.number, place, outcome))
    _store(state, stream, member, block, place, message)


def _refuse_behind(edge: EdgeState, life: Life, member: Member) -> None:
    """A first chunk of an older life than the edge is in: readers never go back to it."""
    newest = max([edge.gone.get(life.rid, 0), *(stream.life.number for stream in edge.streams.get(life.rid, ()))])
    if edge.edge not in life.streams and newest > life.number:
        raise AlreadyPut(
            "the edge is in a newer use of the rid, which another session began; finish or begin the rid to join it",
            rid=life.rid,
            edge=str(edge.edge),
            index=member.index,
        )


def _admit(stream: Stream, member: Member, message: tuple[int, int, int]) -> str:
    """'new', 'replaced' or 'ignored'; raises the refusal. Changes nothing."""
    if stream.failure is not None:
        raise stream.failure.anew()
    facts = {"rid": stream.rid, "edge": str(stream.edge), "index": member.index}
    if stream.readers and member.readers != stream.readers:
        raise ReadersMismatch(
            "the stream was opened for another number of readers",
            readers=member.readers,
            opened_for=stream.readers,
            **facts,
        )
    if member.flags & Flags.END_ONLY and stream.end == member.index:
        return "ignored"
    if stream.was_put(member.index):
        return _admit_again(stream, member, message, facts)
    if stream.end is not None and member.index >= stream.end:
        raise StreamEnded("a chunk behind the stream's END", end=stream.end, **facts)
    _check_end(stream, member, facts)
    return "new"


def _check_end(stream: Stream, member: Member, facts: dict[str, object]) -> None:
    """END may not come before a chunk that was put; said twice of the same count, it is the same END."""
    if not member.flags & (Flags.LAST | Flags.END_ONLY) or member.index + 1 >= stream.high:
        return
    if member.flags & Flags.END_ONLY or stream.end != member.index + 1:
        raise InvalidPayload("END lies before a chunk that was put already", high=stream.high, **facts)


def _admit_done(count: int, edge: Edge, member: Member) -> None:
    """The life's stream was handed over whole: a re-send is ignored, anything else refused."""
    facts = {"rid": member.rid, "edge": str(edge), "index": member.index}
    if member.index >= count and not (member.flags & Flags.END_ONLY and member.index == count):
        raise StreamEnded("a chunk behind the stream's END", end=count, **facts)
    if member.index < count and member.attempt == 0:
        raise AlreadyPut("this index was put and handed over already; finish or begin the rid to use it anew", **facts)


def _admit_again(stream: Stream, member: Member, message: tuple[int, int, int], facts: dict[str, object]) -> str:
    """A chunk that was put before: only a higher attempt may replace it, and only untold."""
    chunk = stream.chunks.get(member.index)
    if chunk is not None and chunk.message == message:
        return "ignored"
    known = stream.attempts.get(member.index, 0)
    if member.attempt <= known:
        if stream.end is not None and member.index >= stream.end:
            raise StreamEnded("a chunk behind the stream's END", end=stream.end, **facts)
        raise AlreadyPut(
            "this index was put already; a re-send needs a higher attempt, a new use of the rid needs finish or begin",
            attempt=member.attempt,
            known_attempt=known,
            **facts,
        )
    if chunk is None or not _is_untold(chunk):
        return "ignored"
    _check_end(stream, member, facts)
    return "replaced"


def _is_untold(chunk: Chunk) -> bool:
    """No reader has it, or had it; one that finished before is none."""
    return all(
        state is ShareState.PENDING or (state is ShareState.RELEASED and share.cursor <= chunk.index)
        for state, share in zip(chunk.shares, chunk.stream.shares, strict=True)
    )


def _store(
    state: State, stream: Stream, member: Member, block: Block, place: int, message: tuple[int, int, int]
) -> None:
    if not stream.readers:
        delivery.open_shares(state, stream, member.readers)
    flags = member.flags
    if flags & Flags.LAST and member.index + 1 in stream.chunks:
        # The END mark that follows says it; a reader is told of one END.
        flags &= ~Flags.LAST
    state.serial += 1
    chunk = Chunk(
        serial=state.serial,
        stream=stream,
        index=member.index,
        attempt=member.attempt,
        flags=flags,
        message=message,
        block=block,
        member=place,
        manifest=member.manifest,
        nbytes=member.nbytes,
        writer=state.sessions[message[0]].label,
        sealed_at=state.now,
        shares=[ShareState.RELEASED if share.closed else ShareState.PENDING for share in stream.shares],
        holders=[0] * member.readers,
    )
    stream.note_put(member.index)
    if member.attempt:
        stream.attempts[member.index] = member.attempt
    if flags & Flags.END_ONLY:
        stream.end = member.index
    elif flags & Flags.LAST:
        stream.end = member.index + 1
    _count(state, stream, chunk)
    due = sum(share is ShareState.PENDING for share in chunk.shares)
    if not due:
        releasing.count_gone(state, chunk)
        lives.settle(state, stream)
        return
    block.members[place] = chunk
    block.outstanding += due
    stream.chunks[member.index] = chunk
    state.shelf.add(chunk)
    delivery.touch(state, stream)
    unclaimed.watch(state, stream)


def _count(state: State, stream: Stream, chunk: Chunk) -> None:
    state.tell("sealed", stream.edge, stream.rid, chunk.index, chunk.message[0], f"{chunk.nbytes} B")
    state.last_progress = state.now
    if chunk.flags & Flags.END_ONLY:
        return
    edge = state.edge(stream.edge)
    edge.payloads_sealed += 1
    edge.bytes_sealed += chunk.nbytes
    state.counters["payloads_sealed"] += 1
    state.counters["bytes_sealed"] += chunk.nbytes


def _refuse(state: State, session: Session, edge: EdgeState, event: Sealed, place: int, error: ConnectorError) -> None:
    """The putter's ticket gets the error."""
    member = event.members[place]
    state.counters["puts_refused"] += 1
    edge.refused += 1
    state.tell("refused", edge.edge, member.rid, member.index, session.id, type(error).__name__)
    state.emit(PutFailed(session.id, event.number, place, error))


def _poison(state: State, stream: Stream, member: Member, error: ConnectorError) -> None:
    """If the refusal leaves a hole, the stream fails with it."""
    if stream.failure is None and not stream.was_put(member.index):
        if stream.end is None or member.index < stream.end:
            lives.fail_stream(state, stream, error)
