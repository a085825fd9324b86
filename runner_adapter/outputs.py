"""A stage's output cut into each request's tensors: rows by declared axes, and nothing given to everyone.

The model's output is one of (runner, `extract_multimodal_outputs`):

| output | |
|---|---|
| Tensor | [tokens, width]: the text hidden states |
| (text, aux) or (text,) | aux: {layer id: Tensor}, Tensors in the order of `aux_layers`, or a nested dict of names |
| an object | with `text_hidden_states`, and `multimodal_outputs` in the forms of aux |

A name is cut as it was declared, never by what its size happens to be: a shape that fits by chance would hand one
request's rows to another.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from connector import errors
from runner_adapter.naming import flatten, key_part
from runner_adapter.plan import StepPlan

#: Where the text hidden states stand.
TEXT = "hidden_states.last"

Cut = dict[str, dict[str, torch.Tensor]]
Failed = dict[str, errors.ConnectorError]


class StageOutput(NamedTuple):
    """The text hidden states, [tokens, width], and what the model gives beside them: a mapping, a sequence, or None."""

    text: object
    aux: object = None

    @classmethod
    def of(cls, output: object) -> StageOutput:
        """The parts of a model's output. InvalidPayload if it has none of the forms."""
        if isinstance(output, torch.Tensor):
            return cls(output)
        missing = object()
        # First: such an object may be a named tuple.
        text = getattr(output, "text_hidden_states", missing)
        if text is not missing:
            return cls(text, getattr(output, "multimodal_outputs", None))
        if isinstance(output, tuple | list) and 1 <= len(output) <= 2:
            return cls(*output)
        raise errors.InvalidPayload(
            "a stage's output is a Tensor, (text, aux), or has text_hidden_states and multimodal_outputs",
            found=type(output).__name__,
            length=len(output) if isinstance(output, tuple | list) else None,
        )

    def hidden(self) -> tuple[torch.Tensor, object]:
        """The text and what stands beside it, {} for nothing. InvalidPayload if there is no text."""
        if not isinstance(self.text, torch.Tensor):
            raise errors.InvalidPayload("a stage's text hidden states are a Tensor", found=type(self.text).__name__)
        return self.text, {} if self.aux is None else self.aux


def cut(
    output: object,
    plan: StepPlan,
    row_axes: Mapping[str, int],
    *,
    aux_layers: Sequence[int] = (),
    wanted: Callable[[str], bool] | None = None,
) -> tuple[Cut, Failed]:
    """Each request's tensors by name, views on the output's, and the requests of the step that failed, and why.

    `row_axes` declares a name: the axis of its Tensor that runs over the step's tokens, as many as the plan's tokens
    or padded tokens; requests get their spans, the padding belongs to nobody. At a declared name a list holds one
    Tensor a row of the batch, and a mapping one by rid; None is nothing. The text (`hidden_states.last`) and layers
    (`hidden_states.layers[L]`) have axis 0 if nothing else is declared. `wanted` says which names are looked at at all;
    others may hold anything.

    A wanted name that is not declared, or whose size, rows or rids are not the step's, is refused for every request
    of the step: nobody can say whose rows these are. What a list or mapping holds for one request, and is no Tensor,
    is that request's failure. A request that failed has no tensors. An output that has none of the forms of
    `StageOutput` is refused for every request, too. All errors are InvalidPayload, with the name.
    """
    found: Cut = {row.rid: {} for row in plan.rows}
    failed: Failed = {}
    seen: set[str] = set()
    try:
        for name, value in _named(StageOutput.of(output), aux_layers, row_axes):
            if value is None or (wanted is not None and not wanted(name)):
                continue
            if name in seen:
                raise errors.InvalidPayload("a name stands twice in the output", name=name)
            seen.add(name)
            for rid, part in _parts(name, value, plan, _axis(name, row_axes)):
                if isinstance(part, torch.Tensor):
                    found[rid][name] = part
                elif part is not None:
                    what = "what a request is given is a Tensor"
                    failed.setdefault(rid, errors.InvalidPayload(what, rid=rid, name=name, found=type(part).__name__))
    except errors.InvalidPayload as error:
        return {}, {row.rid: error.anew(rid=row.rid) for row in plan.rows}
    return {rid: named for rid, named in found.items() if rid not in failed}, failed


