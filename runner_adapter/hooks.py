"""A model's preprocess and postprocess, called request by request; what one request fails on stays its own.

Batched forms of the hooks are not called: in one call of many, one request's failure would be everyone's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from connector import errors

if TYPE_CHECKING:
    from runner_adapter.plan import Row, StepPlan

logger = logging.getLogger("runner_adapter")

#: What went wrong in a step, by rid: the first error of each.
Failures = MutableMapping[str, Exception]
#: Values for one request's hook beside its map, by rid.
Extras = Mapping[str, Mapping[str, Any]]
#: What preprocess puts in its update for talker_mtp: the last hidden state and the text step.
MTP_INPUTS = "mtp_inputs"


class Maps(Protocol):
    """What hooks need of a ModelIntermediateBuffer."""

    def __contains__(self, rid: object, /) -> bool: ...

    def nested(self, rid: str) -> dict[str, Any]: ...

    def merge(self, rid: str, update: Mapping[str, Any]) -> object: ...


class MtpInput(NamedTuple):
    """A decode row's part of the talker_mtp call: own memory, [1, width] each."""

    row: Row
    hidden: torch.Tensor
    text_step: torch.Tensor


MtpInputs = list[MtpInput]


@contextmanager
def isolated(failures: Failures, rids: Sequence[str], hook: str) -> Iterator[None]:
    """What the block raises is kept as the error of these requests, logged once, and stops nobody else.

    KeyboardInterrupt, SystemExit and their like pass.
    """
    try:
        yield
    except Exception as error:
        logger.error("%s failed for request %s: %s", hook, ", ".join(map(repr, rids)), error, exc_info=True)
        # The log has them. Frames hold the step's tensors, and a kept error would keep those alive.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        for rid in rids:
            failures.setdefault(rid, error)


class Hooks:
    """The hooks of one model, looked up once: build this after the engine has wrapped the model.

    A model has them if it says so: `has_preprocess`, `has_postprocess` (runner). UsageError if it says so and the
    hook is not callable. `has_talker_mtp`: it has a preprocess, which gives `mtp_inputs` for decode rows.

    A request whose hook raises, gives what does not fit (InvalidPayload) or whose update is refused is in `failures`
    with its first error; its rows and its map are as they were, and the others go on. A request that is there
    already is not called, nor is a row without tokens.
    """

    def __init__(self, model: object) -> None:
        self._preprocess = _hook(model, "preprocess")
        self._postprocess = _hook(model, "postprocess")
        self.has_talker_mtp = self._preprocess is not None and getattr(model, "talker_mtp", None) is not None

    def preprocess(
        self,
        plan: StepPlan,
        buffer: Maps,
        input_ids: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
        *,
        extras: Extras | None = None,
        failures: Failures,
    ) -> tuple[torch.Tensor, torch.Tensor | None, MtpInputs]:
        """Let the model prepare each row: `preprocess(input_ids=, input_embeds=, **map) -> (ids, embeds, update)`.

        `input_ids` [tokens] and `inputs_embeds` [tokens, width] are written in place and returned. Without
        `inputs_embeds` every request gets None, whoever came before it, and they are made from the first result,
        zero where nobody wrote. The hook is given copies of its rows, and as keywords the request's nested map,
        its `extras` and `request_id`; the last wins. Its embeds [n, width] go to the first rows of the span, its
        ids too if there are as many; the update is merged, but `mtp_inputs` are kept out of the buffer.
        """
        mtp_inputs: MtpInputs = []
        if (hook := self._preprocess) is None:
            return input_ids, inputs_embeds, mtp_inputs
        decoding = {row.rid for row in plan.decode} if self.has_talker_mtp else set()
        prepared = inputs_embeds
        for row in plan.rows:
            if row.rid in failures or not row.tokens:
                continue
            with isolated(failures, [row.rid], "preprocess"):
                keywords = _keywords(buffer, row.rid, (extras or {}).get(row.rid, {}))
                given = hook(input_ids=_rows(input_ids, row), input_embeds=_rows(inputs_embeds, row), **keywords)
                ids, embeds, update = _prepared(given, row.rid, prepared)
                mtp = update.pop(MTP_INPUTS, None) if self.has_talker_mtp else None
                ready = _mtp_input(mtp, row) if row.rid in decoding else None
                # All that can be refused comes before the first row is written.
                if update:
                    buffer.merge(row.rid, update)
                if prepared is None:
                    prepared = embeds.new_zeros(input_ids.shape[0], embeds.shape[1])
                _write(ids, embeds, row, input_ids, prepared)
                if ready is not None:
                    mtp_inputs.append(ready)
        return input_ids, prepared, mtp_inputs

    def postprocess(
        self,
        plan: StepPlan,
        buffer: Maps,
        hidden_states: torch.Tensor,
        multimodal_outputs: object,
        *,
        combined_hidden_states: Mapping[str, torch.Tensor] | None = None,
        combined_multimodal_outputs: Mapping[str, Mapping[str, Any]] | None = None,
        only: Collection[str] | None = None,
        failures: Failures,
    ) -> None:
        """Let the model keep what it needs: `postprocess(hidden, multimodal_outputs=, **map) -> update`, merged.

        `hidden` is the row's span of `hidden_states` [tokens, width], or with a prefix cache the request's own of
        `combined_hidden_states`, which hold the cached rows, too. Likewise `combined_multimodal_outputs`, by name
        and rid; without them the hook is given the step's outputs whole. The map's `hidden_states` stay in the
        buffer, but are no keyword: the argument has that name. `only`: the rids to call for. A request that is
        missing in what is combined fails (InvalidPayload).
        """
        if (hook := self._postprocess) is None:
            return
        for row in plan.rows:
            rid = row.rid
            if rid in failures or not row.tokens or (only is not None and rid not in only):
                continue
            with isolated(failures, [rid], "postprocess"):
                hidden, outputs = hidden_states[row.start : row.stop], multimodal_outputs
                if combined_hidden_states is not None:
                    hidden = _own(combined_hidden_states, rid, "hidden_states")
                if combined_multimodal_outputs is not None:
                    outputs = {name: _own(by_rid, rid, name) for name, by_rid in combined_multimodal_outputs.items()}
                keywords = _keywords(buffer, rid, {})
                keywords.pop("hidden_states", None)
                update = _update(hook(hidden, multimodal_outputs=outputs, **keywords), rid)
                if update:
                    buffer.merge(rid, update)


