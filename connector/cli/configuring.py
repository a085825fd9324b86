"""`connector config check` and `show`: what is wrong in a file; what `serve` would use, and where that is from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from connector.cli import exits, tables
from connector.cli.common import config_options, json_option, overrides
from connector.cli.migrating import migrate
from connector.core.errors import ConfigError


@click.group()
def config() -> None:
    """Check a configuration, or show the broker's."""


@config.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option()
def check(file: Path | None, as_json: bool) -> int:
    """Check what `serve --config FILE` would read: file and environment, without starting anything.

    A FILE that holds engine_args, stages, stage_args or base_config is an engine's: its transfer_config and
    runner_adapter sections are checked, and for each stage is told what it hands on. What else it holds is the
    engine's, but for names that are nearly a section's: those are refused. What stands in its base_config is not read.

    Exit code 1 with a line for each problem: FILE:LINE, field, what is wrong.
    """
    try:
        found, warnings, stages = _checked(file)
    except ConfigError as error:
        if not as_json:
            raise ConfigError(error.message) from error
        told = {"ok": False, "problems": error.message.splitlines(), "facts": error.facts}
        tables.say(tables.as_json(told))
        return exits.NO
    where = str(found) if found else "no file"
    if as_json:
        told = {"ok": True, "file": where, "problems": [], "warnings": warnings}
        tables.say(tables.as_json(told if stages is None else told | {"stages": stages}))
        return exits.OK
    for warning in warnings:
        tables.note(f"warning: {warning}")
    tables.say(tables.printable(f"{where}: ok"))
    for stage in stages or ():
        name = "the stage" if stage["stage_id"] is None else f"stage {stage['stage_id']}"
        tables.say(tables.printable(f"  {name} {stage['hands_on']}"))
    return exits.OK


def _checked(file: Path | None) -> tuple[Path | None, tuple[str, ...], list[dict[str, Any]] | None]:
    """The file that was checked, if one was, warnings, and of an engine's file the stages; ConfigError with its
    problems."""
    from connector.broker.config import load
    from connector.config.source import read
    from runner_adapter.stagefile import handed_on, is_stage_file, read_file

    if file is not None and is_stage_file(read(file).values):
        stages, base = read_file(file)
        warnings = (f"{file}: the stages of its base_config, {base}, are not read: check that file, too",)
        told = [
            {"stage_id": stage.stage_id, "hands_on": handed_on(stage), "transfer_config": stage.transfer.model_dump()}
            for stage in stages.values()
        ]
        return file, warnings if base else (), told
    loaded = load(file, os.environ, {})
    return loaded.file, loaded.warnings, None


@config.command()
@config_options
@json_option()
def show(file: Path | None, run_dir: str | None, pool: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Show each value that `serve` with the same options would use, and its source."""
    from connector.broker.config import load

    loaded = load(file, os.environ, overrides(run_dir, pool, settings))
    found = loaded.config
    values = found.model_dump(mode="json", by_alias=True)
    meant: dict[str, Any] = {"max_blocks": found.block_limit, "ahead_session": found.ahead_limit}
    if as_json:
        fields = {
            name: {"value": values[name], "effective": meant.get(name, values[name]), "source": source}
            for name, source in loaded.sources.items()
        }
        where = str(loaded.file) if loaded.file else None
        tables.say(tables.as_json({"fields": fields, "file": where, "warnings": loaded.warnings}))
        return
    for warning in loaded.warnings:
        tables.note(f"warning: {warning}")
    cells = [(name, _cell(values[name], meant.get(name)), source) for name, source in loaded.sources.items()]
    tables.table(("FIELD", "VALUE", "SOURCE"), cells)


def _cell(value: object, meant: object) -> str:
    """A value as JSON writes it; null with what it stands for."""
    told = value if isinstance(value, str) else tables.as_json(value)
    return f"{told} ({meant})" if value is None and meant is not None else told


config.add_command(migrate)
