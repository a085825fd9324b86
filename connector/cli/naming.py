"""How a payload is named on the command line: KEY, or --edge, --rid and --index.

    KEY = [EDGE "/"] RID ["[" INDEX "]"]

A rid is any text, so the parts are found from the outside: INDEX is a decimal number in brackets at
the very end, EDGE what stands before the first "/" if it reads FROM:TO or FROM:TO:REPLICA. All between
is the rid, slashes included. A rid that itself looks like one of these parts, or a stage with a "/" in
its name, is named by the options.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import click

from connector.core.errors import InvalidPayload, UsageError
from connector.core.names import MAX_INDEX, Edge, check_number, check_rid

_INDEXED = re.compile(r"(.+)\[(0|[1-9][0-9]{0,9})\]", re.DOTALL)


class Target(NamedTuple):
    """What a KEY names: edge None: on every edge; number None: every chunk."""

    edge: Edge | None
    rid: str
    number: int | None

    def __str__(self) -> str:
        place = f"{self.edge}/" if self.edge else ""
        return f"{place}{self.rid}" + ("" if self.number is None else f"[{self.number}]")


def parse(text: str) -> Target:
    """A KEY's parts. InvalidPayload: the rid is empty or too long, or the index too high."""
    number = None
    if match := _INDEXED.fullmatch(text):
        text, number = match[1], check_number(int(match[2]), "index", MAX_INDEX)
    head, slash, tail = text.partition("/")
    edge = _edge(head) if slash else None
    return Target(edge, check_rid(text if edge is None else tail), number)


def _edge(text: str) -> Edge | None:
    try:
        return Edge.parse(text)
    except InvalidPayload:
        return None


def chosen(key: str | None, edge: Edge | None, rid: str | None, index: int | None) -> Target:
    """The target of a command that takes KEY or options; UsageError for both or neither."""
    if key is not None:
        if edge is not None or rid is not None or index is not None:
            raise UsageError("name the payload by KEY or by --edge, --rid and --index, not by both", key=key)
        return parse(key)
    if rid is None:
        raise UsageError("name a payload: KEY, or --rid with --edge and --index where they are needed")
    return Target(edge, check_rid(rid), index)


class EdgeType(click.ParamType):
    """FROM:TO or FROM:TO:REPLICA."""

    name = "edge"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Edge:
        if isinstance(value, Edge):
            return value
        try:
            return Edge.parse(str(value))
        except InvalidPayload as error:
            self.fail(str(error), param, ctx)


EDGE = EdgeType()
INDEX = click.IntRange(0, MAX_INDEX)
EDGE_HELP = "Edge FROM:TO[:REPLICA]; replica 0 if left out."
