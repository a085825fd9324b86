"""Where the broker's configuration comes from: command line > environment > file > default.

Each source is checked by itself first, so that a wrong value is refused even where a stronger source hides it; the
whole is checked last. Refusals are ConfigError with a line for each problem (connector/config/source.py).
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from connector.broker.config_schema import ONE_SOURCE, BrokerConfig
from connector.config import reader
from connector.config.source import DEFAULT, Source, nearest, read, validate
from connector.core.endpoint import default_run_dir
from connector.core.errors import ConfigError

DEFAULT_FILE = Path("/etc/tensor-connector/config.yaml")
PREFIX = "CONNECTOR_"
#: Variables with the prefix that are no field.
OTHER_VARIABLES = ("CONNECTOR_CONFIG", "CONNECTOR_ENDPOINT")

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` found."""

    config: BrokerConfig
    #: Field -> `default`, `file PATH:LINE`, `environment NAME` or `command line`.
    sources: dict[str, str]
    #: Sentences about variables that look like ours and are not.
    warnings: tuple[str, ...]
    #: The file that was read, if one was.
    file: Path | None


def load(
    path: Path | None,
    env: Mapping[str, str],
    overrides: Mapping[str, object],
    default_file: Path = DEFAULT_FILE,
) -> Loaded:
    """The broker's configuration with the source of each value; ConfigError when any of it is refused.

    `path`: the file; None: $CONNECTOR_CONFIG, or `default_file` if it exists. `overrides`: the command line, by field;
    None means not given, and text is read as a variable's text is. An empty variable counts as unset.
    """
    file, found = _file(path, env, default_file)
    layers = [found, _environment(env), _overrides(overrides)]
    for layer in layers:
        validate(BrokerConfig, layer, context=ONE_SOURCE)
    run_dir = default_run_dir(os.getuid(), env)
    merged = Source({"run_dir": run_dir}, {("run_dir",): DEFAULT})
    sources = dict.fromkeys(BrokerConfig.model_fields, DEFAULT)
    for layer in layers:
        for name, value in layer.values.items():
            merged.values[name] = value
            sources[name] = layer.place((name,))
            # A stronger source's value has no lines of the weaker one's.
            merged.places = {path: place for path, place in merged.places.items() if path[0] != name}
            merged.places |= {path: place for path, place in layer.places.items() if path[:1] == (name,)}
            merged.places[(name,)] = sources[name]
    config = validate(BrokerConfig, merged)
    return Loaded(config, sources, tuple(_unknown_variables(env)), file)


def variable(name: str) -> str:
    """The environment variable of a field."""
    return PREFIX + name.upper()


def _file(path: Path | None, env: Mapping[str, str], default_file: Path) -> tuple[Path | None, Source]:
    named = path or (Path(env["CONNECTOR_CONFIG"]) if env.get("CONNECTOR_CONFIG") else None)
    file = named or default_file
    try:
        return file, read(file)
    except ConfigError as error:
        if named is None and isinstance(error.__cause__, FileNotFoundError):
            return None, Source({})
        raise


def _environment(env: Mapping[str, str]) -> Source:
    found = Source({})
    for name in BrokerConfig.model_fields:
        text = env.get(variable(name), "")
        if text:
            found.places[(name,)] = f"environment {variable(name)}"
            found.values[name] = _from_text(name, text, variable(name))
    return found


def _overrides(overrides: Mapping[str, object]) -> Source:
    given = {name: value for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, str):
            given[name] = _from_text(name, value, f"{COMMAND_LINE}: {name}")
    return Source(given, default_place=COMMAND_LINE)


def _from_text(name: str, text: str, place: str) -> object:
    """A field's value from text: verbatim where the field is text, by the file's rules where it is not."""
    if text == "null":
        return None
    if name not in BrokerConfig.model_fields or _is_text(BrokerConfig.model_fields[name].annotation):
        return text
    return reader.parse(text, place).value


def _is_text(annotation: object) -> bool:
    if isinstance(annotation, types.UnionType):
        return any(_is_text(part) for part in typing.get_args(annotation))
    return annotation is str or typing.get_origin(annotation) is typing.Literal


def _unknown_variables(env: Mapping[str, str]) -> Iterable[str]:
    known = [variable(name) for name in BrokerConfig.model_fields] + list(OTHER_VARIABLES)
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in known:
            # Without the prefix, which would make any two of them alike.
            near = nearest(name.removeprefix(PREFIX), [other.removeprefix(PREFIX) for other in known])
            yield f"the variable {name} is not known" + (f"; did you mean {PREFIX}{near}?" if near else "")
