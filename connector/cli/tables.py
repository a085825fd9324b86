"""Output: tables on a terminal, plain aligned lines elsewhere, JSON on request.

Rids, keys and stage names are anybody's text: what is printed is free of control characters, and
never read as markup.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

#: Longest table that is drawn as one; longer ones are printed as they come.
FEW = 200
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Row = Sequence[object]


def printable(value: object) -> str:
    """Text that moves no cursor and breaks no line: control and format characters as escapes."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def size(count: int) -> str:
    """Bytes for people: `512 B`, `1.5 MiB`."""
    exponent = min(max(abs(count).bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if exponent == 0:
        return f"{count} B"
    return f"{count / 1024**exponent:.1f} {_UNITS[exponent]}"


def age(seconds: float) -> str:
    """`0.25s`, `12.3s`, `4m05s`, `3h07m`, `2d03h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.1f}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"


def shape(dims: Iterable[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"


def on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def say(text: str = "") -> None:
    """A line of people's output."""
    click.echo(text)


def note(text: str) -> None:
    """A line beside the output, to stderr."""
    click.echo(printable(text), err=True)


def as_json(value: object) -> str:
    """Strict JSON in ASCII; numbers that JSON has not become text."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def table(columns: Sequence[str], rows: Sequence[Row]) -> None:
    """A table: drawn on a terminal, aligned lines elsewhere."""
    if not on_terminal() or len(rows) > FEW:
        Lines(columns).page(rows)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE, pad_edge=False)
    for name in columns:
        drawn.add_column(name, overflow="fold")
    for row in rows:
        drawn.add_row(*[Text(printable(cell)) for cell in row])
    plain = bool(os.environ.get("NO_COLOR"))
    Console(file=sys.stdout, color_system=None if plain else "auto").print(drawn)


class Lines:
    """Aligned lines, a page at a time: columns only ever grow, so that no page waits for the next."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._widths = [len(name) for name in columns]
        self._head: list[Row] = [columns]

    def page(self, rows: Iterable[Row]) -> None:
        cells = [[printable(cell) for cell in row] for row in [*self._head, *rows]]
        self._head = []
        if not cells:
            return
        self._widths = [max(width, *column) for width, column in zip(self._widths, _lengths(cells), strict=True)]
        click.echo("\n".join(self._line(row) for row in cells))

    def _line(self, row: list[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, self._widths, strict=True)).rstrip()


def _lengths(cells: list[list[str]]) -> list[list[int]]:
    return [[len(cell) for cell in column] for column in zip(*cells, strict=True)]


class JsonList:
    """One JSON array, an element a line, written as the elements come."""

    def __init__(self) -> None:
        self._before = "[\n"

    def page(self, values: Iterable[object]) -> None:
        told = [as_json(value) for value in values]
        if told:
            click.echo(self._before + ",\n".join(told), nl=False)
            self._before = ",\n"

    def end(self) -> None:
        click.echo("[]" if self._before == "[\n" else "\n]")
