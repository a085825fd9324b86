"""Where the broker's configuration comes from: command line > environment > file > default.

Each source is checked by itself first, so that a wrong value is refused even where a stronger source hides it; the
whole is checked last. Refusals are ConfigError; their message has a line for each problem: the place (file and line,
variable, command line), the dotted field, what is wrong and what was given.
"""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from connector.broker.config_schema import ONE_SOURCE, BrokerConfig, EdgeConfig
from connector.config import reader
from connector.core.endpoint import default_run_dir
from connector.core.errors import ConfigError

DEFAULT_FILE = Path("/etc/tensor-connector/config.yaml")
PREFIX = "CONNECTOR_"
#: Variables with the prefix that are no field.
OTHER_VARIABLES = ("CONNECTOR_CONFIG", "CONNECTOR_ENDPOINT")
#: A larger file is not a configuration.
MAX_FILE_BYTES = 1 << 20

COMMAND_LINE = "command line"
DEFAULT = "default"


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


@dataclass(slots=True)
class _Source:
    """Values of one source and where each stands. `place` maps a path into the values to a place in words."""

    values: dict[str, object]
    places: dict[reader.Path, str] = field(default_factory=dict)
    default_place: str = DEFAULT

    def place(self, path: reader.Path) -> str:
        """The place of `path`, or of what it stands in when it is missing."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return self.default_place


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
        _validate(layer, context=ONE_SOURCE)
    run_dir = default_run_dir(os.getuid(), env)
    merged = _Source({"run_dir": run_dir}, {("run_dir",): DEFAULT})
    sources = dict.fromkeys(BrokerConfig.model_fields, DEFAULT)
    for layer in layers:
        for name, value in layer.values.items():
            merged.values[name] = value
            sources[name] = layer.place((name,))
            # A stronger source's value has no lines of the weaker one's.
            merged.places = {path: place for path, place in merged.places.items() if path[0] != name}
            merged.places |= {path: place for path, place in layer.places.items() if path[:1] == (name,)}
            merged.places[(name,)] = sources[name]
    config = _validate(merged, context=None)
    return Loaded(config, sources, tuple(_unknown_variables(env)), file)


def variable(name: str) -> str:
    """The environment variable of a field."""
    return PREFIX + name.upper()


def _file(path: Path | None, env: Mapping[str, str], default_file: Path) -> tuple[Path | None, _Source]:
    named = path or (Path(env["CONNECTOR_CONFIG"]) if env.get("CONNECTOR_CONFIG") else None)
    file = named or default_file
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        if named is None:
            return None, _Source({})
        raise ConfigError(f"{file}: there is no such file", file=str(file)) from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", file=str(file)) from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{file}: too large to be a configuration", limit=MAX_FILE_BYTES)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: this is not UTF-8", byte=error.start) from error
    return file, _mapping(reader.parse(text, str(file)), str(file))


def _mapping(parsed: reader.Parsed, name: str) -> _Source:
    if parsed.value is None:
        return _Source({})
    if not isinstance(parsed.value, dict):
        kind = type(parsed.value).__name__
        raise ConfigError(f"{name}:{parsed.lines[()]}: the configuration must be a mapping of fields", given=kind)
    places = {path: f"file {name}:{line}" for path, line in parsed.lines.items()}
    return _Source(parsed.value, places)


def _environment(env: Mapping[str, str]) -> _Source:
    found = _Source({})
    for name in BrokerConfig.model_fields:
        text = env.get(variable(name), "")
        if text:
            found.places[(name,)] = f"environment {variable(name)}"
            found.values[name] = _from_text(name, text, variable(name))
    return found


def _overrides(overrides: Mapping[str, object]) -> _Source:
    given = {name: value for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, str):
            given[name] = _from_text(name, value, f"{COMMAND_LINE}: {name}")
    return _Source(given, default_place=COMMAND_LINE)


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


def _validate(source: _Source, context: str | None) -> BrokerConfig:
    try:
        return BrokerConfig.model_validate(source.values, context=context)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [_problem(detail, source) for detail in details]
        first = _path(details[0], source)
        nearest = _nearest_field(first) if details[0]["type"] == "extra_forbidden" else None
        raise ConfigError("\n".join(problems), field=_dotted(first), nearest=nearest) from error


def _path(detail: ErrorDetails, source: _Source) -> reader.Path:
    if detail["type"] == "conflict":
        # Whoever sets one of two fields expects to read of that one, not of the other's default.
        paths: list[reader.Path] = detail["ctx"]["paths"]
        return next((path for path in paths if source.place(path) != DEFAULT), paths[0])
    return tuple(detail["loc"])


def _problem(detail: ErrorDetails, source: _Source) -> str:
    """`FILE:LINE: FIELD: what is wrong, given …`"""
    path = _path(detail, source)
    place = source.place(path).removeprefix("file ").removeprefix("environment ")
    if detail["type"] == "extra_forbidden":
        nearest = _nearest_field(path)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        return f"{place}: {_dotted(path)}: there is no such field{hint}"
    text = f"{place}: {_dotted(path)}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
    if detail["type"] in ("missing", "conflict", "edge"):
        return text
    return f"{text}, given {repr(detail['input'])[:200]}"


def _nearest_field(path: reader.Path) -> str | None:
    """The known field nearest to the unknown one that `path` ends in; names inside an edge's entry are its own."""
    if len(path) == 1:
        known: Iterable[str] = BrokerConfig.model_fields
    else:
        known = (info.alias or name for name, info in EdgeConfig.model_fields.items())
    return _nearest(str(path[-1]), known)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def _dotted(path: reader.Path) -> str:
    return ".".join(str(part) for part in path)


def _unknown_variables(env: Mapping[str, str]) -> Iterable[str]:
    known = [variable(name) for name in BrokerConfig.model_fields] + list(OTHER_VARIABLES)
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in known:
            # Without the prefix, which would make any two of them alike.
            nearest = _nearest(name.removeprefix(PREFIX), [other.removeprefix(PREFIX) for other in known])
            yield f"the variable {name} is not known" + (f"; did you mean {PREFIX}{nearest}?" if nearest else "")
