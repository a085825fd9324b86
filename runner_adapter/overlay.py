"""What only migration phases 1 and 2 have: old request fields, the per-request mirror, the prompt-embed overlay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from connector import ConnectorError, errors
from runner_adapter import legacy, phases
from runner_adapter.arguments import check_rows, mapping_of, plan_of
from runner_adapter.naming import flatten, nest
from runner_adapter.phases import Phase

if TYPE_CHECKING:
    from runner_adapter.buffer import ModelIntermediateBuffer
    from runner_adapter.plan import Row, StepPlan


class Accepted(NamedTuple):
    """What running requests were brought, by rid, and the errors of those whose fields were refused."""

    maps: dict[str, dict[str, torch.Tensor]]
    failed: dict[str, ConnectorError]


def accept(request: object, phase: Phase, *, rid: str) -> dict[str, torch.Tensor]:
    """The map that a new request brings, by name: what its old field holds, and over that what its new one holds.

    `request`: whatever the engine has, with the attributes `model_intermediate_buffer` and `additional_information`
    or without them. In phases 1 and 2 plain values of both become tensors; in phase 3 the new field's are as they are,
    for the buffer, which takes tensors alone, and the old one is refused whatever it holds.

    UsageError: the old field in phase 3; a phase that is none. InvalidPayload, UnsupportedTensor: as `legacy.decode`;
    or one field has a tensor where the other has a mapping.
    """
    new, old = getattr(request, phases.NEW_NAME, None), getattr(request, phases.REQUEST_FIELD, None)
    return _joined(new, old, phases.phase_of(phase), rid)


def accept_cached(requests: object, phase: Phase) -> Accepted:
    """What a step brings to requests that run already, by rid. One rid's failure is that rid's.

    `requests`: the engine's object for all of them; each field, if it is there, maps rids to what `accept` takes. The
    PR tells why: without these a talker decodes with what its prefill brought, and stops early.
    UsageError: a field that is no mapping.
    """
    phase = phases.phase_of(phase)
    new, old = _by_rid(requests, phases.NEW_NAME), _by_rid(requests, phases.REQUEST_FIELD)
    found = Accepted({}, {})
    for rid in {**new, **old}:
        try:
            found.maps[rid] = _joined(new.get(rid), old.get(rid), phase, rid)
        except ConnectorError as error:
            found.failed[rid] = error.anew()
    return found


def _by_rid(requests: object, field: str) -> dict[str, Any]:
    """The field's values that are there; None says that there is none."""
    found = getattr(requests, field, None)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise errors.UsageError("this field of cached requests is a mapping", field=field, found=type(found).__name__)
    return {rid: value for rid, value in found.items() if value is not None}


def _joined(new: Any, old: Any, phase: Phase, rid: str) -> dict[str, torch.Tensor]:
    """Both fields as one map: on equal names the new field's tensor, and every other name of both."""
    if old is not None:
        phases.met(phases.REQUEST_FIELD, phase, rid=rid)
    found = {} if old is None else legacy.decode(old, rid=rid)
    if new is not None:
        found |= flatten(new, rid=rid) if phase is Phase.CLEAN else legacy.decode(new, rid=rid, warns=True)
    # A tensor of one field may be a mapping of the other.
    nest(found, rid=rid)
    return found


def mirror(
    buffer: ModelIntermediateBuffer, rids: Iterable[str], phase: Phase, put: Callable[[str, str, dict[str, Any]], None]
) -> None:
    """In phase 1, `put(rid, "additional_information_cpu", map)` for each rid that has a map; afterwards nothing.

    `put` sets the attribute on the engine's own state of the request. The map is nested and fresh: what is written
    into it reaches no buffer (RFC: the per-request mirror goes).
    """
    if phases.writes(phases.REQUEST_MIRROR, phases.phase_of(phase)):
        for rid in rids:
            if rid in buffer:
                put(rid, phases.REQUEST_MIRROR, buffer.nested(rid))


class PromptOverlay:
    """Prompt embeddings by rid, laid over the embeddings of prompt tokens in the steps that compute them."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phases.phase_of(phase)
        self._embeds: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._embeds)

    def add(self, rid: str, value: object) -> None:
        """Keep what a new request brings: a Tensor, an old payload object, or None. Raises as `legacy.prompt_embeds`.

        UsageError in phase 3, unless it is None: there the embeddings stand in the request's map, or are the engine's.
        """
        self._embeds.pop(rid, None)
        if value is None:
            return
        phases.met(phases.PROMPT_FIELD, self._phase, rid=rid)
        found = legacy.prompt_embeds(value, rid=rid)
        if found is not None:
            self._embeds[rid] = found

    def finish(self, rids: Iterable[str]) -> None:
        """Forget these requests, known or not."""
        for rid in rids:
            self._embeds.pop(rid, None)

    def lay(
        self,
        plan: StepPlan,
        inputs_embeds: torch.Tensor,
        *,
        computed: Mapping[str, int],
        prompt_lens: Mapping[str, int],
    ) -> dict[str, ConnectorError]:
        """Write each request's prompt rows of this step into `inputs_embeds` [tokens, width]; errors by rid.

        Of a row with `computed` tokens behind it, min(span, prompt length - computed) rows are written (runner); later
        ones are generated and stay. A request whose embeddings do not reach so far, or have another width, fails
        alone, with nothing written.

        UsageError: `inputs_embeds` has not a row of numbers for each token of the step, or cannot be written; another
        argument of another kind.
        """
        check_rows("inputs_embeds", "[tokens, width]", inputs_embeds, 2, plan_of(plan).tokens)
        for what, by_rid in (("computed", computed), ("prompt_lens", prompt_lens)):
            mapping_of(what, by_rid)
        if self._embeds:
            _check_target(inputs_embeds)
        failed: dict[str, ConnectorError] = {}
        for row in plan.rows:
            embeds = self._embeds.get(row.rid)
            if embeds is None:
                continue
            try:
                _lay(row, embeds, inputs_embeds, computed.get(row.rid, -1), prompt_lens.get(row.rid, -1))
            except ConnectorError as error:
                failed[row.rid] = error.anew()
        return failed


def _check_target(target: torch.Tensor) -> None:
    shared = any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True))
    if not target.is_floating_point() or shared or (target.requires_grad and torch.is_grad_enabled()):
        raise errors.UsageError(
            "`inputs_embeds` is written in place: floating point, with memory for each row, and without a gradient",
            dtype=str(target.dtype),
            strides=list(target.stride()),
            requires_grad=target.requires_grad,
        )


def _lay(row: Row, embeds: torch.Tensor, target: torch.Tensor, computed: int, prompt_len: int) -> None:
    if any(type(count) is not int or count < 0 for count in (computed, prompt_len)):
        raise errors.UsageError("the step must tell the request's computed tokens and its prompt's length", rid=row.rid)
    count = min(row.tokens, prompt_len - computed)
    if count <= 0:
        return
    if embeds.shape[0] < computed + count or embeds.shape[1] != target.shape[1]:
        raise errors.InvalidPayload(
            "the prompt's embeddings do not cover its tokens, or have another width than the model's",
            rid=row.rid,
            entry=phases.PROMPT_FIELD,
            shape=list(embeds.shape),
            needed=[computed + count, target.shape[1]],
        )
    # copy_ converts to the target's dtype and device.
    target[row.start : row.start + count].copy_(embeds[computed : computed + count])
