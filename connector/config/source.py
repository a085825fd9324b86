"""Values of one source with the place of each, and their check by a schema.

Whatever is refused is a ConfigError; its message has a line for each problem: the place (file and line, variable,
command line), the dotted field, what is wrong and what was given.
"""

from __future__ import annotations

import difflib
import errno
import os
import stat
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from connector.config import reader
from connector.core.errors import ConfigError

#: A larger file is not a configuration.
MAX_FILE_BYTES = 1 << 20

DEFAULT = "default"

#: Refusals of no single value: there is nothing that was given.
_OF_NO_VALUE = ("missing", "conflict", "edge")

Model = TypeVar("Model", bound=BaseModel)


@dataclass(slots=True)
class Source:
    """Values of one source and where each stands. `places` maps a path into the values to a place in words."""

    values: dict[str, object]
    places: dict[reader.Path, str] = field(default_factory=dict)
    default_place: str = DEFAULT

    def place(self, path: reader.Path) -> str:
        """The place of `path`, or of what it stands in when it is missing."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return self.default_place


def read(file: Path) -> Source:
    """A file's values; none when it is empty. ConfigError: as `read_text`; no strict YAML, no mapping."""
    return _mapping(reader.parse(read_text(file), str(file)), str(file))


def read_text(file: Path) -> str:
    """A file's text with its own line ends. ConfigError: not there, not readable, no regular file (a pipe could
    keep its reader waiting for ever), too large, not UTF-8."""
    try:
        raw = _bytes(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file", file=str(file)) from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", file=str(file)) from error
    except ValueError as error:
        raise ConfigError(f"this is no path: {error}", file=str(file)) from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{file}: too large to be a configuration", limit=MAX_FILE_BYTES)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: this is not UTF-8", byte=error.start) from error


def validate(model: type[Model], source: Source, context: object = None) -> Model:
    """The source's values as `model`; ConfigError with every problem. `context` is given to the model's validators.

    A validator refuses what breaks a rule between values by PydanticCustomError of the type `conflict`, or by
    `conflicts`; the error's context may hold `paths` from the root: the refusal points at the first that was given.
    """
    try:
        return model.model_validate(source.values, context=context)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [_problem(model, detail, source) for detail in details]
        told = {"field": _dotted(_path(details[0], source)), "nearest": _hint(model, details[0])}
        raise ConfigError("\n".join(problems), **told) from error


def conflicts(*problems: tuple[reader.Path, str]) -> ValidationError:
    """Broken rules between values, each with its path below the model, for a model's validator to raise at once."""
    details = [
        InitErrorDetails(type=PydanticCustomError("conflict", "{problem}", {"problem": problem}), loc=path, input=None)
        for path, problem in problems
    ]
    return ValidationError.from_exception_data("conflicts", details)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, if one is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)), None)


def _bytes(file: Path) -> bytes:
    # Without O_NONBLOCK the open itself would wait for a pipe's writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return stream.read(MAX_FILE_BYTES + 1)


def _mapping(parsed: reader.Parsed, name: str) -> Source:
    if parsed.value is None:
        return Source({})
    if not isinstance(parsed.value, dict):
        kind = type(parsed.value).__name__
        raise ConfigError(f"{name}:{parsed.lines[()]}: the configuration must be a mapping of fields", given=kind)
    places = {path: f"file {name}:{line}" for path, line in parsed.lines.items()}
    return Source(parsed.value, places)


def _path(detail: ErrorDetails, source: Source) -> reader.Path:
    # Whoever sets one of two fields expects to read of that one, not of the other's default.
    paths: list[reader.Path] = detail.get("ctx", {}).get("paths", [tuple(detail["loc"])])
    return next((path for path in paths if source.place(path) != DEFAULT), paths[0])


def _problem(model: type[BaseModel], detail: ErrorDetails, source: Source) -> str:
    """`FILE:LINE: FIELD: what is wrong, given …`"""
    path = _path(detail, source)
    place = source.place(path).removeprefix("file ").removeprefix("environment ")
    near = _hint(model, detail)
    hint = f"; did you mean {near!r}?" if near else ""
    if detail["type"] == "extra_forbidden":
        return f"{place}: {_dotted(path)}: there is no such field{hint}"
    text = f"{place}: {_dotted(path)}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
    if detail["type"] in _OF_NO_VALUE:
        return text
    return f"{text}, given {repr(detail['input'])[:200]}{hint}"


def _hint(model: type[BaseModel], detail: ErrorDetails) -> str | None:
    """The name that could stand where an unknown field or word does and is nearest to it."""
    at = tuple(detail["loc"])
    if detail["type"] == "extra_forbidden":
        within = _type_at(model, at[:-1])
        return nearest(str(at[-1]), _fields(within)) if _is_model(within) else None
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        words = typing.get_args(_type_at(model, at))
        return nearest(detail["input"], [word for word in words if isinstance(word, str)])
    return None


def _type_at(model: type[BaseModel], path: reader.Path) -> typing.Any:
    """The type of what stands at `path`; None where the schema has no word for it."""
    found: typing.Any = model
    for part in path:
        if _is_model(found):
            info = _fields(found).get(str(part))
            found = _bare(info.annotation) if info else None
        else:
            # An entry of a list.
            found = _bare(next(iter(typing.get_args(found)), None))
    return found


def _fields(model: type[BaseModel]) -> dict[str, typing.Any]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


def _is_model(found: typing.Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseModel)


def _bare(annotation: typing.Any) -> typing.Any:
    """Without `| None`."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation
    parts = [part for part in typing.get_args(annotation) if part is not types.NoneType]
    return parts[0] if len(parts) == 1 else annotation


def _dotted(path: reader.Path) -> str:
    return ".".join(str(part) for part in path)
