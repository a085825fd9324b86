"""`connector sweep`: shared memory that dead brokers left. Needs no broker."""

from __future__ import annotations

import os

import click

from connector.arena import sweep as arena_sweep
from connector.arena.segment import SHM_DIR
from connector.arena.sweep import Finding
from connector.cli import exits, tables
from connector.cli.common import json_option


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option(
    "--shm-dir",
    type=click.Path(exists=True, file_okay=False),
    default=SHM_DIR,
    show_default=True,
    metavar="DIR",
    help="Where the segments lie, such as a container's /dev/shm seen from the host.",
)
@json_option()
def sweep(dry_run: bool, shm_dir: str, as_json: bool) -> int:
    """List segments with what speaks for and against them, and remove the stale ones.

    Stale is what no broker and no session can hold: their locks are free. Live, foreign and damaged ones are
    listed and left alone. Exit code 1 if something stale could not be removed.
    """
    try:
        found = arena_sweep.find(shm_dir)
        gone = arena_sweep.remove(found, dry_run, shm_dir=shm_dir)
    except OSError as error:
        raise click.ClickException(f"the sweep stopped: {error.strerror}: {error.filename or shm_dir}") from error
    removed = set(gone)
    rows = [(finding, os.path.join(shm_dir, finding.name) in removed) for finding in found]
    if as_json:
        told = [finding._asdict() | {"removed": went and not dry_run} for finding, went in rows]
        tables.say(tables.as_json({"dry_run": dry_run, "findings": told, "paths": gone}))
    else:
        _print(rows, gone, dry_run)
    left = any(finding.verdict == "stale" and not went for finding, went in rows)
    return exits.NO if left else exits.OK


def _print(rows: list[tuple[Finding, bool]], gone: list[str], dry_run: bool) -> None:
    done = "would go" if dry_run else "removed"
    cells = [
        (finding.name, tables.size(finding.size), finding.verdict, done if went else "left", finding.reason)
        for finding, went in rows
    ]
    if cells:
        tables.table(("NAME", "SIZE", "VERDICT", "DONE", "REASON"), cells)
    freed = sum(finding.size for finding, went in rows if went)
    segments = sum(went for _, went in rows)
    others = len(gone) - segments
    tables.say(f"{done}: {segments} segments ({tables.size(freed)}), {others} sockets and locks")
