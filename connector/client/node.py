"""A node: one process's membership with its broker. Cheap to make, safe to share between threads."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from connector.client.inbox import Channel
from connector.client.link import Link
from connector.client.options import Options
from connector.client.outgoing import Abort
from connector.client.rid_queue import Arrived
from connector.client.session import Session
from connector.client.verbs import SLICE, Verb, run
from connector.core import names
from connector.core.errors import BrokerLost, ConnectorError, ForkedClient, Gone, ReadersMismatch
from connector.core.names import Edge as EdgeName
from connector.wire import messages as msg

if TYPE_CHECKING:
    from connector.client.edge import Edge
    from connector.client.embedded import EmbeddedBroker
    from connector.client.payload import Payload

#: Seconds to wait for the broker's answer to a question.
ANSWER_TIMEOUT = 10.0
CLOSE_TIMEOUT = 5.0


class NodeBase:
    """What the blocking and the asyncio node share: the link, the checks, verbs as generators."""

    def __init__(self, link: Link, broker: EmbeddedBroker | None) -> None:
        self._link = link
        self.session: Session = link.session
        self._broker = broker
        self._pid = os.getpid()
        #: Seconds to wait for the broker's answer to a question.
        self.answer_timeout = ANSWER_TIMEOUT
        # Runs when the node is collected or the interpreter ends, whichever comes first.
        self._finalizer = weakref.finalize(self, _close_soon, link, broker, self._pid)

    def __repr__(self) -> str:
        session = self.session
        state = "closed" if session.closed else "up" if session.up else "away"
        return f"<{type(self).__name__} {session.stage!r} session={session.number} {state} at {self.endpoint}>"

    @property
    def endpoint(self) -> str:
        """The run directory: what another process passes to `connect` to reach the same broker."""
        return self._link.run_dir

    @property
    def stage(self) -> str:
        return self.session.stage

    @property
    def page_locked(self) -> bool:
        """The pool's pages are page-locked in this process, or those of them that this node takes from; a moment after
        `connect(page_lock=True)`."""
        return self._link.page_locked

    @property
    def id(self) -> int:
        """The session's number at the broker."""
        return self.session.number

    def check_usable(self) -> None:
        """ForkedClient in a child made by fork; ClientClosed after close."""
        if os.getpid() != self._pid:
            raise ForkedClient(
                "this node belongs to the parent process; call connector.connect() in the child",
                parent=self._pid,
                child=os.getpid(),
            )
        self.session.must_be_open()

    def channel(self, name: EdgeName, reader: int, readers: int, resume: bool) -> Channel:
        """The inbox of one edge; one for each (edge, reader), whoever asks."""
        self.check_usable()
        names.check_number(readers, "readers", names.MAX_READERS, 1)
        names.check_number(reader, "reader", readers - 1)
        with self.session.lock:
            known = self.session.channels.get((name, reader))
            if known is None:
                known = self.session.channels[(name, reader)] = Channel(
                    name, reader, readers, resume, self.session.voided
                )
            elif known.readers != readers and known.subscribed:
                raise ReadersMismatch(
                    "this node reads the edge as one of another number",
                    edge=str(name),
                    readers=readers,
                    known=known.readers,
                )
            known.readers, known.resume = readers, resume
            return known

    # -- verbs ------------------------------------------------------------------------------------

    def _ask(self, make: Callable[[int], msg.Message]) -> Verb[Any]:
        self.check_usable()
        with self.session.lock:
            self.session.must_be_open()
            request = self.session.ask(make, self.answer_timeout, grace=0.0)
        self.session.push()
        try:
            return (yield request.answer)
        finally:
            with self.session.lock:
                self.session.requests.drop(request.number)

    def _turn(self, rid: str, *, begin: bool) -> Verb[None]:
        """Finish or begin a rid: what was known of it here is forgotten first."""
        self.check_usable()
        names.check_rid(rid)
        yield from self.session.copying.settled((rid,), self.answer_timeout)
        with self.session.lock:
            self.session.must_be_open()
            if begin:
                self.session.outgoing.forget(rid)
                self._leave(rid, None)
                self.session.post(msg.Begin(0, rid))
            else:
                self.finish_here(rid)
        self.session.push()

    def finish_here(self, rid: str) -> None:
        """Finish the rid; the caller holds the session's lock, and pushes."""
        aborted = self.session.aborted(rid)
        self.session.outgoing.forget(rid)
        self._leave(rid, aborted)
        self.session.post(msg.Finish(0, rid, aborted is not None))

    def _leave(self, rid: str, aborted: Abort | None) -> None:
        """Unread payloads of the rid go back; callers that wait for it are told. Lock held."""
        session = self.session
        for channel in session.channels.values():
            unread, waits = channel.forget(rid, None if aborted is None else aborted.life)
            session.give_up(unread)
            for wait in waits:
                session.requests.fail(wait.request, _finished(rid, channel.edge))
                session.post(msg.Cancel(wait.request))

    def _abort(self, rid: str, reason: str, mine: bool) -> Verb[dict[str, Any]]:
        names.check_rid(rid)
        reason = names.check_reason(reason)
        self.check_usable()
        with self.session.lock:
            # At once: this session has seen its own abort.
            self.session.outgoing.abort(rid, reason)
        report: dict[str, Any] = yield from self._ask(lambda n: msg.Abort(0, n, rid, reason, mine))
        return report

    def _flush(self, timeout: float) -> Verb[None]:
        """Wait until the broker has everything; raise the first refusal that nobody was told of."""
        self.check_usable()
        session = self.session
        until = time.monotonic() + timeout
        yield from session.copying.settled(None, timeout)
        timeout = max(until - time.monotonic(), 0.0)
        with session.lock:
            session.queue_taken(everything=True)
            marker = session.wait_here(timeout, False)
            session.flush(marker)
            # Asks for the acknowledgement at once.
            session.post(msg.Pong())
        session.push()
        came = yield marker.answer
        if came is False:
            with session.lock:
                raise session.lost(marker)
        with session.lock:
            error = session.outgoing.first_refusal()
        if error is not None:
            raise error

    def _close(self, timeout: float) -> None:
        if os.getpid() != self._pid:
            return
        self._link.close(timeout)
        self._link.quiet.wait(timeout + 1.0)
        if not self.session.holds.held:
            self._link.thread.join(timeout + 1.0)
        if self._broker is not None:
            self._broker.end(timeout)


