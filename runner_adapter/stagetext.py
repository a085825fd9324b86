"""A stage config as text that is edited: its stages with their fields and lines, and what goes into it. No torch.

Lines are put in and keys renamed; all else, comments and line ends included, stays as it was. YAML has many ways to
write one thing, so each edit is read again: one after which the text does not mean what it should is not made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from connector import errors, parse_yaml
from runner_adapter import phases
from runner_adapter.sections import BASE, LISTS

#: Keys and list positions from the top of the file.
Path = tuple[str | int, ...]

#: A file that has none of these is no stage config.
_KNOWN = (*LISTS, "engine_args", BASE)
#: Names of a request's map, old and new: what was under one is under another afterwards.
ALIKE = (phases.REQUEST_FIELD, phases.FORWARD_KWARG, phases.NEW_NAME)
#: What YAML takes for the end of a line.
_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_SHARED = "its engine_args are shared, or no mapping; they need"
_ODD = "it is written so that nothing can be put in; its engine_args need"

Edit = tuple[int, int, str]


class Stage(NamedTuple):
    """An entry of the list of stages, or the whole file (number -1) where there is no list."""

    number: int
    path: Path
    value: dict[str, Any]
    node: Node | None


class StageText:
    """The old text, its values with their lines, its nodes with their places, and the edits to come.

    ConfigError, with file and line: no strict YAML, or no stage config.
    """

    def __init__(self, text: str, name: str) -> None:
        parsed = parse_yaml(text, name)
        if not isinstance(parsed.value, dict) or not any(key in parsed.value for key in _KNOWN):
            raise errors.ConfigError(f"{name}:1: this is no stage config: it has none of {', '.join(_KNOWN)}")
        self.text, self.name = text, name
        self.value: dict[str, Any] = parsed.value
        self.lines = parsed.lines
        self.root: Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        walked = list(_walk(self.root, set()))
        self.mappings = [node for node, again in walked if isinstance(node, MappingNode) and not again]
        #: Nodes that an alias names, too, and what is in them: an edit of one would be an edit of all.
        self._shared = {id(node) for node, again in walked if again}
        self._edits: list[Edit] = []
        #: What the text with the edits means.
        self._meant: Any = parsed.value

    def refuse(self, path: Path, problem: str) -> errors.ConfigError:
        return errors.ConfigError(f"{self.name}:{self.lines.get(path, 1)}: {problem}")

    def field(self, stage: Stage, key: str) -> tuple[Any, int] | None:
        """The value and line of a stage's field: one of its engine's arguments, or its own."""
        for part in (("engine_args",), (), ("engine_extras",)):
            held = stage.value.get(part[0]) if part else stage.value
            if isinstance(held, dict) and held.get(key) is not None:
                return held[key], self.lines[(*stage.path, *part, key)]
        return None

    def rename(self, keys: Sequence[ScalarNode]) -> list[ScalarNode]:
        """Give keys the new name; those of which that cannot be done without changing more are given back."""
        edits = {id(key): (key.start_mark.index, key.end_mark.index, phases.NEW_NAME) for key in keys}
        if self._make(list(edits.values()), self._meant):
            return []
        return [key for key in keys if not self._make([edits[id(key)]], self._meant)]

    def edited(self) -> str:
        """The text with all edits; what they do not touch stays, byte for byte."""
        return self._with(self._edits)

    def put(self, stage: Stage, config: dict[str, Any]) -> str | None:
        """Put `transfer_config` into the stage's engine_args; None, or why that cannot be done: nothing is changed."""
        held = stage.value.get("engine_args")
        edit = self._edit_of(stage, {"transfer_config": config})
        if edit is None or not isinstance(held, dict | None):
            return _SHARED
        args = {**(held or {}), "transfer_config": config}
        return None if self._make([edit], _replaced(self._meant, (*stage.path, "engine_args"), args)) else _ODD

    def _make(self, edits: list[Edit], meant: Any) -> bool:
        """Make the edits, if the text with them means `meant`, whatever its maps are called; otherwise none."""
        try:
            value = parse_yaml(self._with([*self._edits, *edits]), self.name).value
        except errors.ConfigError:
            return False
        if _told(value) != _told(meant):
            return False
        self._edits += edits
        self._meant = meant
        return True

    def _with(self, edits: Iterable[Edit]) -> str:
        text = self.text
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def _edit_of(self, stage: Stage, entry: dict[str, Any]) -> Edit | None:
        """What puts the entry into the stage's engine_args; None if others share the place, or it is no mapping."""
        key, held = _child(stage.node, "engine_args")
        behind = key
        if "engine_args" not in stage.value:
            # Behind the stage's number, where a reader looks first.
            entry, held = {"engine_args": entry}, stage.node
            key, behind = _child(stage.node, "stage_id")
        if key is None or behind is None or held is None or id(held) in self._shared:
            return None
        if isinstance(held, ScalarNode) and stage.value["engine_args"] is None:
            return held.start_mark.index, held.end_mark.index, " " + json.dumps(entry)
        if not isinstance(held, MappingNode):
            return None
        if held.flow_style:
            start = self.text.index("{", held.start_mark.index) + 1
            return start, start, json.dumps(entry)[1:-1] + (", " if held.value else "")
        told = yaml.safe_dump(entry, sort_keys=False, default_flow_style=None, width=100).splitlines()
        margin = " " * held.value[0][0].start_mark.column
        # An alias stands where its key does, and what it names further up.
        return self._line_behind(max(key.end_mark.index, behind.end_mark.index), [margin + line for line in told])

    def _line_behind(self, index: int, lines: list[str]) -> Edit:
        """What puts the lines in behind the one that `index` is in."""
        end = _BREAK.search(self.text, index)
        if end is not None:
            return end.end(), end.end(), end[0].join([*lines, ""])
        last = _BREAK.search(self.text)
        return len(self.text), len(self.text), (last[0] if last else "\n").join(["", *lines])


