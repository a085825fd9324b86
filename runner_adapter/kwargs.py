"""What a model's forward is given beside its inputs, and the same read back, in each phase of the migration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from connector import errors
from runner_adapter import phases
from runner_adapter.maps import BatchMaps, Map, fresh
from runner_adapter.phases import Phase
from runner_adapter.plan import StepPlan
from runner_adapter.requests import check_rid

NEW_NAME, OLD_NAME = phases.NEW_NAME, phases.FORWARD_KWARG


def forward_kwargs(
    maps: BatchMaps,
    plan: StepPlan,
    phase: Phase,
    *,
    sampling_extra_args: Mapping[str, Mapping[str, Any] | None] | None = None,
    has_sampling_extra_args: bool = False,
) -> dict[str, Any]:
    """The kwargs of one forward, a step without any request included (RFC, data flow 4; runner).

    `model_intermediate_buffer` is `maps`; phase 1 gives the same object as `runtime_additional_information`, too.
    Beside it, one entry a row and in its order: `request_ids`, `request_token_spans` of (start, stop) and
    `generated_len`; with `has_sampling_extra_args`, which the model's config declares, `sampling_extra_args` as well:
    a dict a row, made from those given by rid, `{}` where a request has none. A padded row has the rid "", an
    empty span behind the last token, 0 and `{}`.

    UsageError if the maps are another step's, or a request's extra arguments are no mapping.
    """
    maps.check(plan)
    padding = plan.padded_rows - len(plan.rows)
    given: dict[str, Any] = {
        NEW_NAME: maps,
        "request_ids": [*plan.rids, *[""] * padding],
        "request_token_spans": [*plan.spans, *[(plan.tokens, plan.tokens)] * padding],
        "generated_len": [*(row.generated for row in plan.rows), *[0] * padding],
    }
    if phases.writes(OLD_NAME, phase):
        given[OLD_NAME] = maps
    if has_sampling_extra_args:
        extra = sampling_extra_args or {}
        rows = [_extra_args(rid, extra.get(rid)) for rid in plan.rids]
        given["sampling_extra_args"] = [*rows, *({} for _ in range(padding))]
    return given


def read_kwargs(kwargs: Mapping[str, Any], phase: Phase) -> BatchMaps:
    """The maps that a model's forward was given, under the new name or, in phases 1 and 2, the old one.

    The old name alone is warned of, once. What another runner gave becomes BatchMaps, with dicts of its own: a
    list of mappings, one a row, which `request_ids` beside it names; or a mapping of rid to mapping, which needs
    `request_ids` for its order. Nothing under either name, or None, as a profiling run has it, is no maps.

    UsageError: the old name in phase 3, two names for two objects, anything that is no batch of maps.
    """
    old, new = kwargs.get(OLD_NAME), kwargs.get(NEW_NAME)
    if old is not None and (new is None or not phases.reads(OLD_NAME, phase)):
        phases.met(OLD_NAME, phase)
    if old is not None and new is not None and old is not new:
        raise errors.UsageError("the old name and the new one must hold the same object", old=OLD_NAME, new=NEW_NAME)
    rids = kwargs.get("request_ids")
    if new is not None:
        return _normal(new, rids, NEW_NAME)
    return BatchMaps() if old is None else _normal(old, rids, OLD_NAME)


def _extra_args(rid: str, given: Mapping[str, Any] | None) -> Map:
    if given is not None and not isinstance(given, Mapping):
        raise errors.UsageError("extra sampling arguments must be a mapping", rid=rid, type=type(given).__name__)
    return dict(given or {})


def _normal(value: Any, rids: Sequence[str] | None, name: str) -> BatchMaps:
    if isinstance(value, BatchMaps):
        return value
    if isinstance(value, Mapping):
        if rids is None:
            raise errors.UsageError("maps by rid have no order without request_ids", name=name, maps=len(value))
        rows = [value.get(rid, {}) for rid in rids]
    elif isinstance(value, list | tuple):
        rows = list(value)
    else:
        raise errors.UsageError("a batch of maps is a list, one mapping a row", name=name, type=type(value).__name__)
    if rids is not None and len(rids) != len(rows):
        raise errors.UsageError("request_ids must name every row", name=name, request_ids=len(rids), rows=len(rows))
    for row, entry in enumerate(rows):
        if not isinstance(entry, Mapping):
            raise errors.UsageError("a row's map must be a mapping", name=name, row=row, type=type(entry).__name__)
    return BatchMaps([fresh(entry) for entry in rows], _named(rids or ()))


def _named(rids: Sequence[str]) -> list[str]:
    """The rids without those of padded rows, which are "" and come last."""
    named = list(rids)
    while named and named[-1] == "":
        named.pop()
    return [check_rid(rid) for rid in named]
