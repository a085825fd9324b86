"""Compare the two runs, and say what happened: progress on stderr, tables on stdout, numbers as JSON."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from pipelines import Outcome, Pipeline, Reference, Request
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transport import Flow, raw_bytes

#: Columns of the tables in a narrower place: a broken number is worse than a broken line.
WIDTH = 100


@dataclass
class Run:
    """All that one staged run left behind. Flows by FROM:TO; why requests failed, by rid; the rows of each step, (in
    prefill, decoding), by stage, of stages that run in steps."""

    pipeline: Pipeline
    requests: list[Request]
    pids: dict[str, int]
    outcomes: dict[str, Outcome]
    failed: dict[str, str]
    sent: dict[str, Flow]
    received: dict[str, Flow]
    steps: dict[str, list[list[int]]]
    counters: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)


HANDOVER = ("handover_p50_us", "handover_p99_us", "handover_idle_p50_us", "handover_idle_p99_us")


def percentile(nanoseconds: list[int], share: float) -> float | None:
    """In µs, the smallest value that at least `share` of all values do not exceed; None of none."""
    if not nanoseconds:
        return None
    return sorted(nanoseconds)[max(0, math.ceil(share * len(nanoseconds)) - 1)] / 1e3


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes; unlike torch.equal, NaN equals itself and 0.0 is not -0.0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw_bytes(a), raw_bytes(b))


def differences(run: Run, reference: Reference) -> list[str]:
    """A line per difference between the ends of an edge, the two runs, or the table and the broker's counters.

    Of a request that failed only that it did: who got how far is no difference. Then the counts are no proof either.
    """
    found = [f"{rid}: failed: {why}" for rid, why in run.failed.items()]
    for edge in run.pipeline.edges:
        flows = (run.sent[edge].digests, run.received[edge].digests, reference.digests.get(edge))
        sent, received, made = ({r: d for r, d in (f or {}).items() if r not in run.failed} for f in flows)
        found += _unequal_chunks(edge, sent, received, "sent and received")
        if edge in reference.digests:
            found += _unequal_chunks(edge, received, made, "received and made in one process")
    for request in run.requests:
        if request.rid in run.failed:
            continue
        ours, uncut = run.outcomes[request.rid], reference.outcomes[request.rid]
        if not same_bits(ours.wav, uncut.wav):
            found.append(f"{request.rid}: the waveform is not that of the one process")
        if uncut.codes is not None and (ours.codes is None or not same_bits(ours.codes, uncut.codes)):
            found.append(f"{request.rid}: the codes are not those of the one process")
    return found if run.failed else _miscounts(run) + found


def _unequal_chunks(edge: str, a: dict[str, list[str]], b: dict[str, list[str]], what: str) -> list[str]:
    found = [f"{edge}: no payload passed"] if not a or not b else []
    for rid in sorted(a.keys() | b.keys()):
        left, right = a.get(rid, []), b.get(rid, [])
        if len(left) != len(right):
            found.append(f"{edge} {rid}: {what}: {len(left)} and {len(right)} payloads")
        unequal = [i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y]
        if unequal:
            found.append(f"{edge} {rid}: {what}: payload {unequal[0]} differs (and {len(unequal) - 1} more)")
    return found


def _miscounts(run: Run) -> list[str]:
    found = []
    for row in edge_rows(run):
        for what in ("payloads", "bytes"):
            if not row[what] == row[f"{what}_received"] == row[f"{what}_broker"]:
                told = f"{row[what]} sent, {row[f'{what}_received']} received, {row[f'{what}_broker']} by the broker"
                found.append(f"{row['edge']}: {what} do not agree: {told}")
    for what, total in (("payloads", "payloads_sealed"), ("bytes", "bytes_sealed")):
        ours = sum(row[what] for row in edge_rows(run))
        if ours != run.counters[total]:
            found.append(f"{what} in all: {ours} by the table, {run.counters[total]} by the broker")
    if run.counters["payloads_live"]:
        found.append(f"the broker still holds {run.counters['payloads_live']} payloads that were all read")
    return found


def edge_rows(run: Run) -> list[dict[str, Any]]:
    """Per edge: payloads and bytes by its writer, its reader and the broker; hand-over p50 and p99 in µs.

    The idle ones are over the payloads that their reader was already waiting for; None where there were none.
    """
    rows = []
    for edge in run.pipeline.edges:
        sent, received = run.sent[edge], run.received[edge]
        broker = run.counters["edges"].get(f"{edge}:0", {"payloads_sealed": 0, "bytes_sealed": 0})
        rows.append(
            {
                "edge": edge,
                "requests": len(sent.digests),
                "payloads": sent.payloads,
                "payloads_received": received.payloads,
                "payloads_broker": broker["payloads_sealed"],
                "bytes": sent.nbytes,
                "bytes_received": received.nbytes,
                "bytes_broker": broker["bytes_sealed"],
                "handover_p50_us": percentile(received.handover_ns, 0.50),
                "handover_p99_us": percentile(received.handover_ns, 0.99),
                "handover_idle_p50_us": percentile(received.idle_ns, 0.50),
                "handover_idle_p99_us": percentile(received.idle_ns, 0.99),
            }
        )
    return rows


def as_data(run: Run, found: list[str]) -> dict[str, Any]:
    """The tables' numbers, for --json."""
    rate = run.pipeline.samples_per_second
    return {
        "model": run.pipeline.name,
        "identical": not found,
        "differences": found,
        "edges": edge_rows(run),
        "stages": [
            {"stage": stage, "pid": run.pids[stage], "steps": run.steps[stage]} for stage in run.pipeline.stages
        ],
        "failed": run.failed,
        "requests": [
            {
                "rid": request.rid,
                "says": request.says,
                "chunks": len(run.received[run.pipeline.edges[-1]].digests.get(request.rid, [])),
                "seconds": run.outcomes[request.rid].wav.numel() / rate,
                "wav": run.files[request.rid],
            }
            for request in run.requests
            if request.rid in run.outcomes
        ],
        "broker": run.counters,
    }


