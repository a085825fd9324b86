"""A model's preprocess and postprocess, called request by request; what one request fails on stays its own.

Batched forms of the hooks are not called: in one call of many, one request's failure would be everyone's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

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
T = TypeVar("T")


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


class _Prepared(NamedTuple):
    """What preprocess gave for a row, checked but for its width: embeds [n, width] and a copy of the update."""

    row: Row
    ids: object
    embeds: torch.Tensor
    update: dict[str, Any]


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

    `width`: of the embeds that preprocess gives, for steps that bring none of their own; UsageError if it is no
    int of 1 or more.
    """

    def __init__(self, model: object, *, width: int | None = None) -> None:
        if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
            raise errors.UsageError("the width of a model's embeds is an int of 1 or more", width=repr(width)[:80])
        self._width = width
        self._preprocess = _hook(model, "preprocess")
        self._postprocess = _hook(model, "postprocess")
        self.has_postprocess = self._postprocess is not None
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
        `inputs_embeds` every request gets None, whoever came before it, and they are made with the dtype and device of
        most results, zero where nobody wrote. The hook is given copies of its rows, and as keywords the request's
        nested map, its `extras` and `request_id`; the last wins. Its embeds [n, width] go to the first rows of the
        span, its ids too if there are as many; the update is merged, but `mtp_inputs` are kept out of the buffer.

        A request whose embeds have another width than the step's fails alone. The step's is that of `inputs_embeds`;
        without them the one that these hooks were made with; and if they were made with none, that of most results, or
        of the first one where as many have another: a single good request cannot be told from a single bad one then.
        """
        mtp_inputs: MtpInputs = []
        if self._preprocess is None:
            return input_ids, inputs_embeds, mtp_inputs
        decoding = {row.rid for row in plan.decode} if self.has_talker_mtp else set()
        results: Iterable[_Prepared] = self._called(plan, buffer, input_ids, inputs_embeds, extras or {}, failures)
        prepared = inputs_embeds
        if prepared is None:
            results = list(results)
            prepared = _zeros(results, self._width, input_ids.shape[0])
        for row, ids, embeds, update in results:
            with isolated(failures, [row.rid], "preprocess"):
                step = _fitting(embeds, prepared, self._width, row.rid)
                mtp = update.pop(MTP_INPUTS, None) if self.has_talker_mtp else None
                ready = _mtp_input(mtp, row) if row.rid in decoding else None
                # All that can be refused comes before the first row is written.
                if update:
                    buffer.merge(row.rid, update)
                _write(ids, embeds, row, input_ids, step)
                if ready is not None:
                    mtp_inputs.append(ready)
        return input_ids, prepared, mtp_inputs

    def _called(
        self,
        plan: StepPlan,
        buffer: Maps,
        input_ids: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
        extras: Extras,
        failures: Failures,
    ) -> Iterator[_Prepared]:
        """The hook, row by row."""
        assert self._preprocess is not None
        for row in plan.rows:
            if row.rid in failures or not row.tokens:
                continue
            result: _Prepared | None = None
            with isolated(failures, [row.rid], "preprocess"):
                keywords = _keywords(buffer, row.rid, extras.get(row.rid, {}))
                mine, step = _rows(input_ids, row), _rows(inputs_embeds, row)
                result = _prepared(self._preprocess(input_ids=mine, input_embeds=step, **keywords), row)
            if result is not None:
                yield result

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


def _prepared(given: object, row: Row) -> _Prepared:
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise errors.InvalidPayload("preprocess gives (ids, embeds, update)", rid=row.rid, given=type(given).__name__)
    ids, embeds, update = given
    if not isinstance(embeds, torch.Tensor) or embeds.ndim != 2:
        found = f"{list(embeds.shape)}" if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        raise errors.InvalidPayload("the embeds of preprocess are a tensor [tokens, width]", rid=row.rid, given=found)
    if isinstance(ids, torch.Tensor) and (ids.is_floating_point() or ids.is_complex()):
        raise errors.InvalidPayload("the ids of preprocess are integers", rid=row.rid, dtype=str(ids.dtype))
    return _Prepared(row, ids, embeds.detach(), _update(update, row.rid))


def _zeros(results: Sequence[_Prepared], width: int | None, tokens: int) -> torch.Tensor | None:
    """A step's embeds, [tokens, width], as most results have them; None if none has the width."""
    if width is None:
        width = _most_common(result.embeds.shape[1] for result in results)
    like = _most_common((one.embeds.dtype, one.embeds.device) for one in results if one.embeds.shape[1] == width)
    return None if width is None or like is None else torch.zeros(tokens, width, dtype=like[0], device=like[1])


def _most_common(several: Iterable[T]) -> T | None:
    """Of those that are as frequent the first; None if there are none."""
    counts = Counter(several)
    return max(counts, key=counts.__getitem__, default=None)


def _fitting(embeds: torch.Tensor, step: torch.Tensor | None, width: int | None, rid: str) -> torch.Tensor:
    """The step's embeds, for a row's of the same width."""
    if step is not None and embeds.is_complex() and not step.is_complex():
        raise errors.InvalidPayload(
            "the embeds of preprocess are complex, the step's are not", rid=rid, dtype=str(embeds.dtype)
        )
    if step is None or embeds.shape[1:] != step.shape[1:]:
        raise errors.InvalidPayload(
            "the embeds of preprocess have another width than the step's",
            rid=rid,
            size=embeds.shape[1],
            limit=width if step is None else step.shape[-1],
        )
    return step


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
