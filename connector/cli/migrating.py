"""`connector config migrate`: an old stage config, rewritten for the runner adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from connector.cli import exits, tables
from connector.cli.common import json_option
from connector.config.source import read_text
from connector.core.errors import ConfigError, UsageError


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="NEW", help="Where to; it must not be there yet.")
@click.option("--pipeline", metavar="NAME", help="The pipeline that OLD deploys, where it does not name it.")
@json_option()
def migrate(old: Path, out: Path | None, pipeline: str | None, as_json: bool) -> int:
    """Rewrite an old stage config: an explicit transfer_config for each stage that sends.

    Prints the new file, or writes it to NEW; comments stay. What was done, and what could not be told and is left to
    do, goes to stderr with the lines of OLD. Exit code 1 if something is left to do.
    """
    from runner_adapter.migrate import migrate as rewritten

    found = rewritten(read_text(old), str(old), pipeline=pipeline)
    if out is not None:
        _write(out, found.text)
    if as_json:
        told: dict[str, Any] = {"ok": not found.unsaid, "file": str(old), "out": None if out is None else str(out)}
        told |= {"text": found.text} if out is None else {}
        told |= {"written": [note._asdict() for note in found.written]}
        tables.say(tables.as_json(told | {"unsaid": [note._asdict() for note in found.unsaid]}))
        return exits.NO if found.unsaid else exits.OK
    if out is None:
        click.echo(found.text, nl=False)
    for what, notes in (("done", found.written), ("to do", found.unsaid)):
        for note in notes:
            tables.note(f"{what}: {old}:{note.line}: {note.text}")
    return exits.NO if found.unsaid else exits.OK


def _write(file: Path, text: str) -> None:
    """UsageError if it is there: the old file is the way back."""
    try:
        with file.open("x", newline="", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise UsageError("--out names a file that is there already", file=str(file)) from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
