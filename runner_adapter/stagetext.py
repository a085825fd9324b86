"""A stage config as text that is edited: its stages with their fields and lines, and what goes into it. No torch.

Lines are put in and keys renamed; all else, comments and line ends included, stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from connector import errors, parse_yaml

#: Keys and list positions from the top of the file.
Path = tuple[str | int, ...]

#: Lists of stages: today's name, and the older one.
LISTS = ("stages", "stage_args")
#: A file that has none of these is no stage config.
_KNOWN = (*LISTS, "engine_args", "base_config")


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
        self._edits: list[tuple[int, int, str]] = []

    def refuse(self, path: Path, problem: str) -> errors.ConfigError:
        return errors.ConfigError(f"{self.name}:{self.lines.get(path, 1)}: {problem}")

    def field(self, stage: Stage, key: str) -> tuple[Any, int] | None:
        """The value and line of a stage's field: one of its engine's arguments, or its own."""
        for part in (("engine_args",), (), ("engine_extras",)):
            held = stage.value.get(part[0]) if part else stage.value
            if isinstance(held, dict) and held.get(key) is not None:
                return held[key], self.lines[(*stage.path, *part, key)]
        return None

    def edit(self, start: int, end: int, new: str) -> None:
        """Let `new` stand for the text from `start` to `end`."""
        self._edits.append((start, end, new))

    def edited(self) -> str:
        """The text with all edits; what they do not touch stays, byte for byte."""
        text = self.text
        for start, end, new in sorted(self._edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def put(self, stage: Stage, config: dict[str, Any]) -> bool:
        """Put `transfer_config` into the stage's engine_args; False if others share the place, or it is no mapping."""
        entry: dict[str, Any] = {"transfer_config": config}
        key, held = _child(stage.node, "engine_args")
        behind = key
        if "engine_args" not in stage.value:
            # Behind the stage's number, where a reader looks first.
            entry, held = {"engine_args": entry}, stage.node
            key, behind = _child(stage.node, "stage_id")
        if key is None or behind is None or held is None or id(held) in self._shared:
            return False
        if isinstance(held, ScalarNode) and stage.value["engine_args"] is None:
            self.edit(held.start_mark.index, held.end_mark.index, " " + json.dumps(entry))
        elif not isinstance(held, MappingNode):
            return False
        elif held.flow_style:
            start = self.text.index("{", held.start_mark.index) + 1
            self.edit(start, start, json.dumps(entry)[1:-1] + (", " if held.value else ""))
        else:
            told = yaml.safe_dump(entry, sort_keys=False, default_flow_style=None, width=100).splitlines()
            margin = " " * held.value[0][0].start_mark.column
            self._insert(behind.end_mark.index, [margin + line for line in told])
        return True

    def _insert(self, index: int, lines: list[str]) -> None:
        """Put the lines in behind the one that `index` is in."""
        end = "\r\n" if "\r\n" in self.text else "\n"
        at = self.text.find("\n", index) + 1
        if at:
            self.edit(at, at, end.join([*lines, ""]))
        else:
            self.edit(len(self.text), len(self.text), end.join(["", *lines]))


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
