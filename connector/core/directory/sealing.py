"""A block was sealed: each member becomes a chunk of its stream, or its putter is told why not."""

from __future__ import annotations

from collections.abc import Iterator

from connector.core.directory import alike, delivery, direct, lives, lots, releasing, unclaimed
from connector.core.directory.effects import PutFailed, PutNoted
from connector.core.directory.events import Flags, Member, Sealed, SealedRun, Told
from connector.core.directory.objects import Block, Chunk, EdgeState, Life, Session, Stream, with_one
from connector.core.directory.state import State
from connector.core.directory.transitions import ShareState, next_block
from connector.core.errors import (
    AlreadyPut,
    ConnectorError,
    InvalidPayload,
    ProtocolViolation,
    ReadersMismatch,
    StreamEnded,
    WriterDied,
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
    block.data_offset, block.stride = event.data_offset, event.stride
    edge.used += block.length
    block.serial = state.serial + 1
    state.serial += len(event.members)
    state.shelf.add(block)
    state.last_progress = state.now
    if event.unsaid:
        block.maybe = session.peers
    elif alike.seal(state, session, edge, block, event):
        if block.early:
            direct.apply_early(state, block)
        return
    told = direct.whom(event.told, block, len(event.members)) if event.told or block.early else {}
    # One pair more, so that the block is not freed before its last member has come.
    block.outstanding += 1
    for place, member in enumerate(event.members):
        block.members.append(None)
        try:
            if event.strange:
                raise _of_no_use_here(edge, member)
            _place(state, session, edge, event, block, place, member)
        except ConnectorError as error:
            _refuse(state, session, edge, event, place, error)
        if block.members[place] is None:
            direct.keep_for_all(state, block, place)
        if place in told:
            direct.has_it(state, told[place], block, place)
    if block.early:
        direct.apply_early(state, block)
    block.outstanding -= 1
    releasing.free_if_done(state, block)


def one_by_one(run: SealedRun, first: int) -> Iterator[Sealed]:
    """The Seals of a run, from the one of number `first` on."""
    told = (tuple.__new__(Told, (0, 1, run.told)),)
    who, where = (run.now, run.session), run.data_offset
    for number, (rid, index, handle) in enumerate(run.chunks, run.number):
        if number >= first:
            member = tuple.__new__(Member, (rid, index, 0, 0, run.readers, run.manifest, run.nbytes))
            yield Sealed(*who, number, run.seen, run.edge, handle, where, (member,), told)


def _of_no_use_here(edge: EdgeState, member: Member) -> WriterDied:
    return WriterDied("the writer died before it had said that it was in this use", rid=member.rid, edge=str(edge.edge))


def _own_block(session: Session, event: Sealed) -> Block | None:
    block = session.reserved.get(event.handle.offset)
    if block is None or block.handle != event.handle:
        return None
    last = event.data_offset + max(len(event.members) - 1, 0) * event.stride
    if (event.data_offset | event.stride) % 64 or not 64 <= event.data_offset <= last <= block.length:
        return None
    return block


def _place(
    state: State, session: Session, edge: EdgeState, event: Sealed, block: Block, place: int, member: Member
) -> None:
    rid = member.rid
    life = session.bound.get(rid) if not session.is_behind(rid) else None
    stream = life.streams.get(edge.edge) if life is not None else None
    if stream is None or session.id not in stream.writers:
        life = lives.life_for_put(state, session, edge.edge, rid, event.seen)
        if edge.edge in life.counts:
            _admit_done(life.counts[edge.edge], edge.edge, member)
            state.emit(PutNoted(session.id, event.number, place, "ignored"))
            return
        _refuse_behind(edge, life, member)
        lives.join(state, session, life)
        stream = lives.stream_of(state, life, edge.edge)
    try:
        outcome = _admit(stream, member)
    except ConnectorError as error:
        _poison(state, stream, member, error)
        raise
    stream.writers = with_one(stream.writers, session.id)
    if outcome != "new":
        state.emit(PutNoted(session.id, event.number, place, outcome))
        if outcome == "ignored":
            return
        again = lots.chunk_at(stream, member.index)
        assert again is not None
        releasing.withdraw(state, again)
    _store(state, session, stream, member, block, place)


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


def _admit(stream: Stream, member: Member) -> str:
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
        return _admit_again(stream, member, facts)
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


def _admit_again(stream: Stream, member: Member, facts: dict[str, object]) -> str:
    """A chunk that was put before: only a higher attempt may replace it, and only untold."""
    chunk = lots.chunk_at(stream, member.index)
    known = stream.attempts.get(member.index, 0) if stream.attempts else 0
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


def _store(state: State, session: Session, stream: Stream, member: Member, block: Block, place: int) -> None:
    _, index, attempt, flags, readers, manifest, nbytes = member
    if not stream.readers:
        delivery.open_shares(state, stream, readers)
    if flags & Flags.LAST and index + 1 in stream.live:
        # The END mark that follows says it; a reader is told of one END.
        flags &= ~Flags.LAST
    shares = [ShareState.RELEASED if share.closed else ShareState.PENDING for share in stream.shares]
    chunk = Chunk(
        stream, index, attempt, flags, session.id, block, place, manifest, nbytes, session.label,
        state.now, shares, [0] * readers,
    )  # fmt: skip
    stream.note_put(index)
    if attempt:
        if stream.attempts is None:
            stream.attempts = {}
        stream.attempts[index] = attempt
    if flags & Flags.END_ONLY:
        stream.end = index
    elif flags & Flags.LAST:
        stream.end = index + 1
    _count(state, stream, chunk)
    due = shares.count(ShareState.PENDING)
    if not due:
        releasing.count_gone(state, chunk)
        lives.settle(state, stream)
        return
    block.members[place] = chunk
    block.outstanding += due
    stream.live[index] = chunk
    state.shelf.payloads += 1
    delivery.touch(state, stream)
    if not stream.watched:
        unclaimed.watch(state, stream)


def _count(state: State, stream: Stream, chunk: Chunk) -> None:
    state.tell("sealed", stream.edge, stream.rid, chunk.index, chunk.session, chunk.nbytes)
    if not chunk.flags & Flags.END_ONLY:
        state.count_sealed(stream.at, 1, chunk.nbytes)


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
