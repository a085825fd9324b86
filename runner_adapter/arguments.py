"""What RunnerAdapter is given, checked: an argument of another type is refused by name, before anything is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch

from connector import errors
from runner_adapter.maps import Form
from runner_adapter.plan import StepPlan


def plan_of(plan: object) -> StepPlan:
    """UsageError if it is none."""
    if not isinstance(plan, StepPlan):
        raise errors.UsageError("`plan` is a StepPlan (StepPlan.make)", given=type(plan).__name__)
    return plan


def mapping_of(what: str, given: Any) -> Mapping[str, Any]:
    """UsageError if the argument `what` is none."""
    if not isinstance(given, Mapping):
        raise errors.UsageError(f"`{what}` is a mapping by rid", given=type(given).__name__)
    return given


def error_of(rid: str, error: object) -> Exception:
    """UsageError if what the request fails of is no error."""
    if not isinstance(error, Exception):
        raise errors.UsageError("a request fails of an error", rid=rid, given=type(error).__name__)
    return error


def brings_nothing(update: object) -> bool:
    """Whether a first map is empty or None."""
    return update is None or (isinstance(update, Mapping) and not update)


def check_kind(name: str, given: object, kind: type) -> None:
    """UsageError if an option is neither of this kind nor None."""
    if given is not None and not isinstance(given, kind):
        raise errors.UsageError(f"`{name}` is a {kind.__name__}", given=type(given).__name__)


def check_form(form: object) -> None:
    """UsageError if there is no such form of maps."""
    if form not in get_args(Form):
        raise errors.UsageError("there is no such form of maps", form=repr(form)[:40], known=list(get_args(Form)))


def check_optional(**mappings: object) -> None:
    """UsageError if one is neither a mapping nor None."""
    for name, given in mappings.items():
        if given is not None:
            mapping_of(name, given)


def check_inputs(plan: StepPlan, input_ids: object, inputs_embeds: object, **mappings: object) -> None:
    """UsageError unless the first two are Tensors [tokens] and [tokens, width], or None, with the plan's tokens at
    least, and the others as in `check_optional`."""
    check_optional(**mappings)
    check_rows("input_ids", "[tokens]", input_ids, 1, plan.tokens)
    if inputs_embeds is not None:
        check_rows("inputs_embeds", "[tokens, width]", inputs_embeds, 2, plan.tokens)


def check_rows(name: str, form: str, tensor: object, dims: int, tokens: int) -> None:
    """UsageError unless it is a Tensor of so many dimensions, with a row for each of so many tokens."""
    shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else None
    if shape is None or len(shape) != dims or shape[0] < tokens:
        given = type(tensor).__name__ if shape is None else f"{shape}"
        raise errors.UsageError(f"`{name}` is a Tensor {form}, with all tokens of the plan", given=given, tokens=tokens)
