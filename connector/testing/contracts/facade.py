"""What the contract of the client is written against: one blocking face for every kind of client.

The blocking client has this face already; `Awaited` gives it to the asyncio client, whose verbs run in a
loop of their own thread.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import connector
from connector.core.names import Edge as EdgeName

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
#: Hang guard in seconds: nothing takes so long, nothing is timed by it.
PATIENCE = 60.0


class EdgeFace(Protocol):
    """The verbs of `connector.Edge`."""

    @property
    def name(self) -> EdgeName: ...
    def put(self, rid: str, payload: Mapping[str, torch.Tensor], **options: Any) -> connector.Ticket: ...
    def put_many(
        self, payloads: Mapping[str, Mapping[str, torch.Tensor]], **options: Any
    ) -> dict[str, connector.Ticket]: ...
    def end(self, rid: str, **options: Any) -> connector.Ticket: ...
    def take(self, rid: str, **options: Any) -> connector.Payload: ...
    def stream(self, rid: str, **options: Any) -> Iterator[connector.Payload]: ...
    def open(self, rid: str) -> None: ...
    def expect(self, rid: str) -> None: ...
    def poll(self, **options: Any) -> connector.Polled: ...
    def wait(self, timeout: float = PATIENCE) -> bool: ...


class NodeFace(Protocol):
    """The verbs of `connector.Node` that every kind of client has."""

    def edge(self, from_stage: str, to_stage: str, replica: int = 0, **options: Any) -> EdgeFace: ...
    def begin(self, rid: str) -> None: ...
    def finish(self, rid: str) -> None: ...
    def abort(self, rid: str, reason: str = "aborted", *, mine: bool = False) -> dict[str, Any]: ...
    def flush(self, timeout: float = PATIENCE) -> None: ...
    def counters(self) -> dict[str, Any]: ...
    def status(self, what: str = "summary") -> dict[str, Any]: ...
    def close(self) -> None: ...


class LoopThread:
    """An event loop in a thread. `call` runs a coroutine there and waits for what it returns or raises."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._workers = ThreadPoolExecutor(1)
        self.loop.set_default_executor(self._workers)
        self._thread = threading.Thread(target=self.loop.run_forever, name="contract-loop")
        self._thread.start()
        # The worker is started now, so that no single test seems to leave it behind.
        self._workers.submit(int).result(PATIENCE)

    def call(self, coroutine: Awaitable[T]) -> T:
        async def await_it() -> T:
            return await coroutine

        return asyncio.run_coroutine_threadsafe(await_it(), self.loop).result(PATIENCE)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self._workers.shutdown()
        self.loop.close()


class AwaitedEdge:
    """The blocking face of an asyncio edge."""

    def __init__(self, edge: connector.AsyncEdge, loop: LoopThread) -> None:
        self._edge, self._loop = edge, loop

    @property
    def name(self) -> EdgeName:
        return self._edge.name

    def put(self, rid: str, payload: Mapping[str, torch.Tensor], **options: Any) -> connector.Ticket:
        return self._loop.call(self._edge.put(rid, payload, **options))

    def put_many(
        self, payloads: Mapping[str, Mapping[str, torch.Tensor]], **options: Any
    ) -> dict[str, connector.Ticket]:
        return self._loop.call(self._edge.put_many(payloads, **options))

    def end(self, rid: str, **options: Any) -> connector.Ticket:
        return self._loop.call(self._edge.end(rid, **options))

    def take(self, rid: str, **options: Any) -> connector.Payload:
        return self._loop.call(self._edge.take(rid, **options))

    def stream(self, rid: str, **options: Any) -> Iterator[connector.Payload]:
        source = self._edge.stream(rid, **options)
        while True:
            try:
                payload = self._loop.call(anext(source))
            except StopAsyncIteration:
                return
            found = [payload]
            del payload
            yield found.pop()

    def open(self, rid: str) -> None:
        self._loop.call(self._edge.open(rid))

    def expect(self, rid: str) -> None:
        self._loop.call(self._edge.expect(rid))

    def poll(self, **options: Any) -> connector.Polled:
        return self._loop.call(self._edge.poll(**options))

    def wait(self, timeout: float = PATIENCE) -> bool:
        return self._loop.call(self._edge.wait(timeout))