def _told(value: Any) -> str:
    """A value as text, so that 1, 1.0 and true differ; a map's old name is its new one, where it has but one."""
    return json.dumps(_renamed(value), sort_keys=True)


def _renamed(value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(part) for part in value]
    if not isinstance(value, dict):
        return value
    one = sum(name in value for name in ALIKE) == 1
    return {phases.NEW_NAME if one and key in ALIKE else key: _renamed(part) for key, part in value.items()}


def _replaced(value: Any, path: Path, new: object) -> Any:
    """A copy of the value, with `new` at the path; its last key need not be there."""
    copied = value.copy()
    copied[path[0]] = _replaced(value[path[0]], path[1:], new) if path[1:] else new
    return copied


def stages_of(file: StageText) -> list[Stage]:
    """In the order of their numbers."""
    found: dict[int, Stage] = {}
    for key in LISTS:
        entries, (_, node) = file.value.get(key), _child(file.root, key)
        if entries is None:
            continue
        if not isinstance(entries, list) or not isinstance(node, SequenceNode):
            raise file.refuse((key,), f"{key} is a list of stages")
        for at, entry in enumerate(entries):
            number = entry.get("stage_id") if isinstance(entry, dict) else None
            if type(number) is not int or number < 0 or number in found:
                raise file.refuse((key, at), "a stage has a stage_id of its own, an int from 0")
            found[number] = Stage(number, (key, at), entry, node.value[at])
    if not found and "engine_args" in file.value:
        return [Stage(-1, (), file.value, file.root)]
    return [found[number] for number in sorted(found)]


def edges_of(file: StageText, stages: list[Stage]) -> set[tuple[int, int]]:
    """(from, to) as connectors, input sources and lists of edges tell them."""
    found: set[tuple[int, int]] = set()
    for stage in stages:
        own = stage.number
        found |= {(own, int(other)) for other in _numbers(stage.value.get("output_connectors"), "to_stage_")}
        found |= {(int(other), own) for other in _numbers(stage.value.get("input_connectors"), "from_stage_")}
        sources = stage.value.get("engine_input_source")
        found |= {(other, own) for other in sources if type(other) is int} if isinstance(sources, list) else set()
    for holder in (file.value, file.value.get("runtime")):
        edges = holder.get("edges") if isinstance(holder, dict) else None
        for edge in edges if isinstance(edges, list) else []:
            start, end = (edge.get("from"), edge.get("to")) if isinstance(edge, dict) else (None, None)
            if type(start) is int and type(end) is int:
                found.add((start, end))
    return found


def _numbers(connectors: object, prefix: str) -> Iterator[str]:
    for key in connectors if isinstance(connectors, dict) else ():
        number = key.removeprefix(prefix)
        if number != key and number.isdecimal():
            yield number


def _walk(node: Node | None, seen: set[int]) -> Iterator[tuple[Node, bool]]:
    """Every node as often as it is named, and whether it came before. Strict parsing has bounded how many these are."""
    if node is None:
        return
    yield node, id(node) in seen
    seen.add(id(node))
    if isinstance(node, SequenceNode):
        for part in node.value:
            yield from _walk(part, seen)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            yield from _walk(key, seen)
            yield from _walk(value, seen)


def _child(node: Node | None, name: str) -> tuple[Node | None, Node | None]:
    """The nodes of a key that stands in the mapping itself, and of its value."""
    pairs = node.value if isinstance(node, MappingNode) else []
    return next(((key, value) for key, value in pairs if key.value == name), (None, None))
