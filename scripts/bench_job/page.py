"""docs/performance.md and its plots, from what `connector bench --json` has written.

    python scripts/bench_job/page.py FIGURES.json DOCS COMMAND

DOCS is the folder of the page; the plots and the figures themselves go into DOCS/performance.
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plots import line_plot

from connector.bench.musts import BROKER_PATH, MUSTS
from connector.bench.workloads import WORKLOADS

OURS = "connector"
#: Limits of the machine, which nobody can be ahead of as a peer.
LIMITS = ("memcpy", "ring_sem")
#: Axis of a growth -> what its numbers are.
AXES = {"live": "live payloads on the edge", "sessions": "sessions", "pool": "MiB of the pool"}
WHYS = Path(__file__).with_name("whys.toml")


class Kind(NamedTuple):
    """A figure of a row, and whether more of it is better."""

    name: str
    column: str
    more: bool = False


P50, P99 = Kind("p50_us", "p50 µs"), Kind("p99_us", "p99 µs")
RATE, CPU, BROKER = Kind("per_s", "a second", more=True), Kind("cpu_us", "CPU µs"), Kind("broker_cpu_us", "broker µs")
Medians = Mapping[tuple[str, str], Mapping[str, float]]


def medians(rows: Iterable[Mapping[str, Any]]) -> Medians:
    """(workload, system) -> each figure's median over the rounds."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["workload"], row["system"]), []).append(row)
    kinds = (P50, P99, RATE, CPU, BROKER)
    return {
        key: {kind.name: statistics.median(row[kind.name] for row in found) for kind in kinds}
        for key, found in grouped.items()
    }


def page(figures: Mapping[str, Any], command: str, whys: Mapping[str, Mapping[str, str]]) -> str:
    """The whole page."""
    found = medians(figures["rows"])
    parts = [
        f"<!-- Made by `{command}`; the next run of it writes this page anew. -->",
        "# Performance",
        "",
        "What the figures are, and what they are not, is told in [benchmark.md](benchmark.md).",
        f"They were made by `{command}`; `performance/figures.json` has each round.",
        *_machine(figures),
        *_ratios(figures),
        *_workloads(found),
        *_growth(figures),
        *_ahead(found, whys),
        *_missing(figures),
    ]
    return "\n".join(parts) + "\n"


def _machine(figures: Mapping[str, Any]) -> list[str]:
    told = [(name, str(value)) for name, value in figures["machine"].items()]
    return ["", "## The machine", "", *_table(("what", "is"), told)]


