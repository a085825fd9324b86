"""What may leave a stage, and under which keys; how its adapter works. No torch.

Two sections of a stage's `engine_args` (RFC, "Model Config Driven Transfer"). `from_mapping` and `from_yaml` raise
ConfigError with a line for each problem; made directly, pydantic's ValidationError comes out.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from connector import ConfigSource, TemplateSet, check_config, config_conflicts, errors
from runner_adapter.naming import name_of

if TYPE_CHECKING:
    import torch

Category = Literal["hidden_states", "ids"]
CATEGORIES = ("hidden_states", "ids")

_logger = logging.getLogger("runner_adapter")


def _listed(value: object) -> object:
    """A list as a tuple. null is refused: it would mean all where somebody took the last entry out."""
    if isinstance(value, list | tuple):
        return tuple(value)
    raise PydanticCustomError("list", "this must be a list; [] is none")


def _distinct(value: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    twice = [entry for entry, count in Counter(value or ()).items() if count > 1]
    if twice:
        raise PydanticCustomError("twice", "{entry} stands twice", {"entry": repr(twice[0])})
    return value


def _id_type(text: str) -> str:
    try:
        name_of("ids", text)
    except errors.InvalidPayload as error:
        raise PydanticCustomError("id_type", "{problem}", {"problem": error.message}) from error
    return text


def _template_set(texts: Mapping[str, str]) -> TemplateSet:
    try:
        return TemplateSet(texts)
    except errors.ConfigError as error:
        # The facts hold what collides, and the nearest valid name.
        raise PydanticCustomError("conflict", "{problem}", {"problem": str(error)}) from error


def _template(category: Category, text: str) -> str:
    _template_set({category: text})
    return text


Layer = Annotated[int, Field(ge=0, le=2**63 - 1)]
IdType = Annotated[str, AfterValidator(_id_type)]
_LIST = (BeforeValidator(_listed), AfterValidator(_distinct))


class _Strict(BaseModel):
    """Nothing is coerced, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Section(_Strict):
    """One section of `engine_args`."""

    #: Its name in engine_args.
    SECTION: ClassVar[str]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> Self:
        """The section from its fields. ConfigError: every problem, by field."""
        if not isinstance(mapping, Mapping):
            raise errors.ConfigError(f"{cls.SECTION} must be a mapping of fields, not {type(mapping).__name__}")
        return check_config(cls, ConfigSource(dict(mapping), default_place=cls.SECTION))

    @classmethod
    def from_yaml(cls, path: str | Path, stage_id: int | str | None = None) -> Self:
        """The section of a stage in a file, at its defaults if the stage has none. Raises as `stagefile.stage_of`."""
        from runner_adapter.stagefile import stage_of

        return next(section for section in stage_of(path, stage_id) if isinstance(section, cls))


class KeyTemplates(_Strict):
    """A key template for each category: `{rid}-{layer_id}` and `{rid}-{id_type}` in the RFC."""

    hidden_states: Annotated[str, AfterValidator(partial(_template, "hidden_states"))] | None = None
    ids: Annotated[str, AfterValidator(partial(_template, "ids"))] | None = None

    @property
    def given(self) -> dict[str, str]:
        """Template by category, of those that are there."""
        return {name: text for name, text in self if text is not None}

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.given:
            _template_set(self.given)
        return self


