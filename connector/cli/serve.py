"""`connector serve`: the broker itself."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import click

from connector.cli.common import config_options, json_option, overrides

log = logging.getLogger("connector.cli")


@click.command()
@config_options
@json_option("Log one JSON object a line, as `--set log_format=json` does.")
def serve(file: Path | None, run_dir: str | None, pool: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Serve this node until SIGTERM or SIGINT.

    Each value comes from the strongest source that has it: command line, environment, file, default. Where a
    value that is no default came from is logged at the start; `connector config show` tells it without starting.
    """
    from connector.broker import config, logs
    from connector.broker.serve import run

    if as_json:
        settings = (*settings, "log_format=json")
    loaded = config.load(file, os.environ, overrides(run_dir, pool, settings))
    logs.set_up(loaded.config.log_level, loaded.config.log_format)
    for warning in loaded.warnings:
        log.warning(warning)
    values = loaded.config.model_dump(mode="json", by_alias=True)
    for name, source in loaded.sources.items():
        if source != config.DEFAULT:
            log.info("configured", extra={"facts": {name: values[name], "source": source}})
    run(loaded.config)
