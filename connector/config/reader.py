"""Strict YAML: text -> values, and the line that each value came from. No schema is known here.

Narrower than YAML 1.1 on purpose, since its guesses turn typing errors into values: `yes` and `1:30` stay text (1.1
reads true and 90), `010` too (1.1 reads 8). Tags that build objects, duplicate keys and several documents are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from connector.core.errors import ConfigError

#: A path into the document: keys and list positions.
Path = tuple[str | int, ...]

#: Most values after aliases are followed; a few lines of aliases can stand for billions.
MAX_VALUES = 100_000

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,40})\Z")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN)\Z"
)
_BOOL = {"true": True, "True": True, "false": False, "False": False}
_NULL = ("", "~", "null", "Null", "NULL")


class _Loader(yaml.SafeLoader):
    """Composes nodes only; the resolvers below are all it has."""

    yaml_implicit_resolvers: dict[str, Any] = {}


# The resolvers of one first character are tried in this order: int before float.
_Loader.add_implicit_resolver(_TAG + "bool", re.compile(r"(true|True|false|False)\Z"), list("tTfF"))
_Loader.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(_TAG + "null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_TAG + "merge", re.compile(r"<<\Z"), ["<"])


@dataclass(frozen=True, slots=True)
class Parsed:
    """A document: its value (None when empty) and the line, from 1, of every key and list entry."""

    value: object
    lines: dict[Path, int]


def parse(text: str, name: str) -> Parsed:
    """The one document in `text`. `name` (a file, a variable) stands before the line in a refusal: ConfigError."""
    reader = _Reader(name)
    try:
        node = _Loader(text).get_single_node()
        return Parsed(reader.value(node, ()) if node is not None else None, reader.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{name}:{line}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise ConfigError(f"{name}:{line}: a character that YAML does not allow", given=hex(error.character)) from error
    except RecursionError as error:
        raise ConfigError(f"{name}: lists or mappings are nested too deeply") from error


@dataclass(slots=True)
class _Reader:
    name: str
    lines: dict[Path, int] = field(default_factory=dict)
    count: int = 0
    #: Nodes being read, to refuse an alias that stands inside what it names.
    open_nodes: set[int] = field(default_factory=set)

    def refuse(self, node: Node, problem: str, **facts: object) -> ConfigError:
        return ConfigError(f"{self.name}:{_line(node)}: {problem}", **facts)

    def value(self, node: Node, path: Path) -> object:
        self.count += 1
        if self.count > MAX_VALUES:
            raise self.refuse(node, "too many values", limit=MAX_VALUES)
        self.lines.setdefault(path, _line(node))
        if isinstance(node, ScalarNode):
            return self.scalar(node)
        if id(node) in self.open_nodes:
            raise self.refuse(node, "an alias stands inside the value that it names")
        self.open_nodes.add(id(node))
        value = self.sequence(node, path) if isinstance(node, SequenceNode) else self.mapping(node, path)
        self.open_nodes.discard(id(node))
        return value

    def sequence(self, node: SequenceNode, path: Path) -> list[object]:
        self.expect(node, "seq")
        return [self.value(child, (*path, i)) for i, child in enumerate(node.value)]

    def mapping(self, node: Node, path: Path) -> dict[str, object]:
        self.expect(node, "map")
        found: dict[str, object] = {}
        merged: list[tuple[Node, Node]] = []
        seen: dict[str, int] = {}
        for key_node, child in node.value:
            if key_node.tag == _TAG + "merge":
                merged += self.merge(child)
                continue
            key = self.key(key_node)
            if key in seen:
                raise self.refuse(key_node, f"{key!r} stands twice, first on line {seen[key]}", field=key)
            seen[key] = _line(key_node)
            self.lines[(*path, key)] = seen[key]
            found[key] = self.value(child, (*path, key))
        for key_node, child in merged:
            key = self.key(key_node)
            if key not in found:
                self.lines[(*path, key)] = _line(key_node)
                found[key] = self.value(child, (*path, key))
        return found

    def merge(self, node: Node) -> list[tuple[Node, Node]]:
        """The pairs that `<<: *name` or `<<: [*a, *b]` stands for; the first of equal keys wins."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        pairs: list[tuple[Node, Node]] = []
        for source in sources:
            if not isinstance(source, MappingNode):
                raise self.refuse(node, "'<<' takes a mapping or a list of mappings")
            pairs += source.value
        return pairs

    def key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode) or node.tag != _TAG + "str":
            given = node.value if isinstance(node, ScalarNode) else "a list or mapping"
            raise self.refuse(node, "a field's name must be text", given=given)
        return str(node.value)

    def scalar(self, node: ScalarNode) -> object:
        tag, text = node.tag.removeprefix(_TAG), str(node.value)
        if tag == "str":
            return text
        if tag == "int" and _INT.match(text):
            return int(text)
        if tag == "float" and _FLOAT.match(text):
            return _number(text)
        if tag == "bool" and text in _BOOL:
            return _BOOL[text]
        if tag == "null" and text in _NULL:
            return None
        raise self.refuse(node, f"the tag {node.tag!r} is not taken for this value", given=text[:80])

    def expect(self, node: Node, kind: str) -> None:
        if node.tag != _TAG + kind:
            raise self.refuse(node, f"the tag {node.tag!r} is not taken")


def _number(text: str) -> float:
    lowered = text.lower()
    # YAML writes .inf and .nan where Python reads inf and nan.
    return float(lowered.replace(".", "", 1) if lowered[-1] in "fn" else lowered)


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
