"""What a chunk costs while one thing grows: live payloads on its edge, sessions, or the pool."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

import connector
from connector.bench.clocks import cpu_of, private_bytes
from connector.bench.figures import quantile
from connector.bench.waiting import until_idle

#: Payloads of one put_many while the pool fills, and seconds for the pages of a pool to be touched.
BATCH, PATIENCE = 500, 300.0
#: Processes that share the sessions.
PROCESSES = 4
#: Of the memory that is free, what a pool may take: payloads of others need some, too.
SHARE = 0.8
FILLER, CHUNK = "bench-filler", "bench-taker"
Say = Callable[[str], None]


class Grown(NamedTuple):
    """Figures at one point of an axis: live payloads (sealed, not taken), sessions, or MiB of the pool. Times in µs a
    chunk, bytes a live payload beyond its data."""

    axis: str
    value: int
    p50_us: float
    broker_cpu_us: float
    broker_bytes: float = 0.0


def over_live(steps: Sequence[int], count: int, pool: str, say: Say) -> list[Grown]:
    """Fill a private broker step by step; at each, hand `count` chunks over on the same edge, by name."""
    rows: list[Grown] = []
    with _pair(pool) as (node, taker):
        pid = int(node.status()["pid"])
        edge = node.edge(FILLER, CHUNK)
        _chunks(node, taker, count)
        empty = private_bytes(pid)
        live, payload = 0, _payload()
        for goal in steps:
            say(f"{goal} live payloads")
            while live < goal:
                batch = range(live, min(live + BATCH, goal))
                edge.put_many({f"live-{number}": payload for number in batch}, last=True)
                live += len(batch)
            node.flush()
            p50, cpu = _cost(node, taker, pid, count)
            rows.append(Grown("live", live, p50, cpu, (private_bytes(pid) - empty) / live))
    return rows


def over_pools(sizes: Sequence[int], count: int, say: Say) -> tuple[list[Grown], list[str]]:
    """A private broker of each size (MiB), its pages touched; and why it went no further, if it did not."""
    rows: list[Grown] = []
    for size in sizes:
        free = _free() >> 20
        if size > free * SHARE:
            return rows, [f"pools end before {size} MiB: {free} MiB are free for shared memory here"]
        say(f"a pool of {size} MiB")
        try:
            with _pair(f"{size}MiB") as (node, taker):
                _touched(node)
                _chunks(node, taker, count // 10)
                rows.append(Grown("pool", size, *_cost(node, taker, int(node.status()["pid"]), count)))
        except connector.errors.NoSpace as error:
            return rows, [f"pools end before {size} MiB: {error}"]
    return rows, []


def over_sessions(steps: Sequence[int], count: int, pool: str, say: Say) -> list[Grown]:
    """So many sessions in at most PROCESSES processes; each process goes round its own, putting and taking on each in
    turn, all processes at once."""
    rows: list[Grown] = []
    with connector.connect(stage="bench", embedded=True, pool=pool) as node:
        pid = int(node.status()["pid"])
        for sessions in steps:
            say(f"{sessions} sessions")
            shares = [len(range(first, sessions, PROCESSES)) for first in range(min(sessions, PROCESSES))]
            with ExitStack() as workers:
                pipes = [workers.enter_context(_worker(node.endpoint, share, count)) for share in shares]
                for pipe in pipes:
                    pipe.recv()
                used = cpu_of(pid)
                for pipe in pipes:
                    pipe.send("go")
                spans = [span for pipe in pipes for span in pipe.recv()]
                cpu = (cpu_of(pid) - used) / len(spans) * 1e6
            rows.append(Grown("sessions", sessions, quantile(spans, 0.5), cpu))
    return rows


@contextmanager
def _worker(endpoint: str, sessions: int, count: int) -> Iterator[Connection[Any, Any]]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_go_round, args=(endpoint, sessions, count, theirs), name="bench-sessions")
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        # It ends by itself, or because nobody listens.
        ours.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


def _go_round(endpoint: str, sessions: int, count: int, parent: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stages = [f"bench-{os.getpid()}-{number}" for number in range(sessions)]
        nodes = [stack.enter_context(connector.connect(stage=stage, endpoint=endpoint)) for stage in stages]
        ends = [(node, node.edge(stage, stage)) for node, stage in zip(nodes, stages, strict=True)]
        until_idle()
        parent.send("ready")
        parent.recv()
        spans, payload = [], _payload()
        for number in range(count):
            node, edge = ends[number % sessions]
            spans.append(_hand_over(edge, edge, f"{os.getpid()}-{number}", payload))
            node.finish(f"{os.getpid()}-{number}")
        for node in nodes:
            node.flush()
        parent.send(spans)


@contextmanager
def _pair(pool: str) -> Iterator[tuple[connector.Node, connector.Node]]:
    """A private broker with a session that puts and one that takes, in this process."""
    with connector.connect(stage=FILLER, embedded=True, pool=pool) as node:
        with connector.connect(stage=CHUNK, endpoint=node.endpoint) as taker:
            yield node, taker


def _payload() -> dict[str, torch.Tensor]:
    return {"hidden": torch.zeros(1, 2048, dtype=torch.bfloat16), "ids": torch.zeros(1, dtype=torch.int64)}


def _cost(node: connector.Node, taker: connector.Node, pid: int, count: int) -> tuple[float, float]:
    """µs a chunk: from put to the taker's hands, and of the broker's processor time."""
    used = cpu_of(pid)
    spans = _chunks(node, taker, count)
    return quantile(spans, 0.5), (cpu_of(pid) - used) / count * 1e6


def _chunks(node: connector.Node, taker: connector.Node, count: int) -> list[float]:
    """µs from put to the taker's hands, one at a time."""
    edge, inn = node.edge(FILLER, CHUNK), taker.edge(FILLER, CHUNK)
    spans, payload = [], _payload()
    for number in range(count):
        rid = f"chunk-{number}"
        spans.append(_hand_over(edge, inn, rid, payload))
        node.finish(rid)
        taker.finish(rid)
    node.flush()
    taker.flush()
    return spans


def _hand_over(out: connector.Edge, inn: connector.Edge, rid: str, payload: dict[str, torch.Tensor]) -> float:
    start = time.perf_counter_ns()
    out.put(rid, payload)
    taken = inn.take(rid)
    span = (time.perf_counter_ns() - start) / 1000
    taken.release()
    return span


def _touched(node: connector.Node) -> None:
    """Wait until the pool's pages are there: that takes the broker's time, and this process's."""
    until = time.monotonic() + PATIENCE
    while (told := node.status())["prefaulted_bytes"] < told["pool_bytes"] and time.monotonic() < until:
        time.sleep(0.05)
    until_idle()


def _free() -> int:
    """Bytes that a pool could have: of the tmpfs, and of memory."""
    tmpfs = os.statvfs("/dev/shm")
    memory = tmpfs.f_bavail * tmpfs.f_frsize
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            memory = min(memory, int(line.split()[1]) * 1024)
    return memory
