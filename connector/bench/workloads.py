"""What is handed over, how fast, and with how much of it under way. Shapes, counts and seconds; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]
_ITEM = {"bfloat16": 2, "int64": 8}

_CHUNK: Mapping[str, tuple[Shape, str]] = {"hidden": ((1, 2048), "bfloat16"), "ids": ((1,), "int64")}
_PREFILL: Mapping[str, tuple[Shape, str]] = {
    "embed": ((1024, 2048), "bfloat16"),
    "hidden": ((1024, 2048), "bfloat16"),
    "ids": ((1024,), "int64"),
}
_LARGE: Mapping[str, tuple[Shape, str]] = {"x": ((16384, 8192), "bfloat16")}


class Workload(NamedTuple):
    """One kind of traffic between a writer and a reader.

    The writer has at most `window` payloads under way, waits `pause` to one and a half times `pause` seconds
    before each put, and goes round `streams` requests; with `step` above 1 it puts so many of them as one step.
    With `hops` above 1 a stage between them takes each payload and puts it on, with a window of its own.
    """

    name: str
    shapes: Mapping[str, tuple[Shape, str]]
    pause: float = 0.0
    window: int = 1
    streams: int = 1
    step: int = 1
    hops: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of a payload."""
        return sum(prod(shape) * _ITEM[dtype] for shape, dtype in self.shapes.values())

    @property
    def paced(self) -> bool:
        """One at a time, from idle: its figure is a latency. Otherwise it is a rate."""
        return self.pause > 0


#: By name. chunk, prefill and large wake both sides from idle, as a decode loop does.
WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("chunk", _CHUNK, pause=0.002),
        Workload("sustained", _CHUNK, window=64),
        Workload("sustained16", _CHUNK, window=64, streams=16),
        Workload("step", _CHUNK, window=128, streams=64, step=64),
        Workload("pipeline", _CHUNK, window=64, streams=64, hops=2),
        Workload("prefill", _PREFILL, pause=0.004),
        Workload("large", _LARGE, pause=0.02),
    )
}
