"""`connector status` and `ls`: what the broker holds. They change nothing; `show` is in showing.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from connector.broker.queries import STATES
from connector.cli import tables
from connector.cli.common import broker, client_options
from connector.cli.naming import EDGE, EDGE_HELP
from connector.core.names import Edge

if TYPE_CHECKING:
    from connector.client.node import Node

KEY_COLUMNS = ("EDGE", "RID", "INDEX", "KEY", "DTYPE", "SHAPE", "BYTES", "STATE", "AGE")
PAYLOAD_COLUMNS = (
    "EDGE", "RID", "INDEX", "TENSORS", "BYTES", "MAPPED", "STATE", "AGE", "WRITER", "HOLDERS",
)  # fmt: skip


@click.command()
@client_options
def status(endpoint: str | None, timeout: float, as_json: bool) -> None:
    """The pool, the sessions, the edges, who waits, and the counters, all of one moment."""
    with broker(endpoint, timeout) as node:
        found = node.status("all")
    if as_json:
        tables.say(tables.as_json(found))
        return
    for line in _summary(dict(found["summary"])):
        tables.say(tables.printable(line))
    tables.say()
    tables.table(("SESSION", "STAGE", "PID", "STATE", "AGE", "SILENT", "RESERVED", "HELD", "WAITS", "READS"),
                 [_session(row) for row in found["sessions"]])  # fmt: skip
    tables.say()
    tables.table(("EDGE", "REQUESTS", "LIVE", "SEALED", "RELEASED", "USED", "RESERVED", "WAITS", "OLDEST", "REFUSED",
                  "READERS"), [_edge(row) for row in found["edges"]])  # fmt: skip


def _summary(told: dict[str, Any]) -> Iterator[str]:
    """Lines of people's words; what this version has no words for comes last, by name."""
    take = told.pop
    yield f"broker    pid {take('pid')}, epoch {take('epoch')}, up {tables.age(take('uptime'))}, {take('run_dir')}"
    parts = [f"{tables.size(take('pool_bytes'))}: used {tables.size(take('used_bytes'))}"]
    for name, words in (
        ("free_bytes", "free"),
        ("largest_hole", "largest hole"),
        ("reserved_bytes", "reserved"),
        ("quarantined_bytes", "quarantined"),
    ):
        parts.append(f"{words} {tables.size(take(name))}")
    yield "pool      " + ", ".join(parts)
    yield f"blocks    {take('blocks')} live, {take('blocks_left')} more possible"
    yield f"payloads  {take('payloads')} live, of {take('lives')} requests"
    yield "counters  " + " ".join(f"{name}={value}" for name, value in told.items())


def _session(row: dict[str, Any]) -> tables.Row:
    held = f"{row['held_payloads']} ({tables.size(row['held_bytes'])})"
    waits = f"{row['waiting_puts']} put, {row['waiting_takes']} take"
    ages = (tables.age(row["age"]), tables.age(row["silent"]))
    reads = ", ".join(row["reads"])
    return (row["session"], row["stage"], row["pid"], row["state"], *ages, tables.size(row["reserved_bytes"]), held,
            waits, reads)  # fmt: skip


def _edge(row: dict[str, Any]) -> tables.Row:
    counts = (row["requests"], row["payloads_live"], row["payloads_sealed"], row["payloads_released"])
    sizes = (tables.size(row["bytes_used"]), tables.size(row["bytes_reserved"]))
    waits = (row["waiting_puts"], tables.age(row["oldest_wait"]))
    return (row["edge"], *counts, *sizes, *waits, row["refused"], ", ".join(row["readers"]))


@click.command()
@click.option("--edge", type=EDGE, metavar="EDGE", help=EDGE_HELP)
@click.option("--rid", metavar="RID", help="One request id.")
@click.option("--prefix", metavar="TEXT", help="Request ids that begin so.")
@click.option("--key-prefix", metavar="TEXT", help="Tensor keys that begin so.")
@click.option("--state", type=click.Choice(STATES), help="The furthest that any reader of the payload has come.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N rows.")
@click.option("--payloads", is_flag=True, help="One row a payload instead of one a tensor.")
@client_options
def ls(
    edge: Edge | None,
    rid: str | None,
    prefix: str | None,
    key_prefix: str | None,
    state: str | None,
    limit: int | None,
    payloads: bool,
    endpoint: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """List live tensor keys, oldest payload first: what was there when the listing began and still is.

    Rows are printed as they come. A payload without tensors, or END sent alone, has no key: --payloads shows it.
    """
    given = {"edge": edge and str(edge), "rid": rid, "rid_prefix": prefix, "key_prefix": key_prefix, "state": state}
    filters = {name: value for name, value in given.items() if value is not None}
    with broker(endpoint, timeout) as node:
        pages = _pages(node, filters, payloads, limit)
        if as_json:
            _print_json(pages)
        else:
            _print_rows(PAYLOAD_COLUMNS if payloads else KEY_COLUMNS, pages)


def _pages(node: Node, filters: dict[str, str], payloads: bool, limit: int | None) -> Iterator[list[dict[str, Any]]]:
    """The broker's pages as rows, cut off at `limit`; never more than a page in hand."""
    left = limit
    for page in node.pages(**filters):
        told = (_told(row) for row in page) if payloads else (key for row in page for key in _keys(row))
        rows = list(islice(told, left))
        if rows:
            yield rows
        if left is not None:
            left -= len(rows)
            if left == 0:
                return


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """A payload's row: its tensors as a count."""
    return {**row, "tensors": len(row["tensors"])}


def _keys(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each tensor; `mapped` is the block's length, which tensors and payloads of one step share."""
    of_payload = {name: row[name] for name in ("edge", "rid", "life", "index", "state", "age", "writer", "holders")}
    for key, dtype, dims, nbytes in row["tensors"]:
        yield {**of_payload, "key": key, "dtype": dtype, "shape": dims, "nbytes": nbytes, "mapped": row["length"]}


def _print_json(pages: Iterator[list[dict[str, Any]]]) -> None:
    printed = tables.JsonList()
    for page in pages:
        printed.page(page)
    printed.end()


def _print_rows(columns: tuple[str, ...], pages: Iterator[list[dict[str, Any]]]) -> None:
    """Few rows on a terminal as a table; otherwise lines, page by page."""
    make = _payload_cells if columns is PAYLOAD_COLUMNS else _key_cells
    first = [make(row) for row in next(pages, [])]
    second = next(pages, None)
    if second is None:
        tables.table(columns, first)
        return
    lines = tables.Lines(columns)
    lines.page(first)
    lines.page([make(row) for row in second])
    for page in pages:
        lines.page([make(row) for row in page])


def _key_cells(row: dict[str, Any]) -> tables.Row:
    dims = tables.shape(row["shape"])
    return (row["edge"], row["rid"], row["index"], row["key"], row["dtype"], dims, row["nbytes"], row["state"],
            tables.age(row["age"]))  # fmt: skip


def _payload_cells(row: dict[str, Any]) -> tables.Row:
    what = "END" if row["end_only"] else row["tensors"]
    holders = ", ".join(row["holders"])
    return (row["edge"], row["rid"], row["index"], what, row["nbytes"], row["length"], row["state"],
            tables.age(row["age"]), row["writer"], holders)  # fmt: skip
