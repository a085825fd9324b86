"""`connector bench`: hand-over figures beside limits of this machine, with a private broker."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import click

from connector.cli import exits, tables
from connector.core.errors import UsageError


class _Named(click.ParamType):
    """NAME=MODULE:ATTRIBUTE."""

    name = "system"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, found, where = str(value).partition("=")
        if not (name and found and where.count(":") == 1 and all(where.split(":"))):
            self.fail(f"{value!r} is not NAME=MODULE:ATTRIBUTE", param, ctx)
        return name, where


@click.command()
@click.option("--quick", is_flag=True, help="Less of everything: within a minute.")
@click.option("--workload", "only", multiple=True, metavar="NAME", help="This workload alone; can be given again.")
@click.option("--with", "others", type=_Named(), multiple=True, metavar="NAME=MODULE:ATTRIBUTE",
              help="Measure this system, too: an object like those of connector.bench.systems.")  # fmt: skip
@click.option("--endpoint", metavar="RUN_DIR",
              help="Measure through the broker that runs there, without growth and idleness.")  # fmt: skip
@click.option("--device", metavar="NAME",
              help="Copies between the pool and this device instead (cuda, cuda:1).")  # fmt: skip
@click.option("--limits", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="JSON of limits in µs, by name: those to compare with, instead of the project's.")  # fmt: skip
@click.option("--json", "file", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
              help="Write ratios and rows there.")  # fmt: skip
def bench(
    quick: bool,
    only: tuple[str, ...],
    others: tuple[tuple[str, str], ...],
    endpoint: str | None,
    device: str | None,
    limits: Path | None,
    file: Path | None,
) -> int:
    """Measure hand-over between processes through a private broker, beside what this machine can do at best.

    Every payload's bytes are checked. A run in which the limits lie far from the stored ones is void.
    """
    if device is not None:
        return _of_device(device, file)
    from connector.bench import job, report
    from connector.bench.workloads import WORKLOADS

    # As after Ctrl-C, what was begun is cleared away.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if unknown := set(only) - set(WORKLOADS):
        raise UsageError("no such workload", workload=min(unknown), known=", ".join(WORKLOADS))
    stored = json.loads(limits.read_text()) if limits else None
    result = job.run(job.QUICK if quick else job.FULL, dict(others), only, stored, tables.note, endpoint)
    tables.table(report.COLUMNS, list(report.table(result)))
    if result.grown:
        tables.say()
        tables.table(report.GROWN, list(report.grown(result)))
    tables.say()
    tables.table(("RATIO", "MEDIAN", "LEAST", "MOST", "ROUNDS"), list(report.ratio_rows(result)))
    for name, why in result.missing.items():
        tables.say(f"{name}: not installed: {why}")
    for text in result.notes:
        tables.say(text)
    for name, (found, known) in result.void.items():
        tables.say(f"void: {name} is {found:,.0f} here and {known:,.0f} where the stored limits are of")
    if file:
        file.write_text(json.dumps(report.as_mapping(result), indent=1))
    return exits.NO if result.void else exits.OK


def _of_device(name: str, file: Path | None) -> int:
    from connector.bench import device

    if not re.fullmatch(r"cuda(:[0-9]+)?", name):
        raise UsageError("a device is cuda or cuda:N", device=name)
    found = device.run(name, tables.note)
    rows = [
        (one.way, f"{one.gib_per_s:.1f}", f"{one.pinned_gib_per_s:.1f}", f"{one.ratio:.2f}", str(one.copies))
        for one in found
    ]
    tables.table(("WAY", "GiB/s", "PAGE-LOCKED GiB/s", "RATIO", "COPIES a step"), rows)
    if file:
        file.write_text(json.dumps({"rows": [{**one._asdict(), "ratio": one.ratio} for one in found]}, indent=1))
    return exits.OK
