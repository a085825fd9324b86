"""How a payload is taken: subscribed once, claimed by name, waited for at the broker, opened as views."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from connector.client.inbox import Channel, Taken
from connector.client.payload import Payload, open_payload
from connector.client.rid_queue import Arrived, EndMark, FailMark, TakeWait
from connector.client.session import Session
from connector.client.verbs import Verb
from connector.core.directory.events import Flags
from connector.core.errors import Broken, ConnectorError, RequestAborted
from connector.wire import messages as msg

if TYPE_CHECKING:
    from connector.client.requests import Request

#: How long the broker may take to accept a subscription, in seconds.
SUBSCRIBE_TIMEOUT = 10.0


class Polled(dict[str, list[Payload]]):
    """What poll() found: payloads by rid, in order. `ended`: rids whose stream is complete with what was
    polled so far; `failed`: rids on which nothing more comes, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: set[str] = set()
        self.failed: dict[str, ConnectorError] = {}

    def __bool__(self) -> bool:
        return bool(len(self) or self.ended or self.failed)


def subscribe(session: Session, channel: Channel, push: bool, timeout: float = SUBSCRIBE_TIMEOUT) -> Verb[None]:
    """Become the channel's reader, once, within `timeout` seconds; ReadersMismatch or ReaderTaken say why not."""
    with session.lock:
        session.must_be_open()
        if channel.subscribed and (channel.push or not push):
            return
        channel.push = channel.push or push
        request = session.ask(channel.subscription, min(timeout, SUBSCRIBE_TIMEOUT))
        # At once: what the broker sends behind its answer must find the channel.
        channel.subscribed = True
    session.push()
    accepted = False
    try:
        yield request.answer
        accepted = not request.answer.failed()
    finally:
        if not accepted:
            with session.lock:
                channel.subscribed = False
                session.cancel(request)


def next_taken(session: Session, channel: Channel, rid: str, timeout: float, stream: bool) -> Verb[Taken]:
    """The next payload of a rid; for a stream also its bare END. Waits at most `timeout` seconds."""
    until = time.monotonic() + timeout
    yield from subscribe(session, channel, push=False, timeout=timeout)
    while True:
        with session.lock:
            session.must_be_open()
            found = _taken(session, channel, rid, stream)
            if found is not None:
                return found
            left = max(until - time.monotonic(), 0.0)
            request, wait = _wait(session, channel, rid, left, stream)
        session.push()
        came = False
        try:
            came = yield request.answer
        finally:
            if not came:
                _give_up(session, channel, rid, request, wait)


def _taken(session: Session, channel: Channel, rid: str, stream: bool) -> Taken | None:
    """What is here to be taken, if anything; raises the rid's failure. Lock held."""
    found = channel.pop(rid, stream)
    if found is None:
        if rid in session.outgoing.aborted:
            reason = session.outgoing.aborted[rid].reason
            raise RequestAborted("the request was aborted", rid=rid, edge=str(channel.edge), reason=reason)
        return None
    if found.arrived is not None:
        session.holds.take(found.arrived.arena.uuid, found.arrived.hold)
    if not found.ends and rid not in channel.claimed:
        # What follows is for whoever takes by name, not for poll.
        _claim(channel, rid)
        session.post(msg.Claim(channel.edge, channel.reader, rid))
    return found


def _wait(session: Session, channel: Channel, rid: str, timeout: float, stream: bool) -> tuple[Request, TakeWait]:
    _claim(channel, rid)
    # Await claims the rid, too; a Claim before it would be answered by what lies there, and Await would wait on.
    request = session.ask(lambda n: msg.Await(n, channel.edge, channel.reader, rid, timeout), timeout)
    wait = TakeWait(request.number, request.answer, stream)
    channel.wait_for(rid, wait)
    return request, wait


def _claim(channel: Channel, rid: str) -> None:
    channel.claimed.add(rid)
    channel.fresh.pop(rid, None)


def _give_up(session: Session, channel: Channel, rid: str, request: Request, wait: TakeWait) -> None:
    """The wait ended without a payload for the caller. What came meanwhile is for the next one."""
    with session.lock:
        for number in channel.forget_wait(rid, wait):
            session.requests.drop(number)
        session.cancel(request)
        if rid not in channel.queues:
            channel.claimed.discard(rid)
    session.push()


def opened(session: Session, channel: Channel, arrived: Arrived, last: bool, copy: bool | None) -> Payload:
    """A taken payload as views, or copies. A broken one ends its stream here: nothing is skipped over."""
    owned = channel.readers > 1 if copy is None else copy
    try:
        return open_payload(arrived, session.mapped(arrived.arena), owned, last, session.free)
    except Broken as error:
        told = arrived.descriptor
        with session.lock:
            dropped, answered = channel.break_off(told.rid, told.life, error)
            session.give_up(dropped)
            for request in answered:
                session.requests.drop(request)
        session.later()
        raise


def polled(session: Session, channel: Channel, copy: bool | None) -> Polled:
    """What has arrived for poll; never waits."""
    found = Polled()
    marks = []
    with session.lock:
        session.must_be_open()
        items = channel.poll_all() if channel.fresh else []
        for rid, item in items:
            if type(item) is Arrived:
                session.holds.take(item.arena.uuid, item.hold)
            else:
                marks.append((rid, item))
    ends = {(rid, item.life) for rid, item in marks if isinstance(item, EndMark)} if marks else ()
    for rid, item in items:
        if isinstance(item, FailMark):
            found.failed[rid] = item.error
        elif isinstance(item, EndMark):
            found.ended.add(rid)
        elif rid in found.failed:
            session.free(item.arena.uuid, item.hold)
        else:
            last = bool(item.descriptor.flags & Flags.LAST) and (rid, item.descriptor.life) in ends
            try:
                payload = opened(session, channel, item, last, copy)
            except Broken as error:
                found.failed[rid] = error
            else:
                found.setdefault(rid, []).append(payload)
    if items:
        # What was taken need not be said at once.
        session.later()
    return found
