"""Names of a model's tensors: nested mappings <-> dotted names <-> connector keys. No torch.

| nested | name |
|---|---|
| `{"codes": {"audio": t}}` | `codes.audio` |
| `{"hidden_states": {"layers": {24: t}}}` | `hidden_states.layers[24]`: an int key |
| `{"parts": [a, b]}` | `parts<0>`, `parts<1>`: list positions |
| `{("codes", "audio"): t}` | `codes.audio`: a (type key, qualifier) pair |

A key belongs to one name, and a name has one key or none (RFC, "Connector-compatible key naming"):

| key | name |
|---|---|
| hidden states, layer 24 | `hidden_states.layers[24]` |
| id type `thinker_input_ids` | `ids.thinker_input_ids` |
| id type `codes.audio` | `codes.audio` |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from connector import errors

if TYPE_CHECKING:
    from runner_adapter.config import TransferConfig

Value = TypeVar("Value")

#: Most steps of a name: mappings and lists in each other.
MAX_DEPTH = 64
#: Names that are kept taken apart. A model has a few, and uses them at every step.
_KEPT = 4096

_PART = re.compile(r"[^.\[\]<>]+")
#: One spelling of each number, and none that is long to read.
_COUNT = r"0|[1-9][0-9]{0,18}"
_STEP = re.compile(rf"(?P<dot>\.?)(?P<part>{_PART.pattern})|\[(?P<key>0|-?[1-9][0-9]{{0,18}})\]|<(?P<place>{_COUNT})>")
_LISTS = (list, tuple)

_LAYER = re.compile(rf"hidden_states\.layers\[({_COUNT})\]")
_PLAIN_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DOTTED_ID = re.compile(rf"{_PLAIN_ID.pattern}(\.[A-Za-z0-9_]+)+")


class _Place(NamedTuple):
    """In a list."""

    position: int


_Step = str | int | _Place


class _Inner(dict[_Step, Any]):
    """A mapping or list on the way to a value."""


def flatten(nested: Mapping[Any, Any], **facts: Any) -> dict[str, Any]:
    """Each value by its dotted name; whatever is no mapping, list or tuple is a value.

    Keys of the outermost mapping may also be pairs, or names already: what is flat stays as it is. A tuple's
    positions are a list's, and `nest` gives a list. `{}` is no names.

    InvalidPayload, with `facts`: a key that is neither text nor int; a part that is empty or holds one of `.[]<>`; an
    empty mapping or list within (it holds no tensor); a name that stands twice, or is both a value and a mapping;
    more than MAX_DEPTH steps.
    """
    if not isinstance(nested, Mapping):
        raise errors.InvalidPayload(f"names are made of a mapping, not of a {type(nested).__name__}", **facts)
    found: dict[str, Any] = {}
    apart = True
    for key, value in nested.items():
        name, plain = _outermost(key, facts)
        apart = apart and plain
        _flatten(found, name, value, 1, facts)
    if not apart:
        # What stands under a pair or a name may run into what stands under another key.
        nest(found, **facts)
    return found


def nest(names: Mapping[str, Value], **facts: Any) -> dict[Any, Any]:
    """The nested dict whose values have these names: `nest(flatten(x)) == x` and `flatten(nest(names)) == names`.

    InvalidPayload, with `facts`: a name outside the grammar, a name that is both a value and a mapping, a list that
    lacks a position or is a mapping too.
    """
    root = _Inner()
    for name, value in names.items():
        *outer, last = _steps(name, facts)
        inner: Any = root
        for step in outer:
            inner = inner.setdefault(step, _Inner())
            if not isinstance(inner, _Inner):
                break
        if not isinstance(inner, _Inner) or last in inner:
            raise errors.InvalidPayload("a name is both a value and a mapping", name=name, **facts)
        inner[last] = value
    return {step: _built(value, _below("", step), facts) for step, value in root.items()}


class Naming:
    """Names <-> keys under a transfer config's templates; each other's inverse.

    Items and filters are not looked at: they say what is sent, not what it is called.
    """

    __slots__ = ("_config",)

    def __init__(self, config: TransferConfig) -> None:
        self._config = config

    def key(self, rid: str, name: str) -> str | None:
        """The key of a name; None if it has none: without an enabled config no name has.

        InvalidPayload if the rid is not one, or the key is too long for the connector.
        """
        found, templates = key_part(name), self._config.templates
        if found is None or templates is None or found[0] not in templates.templates:
            return None
        return templates.format(rid, *found)

    def name(self, rid: str, key: str) -> str:
        """The name that the key stands for; InvalidPayload, and an error log, if it is no key of this rid."""
        _, category, part = self._config.parse_key(key, rid)
        return name_of(category, part)


def name_of(category: str, part: str, **facts: Any) -> str:
    """The name of a layer id (category `hidden_states`) or of an id type (`ids`).

    InvalidPayload, with `facts`: an id type that is no name, since a part is empty, or it is `ids.x`, which is
    written `x`.
    """
    if category == "hidden_states":
        name = f"hidden_states.layers[{part}]"
        problem = "a layer id is a decimal number of 19 digits at most, without a leading zero"
    else:
        name = part if "." in part else f"ids.{part}"
        problem = "an id type is letters, digits, _ and single dots between them; 'ids.x' is written 'x'"
    if key_part(name) != (category, part):
        raise errors.InvalidPayload(problem, part=part, **facts)
    return name


@lru_cache(_KEPT)
def key_part(name: str) -> tuple[str, str] | None:
    """(category, layer id or id type as text) of a name that a key can stand for, else None."""
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        return "hidden_states", layer[1]
    head, _, tail = name.partition(".")
    if head == "ids" and "." not in tail:
        return ("ids", tail) if _PLAIN_ID.fullmatch(tail) else None
    return ("ids", name) if _DOTTED_ID.fullmatch(name) else None


@lru_cache(_KEPT)
def _parsed(name: str) -> tuple[_Step, ...]:
    """The steps of a name; none if it is no name."""
    found: list[_Step] = []
    at = 0
    while at < len(name) and len(found) < MAX_DEPTH:
        step = _STEP.match(name, at)
        # A dot stands before each part but the first.
        if step is None or (step["part"] and bool(step["dot"]) != bool(found)):
            return ()
        place = step["place"]
        found.append(step["part"] or (_Place(int(place)) if place else int(step["key"])))
        at = step.end()
    # The outermost is a mapping.
    return () if at < len(name) or isinstance(found[0], _Place) else tuple(found)


def _steps(name: object, facts: Mapping[str, Any]) -> tuple[_Step, ...]:
    steps = _parsed(name) if isinstance(name, str) and name else ()
    if not steps:
        raise errors.InvalidPayload(
            "not a name: parts with dots between them, [int] and <position>",
            name=name[:80] if isinstance(name, str) else type(name).__name__,
            limit=MAX_DEPTH,
            **facts,
        )
    return steps


def _outermost(key: object, facts: Mapping[str, Any]) -> tuple[str, bool]:
    """The name of a key of the outermost mapping, and whether no other key's name can begin with it."""
    if isinstance(key, tuple) and len(key) == 2:
        return _below(_below("", _checked(key[0], facts)), _checked(key[1], facts)), False
    if isinstance(key, str) and not _PART.fullmatch(key):
        _steps(key, facts)
        return key, False
    return _below("", _checked(key, facts)), True


