"""How an update meets what is there: it replaces, its rows are appended, or its absolute span is continued."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from connector import errors
from runner_adapter import values
from runner_adapter.naming import flatten
from runner_adapter.values import Device

#: A name as rules take it: dotted, or a model's pair of type key and qualifier.
Name = str | tuple[str, str]
#: Reset by every new segment; it survives a snapshot, as does whether the input can go on.
PROCESSED_TOKENS = "meta.num_processed_tokens"
KEPT = (PROCESSED_TOKENS, "meta.resumable")

#: By rule, the attribute of a model that declares it (the runner).
_DECLARED = {"gpu_resident": "gpu_resident_buffer_keys", "by_segment": "streaming_accumulated_keys"}

#: Where the next part of a name begins, and what then stands before it.
_OPENS = {".": "mapping", "[": "mapping", "<": "list"}
_OPENING = re.compile(r"[.\[<]")


#: By name, where the rows of names stand that grow.
Blocks = MutableMapping[str, values.Growing]


class Span(NamedTuple):
    """The names of the two ends of a name's rows in the absolute sequence: [start, end)."""

    start: str
    end: str


class MergeRules:
    """What a model declares of its names. `gpu_resident` and `kept` mean all that stands below a name, too.

    gpu_resident: they stay on the device, as clones (the runner's `gpu_resident_buffer_keys`). accumulated: rows
    [n, ...] are appended on dim 0, by every update. by_segment: by a further segment of input, while any other update
    replaces them (its `streaming_accumulated_keys`). spans: name -> (start name, end name), rows of
    an absolute sequence. kept: they survive a snapshot that does not hold them. row_axes: name -> the axis that runs
    over a batch's rows, 0 or more.

    Raises UsageError, with the rule and the name, for what is no name, an axis that is no int, and rules that
    contradict each other.
    """

    __slots__ = ("accumulated", "by_segment", "gpu_resident", "kept", "row_axes", "spans")

    def __init__(
        self,
        *,
        gpu_resident: Iterable[Name] = (),
        accumulated: Iterable[Name] = (),
        by_segment: Iterable[Name] = (),
        spans: Mapping[Name, tuple[Name, Name]] | None = None,
        kept: Iterable[Name] = KEPT,
        row_axes: Mapping[Name, int] | None = None,
    ) -> None:
        self.gpu_resident = _names("gpu_resident", gpu_resident)
        self.accumulated = _names("accumulated", accumulated)
        self.by_segment = _names("by_segment", by_segment)
        self.kept = _names("kept", kept)
        self.spans: Mapping[str, Span] = MappingProxyType(
            {_name("spans", name): _span(name, ends) for name, ends in (spans or {}).items()}
        )
        self.row_axes: Mapping[str, int] = MappingProxyType(
            {_name("row_axes", name): _axis(name, axis) for name, axis in (row_axes or {}).items()}
        )
        self._check_apart()

    @classmethod
    def of(cls, model: object, **more: Any) -> MergeRules:
        """The rules that a model declares by the attributes of vLLM-Omni's runner, `gpu_resident_buffer_keys` and
        `streaming_accumulated_keys`; `more` takes their place, or says what they do not. Raises as the class does."""
        declared = {rule: getattr(model, name, None) or () for rule, name in _DECLARED.items()}
        return cls(**{**declared, **more})

    def is_resident(self, name: str) -> bool:
        return _covered(name, self.gpu_resident)

    def is_kept(self, name: str) -> bool:
        return _covered(name, self.kept)

    def _check_apart(self) -> None:
        ends = [end for span in self.spans.values() for end in span]
        for name in [*self.accumulated, *self.by_segment, *self.spans, *ends]:
            if "<" in name:
                raise errors.UsageError("a list is replaced as a whole: no rule for one place", name=name)
        grows = [*self.accumulated, *self.by_segment, *self.spans, *ends]
        for name in grows:
            if grows.count(name) > 1:
                raise errors.UsageError("a name has two rules of how its rows grow", name=name)
        for name in ends:
            if self.is_resident(name):
                raise errors.UsageError("the ends of a span are read at every merge: they stay on the host", name=name)
        for name, span in self.spans.items():
            if len({self.is_kept(one) for one in (name, *span)}) > 1:
                raise errors.UsageError("rows of a span and its ends are kept together, or not at all", name=name)


def merged(
    current: Mapping[str, torch.Tensor],
    updates: Iterable[Mapping[str, Any]],
    rules: MergeRules,
    device: Device,
    blocks: Blocks,
    *,
    segment: bool = False,
) -> dict[str, torch.Tensor]:
    """A new map by name: `current`, and over it the updates in order, in one go; `current` is not changed. `segment`:
    they are a further segment of input.

    What is stored anew owns its memory, on `device` if it is resident, else on the host. No row is copied twice, and
    what a later update replaces not at all. `current`'s own tensor in an update is no news: nothing is copied,
    and no row appended. A tensor takes the place of a mapping of its name, and the other way round; a list
    that of the list.

    `blocks` are kept for the next merge, so that its appends copy the new rows alone (`values.Growing`). Whichever map
    it begins with, and also if it is refused, all maps that were made with these blocks stay as they are.

    Raises, with the name: InvalidPayload (no Tensor; rows that do not fit those before; a span with a gap, without
    its ends, or with ends that are no 0-dim int64 or do not count its rows; a tensor and a mapping of one name in one
    update) and UnsupportedTensor.
    """
    made = {name: [tensor] for name, tensor in current.items()}
    appended = rules.accumulated | rules.by_segment if segment else rules.accumulated
    for update in updates:
        places = _places(update)
        # Names that are there already leave all others in place, but for those of a list.
        if not update.keys() <= made.keys() or "list" in places.values():
            made = {name: pieces for name, pieces in made.items() if not _must_go(name, places)}
        # As values that can be kept; the map's own stay the very objects.
        found = {n: t if n in current and t is current[n] else values.plain(t, name=n) for n, t in update.items()}
        for name, span in rules.spans.items():
            _continue_span(made, found, name, span)
        for name, tensor in found.items():
            if name not in appended:
                made[name] = [tensor]
            elif not any(tensor is piece for piece in made.get(name, ())):
                made[name] = [*made.get(name, ()), _rows(tensor, name)]
    return {name: _stored(name, pieces, current.get(name), rules, device, blocks) for name, pieces in made.items()}