def _ratios(figures: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, value in figures["ratios"].items():
        low, high = figures["spread"][name]
        must = MUSTS.get(name)
        wanted, aim, state = "", "", ""
        if must is not None:
            sign = "≥" if must.least else "≤"
            other = f" ({BROKER_PATH[name]:g} by the broker's path)" if name in BROKER_PATH else ""
            wanted, aim = f"{sign} {must.must:g}{other}", f"{sign} {must.aim:g}"
            state = "aim" if must.reached(value) else "holds" if must.holds(value) else "**missed**"
        rows.append((f"`{name}`", wanted, aim, f"{value:.3f}", f"{low:.3f} … {high:.3f}", state))
    unmeasured = ", ".join(f"`{name}`" for name in MUSTS if name not in figures["ratios"])
    said = ["", f"Not measured: {unmeasured}."] if unmeasured else []
    head = ("ratio", "must", "aim", "median", "least … most", "")
    return ["", "## Ratios", "", *_table(head, rows), *said]


def _workloads(found: Medians) -> Iterator[str]:
    yield from ("", "## Workloads", "", "Medians over the rounds; processor time is a payload's, of all processes.")
    for workload in dict.fromkeys(workload for workload, _ in found):
        shown = (P50, P99, RATE, CPU, BROKER)
        main = _main(workload)
        ours = found.get((workload, OURS))
        rows = []
        for (of, system), figures in found.items():
            if of == workload:
                times = figures[main.name] / ours[main.name] if ours else 0.0
                rows.append((system, *(_number(figures[kind.name]) for kind in shown), f"{times:.2f}" if ours else ""))
        head = ("system", *(kind.column for kind in shown), f"{main.column} by ours")
        yield from ("", f"### {workload}", "", *_table(head, rows))


def _growth(figures: Mapping[str, Any]) -> Iterator[str]:
    if not figures["growth"]:
        return
    yield from ("", "## Growth", "", "One chunk after another, put and taken by name, while one thing grows.")
    for axis, name in AXES.items():
        rows = [row for row in figures["growth"] if row["axis"] == axis]
        if rows:
            told = [(f"{row['value']:,}", _number(row["p50_us"]), _number(row["broker_cpu_us"])) for row in rows]
            yield from ("", f"![{name}](performance/{axis}.svg)", "")
            yield from _table((name, "p50 µs", "broker CPU µs a chunk"), told)
    for text in figures["notes"]:
        yield from ("", text[0].upper() + text[1:] + ".")


def plots(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of each growth's plot."""
    for axis, name in AXES.items():
        rows = [row for row in figures["growth"] if row["axis"] == axis]
        if rows:
            series = {
                "p50": [(row["value"], row["p50_us"]) for row in rows],
                "broker CPU": [(row["value"], row["broker_cpu_us"]) for row in rows],
            }
            yield f"{axis}.svg", line_plot("µs a chunk", name, "µs", series, log_x=True, x_ticks=axis != "live")


def ahead(found: Medians) -> Iterator[tuple[str, str, Kind, float, float]]:
    """Peer, workload, figure, theirs and ours, wherever theirs is the better."""
    for (workload, system), theirs in found.items():
        ours = found.get((workload, OURS))
        if ours is None or system == OURS or system in LIMITS:
            continue
        for kind in (_main(workload), P99, CPU):
            better, worse = (theirs, ours) if not kind.more else (ours, theirs)
            if better[kind.name] < worse[kind.name]:
                yield system, workload, kind, theirs[kind.name], ours[kind.name]


def _ahead(found: Medians, whys: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    losses = list(ahead(found))
    yield from ("", "## Where a peer is ahead", "")
    yield "By the medians above. Ahead in processor time counts, too." if losses else "Nowhere in this run."
    for peer in dict.fromkeys(loss[0] for loss in losses):
        rows, workloads = [], dict.fromkeys(loss[1] for loss in losses if loss[0] == peer)
        for _, workload, kind, theirs, ours in (loss for loss in losses if loss[0] == peer):
            times = theirs / ours if kind.more else ours / theirs
            rows.append((workload, kind.column, _number(theirs), _number(ours), f"{times:.2f} ×"))
        said = whys.get(peer, {})
        whole = said.get("any", "Why, nobody has said yet.")
        yield from ("", f"### {peer}", "", whole)
        yield from (f"In *{workload}*: {said[workload]}" for workload in workloads if workload in said)
        yield from ("", *_table(("workload", "figure", peer, OURS, "ahead by"), rows))


def _missing(figures: Mapping[str, Any]) -> Iterator[str]:
    if figures["missing"]:
        yield from ("", "## Not measured", "")
        yield from (f"- {name}: not installed: {why}" for name, why in figures["missing"].items())


def _main(workload: str) -> Kind:
    return P50 if WORKLOADS[workload].paced else RATE


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def write(file: Path, docs: Path, command: str) -> None:
    """The page, its plots, and the figures that they are of."""
    figures = json.loads(file.read_text())
    folder = docs / "performance"
    folder.mkdir(parents=True, exist_ok=True)
    (docs / "performance.md").write_text(page(figures, command, tomllib.loads(WHYS.read_text())))
    for name, text in plots(figures):
        (folder / name).write_text(text)
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
