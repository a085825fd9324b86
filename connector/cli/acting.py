"""`connector rm` and `abort`: what the operator takes away by hand."""

from __future__ import annotations

import sys
from typing import Any

import click

from connector.cli import exits, tables
from connector.cli.common import broker, client_options, target_options
from connector.cli.naming import chosen
from connector.cli.showing import find, not_found
from connector.core.names import Edge

RISK = (
    "--force gives the memory back although a live reader may still look at it: that reader can then see the bytes "
    "of another payload, and no error. Make sure that it has stopped, or is stuck for good."
)


@click.command()
@target_options
@click.option("--force", is_flag=True, help="Free at once what a live reader may still hold. " + RISK)
@click.option("--yes", is_flag=True, help="Do not ask; without a terminal nothing is asked anyway.")
@client_options
def rm(
    key: str | None,
    edge: Edge | None,
    rid: str | None,
    index: int | None,
    force: bool,
    yes: bool,
    endpoint: str | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Drop live payloads: KEY is [EDGE/]RID[INDEX], as for `show`.

    Their streams fail for writer and reader, since a hole is never skipped. What a live reader holds stays until
    it lets go, unless --force. For a request as a whole `abort` is the gentler way.
    """
    target = chosen(key, edge, rid, index)
    with broker(endpoint, timeout) as node:
        edges = [target.edge] if target.edge else sorted({Edge.parse(row["edge"]) for row in find(node, target)})
        if not edges:
            raise not_found(target)
        if force:
            tables.note(RISK)
        where = ", ".join(str(edge) for edge in edges)
        if not _confirmed(f"remove {target} on {where}?", yes):
            tables.note("nothing was removed")
            return exits.NO
        reports: list[dict[str, Any]] = [
            {"edge": str(edge), "rid": target.rid, "index": target.number}
            | node.remove(edge, target.rid, target.number, force)
            for edge in edges
        ]
    if as_json:
        tables.say(tables.as_json({"removed": reports}))
        return exits.OK
    for report in reports:
        tables.say(tables.printable(f"{report['edge']}/{target.rid}: {_freed(report)}"))
    return exits.OK


def _freed(report: dict[str, Any]) -> str:
    held = f"; {report['held']} still held, freed when their readers let go" if report["held"] else ""
    return f"{report['payloads']} payloads freed{held}"


def _confirmed(question: str, yes: bool) -> bool:
    if yes or sys.stdin is None or not sys.stdin.isatty():
        return True
    return click.confirm(tables.printable(question), err=True)


@click.command()
@click.argument("rid")
@click.option(
    "--reason", default="aborted by the operator", show_default=True, metavar="TEXT", help="Told to everyone who waits."
)
@client_options
def abort(rid: str, reason: str, endpoint: str | None, timeout: float, as_json: bool) -> int:
    """End a request everywhere, and say what that freed.

    Late puts of the request are refused from then on, even if nothing is known of it yet (exit code 1).
    """
    with broker(endpoint, timeout) as node:
        known = bool(node.story(rid))
        report = node.abort(rid, reason)
    known = known or bool(report["payloads"] or report["held"])
    if as_json:
        tables.say(tables.as_json({"rid": rid, "known": known, **report}))
    elif known:
        tables.say(tables.printable(f"aborted {rid}: {_freed(report)}, {report['bytes']} bytes"))
    else:
        tables.note(f"nothing was known of {rid}; puts of it are refused from now on")
    return exits.OK if known else exits.NO