def _stored(
    name: str, pieces: list[torch.Tensor], there: torch.Tensor | None, rules: MergeRules, device: Device, blocks: Blocks
) -> torch.Tensor:
    if len(pieces) == 1 and pieces[0] is there:
        return there
    place = device if rules.is_resident(name) else "cpu"
    if pieces[0] is not there:
        # These may be all that ever come: there is no room behind them.
        blocks.pop(name, None)
        return values.joined(pieces, place, name=name)
    return blocks.setdefault(name, values.Growing()).append(there, pieces[1:], place, name=name)


def _continue_span(made: dict[str, list[torch.Tensor]], update: dict[str, torch.Tensor], name: str, span: Span) -> None:
    """Take a span's rows and ends out of the update, and put behind what is there the rows that are not there yet."""
    given = [one for one in (name, *span) if one in update]
    if not given:
        return
    if len(given) < 3:
        raise errors.InvalidPayload("rows of a span and its two ends come together", name=name, given=given)
    rows, (first, last) = _rows(update.pop(name), name), (update.pop(end) for end in span)
    start, end = _end(first, span.start), _end(last, span.end)
    if not 0 <= start <= end or end - start != len(rows):
        raise errors.InvalidPayload(
            "the ends of a span do not count its rows", name=name, start=start, end=end, rows=len(rows)
        )
    if any(one not in made for one in (name, *span)):
        made[name], made[span.start], made[span.end] = [rows], [first], [last]
        return
    reached = int(made[span.end][-1])
    if start > reached:
        raise errors.InvalidPayload("rows of a span are missing before these", name=name, start=start, reached=reached)
    if end > reached:
        made[name] = [*made[name], rows[reached - start :]]
        made[span.end] = [last]


def _rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.dim() == 0:
        raise errors.InvalidPayload("a name whose rows are appended cannot be a tensor without rows (0-dim)", name=name)
    return tensor


def _end(tensor: torch.Tensor, name: str) -> int:
    if tensor.dim() != 0 or tensor.dtype is not torch.int64:
        raise errors.InvalidPayload(
            "an end of a span is a 0-dim int64 tensor", name=name, dtype=str(tensor.dtype), shape=list(tensor.shape)
        )
    return int(tensor)


@lru_cache(4096)
def _path(name: str) -> tuple[tuple[str, str], ...]:
    """All that a name says is there, and as what: `a.b<0>` a mapping `a`, a list `a.b`, a tensor `a.b<0>`."""
    above = [(name[: found.start()], _OPENS[found.group()]) for found in _OPENING.finditer(name)]
    return (*above, (name, "tensor"))


def _places(names: Iterable[str]) -> dict[str, str]:
    places: dict[str, str] = {}
    for name in names:
        for place, kind in _path(name):
            if places.setdefault(place, kind) != kind:
                raise errors.InvalidPayload(f"a name is both a {kind} and a {places[place]}", name=place)
    return places


def _must_go(name: str, places: Mapping[str, str]) -> bool:
    """Whether a name cannot stand beside what an update says is there. A list in an update is the whole list."""
    return any(places.get(place, kind) != kind or (kind == "list" and place in places) for place, kind in _path(name))


def _covered(name: str, wholes: Iterable[str]) -> bool:
    return any(name == whole or name.startswith(whole) and name[len(whole)] in _OPENS for whole in wholes)


def _names(rule: str, several: Iterable[Name]) -> frozenset[str]:
    if isinstance(several, str):
        raise errors.UsageError("a rule takes several names, not one str", rule=rule, name=several)
    return frozenset(_name(rule, name) for name in several)


def _name(rule: str, name: object) -> str:
    """The dotted name of either spelling."""
    if not isinstance(name, str | tuple):
        raise errors.UsageError(
            "a name is dotted text or a pair (type key, qualifier)", rule=rule, name=repr(name)[:80]
        )
    return next(iter(flatten({name: None}, rule=rule)))


def _span(name: Name, ends: object) -> Span:
    if not isinstance(ends, tuple | list) or len(ends) != 2:
        raise errors.UsageError("a span has a start name and an end name", rule="spans", name=str(name))
    return Span(_name("spans", ends[0]), _name("spans", ends[1]))


def _axis(name: Name, axis: object) -> int:
    if type(axis) is not int or axis < 0:
        raise errors.UsageError("a row axis is an int, 0 or more", rule="row_axes", name=str(name), axis=repr(axis))
    return axis
