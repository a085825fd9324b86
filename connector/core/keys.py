"""Key templates of the transfer config: how a rid and a name become a key, and back.

A template is literal text around `{rid}` and one of `{layer_id}` or `{id_type}`. The rid may
be any text at all, so a template can be parsed back only if the grammar of the name says where
the name stops, and two templates are apart only if no rid and no name bring them together.
Both questions are decided when a template is built, never when a key arrives.
"""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from connector.core.errors import ConfigError, InvalidPayload, UsageError
from connector.core.names import MAX_KEY_BYTES, check_number, check_rid, check_text

#: Placeholders of a template: the rid, and one of the names.
PLACEHOLDERS = ("rid", "layer_id", "id_type")
#: The name that a category's keys hold. Other categories may hold either.
CATEGORY_NAMES: Mapping[str, str] = {"hidden_states": "layer_id", "ids": "id_type"}
#: Highest layer id that is given as an int.
MAX_LAYER_ID = 2**63 - 1

_Chars = frozenset[str]
_DIGITS = frozenset("0123456789")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
#: Every character a name can hold, and the name's pattern.
_NAME_CHARS: Mapping[str, _Chars] = {"layer_id": _DIGITS, "id_type": _LETTERS | _DIGITS | {"."}}
_NAME_PATTERNS: Mapping[str, str] = {"layer_id": "0|[1-9][0-9]*", "id_type": "[A-Za-z_][A-Za-z0-9_.]*"}
_FIELD = re.compile(r"\{([^{}]*)\}")


class _Step(NamedTuple):
    """One character of `first`, then any number of `loop`. None stands for every character."""

    first: _Chars | None
    loop: _Chars | None


_NO_CHARS: _Chars = frozenset()
_RID_STEP = _Step(None, None)
#: The name grammars as alternatives of one step each.
_NAME_STEPS: Mapping[str, tuple[_Step, ...]] = {
    "layer_id": (_Step(frozenset("0"), _NO_CHARS), _Step(_DIGITS - {"0"}, _DIGITS)),
    "id_type": (_Step(_LETTERS, _NAME_CHARS["id_type"]),),
}


