"""Where the broker is: argument > $CONNECTOR_ENDPOINT > configuration file > default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from connector.config import reader
from connector.core.endpoint import default_run_dir, parse_endpoint
from connector.core.errors import ConfigError

DEFAULT_FILE = Path("/etc/tensor-connector/config.yaml")


class Resolved(NamedTuple):
    """The run directory and where its name came from, for error messages."""

    run_dir: str
    source: str


def resolve(endpoint: str | None, env: Mapping[str, str] = os.environ, default_file: Path = DEFAULT_FILE) -> Resolved:
    """The broker's run directory; ConfigError for an endpoint or file that names none."""
    if endpoint is not None:
        return Resolved(parse_endpoint(endpoint), "argument")
    if env.get("CONNECTOR_ENDPOINT"):
        return Resolved(parse_endpoint(env["CONNECTOR_ENDPOINT"]), "$CONNECTOR_ENDPOINT")
    if env.get("CONNECTOR_RUN_DIR"):
        return Resolved(parse_endpoint(env["CONNECTOR_RUN_DIR"]), "$CONNECTOR_RUN_DIR")
    named = env.get("CONNECTOR_CONFIG")
    path = Path(named) if named else default_file
    if named or path.exists():
        found = _run_dir_in(path)
        if found is not None:
            return Resolved(parse_endpoint(found), str(path))
    return Resolved(default_run_dir(os.getuid(), env), "default")


def _run_dir_in(path: Path) -> str | None:
    """Only the run directory is the client's business: the broker checks the rest of the file."""
    try:
        found = reader.parse(path.read_text(), str(path)).value
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file cannot be read: {error}", file=str(path)) from error
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ConfigError("the configuration file is no mapping", file=str(path))
    run_dir = found.get("run_dir")
    if run_dir is not None and not isinstance(run_dir, str):
        raise ConfigError("run_dir must be a path", file=str(path), given=repr(run_dir)[:80])
    return run_dir
