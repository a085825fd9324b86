"""An edge as one node uses it: put on it, take from it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from connector.client import reading, writing
from connector.client.inbox import Taken
from connector.client.outgoing import Ticket
from connector.client.payload import Payload, open_ahead
from connector.client.reading import Polled
from connector.client.requests import GRACE, Request
from connector.client.session import Session
from connector.client.verbs import Verb, run
from connector.client.writing import Item
from connector.core import names
from connector.core.directory.events import Flags
from connector.core.errors import BrokerLost, InvalidPayload
from connector.core.names import Edge as EdgeName
from connector.wire import messages as msg

if TYPE_CHECKING:
    import torch

    from connector.client.node import NodeBase

#: Seconds that a take waits if its caller names no time-out.
TAKE_TIMEOUT = 30.0


class EdgeVerbs:
    """Verbs as generators, shared by the blocking and the asyncio edge."""

    def __init__(self, node: NodeBase, name: EdgeName, reader: int, readers: int, resume: bool) -> None:
        self._node = node
        self._session: Session = node.session
        self._session.opener = open_ahead
        self.name = name
        self.readers = readers
        self.channel = node.channel(name, reader, readers, resume)
        #: What poll asked the broker when it first found it away.
        self._question: Request | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _one(
        self,
        rid: str,
        payload: Mapping[str, torch.Tensor],
        index: int | None,
        last: bool | None,
        attempt: int,
        readers: int | None,
    ) -> list[Item]:
        self._node.check_usable()
        if index is not None:
            names.check_number(index, "index", names.MAX_INDEX)
        # Without index and `last` it is a full payload: a stream of one chunk.
        flags = Flags.LAST if (last or (last is None and index is None)) else 0
        return [self._item(rid, payload, index, flags, attempt, readers)]

    def _item(
        self,
        rid: str,
        payload: Mapping[str, torch.Tensor],
        index: int | None,
        flags: int,
        attempt: int,
        readers: int | None,
    ) -> Item:
        # A look at what is common; any other is asked about by name.
        if type(rid) is not str or not 0 < len(rid) <= names.MAX_RID_BYTES or not rid.isascii():
            names.check_rid(rid)
        if attempt != 0 or type(attempt) is not int:
            names.check_number(attempt, "attempt", names.MAX_INDEX)
        count = self.readers if readers is None else names.check_number(readers, "readers", names.MAX_READERS, 1)
        # As Item(...) makes it, without the call: this is done for every chunk.
        return tuple.__new__(Item, (rid, payload, index, flags, attempt, count))

    def _step(
        self, payloads: Mapping[str, Mapping[str, torch.Tensor]], last: Iterable[str] | bool, readers: int | None
    ) -> list[Item]:
        self._node.check_usable()
        if not isinstance(payloads, Mapping):
            raise InvalidPayload(f"put_many takes a dict of rid to payload, not {type(payloads).__name__}")
        ends = set(payloads) if last is True else set() if last is False else set(last)
        if ends - set(payloads):
            raise InvalidPayload("`last` names a rid that is not in the step", rid=min(ends - set(payloads)))
        return [
            self._item(rid, payload, None, Flags.LAST if rid in ends else 0, 0, readers)
            for rid, payload in payloads.items()
        ]

    def _end(self, rid: str) -> list[Item]:
        self._node.check_usable()
        return [self._item(rid, {}, None, Flags.END_ONLY, 0, None)]

    def _put_now(self, items: list[Item], timeout: float | None) -> list[Ticket] | None:
        """Tickets, unless room has to be waited for."""
        if timeout is not None:
            check_timeout(timeout)
        return writing.put_now(self._session, self.name, items) if items else []

    def _put_step(self, items: list[Item], timeout: float | None) -> Verb[list[Ticket]]:
        if timeout is None:
            timeout = float(self._session.limits.get("put_timeout", 30.0))
        return writing.put_step(self._session, self.name, items, timeout)

    def _take(self, rid: str, timeout: float, copy: bool | None) -> Verb[Payload]:
        self._check_take(rid, timeout)
        taken = yield from reading.next_taken(self._session, self.channel, rid, timeout, stream=False)
        assert taken.arrived is not None
        return reading.opened(self._session, self.channel, taken.arrived, taken.ends, copy)

    def _next(self, rid: str, timeout: float, copy: bool | None) -> Verb[tuple[Payload | None, bool]]:
        """A stream's next payload (None at a bare END), and whether it has ended."""
        self._check_take(rid, timeout)
        taken: Taken = yield from reading.next_taken(self._session, self.channel, rid, timeout, stream=True)
        if taken.arrived is None:
            return None, True
        return reading.opened(self._session, self.channel, taken.arrived, taken.ends, copy), taken.ends

    def _subscribe(self, push: bool) -> Verb[None]:
        self._node.check_usable()
        yield from reading.subscribe(self._session, self.channel, push)

    def _enter(self, rid: str, *, sends: bool) -> None:
        self._node.check_usable()
        names.check_rid(rid)
        session = self._session
        with session.lock:
            session.must_be_open()
            if not sends and self.channel.has(rid):
                # It is in the use that this is of.
                return
            heard = session.outgoing.aborted.get(rid)
            if heard is not None:
                # It is answered: puts are taken again. Whether it is of this use the broker says.
                self._node.finish_here(rid)
            if not sends:
                self.channel.expect(rid)
            last, reason = 0, ""
            if heard is not None and self.name in heard.edges:
                last, reason = heard.life or 0, heard.reason
            session.post(msg.Enter(0, self.name, rid, sends, last, reason))
        session.push()

    def _poll(self, copy: bool | None) -> Verb[Polled]:
        yield from self._subscribe(push=True)
        return self._polled(copy)

    def _polled(self, copy: bool | None) -> Polled:
        # What lies there and nobody has read yet.
        self._session.drain()
        found = reading.polled(self._session, self.channel, copy)
        if not found and (self._question is not None or not self._session.up):
            self._check_broker()
        return found

    def _check_broker(self) -> None:
        """BrokerLost if the broker has been away for the node's `answer_timeout`; before that it may be restarting."""
        session = self._session
        with session.lock:
            asked = self._question
            if session.up:
                self._question = None
                return
            if asked is not None and asked.answer.done and asked.answer.failed():
                raise session.lost(asked)
            # One that was answered is of an earlier absence.
            if asked is None or asked.answer.done:
                self._question = session.ask(_are_you_there, self._node.answer_timeout, grace=0.0)

    def _wait(self, timeout: float) -> Verb[bool]:
        check_timeout(timeout)
        yield from self._subscribe(push=True)
        session = self._session
        with session.lock:
            session.must_be_open()
            if self.channel.fresh:
                return True
            request = session.wait_here(timeout, False)
            self.channel.poll_waits.append(request.number)
        try:
            came: bool = yield request.answer
        finally:
            with session.lock:
                session.cancel(request)
                if request.number in self.channel.poll_waits:
                    self.channel.poll_waits.remove(request.number)
        return came or (yield from self._came_late(request))

    def _came_late(self, waited: Request) -> Verb[bool]:
        """The deadline of a wait has passed: a broker that is away then has a moment to come back, as in a take."""
        session = self._session
        with session.lock:
            session.must_be_open()
            if session.up:
                return False
            question = session.ask(_are_you_there, min(GRACE, self._node.answer_timeout), grace=0.0)
        session.push()
        try:
            yield question.answer
        except BrokerLost:
            with session.lock:
                session.must_be_open()
                raise session.lost(waited) from None
        finally:
            with session.lock:
                session.requests.drop(question.number)
        with session.lock:
            return bool(self.channel.fresh)

    def _check_take(self, rid: str, timeout: float) -> None:
        self._node.check_usable()
        names.check_rid(rid)
        check_timeout(timeout)