def _hook(model: object, name: str) -> Callable[..., Any] | None:
    if not getattr(model, f"has_{name}", False):
        return None
    hook: Callable[..., Any] | None = getattr(model, name, None)
    if not callable(hook):
        raise errors.UsageError(f"the model says has_{name}, but has no such method", model=type(model).__name__)
    return hook


def _keywords(buffer: Maps, rid: str, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Fresh at every level of the map: what the hook writes into it stays with the hook."""
    return {**(buffer.nested(rid) if rid in buffer else {}), **extras, "request_id": rid}


def _rows(step: torch.Tensor | None, row: Row) -> torch.Tensor | None:
    """A copy: a hook that writes in place and then raises has not written into the step."""
    return None if step is None else step[row.start : row.stop].clone()


def _prepared(given: object, rid: str, step: torch.Tensor | None) -> tuple[object, torch.Tensor, dict[str, Any]]:
    """What preprocess gave, checked: ids, embeds [n, width of the step's] and a copy of the update."""
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise errors.InvalidPayload("preprocess gives (ids, embeds, update)", rid=rid, given=type(given).__name__)
    ids, embeds, update = given
    if not isinstance(embeds, torch.Tensor) or embeds.ndim != 2:
        found = f"{list(embeds.shape)}" if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        raise errors.InvalidPayload("the embeds of preprocess are a tensor [tokens, width]", rid=rid, given=found)
    if step is not None and embeds.shape[1:] != step.shape[1:]:
        raise errors.InvalidPayload(
            "the embeds of preprocess have another width than the step's",
            rid=rid,
            size=embeds.shape[1],
            limit=step.shape[1],
        )
    return ids, embeds.detach(), _update(update, rid)


def _update(update: object, rid: str) -> dict[str, Any]:
    if update is None:
        return {}
    if not isinstance(update, Mapping):
        raise errors.InvalidPayload("a hook's update is a dict", rid=rid, given=type(update).__name__)
    return dict(update)


def _mtp_input(given: object, row: Row) -> MtpInput:
    if not isinstance(given, tuple | list) or [isinstance(part, torch.Tensor) for part in given] != [True, True]:
        raise errors.InvalidPayload(
            "at a decode row the update of preprocess holds mtp_inputs: (last hidden state, text step), two tensors",
            rid=row.rid,
            given=type(given).__name__,
        )
    # Copies: a model may give the same scratch tensors for every request.
    hidden, text_step = (part.detach().reshape(1, -1).clone() for part in given)
    return MtpInput(row, hidden, text_step)


def _write(ids: object, embeds: torch.Tensor, row: Row, input_ids: torch.Tensor, prepared: torch.Tensor) -> None:
    stop = min(row.stop, row.start + embeds.shape[0])
    prepared[row.start : stop] = embeds[: stop - row.start]
    if isinstance(ids, torch.Tensor) and ids.numel() == stop - row.start:
        input_ids[row.start : stop] = ids.reshape(-1)


def _own(by_rid: Mapping[str, Any], rid: str, name: str) -> Any:
    if rid not in by_rid:
        raise errors.InvalidPayload("the request is missing in what is combined by rid", rid=rid, key=name)
    return by_rid[rid]