def _checked(key: object, facts: Mapping[str, Any], name: str | None = None) -> str | int:
    """A key of the mapping called `name`, if a name can hold it."""
    if isinstance(key, str) and _PART.fullmatch(key):
        return key
    if type(key) is int and -(10**19) < key < 10**19:
        return key
    # Of anything but text the type: an int may be too long to be printed.
    told = key[:80] if isinstance(key, str) else type(key).__name__
    raise errors.InvalidPayload(
        "a key is text without any of .[]<>, or an int of 19 digits at most", name=name, key=told, **facts
    )


def _below(name: str, step: _Step) -> str:
    """The name of what is one step below."""
    if isinstance(step, str):
        return f"{name}.{step}" if name else step
    return f"{name}<{step.position}>" if isinstance(step, _Place) else f"{name}[{step}]"


def _flatten(found: dict[str, Any], name: str, value: Any, depth: int, facts: Mapping[str, Any]) -> None:
    """Put into `found` what stands in `value`, which is called `name`."""
    if isinstance(value, Mapping):
        inner = [(_below(name, _checked(key, facts, name)), part) for key, part in value.items()]
    elif isinstance(value, _LISTS):
        inner = [(f"{name}<{i}>", part) for i, part in enumerate(value)]
    elif name in found:
        raise errors.InvalidPayload("a name stands twice", name=name, **facts)
    else:
        found[name] = value
        return
    if not inner:
        raise errors.InvalidPayload("an empty mapping or list holds no tensor", name=name, **facts)
    if depth >= MAX_DEPTH:
        raise errors.InvalidPayload("mappings or lists are nested too deeply", name=name[:80], limit=MAX_DEPTH, **facts)
    for below, part in inner:
        _flatten(found, below, part, depth + 1, facts)


def _built(found: Any, name: str, facts: Mapping[str, Any]) -> Any:
    """The mapping or list that has these steps; any other value itself."""
    if not isinstance(found, _Inner):
        return found
    if not any(isinstance(step, _Place) for step in found):
        return {step: _built(value, _below(name, step), facts) for step, value in found.items()}
    if any(_Place(i) not in found for i in range(len(found))):
        raise errors.InvalidPayload(
            "a list lacks a position, or is a mapping too", name=name, found=len(found), **facts
        )
    return [_built(found[_Place(i)], f"{name}<{i}>", facts) for i in range(len(found))]
