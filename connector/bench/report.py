"""A result as lines for people and as a mapping for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from connector.bench.figures import Row
from connector.bench.job import Result

GROWN = ("AXIS", "AT", "p50 µs", "BROKER µs each", "BYTES each")
COLUMNS = ("WORKLOAD", "SYSTEM", "p50 µs", "p99 µs", "a second", "CPU µs each", "BROKER µs each")


def table(result: Result) -> Iterator[tuple[str, ...]]:
    """A row a workload and system: medians over the rounds."""
    for workload, system in dict.fromkeys((row.workload, row.system) for row in result.rows):
        rows = [row for row in result.rows if (row.workload, row.system) == (workload, system)]
        yield (
            workload,
            system,
            _number(_median(rows, "p50_us")),
            _number(_median(rows, "p99_us")),
            _number(_median(rows, "per_s")),
            _number(_median(rows, "cpu_us")),
            _number(_median(rows, "broker_cpu_us")),
        )


def grown(result: Result) -> Iterator[tuple[str, ...]]:
    for row in result.grown:
        each = _number(row.broker_bytes) if row.axis == "live" else "-"
        yield row.axis, f"{row.value:,}", _number(row.p50_us), _number(row.broker_cpu_us), each


def ratio_rows(result: Result) -> Iterator[tuple[str, ...]]:
    for ratio in result.ratios.values():
        yield ratio.name, f"{ratio.median:.3f}", f"{ratio.low:.3f}", f"{ratio.high:.3f}", str(ratio.rounds)


def as_mapping(result: Result) -> dict[str, Any]:
    """`ratios` by name, medians; `rows` one a system, workload and round; and what else was found."""
    return {
        "ratios": {name: round(ratio.median, 4) for name, ratio in result.ratios.items()},
        "spread": {name: [round(ratio.low, 4), round(ratio.high, 4)] for name, ratio in result.ratios.items()},
        "rows": [{name: _rounded(value) for name, value in row._asdict().items()} for row in result.rows],
        "growth": [{name: _rounded(value) for name, value in row._asdict().items()} for row in result.grown],
        "void": {name: list(pair) for name, pair in result.void.items()},
        "missing": result.missing,
        "notes": result.notes,
        "machine": result.machine,
    }


def _median(rows: list[Row], figure: str) -> float:
    return statistics.median(getattr(row, figure) for row in rows)


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value
