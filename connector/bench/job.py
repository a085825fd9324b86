"""A whole run of the benchmark: what is measured in which length, the ratios, and whether the machine let it count."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from connector.bench import growth, standing
from connector.bench.figures import Ratio, Row, far_off, ratios, spread
from connector.bench.rules import RULES, STORED
from connector.bench.schedule import Entry, measure
from connector.bench.systems import OWN

#: 256 MiB several times over, and room for 100 000 live chunks.
POOL = "1GiB"


class Length(NamedTuple):
    """How much is measured: rounds, payloads of each workload a round, live payloads, seconds of idleness, sessions
    and sizes of the pool in MiB."""

    rounds: int
    counts: Mapping[str, int]
    live: tuple[int, ...]
    idle: float
    #: Systems that are not measured under a workload.
    without: Mapping[str, tuple[str, ...]] = {}
    sessions: tuple[int, ...] = ()
    pools: tuple[int, ...] = ()


def _counts(chunk: int, sustained: int, step: int, prefill: int, large: int) -> Mapping[str, int]:
    fast = {"sustained": sustained, "sustained16": sustained, "step": step, "pipeline": sustained}
    return {"chunk": chunk, **fast, "prefill": prefill, "large": large}


QUICK = Length(
    5,
    _counts(100, 2000, 64 * 30, 30, 6),
    (10, 100_000),
    2.0,
    # No ratio is made of these, and they take a third of the time.
    {"large": ("ring_sem", "zmq_hop", "vllm_omni_tight")},
)
FULL = Length(
    7,
    _counts(400, 2000, 64 * 30, 40, 6),
    (10, 100, 1000, 10_000, 100_000),
    10.0,
    sessions=(1, 4, 16, 64),
    pools=(64, 256, 1024, 4096, 8192),
)
#: Chunks at each point of a growth.
CHUNKS = 300


class Result(NamedTuple):
    rows: list[Row]
    grown: list[growth.Grown]
    ratios: dict[str, Ratio]
    #: Limits that lie too far from the stored ones: the run is void.
    void: dict[str, tuple[float, float]]
    missing: dict[str, str]
    #: What else is to be said.
    notes: list[str]
    machine: dict[str, Any]


def run(
    length: Length, others: Mapping[str, str], only: Sequence[str], stored: Mapping[str, float] | None,
    say: Callable[[str], None], endpoint: str | None = None,
) -> Result:  # fmt: skip
    """Measure. `others`: more systems, by name. `only`: these workloads, and no growth or idleness. `stored`: limits to
    compare with; the project's own if None. `endpoint`: run directory of a broker that serves others, too; growth and
    idleness are then left out, which need one of their own.

    Raises line.Failed if a stage met an error, and the connector's errors.
    """
    torch.set_num_threads(1)
    entries = [
        Entry(name, count, tuple(system for system in (*OWN, *others) if _fits(system, name, length)))
        for name, count in length.counts.items()
        if not only or name in only
    ]
    broker = {"endpoint": endpoint} if endpoint else {"embedded": True, "pool": POOL}
    measured = measure(entries, length.rounds, {**OWN, **others}, broker, say)
    found = ratios(measured.rows, RULES)
    for name, value in _steps(measured.rows):
        found[name] = value
    grown: list[growth.Grown] = []
    notes: list[str] = []
    if endpoint is not None:
        notes.append(f"through the broker of {endpoint}: no growth, no idleness")
    elif not only:
        grown, notes = _grown(length, say)
        found |= _standing(grown, length.idle)
    far = far_off(limits(measured.rows), STORED if stored is None else stored)
    return Result(measured.rows, grown, found, far, measured.missing, notes, machine())


def _grown(length: Length, say: Callable[[str], None]) -> tuple[list[growth.Grown], list[str]]:
    live = growth.over_live(length.live, CHUNKS, POOL, say)
    sessions = growth.over_sessions(length.sessions, CHUNKS, POOL, say)
    pools, notes = growth.over_pools(length.pools, CHUNKS, say)
    return [*live, *sessions, *pools], notes


def _fits(system: str, workload: str, length: Length) -> bool:
    if system == "memcpy" and workload not in ("prefill", "large"):
        return False
    return system not in length.without.get(workload, ())


def _steps(rows: Sequence[Row]) -> list[tuple[str, Ratio]]:
    values = [row.broker_cpu_us for row in rows if (row.system, row.workload) == ("connector", "step")]
    name = "broker_cpu_us_per_chunk"
    return [(name, spread(name, values))] if values else []


def _standing(grown: Sequence[growth.Grown], seconds: float) -> dict[str, Ratio]:
    live = [row for row in grown if row.axis == "live"]
    values = {
        "growth_broker_cpu_100k_vs_10": live[-1].broker_cpu_us / live[0].broker_cpu_us,
        "broker_bytes_per_live_payload": live[-1].broker_bytes,
        "idle_cpu_percent": max(standing.idle(seconds)),
    }
    return {name: spread(name, [value]) for name, value in values.items()}


def limits(rows: Sequence[Row]) -> dict[str, float]:
    """What the machine gave: the limits' figures, medians over the rounds."""
    wanted = {
        "memcpy_large_us": ("memcpy", "large", "p50_us"),
        "memcpy_prefill_us": ("memcpy", "prefill", "p50_us"),
        "ring_sem_chunk_us": ("ring_sem", "chunk", "p50_us"),
        "zmq_hop_chunk_us": ("zmq_hop", "chunk", "p50_us"),
    }
    found = {}
    for name, (system, workload, figure) in wanted.items():
        values = [getattr(row, figure) for row in rows if (row.system, row.workload) == (system, workload)]
        if values:
            found[name] = spread(name, values).median
    return found


def machine() -> dict[str, Any]:
    """What the figures are of."""
    model = ""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