def step_parts(
    plan: StepPlan,
    output: object,
    beside: Mapping[str, object],
    row_axes: Mapping[str, int],
    *,
    aux_layers: Sequence[int] = (),
    wanted: Callable[[str], bool] | None = None,
) -> tuple[Cut, Failed]:
    """What each request hands on of a step: its part of the output, and over it what stands `beside` it, tensors by
    name. A row without tokens hands nothing on.
    """
    cuts, failed = cut(output, plan, row_axes, aux_layers=aux_layers, wanted=wanted)
    idle = {row.rid for row in plan.rows if not row.tokens}
    named: Cut = {}
    for rid in [rid for rid in {**cuts, **beside} if rid not in idle]:
        more = beside.get(rid, {})
        if isinstance(more, Mapping):
            named[rid] = {**cuts.get(rid, {}), **more}
        else:
            what = "what stands beside a request's output is a mapping of names"
            failed.setdefault(rid, errors.InvalidPayload(what, rid=rid, given=type(more).__name__))
    return named, failed


def _named(output: StageOutput, aux_layers: Sequence[int], declared: Container[str]) -> Iterator[tuple[str, Any]]:
    yield TEXT, output.text
    aux = output.aux
    if isinstance(aux, Mapping):
        layers = bool(aux) and all(type(layer) is int for layer in aux)
        yield from _leaves("", {"hidden_states": {"layers": aux}} if layers else aux, declared)
    elif isinstance(aux, tuple | list):
        if len(aux) != len(aux_layers):
            raise errors.InvalidPayload(
                "the output holds another number of layers than were asked for", found=len(aux), asked=len(aux_layers)
            )
        yield from ((f"hidden_states.layers[{layer}]", part) for layer, part in zip(aux_layers, aux, strict=True))
    elif aux is not None:
        raise errors.InvalidPayload("what stands beside the text is a mapping or a list", found=type(aux).__name__)


def _leaves(name: str, value: Any, declared: Container[str]) -> Iterator[tuple[str, Any]]:
    """Names and values. A mapping at a declared name is one value: its keys are rids, which may be any text."""
    if not isinstance(value, Mapping) or name in declared:
        yield name, value
        return
    for key, part in value.items():
        (below,) = flatten({name: {key: None}} if name else {key: None})
        yield from _leaves(below, part, declared)


def _axis(name: str, row_axes: Mapping[str, int]) -> int:
    part = key_part(name)
    usual = 0 if name == TEXT or (part is not None and part[0] == "hidden_states") else None
    axis = row_axes.get(name, usual)
    if axis is None:
        raise errors.InvalidPayload(
            "no row axis is declared for the name, by MergeRules(row_axes=…): nobody can say whose rows it holds",
            name=name,
        )
    return axis


def _parts(name: str, value: Any, plan: StepPlan, axis: int) -> Iterator[tuple[str, Any]]:
    """(rid, its part) of one value; InvalidPayload if it is not this step's."""
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout is not torch.strided:
            layout = "nested" if value.is_nested else str(value.layout)
            raise errors.InvalidPayload("rows are cut out of dense tensors only", name=name, layout=layout)
        size = value.shape[axis] if axis < value.dim() else None
        if size not in (plan.tokens, plan.padded_tokens):
            raise errors.InvalidPayload(
                "the rows are not those of the step",
                name=name,
                shape=list(value.shape),
                axis=axis,
                expected=sorted({plan.tokens, plan.padded_tokens}),
            )
        yield from ((row.rid, value.narrow(axis, row.start, row.tokens)) for row in plan.rows)
    elif isinstance(value, tuple | list):
        if len(value) not in (len(plan.rows), plan.padded_rows):
            raise errors.InvalidPayload(
                "the list does not hold one entry a row of the batch",
                name=name,
                found=len(value),
                expected=sorted({len(plan.rows), plan.padded_rows}),
            )
        yield from ((row.rid, part) for row, part in zip(plan.rows, value, strict=False))
    elif isinstance(value, Mapping):
        strange = [rid for rid in value if rid not in plan]
        if strange:
            raise errors.InvalidPayload(
                "a part belongs to a request that is not in the step", name=name, strange=str(strange[0])[:80]
            )
        yield from ((row.rid, value[row.rid]) for row in plan.rows if row.rid in value)
    else:
        raise errors.InvalidPayload("the name holds no Tensors", name=name, found=type(value).__name__)
