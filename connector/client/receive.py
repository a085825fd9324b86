"""What each message of the broker does to the session. The session's lock is held."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from connector.client.blocks import ReservedBlock
from connector.client.inbox import Channel
from connector.client.pairs import Pair, Way
from connector.client.rid_queue import Arrived
from connector.core.directory.effects import Descriptor, Notice
from connector.core.errors import BrokerStopping, ConnectorError, ProtocolViolation, RequestAborted
from connector.core.names import Edge
from connector.wire import messages as msg

if TYPE_CHECKING:
    from connector.client.session import Session

log = logging.getLogger("connector.client")

#: Voided payloads that are remembered until they come.
MOST_VOIDED = 4096


def _grant(session: Session, message: msg.Grant) -> None:
    """Blocks for one who waits, or for the shelf. Nobody waits any more: back they go."""
    assert session.arena is not None
    blocks = [ReservedBlock(session.arena, handle, length) for handle, length in message.blocks]
    if not session.requests.answer(message.request, blocks):
        session.give_back(blocks)


def _failure(session: Session, message: msg.Failure) -> None:
    if message.request:
        session.requests.fail(message.request, message.error)
        return
    log.error("the broker refused a message: %s", message.error)


def _answer(session: Session, message: msg.Answer) -> None:
    session.requests.answer(message.request, message.facts)


def _rows(session: Session, message: msg.Rows) -> None:
    session.requests.answer(message.request, message)


def _shown(session: Session, message: msg.Shown) -> None:
    """An inspected payload. If nobody waits for it any more, the look ends at once."""
    assert session.arena is not None
    arrived = Arrived.of(message.descriptor, session.arena)
    if not session.requests.answer(message.request, arrived):
        session.holds.free(session.arena.uuid, arrived.hold)


def deliver(session: Session, descriptors: Iterable[Descriptor | Arrived]) -> None:
    arena = session.arena
    assert arena is not None
    for came in descriptors:
        arrived = came if isinstance(came, Arrived) else Arrived.of(came, arena)
        descriptor = arrived.descriptor
        channel = session.channels.get((descriptor.edge, descriptor.reader))
        if channel is None:
            session.holds.free(arena.uuid, arrived.hold)
            continue
        back, answered = channel.deliver(arrived)
        for hold in back:
            # A payload that this process still has, views and all, is given back when they die.
            if hold not in session.holds.held:
                session.holds.free(arena.uuid, hold)
        if answered or channel.poll_waits:
            _answered(session, channel, answered)


def _next(session: Session, message: msg.Next) -> None:
    try:
        came = session.coming.read(message.frame)
    except ProtocolViolation as error:
        log.error("what the broker told cannot be read: %s", error)
        return
    deliver(session, came)


def _answered(session: Session, channel: Channel, requests: list[int]) -> None:
    for request in requests:
        session.requests.drop(request)
    _wake_pollers(session, channel)


def _wake_pollers(session: Session, channel: Channel) -> None:
    while channel.fresh and channel.poll_waits:
        session.requests.answer(channel.poll_waits.popleft(), True)


def _ended(session: Session, message: msg.Ended) -> None:
    channel = session.channels.get((message.edge, message.reader))
    if channel is not None:
        _answered(session, channel, channel.end(message.rid, message.life, message.behind))


def _stream_failed(session: Session, message: msg.StreamFailed) -> None:
    """To the writer: every put from now on raises it. To the reader: behind what came in order."""
    if message.reader < 0:
        if not session.reopened(message.rid, message.applied):
            session.outgoing.poison(message.edge, message.rid, message.error)
        return
    channel = session.channels.get((message.edge, message.reader))
    if channel is not None:
        answered = channel.fail(message.rid, message.life, message.error, message.behind)
        _answered(session, channel, answered)


def _put_failed(session: Session, message: msg.PutFailed) -> None:
    log.warning("a put was refused: %s", message.error)
    session.outgoing.put_failed(message.number, message.member, message.error)


def _put_noted(session: Session, message: msg.PutNoted) -> None:
    session.outgoing.put_noted(message.number, message.member, message.outcome)


def _notices(session: Session, message: msg.Notices) -> None:
    """Aborts: puts raise, unread payloads go back, whoever waits for the rid is told."""
    for notice in message.notices:
        session.seen = max(session.seen, notice.number)
        if session.reopened(notice.rid, notice.applied):
            _drop_former(session, notice)
        else:
            _abort(session, notice)
    if message.lost:
        session.outgoing.unsure = True
        for stream in session.outgoing.streams.values():
            stream.unsure = True
    # A node that is idle says nothing else, and the broker keeps the next ones until it knows that these were heard.
    session.post(msg.Pong())


def _drop_former(session: Session, notice: Notice) -> None:
    """The session has finished or begun the rid since: it is in a later use, of which nothing is dropped."""
    for channel in session.channels.values():
        dropped = channel.drop_lives(notice.rid, notice.life)
        session.give_up(dropped)


def _abort(session: Session, notice: Notice) -> None:
    session.outgoing.abort(notice.rid, notice.reason, notice.life, notice.edges)
    for channel in session.channels.values():
        error = _aborted(notice.rid, notice.reason, channel.edge)
        told_by_poll = channel.meet(notice.rid) or channel.push
        dropped, answered = channel.break_off(notice.rid, notice.life, error)
        session.give_up(dropped)
        if notice.rid in channel.claimed or not told_by_poll:
            channel.forget(notice.rid)
        _answered(session, channel, answered)
    for request in session.requests:
        if request.rids == (notice.rid,):
            session.requests.fail(request.number, _aborted(notice.rid, notice.reason, None))
            session.post(msg.Cancel(request.number))


def _aborted(rid: str, reason: str, edge: Edge | None) -> ConnectorError:
    return RequestAborted("the request was aborted", rid=rid, edge=str(edge) if edge else None, reason=reason)


def _drop(session: Session, message: msg.Drop) -> None:
    """Void payloads: those nobody took go back now, the others with their last view."""
    for hold in message.holds:
        known = hold in session.holds.held
        for channel in session.channels.values():
            if hold.reader == channel.reader and (dropped := channel.discard(hold)):
                session.give_up(dropped)
                known = True
        if not known and message.writer and message.writer not in session.pairs:
            # All that this writer told was read.
            session.give_up_holds([hold])
        elif not known:
            # The writer's word of it may be on its way.
            session.voided[hold] = message.writer
            while len(session.voided) > MOST_VOIDED:
                session.voided.popitem(last=False)


def _peer(session: Session, message: msg.Peer) -> None:
    """A socket to another session came with it, unless there was no descriptor left for it."""
    if session.passed:
        pair = session.pairs[message.session] = Pair(message.session, session.passed.popleft())
        session.introduced.append(pair)


def _direct(session: Session, message: msg.Direct) -> None:
    """Streams whose reader may be told directly, or not any more. What was said of a former use is nothing to this."""
    for edge, rid, life, number, applied in message.ways:
        stream = session.outgoing.streams.get((edge, rid))
        if stream is not None and not session.reopened(rid, applied):
            pair = session.pairs.get(number)
            stream.way = Way(pair, life) if pair is not None and not pair.deaf else None


def _recall(session: Session, message: msg.Recall) -> None:
    session.give_back(session.blocks.take_all())


def _ping(session: Session, message: msg.Ping) -> None:
    session.post(msg.Pong())


def _resend(session: Session, message: msg.Resend) -> None:
    """Numbered messages were lost on the way: say them again, in order, before anything newer."""
    session.say_again(message.number)


def _stopping(session: Session, message: msg.Stopping) -> None:
    """Whoever waits was answered by the broker; those who come now learn it at once."""
    session.stopping = True
    session.lost_reason = "it is stopping"
    for request in session.requests:
        if request.message is not None:
            session.requests.fail(request.number, BrokerStopping("the broker is stopping", path=session.tried))


#: One handler a message that a broker may send to a session.
HANDLERS: dict[type[msg.Message], Callable[[Session, Any], None]] = {
    msg.Grant: _grant,
    msg.Failure: _failure,
    msg.Answer: _answer,
    msg.Rows: _rows,
    msg.Shown: _shown,
    msg.Deliver: lambda session, message: deliver(session, message.descriptors),
    msg.Next: _next,
    msg.Peer: _peer,
    msg.Direct: _direct,
    msg.Ended: _ended,
    msg.StreamFailed: _stream_failed,
    msg.PutFailed: _put_failed,
    msg.PutNoted: _put_noted,
    msg.Notices: _notices,
    msg.Drop: _drop,
    msg.Recall: _recall,
    msg.Ping: _ping,
    msg.Resend: _resend,
    msg.Stopping: _stopping,
    msg.Welcome: lambda session, message: None,
}
