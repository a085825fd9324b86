"""`connector show`: one request's payloads, tensor by tensor. Changes nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from connector.cli import inspecting, tables
from connector.cli.common import broker, client_options, target_options
from connector.cli.naming import Target, chosen
from connector.core.errors import UnknownRequest, UsageError
from connector.core.names import Edge

if TYPE_CHECKING:
    from connector.client.node import Node


@click.command()
@target_options
@click.option("--stats", is_flag=True, help="Minimum, maximum, mean and NaN count of each tensor (reads the payload).")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.safetensors",
              help="Write the one payload that is named to a file. It stays what it is to its readers.")  # fmt: skip
@click.option("--story", is_flag=True, help="What happened to the request's payloads, as far as it is remembered.")
@client_options
def show(
    key: str | None,
    edge: Edge | None,
    rid: str | None,
    index: int | None,
    stats: bool,
    save: Path | None,
    story: bool,
    endpoint: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Show live payloads with their tensors: KEY is [EDGE/]RID[INDEX].

    INDEX is a number in brackets at the very end, and EDGE (FROM:TO or FROM:TO:REPLICA) what stands before the
    first slash; both may be left out: `thinker:talker:0/r1[3]`, `thinker:talker/r1`, `r1[0]`, `r1`. A rid that
    looks like one of these parts, or a stage with a slash, needs --edge, --rid and --index instead.
    """
    target = chosen(key, edge, rid, index)
    with broker(endpoint, timeout) as node:
        rows = find(node, target)
        lines = node.story(target.rid) if story else []
        if not rows and not lines:
            raise not_found(target)
        if save is not None:
            inspecting.save(node, _the_one(rows, target), save)
        if stats:
            for row in rows:
                row["stats"] = inspecting.statistics(node, row)
        _print_shown(rows, lines, story, as_json)


def find(node: Node, target: Target) -> list[dict[str, Any]]:
    """The live payloads that a target names, oldest first."""
    filters = {"rid": target.rid} | ({"edge": str(target.edge)} if target.edge else {})
    return [row for page in node.pages(**filters) for row in page if target.number in (None, row["index"])]


def not_found(target: Target) -> UnknownRequest:
    edge = str(target.edge) if target.edge else None
    return UnknownRequest("no such live payload", rid=target.rid, edge=edge, index=target.number)


def _the_one(rows: list[dict[str, Any]], target: Target) -> dict[str, Any]:
    if not rows:
        raise not_found(target)
    if len(rows) > 1:
        names = [f"{row['edge']}/{row['rid']}[{row['index']}]" for row in rows[:10]]
        raise UsageError("--save takes one payload; name one of these", found=len(rows), names=names)
    return rows[0]


def _print_shown(rows: list[dict[str, Any]], lines: list[list[Any]], story: bool, as_json: bool) -> None:
    names = ("at", "what", "edge", "index", "session", "detail")
    if as_json:
        told: dict[str, Any] = {"payloads": [_named_tensors(row) for row in rows]}
        if story:
            told["story"] = [dict(zip(names, line, strict=True)) for line in lines]
        tables.say(tables.as_json(told))
        return
    for row in rows:
        _print_payload(row)
    if story:
        # The broker's clock is the node's monotonic one, as ours.
        now = time.monotonic()
        cells = [(tables.age(max(now - line[0], 0.0)) + " ago", *line[1:]) for line in lines]
        tables.table(("WHEN", "WHAT", "EDGE", "INDEX", "SESSION", "DETAIL"), cells)


def _named_tensors(row: dict[str, Any]) -> dict[str, Any]:
    stats = row.get("stats", {})
    told = {name: value for name, value in row.items() if name != "stats"}
    told["tensors"] = [
        {"key": key, "dtype": dtype, "shape": dims, "nbytes": nbytes} | ({"stats": stats[key]} if key in stats else {})
        for key, dtype, dims, nbytes in row["tensors"]
    ]
    return told


def _print_payload(row: dict[str, Any]) -> None:
    marks = [word for name, word in (("last", "last"), ("end_only", "END alone")) if row[name]]
    marks += [f"damaged: {row['damage']}"] if "damage" in row else []
    lines = [
        f"{row['edge']}/{row['rid']}[{row['index']}]  {row['state']}, {tables.age(row['age'])} old",
        f"  {row['nbytes']} bytes in a block of {row['length']}, life {row['life']}, attempt {row['attempt']}, "
        f"readers {row['readers']}" + "".join(f", {mark}" for mark in marks),
        f"  writer: {row['writer']}",
        f"  holders: {', '.join(row['holders']) or 'none'}",
    ]
    for line in lines:
        tables.say(tables.printable(line))
    stats = row.get("stats")
    columns = ("KEY", "DTYPE", "SHAPE", "BYTES") + (("MIN", "MAX", "MEAN", "NAN") if stats is not None else ())
    cells: list[tables.Row] = []
    for key, dtype, dims, nbytes in row["tensors"]:
        found = stats[key].values() if stats is not None else ()
        cells.append((key, dtype, tables.shape(dims), nbytes, *["-" if value is None else value for value in found]))
    tables.table(columns, cells)
    tables.say()
