"""What live payloads cost, and what standing still does: growth, bytes a payload, processor time when idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import connector
from connector.bench.clocks import cpu_of
from connector.bench.figures import quantile

#: Live payloads at which the cost of a chunk is measured.
STEPS = (10, 1000, 10_000, 100_000)
#: Payloads of one put_many while the pool fills.
BATCH = 500
FILLER, CHUNK = "bench-filler", "bench-taker"


class Grown(NamedTuple):
    """Figures with so many payloads live on the same edge, sealed and not taken. Times in µs a chunk, bytes a payload
    beyond its data."""

    live: int
    p50_us: float
    broker_cpu_us: float
    broker_bytes: float


def growth(steps: tuple[int, ...], count: int, pool: str, say: Callable[[str], None]) -> list[Grown]:
    """Fill a private broker step by step; at each, hand `count` chunks over on the same edge, by name."""
    payload = {"hidden": torch.zeros(1, 2048, dtype=torch.bfloat16), "ids": torch.zeros(1, dtype=torch.int64)}
    rows: list[Grown] = []
    with connector.connect(stage=FILLER, embedded=True, pool=pool) as node:
        pid = int(node.status()["pid"])
        edge = node.edge(FILLER, CHUNK)
        with connector.connect(stage=CHUNK, endpoint=node.endpoint) as taker:
            inn = taker.edge(FILLER, CHUNK)
            _chunks(edge, inn, node, taker, payload, count)
            node.flush()
            empty = private_bytes(pid)
            live = 0
            for goal in steps:
                say(f"{goal} live payloads")
                while live < goal:
                    batch = range(live, min(live + BATCH, goal))
                    edge.put_many({f"live-{number}": payload for number in batch}, last=True)
                    live += len(batch)
                node.flush()
                used = cpu_of(pid)
                spans = _chunks(edge, inn, node, taker, payload, count)
                cpu = (cpu_of(pid) - used) / count * 1e6
                rows.append(Grown(live, quantile(spans, 0.5), cpu, (private_bytes(pid) - empty) / live))
    return rows


def _chunks(
    edge: connector.Edge,
    inn: connector.Edge,
    node: connector.Node,
    taker: connector.Node,
    payload: dict[str, torch.Tensor],
    count: int,
) -> list[float]:
    """µs from put to the taker's hands, one at a time."""
    spans: list[float] = []
    for number in range(count):
        rid = f"chunk-{number}"
        start = time.perf_counter_ns()
        edge.put(rid, payload)
        taken = inn.take(rid)
        spans.append((time.perf_counter_ns() - start) / 1000)
        taken.release()
        del taken
        node.finish(rid)
        taker.finish(rid)
    node.flush()
    taker.flush()
    return spans


def idle(seconds: float) -> tuple[float, float]:
    """Percent of a core that a broker, and each of two joined clients in this process, use while nothing happens."""
    with connector.connect(stage="bench-idle", embedded=True, pool="16MiB") as node:
        with connector.connect(stage="bench-idle", endpoint=node.endpoint) as other:
            node.edge("bench-idle", "bench-other").put("warm", {})
            other.edge("bench-idle", "bench-other").take("warm")
            node.flush()
            time.sleep(0.2)
            pid = int(node.status()["pid"])
            broker, own = cpu_of(pid), time.process_time()
            time.sleep(seconds)
            return (cpu_of(pid) - broker) / seconds * 100, (time.process_time() - own) / seconds * 50


def private_bytes(pid: int) -> int:
    """Memory of a process that is its own alone: not the mapped pool."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")