class Edge(EdgeVerbs):
    """A directed connection between two stages. Threads may share it; see the table of errors in docs/errors.md.

    `put` and its like copy once, straight into shared memory, and return a ticket; `take` and its like give
    views on it. Raised everywhere: ClientClosed, ForkedClient, BrokerLost, BrokerStopping.
    """

    def put(
        self,
        rid: str,
        payload: Mapping[str, torch.Tensor],
        *,
        index: int | None = None,
        last: bool | None = None,
        attempt: int = 0,
        readers: int | None = None,
        timeout: float | None = None,
    ) -> Ticket:
        """Hand over a payload: `dict[str, Tensor]`, strictly, `{}` included.

        Alone it is a full payload: a stream of one chunk. With `last=False` (and then `last=True`) or an `index`
        it is a chunk of a stream; without `index` the next one. `attempt` above 0 re-sends a chunk after
        preemption. `timeout` seconds to wait for room (default: the broker's put_timeout).

        Raises InvalidPayload, UnsupportedTensor, PayloadTooLarge, RequestAborted, AlreadyPut, StreamEnded, the
        error of an earlier refused put on this stream; PoolFull or PoolDeadlock after waiting for room. What
        the broker refuses later is in the ticket, and raised by the next put on the stream, or by flush.
        """
        return self._put(self._one(rid, payload, index, last, attempt, readers), timeout)[0]

    def _put(self, items: list[Item], timeout: float | None) -> list[Ticket]:
        tickets = self._put_now(items, timeout)
        return tickets if tickets is not None else run(self._put_step(items, timeout), self._session)

    def put_many(
        self,
        payloads: Mapping[str, Mapping[str, torch.Tensor]],
        *,
        last: Iterable[str] | bool = False,
        readers: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, Ticket]:
        """A step: the next chunk of each rid, as one block and one message. `last`: the rids that end with it.

        Raises as put does; then nothing of the step was put.
        """
        return {ticket.rid: ticket for ticket in self._put(self._step(payloads, last, readers), timeout)}

    def end(self, rid: str, *, timeout: float | None = None) -> Ticket:
        """END alone: the stream has the chunks put so far."""
        return self._put(self._end(rid), timeout)[0]

    def take(self, rid: str, *, timeout: float = TAKE_TIMEOUT, copy: bool | None = None) -> Payload:
        """The rid's next payload; waits up to `timeout` seconds. `copy`: owned tensors instead of views (default
        for readers > 1).

        Raises at the deadline UnknownRequest, NotYet or Gone; at once RequestAborted, WriterDied, ReaderDied,
        StreamGap, StreamPoisoned or Broken; ReadersMismatch and ReaderTaken when it subscribes.
        """
        return run(self._take(rid, timeout, copy), self._session)

    def stream(self, rid: str, *, timeout: float = TAKE_TIMEOUT, copy: bool | None = None) -> Iterator[Payload]:
        """The rid's payloads in order until END; each wait is at most `timeout` seconds. Raises as take does."""
        ended = False
        while not ended:
            payload, ended = run(self._next(rid, timeout, copy), self._session)
            found = [payload] if payload is not None else []
            # The iterator, waiting at its yield, must not pin a block that its caller let go.
            del payload
            while found:
                yield found.pop()

    def open(self, rid: str) -> None:
        """This node is in the rid's use, and will put to it: readers that expect the use get nothing of a later one
        before they have finished it, although nothing may be put at all, and hear WriterDied should this process die
        before its first put. `Node.finish` ends it."""
        self._enter(rid, sends=True)

    def expect(self, rid: str) -> None:
        """This node is in the rid's use, of which nothing may have come yet: should it be aborted before anything
        comes, or its sender die, `poll` says so, in `failed`; nothing of a later use comes before `Node.finish`, which
        means this one.

        An abort that this node has heard of, and not answered by a finish, is of this use if there was to be something
        on this edge, unless others have begun the rid since, or this node said it. A rid that is not expected, and of
        which nothing has come, is nothing to poll.
        """
        self._enter(rid, sends=False)

    def poll(self, *, copy: bool | None = None) -> Polled:
        """All unclaimed payloads that have arrived, by rid; does not wait. The first call subscribes.

        BrokerLost if there are none, and the broker has been away for the node's `answer_timeout` since a poll found it
        so. One that is started again before that is a pause, and one that is started later heals it.
        """
        if not self.channel.push:
            run(self._subscribe(push=True), self._session)
        return self._polled(copy)

    def wait(self, timeout: float = TAKE_TIMEOUT) -> bool:
        """Wait until poll would return something; False if nothing came within `timeout` seconds.

        BrokerLost if the broker is away then, and not back within two seconds more, as in a take.
        """
        channel, session = self.channel, self._session
        if channel.push and not session.closed:
            # The common case: the caller reads, and sees what comes.
            until = time.monotonic() + check_timeout(timeout)
            if session.lead(channel.fresh.__len__, timeout):
                return True
            timeout = max(until - time.monotonic(), 0.0)
        return run(self._wait(timeout), session)


def _are_you_there(number: int) -> msg.Message:
    return msg.Status(number, "summary")


def check_timeout(timeout: object) -> float:
    """A finite number of seconds, 0 or more."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout <= 1e9:
        raise InvalidPayload("a time-out is a number of seconds, 0 or more", timeout=repr(timeout)[:40])
    return float(timeout)