class KeyTemplate:
    """One template, such as `{rid}-{layer_id}`.

    `text` is the template as written, `field` the name it holds: `layer_id` or `id_type`.
    ConfigError if it is not a template, or if a key made with it could be read in two ways.
    """

    __slots__ = ("_between", "_head", "_pattern", "_rid_first", "_tail", "field", "text")

    def __init__(self, text: str) -> None:
        self.text = _template_text(text)
        parts = _FIELD.split(text)
        literals, fields = parts[0::2], parts[1::2]
        self.field = _check_fields(text, literals, fields)
        self._head, self._between, self._tail = literals
        self._rid_first = fields[0] == "rid"
        # The rid takes any character. If the separator could be a part of the name, some name
        # holds the separator, and its key can be cut in two places; if one of its characters
        # cannot, every name stops there, and there is one cut only.
        if _NAME_CHARS[self.field].issuperset(self._between):
            raise ConfigError(
                f"keys of this template cannot be parsed back: what stands between {{rid}} and {{{self.field}}} "
                "needs a character that the name cannot hold, such as '-'",
                template=text,
                separator=self._between,
            )
        name = f"(?P<name>{_NAME_PATTERNS[self.field]})"
        first, last = ("(?P<rid>.+)", name) if self._rid_first else (name, "(?P<rid>.+)")
        head, between, tail = (re.escape(literal) for literal in literals)
        self._pattern = re.compile(head + first + between + last + tail, re.DOTALL)

    def __repr__(self) -> str:
        return f"KeyTemplate({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyTemplate) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def format(self, *, rid: str, layer_id: int | str | None = None, id_type: str | None = None) -> str:
        """The key of this rid and name; the template's own name, and no other, must be given.

        `layer_id` is an int from 0 to MAX_LAYER_ID or its decimal text. InvalidPayload if the rid
        or the name is outside its grammar, or the key is longer than MAX_KEY_BYTES.
        """
        given = {k: v for k, v in (("layer_id", layer_id), ("id_type", id_type)) if v is not None}
        if list(given) != [self.field]:
            raise InvalidPayload(
                f"this template takes rid and {self.field}", rid=rid, template=self.text, given=sorted(given)
            )
        return self._make(rid, given[self.field])

    def parse(self, key: str) -> dict[str, str]:
        """`{"rid": …, "layer_id" or "id_type": …}`, all text; InvalidPayload if the key does not match."""
        found = self._match(check_text(key, "key", MAX_KEY_BYTES))
        if found is None:
            raise InvalidPayload("the key does not match the template", key=key, template=self.text)
        return {"rid": found[0], self.field: found[1]}

    def collision(self, other: KeyTemplate) -> str | None:
        """A shortest key that both templates make, each with a rid and name of its own; None if there is none."""
        words = (_shared_word(mine, theirs) for mine in self._paths() for theirs in other._paths())
        return min((word for word in words if word is not None), key=len, default=None)

    def _make(self, rid: str, value: object) -> str:
        check_rid(rid)
        name = _check_name(self.field, value, rid)
        first, last = (rid, name) if self._rid_first else (name, rid)
        key = self._head + first + self._between + last + self._tail
        size = len(key.encode())
        if size > MAX_KEY_BYTES:
            raise InvalidPayload("key is too long", rid=rid, key=key, size=size, limit=MAX_KEY_BYTES)
        return key

    def _match(self, key: str) -> tuple[str, str] | None:
        found = self._pattern.fullmatch(key)
        return None if found is None else (found["rid"], found["name"])

    def _paths(self) -> list[list[_Step]]:
        """The language of the template's keys as a union of step sequences."""
        head, between, tail = (
            [_Step(frozenset(char), _NO_CHARS) for char in literal]
            for literal in (self._head, self._between, self._tail)
        )
        paths = []
        for name in _NAME_STEPS[self.field]:
            first, last = (_RID_STEP, name) if self._rid_first else (name, _RID_STEP)
            paths.append([*head, first, *between, last, *tail])
        return paths


class TemplateSet:
    """The templates of all categories, apart from each other: a key belongs to at most one.

    `templates` maps a category to its template, or the template's text. ConfigError, with the
    category, if one is refused, holds the wrong name for its category, or meets another.
    """

    __slots__ = ("templates",)

    def __init__(self, templates: Mapping[str, str | KeyTemplate]) -> None:
        if not isinstance(templates, Mapping) or not templates:
            raise ConfigError("key templates must be a mapping from category to template, with one at least")
        #: Category -> template, in the given order.
        self.templates: Mapping[str, KeyTemplate] = {c: _category_template(c, t) for c, t in templates.items()}
        _check_apart(self.templates)

    def __repr__(self) -> str:
        return f"TemplateSet({self._texts()!r})"

    def format(self, rid: str, category: str, name: int | str) -> str:
        """The key that `parse` takes apart into (rid, category, name); raises as KeyTemplate.format does.

        UsageError, with the nearest one, if the category has no template.
        """
        template = self.templates.get(category)
        if template is None:
            near = _nearest(category, list(self.templates))
            raise UsageError("this category has no key template", rid=rid, category=category, nearest=near)
        return template._make(rid, name)

    def parse(self, key: str, rid: str | None = None) -> tuple[str, str, str]:
        """(rid, category, name) of a key; InvalidPayload with key, templates and rid if none matches.

        With `rid` given, a key of another rid is refused too.
        """
        check_text(key, "key", MAX_KEY_BYTES)
        for category, template in self.templates.items():
            found = template._match(key)
            if found is None:
                continue
            if rid is not None and found[0] != rid:
                raise InvalidPayload(
                    "the key belongs to another rid", rid=rid, key=key, key_rid=found[0], templates=self._texts()
                )
            return found[0], category, found[1]
        raise InvalidPayload("the key matches no template", rid=rid, key=key, templates=self._texts())

    def _texts(self) -> list[str]:
        return [f"{category}: {template.text}" for category, template in self.templates.items()]


