"""How an Outbox's steps are put, in order, and what becomes of a put that fails."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from connector import ConnectorError, Edge, Node, Ticket, errors

logger = logging.getLogger("runner_adapter")

#: Refusals of a step as a whole: what rid they name is no more to blame than the others.
_OF_THE_STEP = (errors.PoolFull, errors.PoolDeadlock, errors.BrokerLost, errors.ClientClosed, errors.ForkedClient)


class Stream:
    """One use of a rid, as this stage sends it. The Outbox sets the first three, its Sender the others."""

    __slots__ = ("bare_end", "chunks", "ended", "failed", "over", "rid")

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.chunks = 0
        #: END was said; `bare_end`: with no chunk.
        self.ended = self.bare_end = False
        #: Nothing more of it is put. `over`: its node has finished the rid.
        self.failed = self.over = False


class Item(NamedTuple):
    """One stream's part of a step. An empty payload is put for its END only."""

    stream: Stream
    payload: Mapping[str, torch.Tensor]
    last: bool


class Sender:
    """One thread at a time. `failures` may be emptied by another."""

    def __init__(self, node: Node, edge: Edge, timeout: float | None) -> None:
        self._node, self._edge, self._timeout = node, edge, timeout
        self._tickets: list[tuple[Stream, Ticket]] = []
        #: The broker did not answer: do not wait for the answer to the next abort.
        self._away = False
        self._patience = node.answer_timeout
        self.failures: deque[tuple[Stream, ConnectorError]] = deque()
        self.counters = {"chunks": 0, "dropped": 0, "failed": 0, "replaced": 0, "ignored": 0}

    def put(self, items: Sequence[Item], refused: Iterable[tuple[Stream, ConnectorError]] = ()) -> None:
        """A step: one put_many; more only to leave out what it is refused for."""
        self.collect()
        for stream, error in refused:
            self.fail(stream, error)
        self.counters["dropped"] += sum(item.stream.failed for item in items)
        self._put(items)

    def _put(self, items: Sequence[Item]) -> None:
        # All or nothing: a step that is refused is put again without those who are to blame.
        while items := [item for item in items if not item.stream.failed]:
            payloads = {item.stream.rid: item.payload for item in items}
            ends = [item.stream.rid for item in items if item.last]
            try:
                tickets = self._edge.put_many(payloads, last=ends, timeout=self._timeout)
            except ConnectorError as error:
                blamed = _blamed(items, error)
                for item in blamed:
                    self.fail(item.stream, error)
                if not blamed:
                    half = len(items) // 2
                    self._put(items[:half])
                    self._put(items[half:])
                    return
            else:
                self._tickets += [(item.stream, tickets[item.stream.rid]) for item in items]
                self.counters["chunks"] += sum(bool(item.payload) for item in items)
                self._away = False
                return

    def put_again(self, item: Item, index: int, attempt: int) -> None:
        """A chunk that was put before, as a higher attempt."""
        self.collect()
        stream = item.stream
        if stream.failed:
            self.counters["dropped"] += 1
            return
        try:
            ticket = self._edge.put(
                stream.rid, item.payload, index=index, last=item.last, attempt=attempt, timeout=self._timeout
            )
        except ConnectorError as error:
            self.fail(stream, error)
        else:
            self._tickets.append((stream, ticket))

    def begin(self, rid: str) -> None:
        """The stage is in a use of the rid."""
        self._edge.open(rid)

    def finish(self, rid: str, stream: Stream | None) -> None:
        """The node is done with the rid. A stream that did not end ends here."""
        self.collect()
        if stream is not None:
            if stream.chunks and not stream.ended and not stream.failed and self._node.aborted(rid) is None:
                self._end(stream)
            stream.over = True
        self._node.finish(rid)

    def _end(self, stream: Stream) -> None:
        # The node's finish says END, too, but only a chunk tells its reader of which use of the rid.
        try:
            ticket = self._edge.put(stream.rid, {}, last=True, timeout=0.0)
        except (errors.PoolFull, errors.PoolDeadlock) as error:
            logger.info("no room for an END of its own: %s", str(error))
        except ConnectorError as error:
            self.fail(stream, error)
        else:
            self._tickets.append((stream, ticket))

    def fail(self, stream: Stream, error: ConnectorError) -> None:
        """End the request at both ends."""
        if stream.failed:
            return
        stream.failed = True
        told = error.anew(rid=stream.rid)
        logger.error("a hand-over failed: %s", str(told))
        self.counters["failed"] += 1
        self.failures.append((stream, told))
        # Aborted already: an abort more could hit what others have begun since. Over: the rid is another use's now.
        if not stream.over and not isinstance(error, errors.RequestAborted):
            self.abort(stream, f"{type(error).__name__}: {error.message}")

    def abort(self, stream: Stream, reason: str) -> None:
        stream.failed = True
        self._node.answer_timeout = 0.0 if self._away else self._patience
        try:
            self._node.abort(stream.rid, reason[:1000], mine=True)
        except errors.BrokerLost:
            # It is queued, and said when the broker is back.
            self._away = True
        except errors.UsageError as error:
            # The rid is none, or the node is closed: there is no stream, or its end is told by the broker.
            logger.info("a request could not be aborted: %s", str(error))
        finally:
            self._node.answer_timeout = self._patience

    def collect(self) -> None:
        """Look at the tickets: what the broker has refused since is a failure like any other."""
        tickets, self._tickets = self._tickets, []
        for stream, ticket in tickets:
            if not ticket.done():
                self._tickets.append((stream, ticket))
                continue
            try:
                outcome = ticket.result()
            except ConnectorError as error:
                self.fail(stream, error)
            else:
                if outcome in self.counters:
                    self.counters[outcome] += 1


