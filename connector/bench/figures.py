"""From spans and processor time to figures and ratios. Pure: numbers in, numbers out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

#: The first so many hand-overs of a paced run are not counted: caches, shelves and page tables warm up.
WARM = 0.1
#: A limit further than this from the stored one makes the run void.
FACTOR = 2.0


class Row(NamedTuple):
    """One system under one workload in one round. Times in µs, rates a second."""

    system: str
    workload: str
    round: int
    payloads: int
    nbytes: int
    p50_us: float
    p99_us: float
    per_s: float
    #: Processor time a payload: all stages, their servers and the broker, and the broker's alone.
    cpu_us: float
    broker_cpu_us: float

    @property
    def us_each(self) -> float:
        """µs of the clock a payload, at this rate."""
        return 1e6 / self.per_s


class Ratio(NamedTuple):
    """A figure of one system by that of another in the same round: median, least, most over the rounds."""

    name: str
    median: float
    low: float
    high: float
    rounds: int


class Rule(NamedTuple):
    """`figure` of (system, workload) divided by `figure_of` of (other, other_workload)."""

    name: str
    figure: str
    system: str
    workload: str
    other_figure: str
    other: str
    other_workload: str


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie; the nearest one that was measured."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def settled(spans: Sequence[float]) -> Sequence[float]:
    """Without the first ones."""
    return spans[int(len(spans) * WARM) :]


def spread(name: str, values: Iterable[float]) -> Ratio:
    found = list(values)
    return Ratio(name, statistics.median(found), min(found), max(found), len(found))


def ratios(rows: Sequence[Row], rules: Iterable[Rule]) -> dict[str, Ratio]:
    """Each rule's ratio, round by round; a rule of which a side was not measured is left out."""
    known: dict[tuple[str, str, int], Row] = {(row.system, row.workload, row.round): row for row in rows}
    rounds = sorted({row.round for row in rows})
    found: dict[str, Ratio] = {}
    for rule in rules:
        pairs = [
            (known.get((rule.system, rule.workload, at)), known.get((rule.other, rule.other_workload, at)))
            for at in rounds
        ]
        values = [
            getattr(ours, rule.figure) / getattr(theirs, rule.other_figure)
            for ours, theirs in pairs
            if ours is not None and theirs is not None
        ]
        if values:
            found[rule.name] = spread(rule.name, values)
    return found


def far_off(measured: Mapping[str, float], stored: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Limits that lie more than FACTOR from the stored ones: name -> (measured, stored)."""
    return {
        name: (value, stored[name])
        for name, value in measured.items()
        if name in stored and not stored[name] / FACTOR <= value <= stored[name] * FACTOR
    }
