"""The same verbs, awaited. See `Node` and `Edge` for what they do and raise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from connector.client.edge import TAKE_TIMEOUT, EdgeVerbs
from connector.client.node import CLOSE_TIMEOUT, NodeBase
from connector.client.outgoing import Ticket
from connector.client.payload import Payload
from connector.client.reading import Polled
from connector.client.verbs import arun
from connector.client.writing import Item
from connector.core import names
from connector.core.names import Edge as EdgeName
from connector.wire import messages as msg

if TYPE_CHECKING:
    import torch


class AsyncEdge(EdgeVerbs):
    """An edge for coroutines. A cancelled take loses nothing: what came for it goes back to its place."""

    async def put(
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
        """As Edge.put. The copy itself runs in the event loop's thread."""
        return (await self._put(self._one(rid, payload, index, last, attempt, readers), timeout))[0]

    async def _put(self, items: list[Item], timeout: float | None) -> list[Ticket]:
        tickets = self._put_now(items, timeout)
        return tickets if tickets is not None else await arun(self._put_step(items, timeout))

    async def put_many(
        self,
        payloads: Mapping[str, Mapping[str, torch.Tensor]],
        *,
        last: Iterable[str] | bool = False,
        readers: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, Ticket]:
        """As Edge.put_many."""
        return {ticket.rid: ticket for ticket in await self._put(self._step(payloads, last, readers), timeout)}

    async def end(self, rid: str, *, timeout: float | None = None) -> Ticket:
        """As Edge.end."""
        return (await self._put(self._end(rid), timeout))[0]

    async def take(self, rid: str, *, timeout: float = TAKE_TIMEOUT, copy: bool | None = None) -> Payload:
        """As Edge.take."""
        return await arun(self._take(rid, timeout, copy))

    async def stream(
        self, rid: str, *, timeout: float = TAKE_TIMEOUT, copy: bool | None = None
    ) -> AsyncIterator[Payload]:
        """As Edge.stream."""
        ended = False
        while not ended:
            payload, ended = await arun(self._next(rid, timeout, copy))
            found = [payload] if payload is not None else []
            del payload
            while found:
                yield found.pop()

    async def open(self, rid: str) -> None:
        """As Edge.open."""
        self._enter(rid, sends=True)

    async def expect(self, rid: str) -> None:
        """As Edge.expect."""
        self._enter(rid, sends=False)

    async def poll(self, *, copy: bool | None = None) -> Polled:
        """As Edge.poll."""
        return await arun(self._poll(copy))

    async def wait(self, timeout: float = TAKE_TIMEOUT) -> bool:
        """As Edge.wait."""
        return await arun(self._wait(timeout))


class AsyncNode(NodeBase):
    """`await connector.connect_async(...)` makes one."""

    def edge(
        self,
        from_stage: str,
        to_stage: str,
        replica: int = 0,
        *,
        reader: int = 0,
        readers: int = 1,
        resume: bool = False,
    ) -> AsyncEdge:
        """As Node.edge."""
        return AsyncEdge(self, names.check_edge(EdgeName(from_stage, to_stage, replica)), reader, readers, resume)

    async def begin(self, rid: str) -> None:
        """As Node.begin."""
        await arun(self._turn(rid, begin=True))

    async def finish(self, rid: str) -> None:
        """As Node.finish."""
        await arun(self._turn(rid, begin=False))

    async def abort(self, rid: str, reason: str = "aborted", *, mine: bool = False) -> dict[str, Any]:
        """As Node.abort."""
        return await arun(self._abort(rid, reason, mine))

    async def flush(self, timeout: float = 30.0) -> None:
        """As Node.flush."""
        await arun(self._flush(timeout))

    async def counters(self) -> dict[str, Any]:
        """As Node.counters."""
        return await self.status("counters")

    async def status(self, what: str = "summary") -> dict[str, Any]:
        """As Node.status."""
        found: dict[str, Any] = await arun(self._ask(lambda n: msg.Status(n, what)))
        return found

    async def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """As Node.close."""
        await asyncio.get_running_loop().run_in_executor(None, self._close, timeout)

    async def __aenter__(self) -> AsyncNode:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
