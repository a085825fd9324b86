"""A caller that goes away, asyncio's way: what came for it is not lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

import connector
from connector.core import errors
from connector.testing.contracts.facade import PATIENCE, Bench, LoopThread
from connector.testing.contracts.samples import number, values

ROUNDS = 150


@pytest.fixture
def writer(host: connector.Node) -> Iterator[Bench]:
    """A bench whose writer end is a blocking client."""
    bench = Bench(lambda stage: connector.connect(stage=stage, endpoint=host.endpoint))
    yield bench
    bench.close()


def run(
    loop: LoopThread, host: connector.Node, writer: Bench, body: Callable[[connector.AsyncEdge], Awaitable[None]]
) -> None:
    async def with_node() -> None:
        async with await connector.connect_async(stage="asyncio", endpoint=host.endpoint) as node:
            await body(node.edge(writer.writer_stage, writer.reader_stage))

    loop.call(with_node())


def test_a_cancelled_take_loses_nothing(loop: LoopThread, host: connector.Node, writer: Bench) -> None:
    """Whether it is cancelled before its payload came, meanwhile, or after: the next take has it."""
    out = writer.edge(writer.writer)

    async def body(into: connector.AsyncEdge) -> None:
        lost_races = 0
        for i in range(ROUNDS):
            taking = asyncio.create_task(into.take(writer.rid, timeout=PATIENCE))
            await asyncio.sleep(0)
            out.put(writer.rid, number(i), last=False)
            for _ in range(i % 30):
                await asyncio.sleep(0)
            taking.cancel()
            try:
                found = await taking
            except asyncio.CancelledError:
                lost_races += 1
                found = await into.take(writer.rid, timeout=PATIENCE)
            assert (values([found]), found.index) == ([i], i)
        assert lost_races, "no take was ever cancelled in time"

    run(loop, host, writer, body)


def test_a_cancelled_take_leaves_the_request_to_poll(loop: LoopThread, host: connector.Node, writer: Bench) -> None:
    """Nothing is claimed any more by a caller that took nothing."""
    out = writer.edge(writer.writer)

    async def body(into: connector.AsyncEdge) -> None:
        taking = asyncio.create_task(into.take(writer.rid, timeout=PATIENCE))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        out.put(writer.rid, number(1))
        assert await into.wait(PATIENCE)
        assert values((await into.poll())[writer.rid]) == [1]

    run(loop, host, writer, body)


def test_a_cancelled_wait_is_forgotten(loop: LoopThread, host: connector.Node, writer: Bench) -> None:
    """The next wait is answered."""
    out = writer.edge(writer.writer)

    async def body(into: connector.AsyncEdge) -> None:
        waiting = asyncio.create_task(into.wait(PATIENCE))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        out.put(writer.rid, number(1))
        assert await into.wait(PATIENCE)

    run(loop, host, writer, body)


def test_a_stream_that_is_left_early_goes_on_later(loop: LoopThread, host: connector.Node, writer: Bench) -> None:
    """Leaving the loop gives nothing back and takes nothing away."""
    out = writer.edge(writer.writer)

    async def body(into: connector.AsyncEdge) -> None:
        for i in range(4):
            out.put(writer.rid, number(i), last=i == 3)
        chunks = into.stream(writer.rid, timeout=PATIENCE)
        async for first in chunks:
            assert values([first]) == [0]
            break
        await chunks.aclose()  # type: ignore[attr-defined]
        assert [values([chunk])[0] async for chunk in into.stream(writer.rid, timeout=PATIENCE)] == [1, 2, 3]

    run(loop, host, writer, body)


def test_a_cancelled_put_that_waits_for_room_takes_none(loop: LoopThread, host: connector.Node, writer: Bench) -> None:
    """What it was granted meanwhile goes back; nothing of it is put."""
    pool = host.status()["pool_bytes"]

    async def body(into: connector.AsyncEdge) -> None:
        async with await connector.connect_async(stage="putter", endpoint=host.endpoint) as node:
            out = node.edge(writer.writer_stage, writer.reader_stage)
            for i in range(3):
                await out.put(writer.rid, number(i, pool // 32), last=False)
            putting = asyncio.create_task(out.put(writer.rid, number(3, pool // 32), last=True))
            while not any(row["waiting_puts"] for row in (await node.status("sessions"))["sessions"]):
                await asyncio.sleep(0)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            for i in range(3):
                with await into.take(writer.rid, timeout=PATIENCE) as chunk:
                    assert chunk.index == i
            with pytest.raises(errors.NotYet):
                await into.take(writer.rid, timeout=0)
            await out.end(writer.rid)
            await node.flush()

    run(loop, host, writer, body)