class AwaitedNode:
    """The blocking face of an asyncio node."""

    def __init__(self, node: connector.AsyncNode, loop: LoopThread) -> None:
        self._node, self._loop = node, loop

    def edge(self, from_stage: str, to_stage: str, replica: int = 0, **options: Any) -> AwaitedEdge:
        return AwaitedEdge(self._node.edge(from_stage, to_stage, replica, **options), self._loop)

    def begin(self, rid: str) -> None:
        self._loop.call(self._node.begin(rid))

    def finish(self, rid: str) -> None:
        self._loop.call(self._node.finish(rid))

    def abort(self, rid: str, reason: str = "aborted", *, mine: bool = False) -> dict[str, Any]:
        return self._loop.call(self._node.abort(rid, reason, mine=mine))

    def flush(self, timeout: float = PATIENCE) -> None:
        self._loop.call(self._node.flush(timeout))

    def counters(self) -> dict[str, Any]:
        return self._loop.call(self._node.counters())

    def status(self, what: str = "summary") -> dict[str, Any]:
        return self._loop.call(self._node.status(what))

    def close(self) -> None:
        self._loop.call(self._node.close())


class Bench:
    """What one test works on: nodes of the kind under contract, on edges that no other test uses."""

    _numbers = itertools.count(1)

    def __init__(self, open_node: Callable[[str], NodeFace]) -> None:
        """`open_node(stage)` connects a client of the kind under contract to a running broker."""
        self._open = open_node
        self._nodes: list[NodeFace] = []
        self._threads: list[tuple[threading.Thread, Future[Any]]] = []
        number = next(Bench._numbers)
        self._number = number
        self._rids: set[str] = set()
        #: A request's id. A request lives on all edges of a broker: no two tests may share one.
        self.rid = self.name("r")
        self.writer_stage, self.reader_stage = f"writer{number}", f"reader{number}"
        self.writer = self.node(self.writer_stage)
        self.reader = self.node(self.reader_stage)

    def node(self, stage: str = "") -> NodeFace:
        """Another client, closed with the bench."""
        self._nodes.append(self._open(stage or self.reader_stage))
        return self._nodes[-1]

    def name(self, rid: str) -> str:
        """Another request's id that no other test uses."""
        self._rids.add(f"{rid}-{self._number}")
        return f"{rid}-{self._number}"

    def edge(self, node: NodeFace, replica: int = 0, **options: Any) -> EdgeFace:
        """The bench's edge as `node` uses it."""
        return node.edge(self.writer_stage, self.reader_stage, replica, **options)

    def ends(self, **options: Any) -> tuple[EdgeFace, EdgeFace]:
        """The writer's and the reader's end of the bench's edge."""
        return self.edge(self.writer), self.edge(self.reader, **options)

    def row(self, replica: int = 0) -> dict[str, Any]:
        """The broker's row of the bench's edge."""
        found: dict[str, Any] = self.writer.counters()["edges"][f"{self.writer_stage}:{self.reader_stage}:{replica}"]
        return found

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Run a call that waits in a thread of its own."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                value = call()
            except connector.ConnectorError as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        thread = threading.Thread(target=work, name="contract-caller")
        self._threads.append((thread, future))
        thread.start()
        return future

    def until_waiting(self, stage: str, what: str = "waiting_takes", count: int = 1) -> None:
        """Until the broker has `count` waiting calls of a stage's node."""
        self.eventually(
            lambda: any(
                row["stage"] == stage and row[what] == count for row in self.writer.status("sessions")["sessions"]
            )
        )

    @staticmethod
    def eventually(true: Callable[[], bool]) -> None:
        """Ask until it is so: each question is a round trip to the broker, which paces the asking."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError("it never became so")

    def close(self) -> None:
        """Leave no payload, client or thread behind."""
        for rid in self._rids:
            self.writer.abort(rid)
        for node in self._nodes:
            node.close()
        for thread, future in self._threads:
            thread.join(PATIENCE)
            # Read, so that the error of a caller that nobody waits for keeps no traceback alive.
            future.exception(PATIENCE)
        self._threads.clear()
        self._nodes.clear()