def _template_text(text: object) -> str:
    try:
        return check_text(text, "template", MAX_KEY_BYTES)
    except InvalidPayload as err:
        raise ConfigError(err.message, **err.facts) from None


def _check_fields(text: str, literals: list[str], fields: list[str]) -> str:
    """The name's placeholder, if the fields are `rid` and one name."""
    for field in fields:
        if field not in PLACEHOLDERS:
            raise ConfigError(
                "a key template holds an unknown placeholder",
                template=text,
                placeholder=field,
                nearest=_nearest(field, PLACEHOLDERS),
                valid=list(PLACEHOLDERS),
            )
    if any("{" in literal or "}" in literal for literal in literals):
        raise ConfigError("a key template holds a brace that belongs to no placeholder", template=text)
    names = [field for field in fields if field != "rid"]
    if fields.count("rid") != 1 or len(names) != 1:
        raise ConfigError(
            "a key template holds {rid} once, and one of {layer_id} and {id_type} once", template=text, found=fields
        )
    return names[0]


def _category_template(category: str, template: str | KeyTemplate) -> KeyTemplate:
    if not isinstance(category, str):
        raise ConfigError("a category of key templates must be a str", found=type(category).__name__)
    try:
        made = template if isinstance(template, KeyTemplate) else KeyTemplate(template)
    except ConfigError as err:
        raise ConfigError(err.message, category=category, **err.facts) from None
    wanted = CATEGORY_NAMES.get(category, made.field)
    if made.field != wanted:
        raise ConfigError(
            f"keys of this category hold {{{wanted}}}", category=category, template=made.text, found=made.field
        )
    return made


def _check_apart(templates: Mapping[str, KeyTemplate]) -> None:
    seen: list[tuple[str, KeyTemplate]] = []
    for category, template in templates.items():
        for earlier, other in seen:
            key = template.collision(other)
            if key is not None:
                raise ConfigError(
                    "two key templates collide: one key belongs to both",
                    categories=[earlier, category],
                    templates=[other.text, template.text],
                    key=key,
                )
        seen.append((category, template))


def _check_name(field: str, value: object, rid: str) -> str:
    if field == "layer_id" and not isinstance(value, str):
        return str(check_number(value, "layer_id", MAX_LAYER_ID))
    name = check_text(value, field, MAX_KEY_BYTES)
    if re.fullmatch(_NAME_PATTERNS[field], name) is None:
        raise InvalidPayload(f"not a {field}: it must match {_NAME_PATTERNS[field]}", rid=rid, **{field: name})
    return name


def _nearest(word: str, valid: tuple[str, ...] | list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, valid, n=1, cutoff=0.4)), None)


def _shared_word(left: list[_Step], right: list[_Step]) -> str | None:
    """A shortest word of both step sequences: breadth first over pairs of positions, each seen once."""
    queue = deque([(0, 0, "")])
    seen = {(0, 0)}
    while queue:
        i, j, word = queue.popleft()
        if (i, j) == (len(left), len(right)):
            return word
        for mine, after_i in _moves(left, i):
            for theirs, after_j in _moves(right, j):
                char = _common(mine, theirs)
                if char is not None and (after_i, after_j) not in seen:
                    seen.add((after_i, after_j))
                    queue.append((after_i, after_j, word + char))
    return None


def _moves(steps: list[_Step], at: int) -> list[tuple[_Chars | None, int]]:
    """What may be read with `at` steps entered: one more of the last step's loop, or the next step's first."""
    moves: list[tuple[_Chars | None, int]] = []
    if at > 0:
        moves.append((steps[at - 1].loop, at))
    if at < len(steps):
        moves.append((steps[at].first, at + 1))
    return moves


def _common(left: _Chars | None, right: _Chars | None) -> str | None:
    """One character that both sets hold, the same one each time."""
    if left is None or right is None:
        both = left if right is None else right
        return "x" if both is None else min(both, default=None)
    return min(left & right, default=None)