def _list_page(after: int, last: int, filters: dict[str, str], number: int) -> msg.ListPage:
    return msg.ListPage(number, after, last, 1000, dict(filters))


def _finished(rid: str, edge: EdgeName) -> ConnectorError:
    return Gone("the request was finished by this node while it waited", rid=rid, edge=str(edge))


def _close_soon(link: Link, broker: EmbeddedBroker | None, pid: int) -> None:
    """Finaliser: no lock, no wait in a collector; a forked child leaves its parent's node alone."""
    if os.getpid() != pid:
        return
    link.close(CLOSE_TIMEOUT)
    if broker is not None:
        broker.end_soon()


class Node(NodeBase):
    """`connector.connect(...)` makes one. Use it as a context manager, or call close()."""

    def edge(
        self,
        from_stage: str,
        to_stage: str,
        replica: int = 0,
        *,
        reader: int = 0,
        readers: int = 1,
        resume: bool = False,
    ) -> Edge:
        """The edge between two stages. As a reader this node is number `reader` of `readers`; `readers` is also
        what its puts are for. `resume`: this reader keeps state of its own, so that after a crash of it only
        what it had not released is delivered again."""
        from connector.client.edge import Edge

        return Edge(self, names.check_edge(EdgeName(from_stage, to_stage, replica)), reader, readers, resume)

    def begin(self, rid: str) -> None:
        """Start a new life of the rid: what this node did with it before is over."""
        run(self._turn(rid, begin=True), self.session)

    def finish(self, rid: str) -> None:
        """This node is done with the rid: its streams end, what it has not read is dropped. Nothing unread by
        others is destroyed."""
        run(self._turn(rid, begin=False), self.session)

    def abort(self, rid: str, reason: str = "aborted", *, mine: bool = False) -> dict[str, Any]:
        """End the rid everywhere. Returns what that freed: payloads, bytes, and payloads still held by readers.

        `mine`: the use that this node is in (it has put, got, opened or expected something of it); neither one that
        others have begun under the rid since is meant, nor one before, which it has finished and others still read.
        """
        return run(self._abort(rid, reason, mine), self.session)

    def aborted(self, rid: str) -> str | None:
        """Why the rid is aborted, if this node has heard so and neither finished nor began it since: puts raise."""
        names.check_rid(rid)
        with self.session.lock:
            abort = self.session.outgoing.aborted.get(rid)
        return None if abort is None else abort.reason

    def flush(self, timeout: float = 30.0) -> None:
        """Wait until the broker has all that was put; raises the first refusal that nobody was told of."""
        run(self._flush(timeout), self.session)

    def counters(self) -> dict[str, Any]:
        """The broker's counters, and those of each edge under `edges`."""
        return self.status("counters")

    def status(self, what: str = "summary") -> dict[str, Any]:
        """`summary`, `sessions`, `edges` or `counters`, as the broker sees them; `all`: the first three at once."""
        found: dict[str, Any] = run(self._ask(lambda n: msg.Status(n, what)), self.session)
        return found

    def payloads(self, limit: int | None = None, **filters: str) -> Iterator[dict[str, Any]]:
        """Live payloads, oldest first, page by page. Filters: edge, rid, rid_prefix, key_prefix, state."""
        seen = 0
        for page in self.pages(**filters):
            for row in page:
                yield row
                seen += 1
                if limit is not None and seen >= limit:
                    return

    def pages(self, **filters: str) -> Iterator[list[dict[str, Any]]]:
        """As payloads, a page at a time: payloads of at most 1000 tensors, or one payload of more. May be empty."""
        after, last = 0, int(self.status()["snapshot"])
        while last:
            page = run(self._ask(partial(_list_page, after, last, filters)), self.session)
            yield page.rows
            after = page.cursor
            if not after:
                return

    def inspect(self, edge: EdgeName, rid: str, index: int | None = None) -> Payload:
        """Look at a live payload without taking it: views that keep its block until they die."""
        from connector.client.payload import open_payload

        names.check_rid(rid)
        arrived: Arrived = run(
            self._ask(lambda n: msg.Inspect(n, edge, rid, -1 if index is None else index)), self.session
        )
        with self.session.lock:
            self.session.holds.look(arrived.hold)
        return open_payload(arrived, arrived.arena, False, False, self.session.free)

    def remove(self, edge: EdgeName, rid: str, index: int | None = None, force: bool = False) -> dict[str, Any]:
        """Drop a live payload, or all of the rid on the edge; the stream fails for its reader."""
        names.check_rid(rid)
        at = -1 if index is None else index
        report: dict[str, Any] = run(self._ask(lambda n: msg.Remove(n, edge, rid, at, force)), self.session)
        return report

    def story(self, rid: str) -> list[list[Any]]:
        """What happened to the rid's payloads: [time, what, edge, index, session, detail], oldest first."""
        names.check_rid(rid)
        rows: list[list[Any]] = run(self._ask(lambda n: msg.Story(n, rid)), self.session).rows
        return rows

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Send what is queued, say good-bye, end. Views stay valid and are released as they die. Idempotent."""
        self._close(timeout)

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_link(
    stage: str,
    run_dir: str,
    source: str,
    timeout: float,
    options: Options,
    ended: Callable[[], bool] | None = None,
) -> Link:
    """A connected link; BrokerLost with the path tried if no broker answers within `timeout` seconds."""
    names.check_text(stage, "stage", names.MAX_STAGE_BYTES)
    link = Link(stage, run_dir, source, options, ended)
    link.thread.start()
    until = time.monotonic() + timeout
    # In slices: a Ctrl-C that comes just before a wait begins does not interrupt it.
    while not link.ready.wait(min(SLICE, max(until - time.monotonic(), 0.0))) and time.monotonic() < until:
        continue
    if link.session.up:
        return link
    link.close(0.0)
    link.thread.join(5.0)
    refusal = link.refusal
    if refusal is not None and not isinstance(refusal, BrokerLost):
        raise refusal
    told = refusal.message if refusal is not None else "it does not answer"
    hint = "start one with `connector serve`, or name its run directory (argument, $CONNECTOR_ENDPOINT, config)"
    raise BrokerLost(f"cannot reach a broker: {told}; {hint}", path=run_dir, path_from=source, waited=timeout)