def _blamed(items: Sequence[Item], error: ConnectorError) -> Sequence[Item]:
    """Whom a refused step is refused for; nobody if it must be found out."""
    if len(items) == 1 or isinstance(error, _OF_THE_STEP):
        return items
    return [item for item in items if item.stream.rid == error.facts.get("rid")]


class _Work(NamedTuple):
    future: Future[None]
    streams: Sequence[Stream]
    bounded: bool


class Behind:
    """Work done in order by a thread of its own. What it raises is raised by the next call."""

    def __init__(self, depth: int) -> None:
        self._pool = ThreadPoolExecutor(1, "connector-outbox")
        self._depth = depth
        self._open: deque[_Work] = deque()
        #: Steps that had to wait for an earlier one to be put.
        self.waited = 0

    def do(self, work: Callable[[], None], streams: Sequence[Stream] = (), bounded: bool = False) -> None:
        """Queue it; if it is `bounded`, and `depth` of that kind are under way, wait for the oldest."""
        self._look()
        if bounded and not self._has_room():
            self.waited += 1
            while not self._has_room():
                self._open.popleft().future.result()
        self._open.append(_Work(self._pool.submit(work), streams, bounded))

    def _has_room(self) -> bool:
        return sum(work.bounded for work in self._open) < self._depth

    def _look(self) -> None:
        while self._open and self._open[0].future.done():
            self._open.popleft().future.result()

    def drain(self, timeout: float) -> bool:
        """Wait until all is done; False if it is not within `timeout` seconds."""
        wait([work.future for work in self._open], timeout)
        self._look()
        return not self._open

    def stop(self) -> list[Stream]:
        """Take no more; the streams of what was not done."""
        left = [stream for work in self._open if not work.future.done() for stream in work.streams]
        self._pool.shutdown(wait=False, cancel_futures=True)
        return left

    def join(self) -> None:
        """Wait for what is being done."""
        self._pool.shutdown(wait=True)
        while self._open:
            future = self._open.popleft().future
            if not future.cancelled():
                future.result()