def _table(title: str, columns: list[str], numbers: set[str], rows: list[list[Any]], caption: str = "") -> Table:
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=column != "file")
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    return table


def _batches(steps: list[list[int]]) -> list[Any]:
    """How many steps, rows a step on average and at most, and steps that mixed prompts and decoding requests."""
    rows = [sum(step) for step in steps]
    mean = f"{sum(rows) / len(rows):.1f}" if rows else "-"
    return [len(rows), mean, max(rows, default=0), sum(all(step) for step in steps)]


def print_tables(console: Console, data: dict[str, Any]) -> None:
    """Requests, stages, and edges beside the broker's own counters."""
    requests = [[r["rid"], r["chunks"], f"{r['seconds']:.2f}", r["wav"]] for r in data["requests"]]
    columns = ["request", "chunks", "seconds", "file"]
    console.print(_table("Requests", columns, {"chunks", "seconds"}, requests))
    columns = ["stage", "pid", "steps", "rows a step", "most", "mixed"]
    stages = [[stage["stage"], str(stage["pid"]), *_batches(stage["steps"])] for stage in data["stages"]]
    caption = "rows: requests that ran together; mixed: steps with prompts and decoding ones"
    shown = len(columns) if any(stage["steps"] for stage in data["stages"]) else 2
    rows = [stage[:shown] for stage in stages]
    console.print(_table("Stage processes", columns[:shown], set(columns[1:]), rows, caption if shown > 2 else ""))
    rows, broker = data["edges"], data["broker"]
    keys = ("edge", "requests", "payloads", "payloads_broker", "bytes", "bytes_broker")
    counted = [[row[key] for key in keys] for row in rows]
    total = [sum(row[key] for row in rows) for key in ("payloads", "bytes")]
    counted.append(["all", len(requests), total[0], broker["payloads_sealed"], total[1], broker["bytes_sealed"]])
    columns = ["edge", "reqs", "payloads", "by broker", "bytes", "by broker "]
    console.print(
        _table("Payloads, by the stages and by the broker's own counters", columns, set(columns[1:]), counted)
    )
    times = [[row["edge"], *("-" if row[key] is None else f"{row[key] / 1e3:.2f}" for key in HANDOVER)] for row in rows]
    columns = ["edge", "p50", "p99", "idle p50", "idle p99"]
    caption = "from put to the reader's hands, busy with others or not; idle: it waited"
    console.print(_table("Hand-over, ms", columns, set(columns[1:]), times, caption))


class Watch(AbstractContextManager["Watch"]):
    """Progress on stderr: bars on a terminal, lines elsewhere."""

    def __init__(self, requests: list[Request], samples_per_second: int) -> None:
        self._console = Console(stderr=True)
        self._rate = samples_per_second
        self._started = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[heard]}"))
        self._bars = Progress(*columns, TimeElapsedColumn(), console=self._console)
        self._samples = {request.rid: 0 for request in requests}
        self._tasks: dict[str, TaskID] = {}

    def say(self, line: str) -> None:
        """One line, as it is."""
        self._console.print(
            f"{time.monotonic() - self._started:6.1f} s  {line}", markup=False, highlight=False, soft_wrap=True
        )

    def heard(self, rid: str, samples: int, last: bool) -> None:
        """A chunk of speech of `rid` has come."""
        self._samples[rid] += samples
        told = f"{self._samples[rid] / self._rate:.2f} s of speech{', complete' if last else ''}"
        if not self._console.is_terminal:
            self.say(f"{rid}: {told}")
            return
        if not self._tasks:
            self._bars.start()
            self._tasks = {r: self._bars.add_task(r, total=None, heard="") for r in self._samples}
        if last:
            self._bars.update(self._tasks[rid], total=1, completed=1)
        self._bars.update(self._tasks[rid], heard=told)

    def close_bars(self) -> None:
        """The bars, if there are any, stand still from here on."""
        if self._tasks:
            self._bars.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_bars()
