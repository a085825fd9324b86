"""Which system runs which workload when: in rounds, side by side, so that what the machine does meets all alike."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import connector
from connector.bench.figures import Row, quantile, settled
from connector.bench.line import Line, Missing, Run
from connector.bench.workloads import WORKLOADS


class Entry(NamedTuple):
    """So many payloads of a workload in each round, by these systems in this order."""

    workload: str
    payloads: int
    systems: tuple[str, ...]


class Measured(NamedTuple):
    rows: list[Row]
    #: Systems that are not installed, and what is missing.
    missing: dict[str, str]


def measure(
    entries: Sequence[Entry],
    rounds: int,
    where: Mapping[str, str],
    broker: Mapping[str, Any],
    say: Callable[[str], None],
) -> Measured:
    """Run all entries `rounds` times, interleaved. `broker`: what connects to it, a private one or a running one.
    `say` hears of each round.

    Raises line.Failed if a stage met an error, and the connector's errors; nothing is left behind.
    """
    rows: list[Row] = []
    missing: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        connector.connect(stage="bench", **broker) as node,
        Line(folder, node.endpoint, int(node.status()["pid"]), where) as line,
    ):
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for entry in entries:
                nbytes = WORKLOADS[entry.workload].nbytes
                for system in entry.systems:
                    if system in missing:
                        continue
                    try:
                        run = line.run(system, entry.workload, entry.payloads)
                    except Missing as error:
                        missing[system] = str(error)
                    else:
                        rows.append(_row(system, entry.workload, number, nbytes, run))
    return Measured(rows, missing)


def _row(system: str, workload: str, number: int, nbytes: int, run: Run) -> Row:
    spans = settled(run.spans)
    used = run.stages_cpu + run.broker_cpu
    return Row(
        system,
        workload,
        number,
        len(run.spans),
        nbytes,
        quantile(spans, 0.5),
        quantile(spans, 0.99),
        len(run.spans) / run.wall,
        used / len(run.spans) * 1e6,
        run.broker_cpu / len(run.spans) * 1e6,
    )