class TransferConfig(Section):
    """Which tensors a stage hands over, and under which keys. The default, and `enabled: false`, moves nothing."""

    SECTION: ClassVar[str] = "transfer_config"

    #: Whether anything leaves. Required where another field is given.
    enabled: bool = False
    #: Categories that may leave. Required when enabled; with [] a stage sends nothing, but reads.
    items: Annotated[tuple[Category, ...], *_LIST] = ()
    #: Keys of each category. Required when enabled, for all items at least.
    key_templates: KeyTemplates = KeyTemplates()
    #: Layers that may leave; left out: all; []: none.
    hidden_state_layers: Annotated[tuple[Layer, ...] | None, *_LIST] = None
    #: Id types that may leave; left out: all but those under `hidden_states.`, which are to be named; []: none.
    id_types: Annotated[tuple[IdType, ...] | None, *_LIST] = None

    @classmethod
    def disabled(cls) -> Self:
        """Moves nothing, as the default does."""
        return cls()

    @cached_property
    def templates(self) -> TemplateSet | None:
        """The key templates; None unless enabled."""
        return TemplateSet(self.key_templates.given) if self.enabled else None

    @cached_property
    def chosen(self) -> Mapping[str, frozenset[str] | None]:
        """What may leave: category -> layer ids or id types as text, None for all. Categories not here: nothing."""
        if not self.enabled:
            return {}
        filters: dict[str, tuple[Any, ...] | None] = {"hidden_states": self.hidden_state_layers, "ids": self.id_types}
        return {item: None if (names := filters[item]) is None else frozenset(map(str, names)) for item in self.items}

    @property
    def sends(self) -> bool:
        """Whether anything may leave."""
        return any(names is None or names for names in self.chosen.values())

    def allows(self, category: str, name: int | str) -> bool:
        """Whether this layer id or id type may leave. UsageError: no such category.

        An id type under `hidden_states.` is no id: all id types are not it, and only `id_types` can name it.
        """
        if category not in CATEGORIES:
            raise errors.UsageError("there is no such category of tensors", category=category, valid=list(CATEGORIES))
        names, text = self.chosen.get(category, frozenset()), str(name)
        if names is None:
            return category != "ids" or not text.startswith("hidden_states.")
        return text in names

    def hidden_state_key(self, rid: str, layer_id: int) -> str:
        """The key of a layer's hidden states; made whether or not they may leave.

        InvalidPayload: the rid or layer id is not one, or the key too long. UsageError: there is no template.
        """
        return self._key(rid, "hidden_states", layer_id)

    def id_key(self, rid: str, id_type: str) -> str:
        """The key of an id type; made whether or not it may leave. Raises as `hidden_state_key` does."""
        return self._key(rid, "ids", id_type)

    def parse_key(self, key: str, rid: str | None = None) -> tuple[str, str, str]:
        """(rid, category, layer id or id type as text) of a key; rids may hold dashes, and whatever else.

        InvalidPayload, with key, templates and rid, and an error log with the same, for a key that no template makes
        or that belongs to another rid than `rid` (RFC, "Config Rules"). Without an enabled config that is every key.
        """
        try:
            if self.templates is None:
                raise errors.InvalidPayload("no transfer config is enabled, so there are no keys", key=key)
            found = self.templates.parse(key, rid)
            name_of(found[1], found[2])
        except errors.InvalidPayload as error:
            texts = self.key_templates.given if self.enabled else {}
            told = {"key": key, **error.facts, "rid": rid, "templates": [f"{c}: {text}" for c, text in texts.items()]}
            refusal = errors.InvalidPayload(error.message, **told)
            # Its text: a handler that keeps records would keep the frames of the object, and their views.
            _logger.error("%s", str(refusal))
            raise refusal from None
        return found

    def select(
        self,
        rid: str,
        hidden_states: Mapping[int, torch.Tensor] | None = None,
        ids: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """What may leave, by key: `hidden_states` by layer id, `ids` by id type, tensors of any shape and dtype.

        Values that are filtered out are not looked at, not even fetched from their mapping. InvalidPayload, with
        rid, key and type: one that is no Tensor (RFC: strictly dict[str, Tensor]); or what is given is no mapping.
        Nothing is copied.
        """
        given: dict[str, Mapping[Any, torch.Tensor] | None] = {"hidden_states": hidden_states, "ids": ids}
        sent: dict[str, torch.Tensor] = {}
        for category, tensors in given.items():
            if tensors is None:
                continue
            if not isinstance(tensors, Mapping):
                what, kind = "tensors are given in a mapping, by layer id or id type", type(tensors).__name__
                raise errors.InvalidPayload(what, rid=rid, category=category, type=kind)
            for name in tensors:
                if not self.allows(category, name):
                    continue
                key, value = self._key(rid, category, name), tensors[name]
                if key in sent:
                    raise errors.InvalidPayload("two tensors have one key", rid=rid, key=key)
                if not _is_tensor(value):
                    kind = type(value).__name__
                    raise errors.InvalidPayload("only Tensors are handed over", rid=rid, key=key, type=kind)
                sent[key] = value
        return sent

    def _key(self, rid: str, category: str, name: int | str) -> str:
        if self.templates is None:
            raise errors.UsageError("no transfer config is enabled, so there are no keys", rid=rid, category=category)
        key = self.templates.format(rid, category, name)
        name_of(category, str(name), rid=rid)
        return key

    @model_validator(mode="after")
    def _complete(self) -> Self:
        given, templates = self.model_fields_set, self.key_templates.given
        problems: list[tuple[tuple[str], str]] = []
        if given and "enabled" not in given:
            problems.append((("enabled",), "field required where another is given: true or false"))
        if self.enabled and "items" not in given:
            problems.append((("items",), "field required when enabled: the categories that may leave, [] for none"))
        if self.enabled and not templates:
            problems.append((("key_templates",), "field required when enabled: a template for each category"))
        elif self.enabled:
            lacking = [item for item in self.items if item not in templates]
            problems += [(("key_templates",), f"there is no template for the item {item!r}") for item in lacking]
        if problems:
            raise config_conflicts(*problems)
        return self


class AdapterConfig(Section):
    """How the adapter of a stage works (`engine_args.runner_adapter`)."""

    SECTION: ClassVar[str] = "runner_adapter"

    #: RFC, Migration Plan. No Literal of ints: it takes true for 1.
    migration_phase: Annotated[int, Field(ge=1, le=3)] = 2
    #: Tensor-parallel ranks: rank 0 reads and broadcasts, or each rank reads.
    ranks: Literal["broadcast", "each"] = "broadcast"
    #: Whether a step's puts run behind the model.
    background_send: bool = False


def _is_tensor(value: object) -> bool:
    """Exactly isinstance(value, torch.Tensor), without importing torch: where it is not loaded, nothing is one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
