"""What the mixins of both runners do: the engine's steps as the adapter's, its batch as a plan.

The engine's own objects are taken as they come (`Any`): a scheduler's output and its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from connector import ConnectorError, errors
from runner_adapter import overlay, phases
from runner_adapter.adapters.vllm.held import Held
from runner_adapter.adapters.vllm.ids import ExternalId, Ids, as_it_is
from runner_adapter.adapters.vllm.ledger import Ledger
from runner_adapter.adapters.vllm.telling import ASKED
from runner_adapter.hooks import Extras
from runner_adapter.plan import StepPlan
from runner_adapter.runner import RunnerAdapter

Tensors = Mapping[str, torch.Tensor]
#: Seconds that a step without requests waits for input: so its scheduler, which asks again and again, rests.
IDLE = 0.005
#: What new and running requests may hold for the buffer.
_FIELDS = (phases.NEW_NAME, phases.REQUEST_FIELD)


class Steps:
    """The steps of one runner, in this order: take, (the engine's own), begin, plan, preprocess, kwargs, after.

    The engine's ids come in and go out here, and nowhere else; everything else is by rid (`Ids`).

    `embeds`: the engine's forward is given embeddings. `talking()` is entered around the hooks if there is a talker.
    `external_id`: what the rid of an engine's id is.

    UsageError: pipeline parallelism, prefill context parallelism or microbatches, which split what a plan describes; a
    stage that sends and drafts tokens, which would hand over rows of tokens that are not accepted; a prefix cache in a
    stage that reads, where equal prompts are not equal input.
    """

    def __init__(
        self,
        adapter: RunnerAdapter,
        model: object,
        vllm_config: Any,
        *,
        embeds: bool,
        talking: Callable[[], Any] = nullcontext,
        external_id: ExternalId = as_it_is,
    ) -> None:
        _check(adapter, vllm_config)
        self.adapter, self.ids = adapter, Ids(external_id)
        self.has_preprocess = bool(getattr(model, "has_preprocess", False))
        #: Whether the step under way has begun.
        self.began = False
        #: Its plan; None before there is one, and in a step of profiling, capture or warm-up.
        self.current: StepPlan | None = None
        #: Requests that the scheduler keeps back.
        self.held = Held(adapter, self.ids)
        self._replaces = bool(getattr(model, "replace_runtime_additional_information", False))
        self._has_extra_args = bool(getattr(vllm_config.model_config, "has_sampling_extra_args", False))
        self._embeds = embeds or self.has_preprocess
        self._talking = talking if adapter.talker is not None else nullcontext
        self._known = Ledger(drafts_late=bool(vllm_config.scheduler_config.async_scheduling))
        self._overlay = overlay.PromptOverlay(adapter.phase)
        #: Old prompt embeddings of this step's new requests, by the engine's id; tokens computed before it, by rid.
        self._old_embeds: dict[str, object] = {}
        self._computed: dict[str, int] = {}

    # -- the beginning of a step ------------------------------------------------------------------

    def take(self, output: Any) -> None:
        """Before the engine updates its states: old prompt embeddings, which it takes for its own, are taken out."""
        self.began, self.current = False, None
        self.held.begin_step(getattr(output, ASKED, None))
        self._old_embeds = {}
        for request in output.scheduled_new_reqs:
            if not isinstance(request.prompt_embeds, torch.Tensor | None):
                self._old_embeds[request.req_id] = request.prompt_embeds
                request.prompt_embeds = None

    def begin(self, output: Any) -> None:
        """After it: finished requests leave, new ones enter, and what the engine and the other stage bring to those of
        this step is merged, once each. Nobody else merges it after that: the fields are emptied. What a preempted
        request brings again is what it brought at first: its state goes on.

        One request's failure is that request's. Raises as `RunnerAdapter.begin_step`, `bring` and `receive` do, and
        UnknownRequest for a request that runs and is not live.
        """
        adapter, ids = self.adapter, self.ids
        preempted = [ids.rid(engine_id) for engine_id in output.preempted_req_ids or () if engine_id in ids]
        finished = ids.leave(output.finished_req_ids)
        self._known.leave(finished, preempted)
        self._overlay.finish(finished)
        failed: dict[str, ConnectorError] = {}
        new = {ids.enter(request, failed): request for request in output.scheduled_new_reqs}
        begun = {rid: request for rid, request in new.items() if not self._known.resume(rid, request)}
        maps = {rid: self._enter(rid, request, failed) for rid, request in begun.items()}
        scheduled = [ids.rid(engine_id) for engine_id in output.num_scheduled_tokens]
        adapter.begin_step(finished=finished, new=maps, scheduled=scheduled)
        for rid, error in failed.items():
            adapter.fail(rid, error)
        self.bring(output.scheduled_cached_reqs)
        self._count(output)
        _empty(output)
        self.held.expect()
        adapter.receive()
        self.began = True
        if not scheduled:
            self._rest(bool(finished))

    def _rest(self, has_news: bool) -> None:
        """In a step without requests, a moment, unless there is something to say."""
        self.held.look()
        if self.held.asked and not (has_news or self.held.has_news):
            # A broker that is being started again is a pause; one that stays away is told by the next look.
            with suppress(errors.BrokerLost):
                self.adapter.wait(IDLE)
            self.held.look()

    def _enter(self, rid: str, request: Any, failed: dict[str, ConnectorError]) -> dict[str, torch.Tensor] | None:
        """What a new request, or a further segment of one, brings; nothing of one that is refused."""
        self._known.enter(rid, request)
        if rid in failed:
            return None
        old = self._old_embeds.get(request.req_id)
        try:
            self._overlay.add(rid, old)
            if old is not None and not self._embeds:
                raise errors.UsageError("the engine's forward takes no embeddings: set enable_prompt_embeds", rid=rid)
            return overlay.accept(request, self.adapter.phase, rid=rid) or None
        except ConnectorError as error:
            failed[rid] = error.anew()
            return None

    def _count(self, output: Any) -> None:
        cached, rid = output.scheduled_cached_reqs, self.ids.rid
        generated = zip(map(rid, cached.req_ids), cached.num_output_tokens, strict=True)
        drafted = {rid(engine_id): len(tokens) for engine_id, tokens in output.scheduled_spec_decode_tokens.items()}
        self._known.count(dict(generated), drafted)

    def bring(self, requests: object) -> None:
        """Merge what the engine brings to requests that run; `requests` as `overlay.accept_cached` takes them, by the
        engine's ids."""
        fields = {field: getattr(requests, field, None) for field in _FIELDS}
        named = {field: self.ids.by_rid(by) if isinstance(by, Mapping) else by for field, by in fields.items()}
        brought = overlay.accept_cached(SimpleNamespace(**named), self.adapter.phase)
        self.adapter.bring(brought.maps, replace=self._replaces)
        for rid, error in brought.failed.items():
            if rid in self.adapter.requests:
                self.adapter.fail(rid, error)

    def bring_one(self, engine_id: str, update: object) -> None:
        """The same for one request."""
        self.bring(SimpleNamespace(**{phases.NEW_NAME: {engine_id: update}}))

    # -- around the forward -----------------------------------------------------------------------

    def plan(
        self,
        engine_ids: Sequence[str],
        counts: Mapping[str, int],
        computed: Mapping[str, int],
        *,
        padded_tokens: int,
        padded_rows: int | None = None,
    ) -> StepPlan:
        """The plan of the step under way, by rid, in the order of `engine_ids`. Also by the engine's ids, `counts`:
        tokens of this step, `computed`: those computed before."""
        rid = self.ids.rid
        rids = [rid(engine_id) for engine_id in engine_ids]
        self._computed = {rid(engine_id): int(computed[engine_id]) for engine_id in engine_ids}
        self.current = StepPlan.make(
            rids,
            {rid(engine_id): count for engine_id, count in counts.items()},
            generated={rid: self._known[rid].generated for rid in rids},
            prefill={rid for rid in rids if self._known[rid].is_reading(self._computed[rid])},
            padded_rows=padded_rows,
            padded_tokens=padded_tokens,
        )
        return self.current

    def preprocess(
        self,
        input_ids: torch.Tensor,
        inputs_embeds: torch.Tensor,
        own: Callable[[StepPlan], Extras] = lambda plan: {},
    ) -> None:
        """Old prompt embeddings, the model's hook and its talker; `input_ids` [tokens] and `inputs_embeds` [tokens,
        width] are written in place. `own` is asked for the model's own values for its hook, which stand over what the
        engine's runner tells it. Nothing in a step without a plan."""
        plan = self.current
        if plan is None:
            return
        known = {rid: self._known[rid] for rid in plan.rids}
        lens = {rid: one.prompt_len for rid, one in known.items()}
        for rid, error in self._overlay.lay(plan, inputs_embeds, computed=self._computed, prompt_lens=lens).items():
            self.adapter.fail(rid, error)
        seeds = {rid: one.seed for rid, one in known.items() if one.seed is not None}
        values = own(plan) if self.has_preprocess else {}
        extras = {rid: {**one.told(self._computed[rid]), **values.get(rid, {})} for rid, one in known.items()}
        with self._talking():
            self.adapter.preprocess(plan, input_ids, inputs_embeds, extras=extras, seeds=seeds)

    def warm_up(self, rows: int) -> None:
        """The talker alone, once, for so many rows or as many as it has room for: in a step of profiling, capture or
        warm-up, so that its memory is counted. Nothing without a talker."""
        talker = self.adapter.talker
        if talker is not None and rows > 0:
            with self._talking():
                talker.warm_up(min(rows, talker.max_rows))

    def kwargs(self, rows: int = 0, tokens: int = 0) -> dict[str, Any]:
        """What the forward is given beside its inputs; a graph, which is given nothing, reads the rows staged here.
        In a step without a plan: empty maps for so many rows."""
        plan = self.current or StepPlan.empty(rows, tokens)
        if self.adapter.rows is not None:
            self.adapter.stage(plan)
        extra = {rid: self._known[rid].extra_args for rid in plan.rids} if self._has_extra_args else None
        return self.adapter.forward_kwargs(plan, sampling_extra_args=extra)

    def drops(self, name: str) -> bool:
        """Whether the phase writes this old name no more: what the engine gives under it is taken out."""
        return name in phases.OLD_NAMES and not phases.writes(name, self.adapter.phase)

    def after(self, output: object, beside: Callable[[StepPlan], Mapping[str, Tensors]]) -> None:
        """The model's postprocess, and the hand-over of rows that were not handed over before; `beside` is asked what
        goes with these. The step is over."""
        plan, self.current = self.current, None
        if plan is not None:
            self.adapter.postprocess(plan, output)
            if self.adapter.outbox is not None:
                unsent = self._unsent(plan)
                self.adapter.send(unsent, output, beside=beside(unsent))
            self.held.look()

    def mirror(self, put: Callable[[str, str, dict[str, Any]], None]) -> None:
        """As `overlay.mirror`, for the requests that run; `put` by the engine's id."""
        running = [rid for rid in self.adapter.requests if self.adapter.requests.is_active(rid)]

        def put_by_rid(rid: str, name: str, value: dict[str, Any]) -> None:
            put(self.ids.engine_id(rid), name, value)

        overlay.mirror(self.adapter.buffer, running, self.adapter.phase, put_by_rid)

    def failures(self) -> dict[str, Exception]:
        """As `RunnerAdapter.failures`, by the engine's ids."""
        return {self.ids.engine_id(rid): error for rid, error in self.adapter.failures().items()}

    def _unsent(self, plan: StepPlan) -> StepPlan:
        """The plan without tokens that a preempted request computes again. The first ones of a request must be
        computed here: rows that the engine's prefix cache spares it would be missing in the next stage."""
        rows = []
        for row in plan.rows:
            known, computed = self._known[row.rid], self._computed[row.rid]
            if computed > known.handed:
                lost = "rows were not computed here and cannot be handed over: switch off the engine's prefix caching"
                self.adapter.fail(row.rid, errors.UsageError(lost, rid=row.rid, handed=known.handed, computed=computed))
            rows.append(replace(row, start=row.start + known.hand(computed, row.tokens)))
        return replace(plan, rows=tuple(rows))


def _check(adapter: RunnerAdapter, config: Any) -> None:
    parallel = config.parallel_config
    split = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "use_ubatching": getattr(parallel, "use_ubatching", False),
    }
    for name, is_set in split.items():
        if is_set:
            raise errors.UsageError("the engine splits its batch, and the adapter does not", setting=name)
    if adapter.inbox is not None and config.cache_config.enable_prefix_caching:
        same = "equal prompts share what one of them was computed from, whatever the other is handed over"
        raise errors.UsageError(f"{same}: switch off the engine's prefix caching", setting="enable_prefix_caching")
    if adapter.outbox is not None and config.speculative_config is not None:
        raise errors.UsageError("a stage that drafts tokens would hand over rows of those that are not accepted")


def _empty(output: Any) -> None:
    for field in _FIELDS:
        for request in output.scheduled_new_reqs:
            if getattr(request, field, None) is not None:
                setattr(request, field, None)
        if getattr(output.scheduled_cached_reqs, field, None):
            setattr(output.scheduled_cached_reqs, field, {})
