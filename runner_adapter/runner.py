"""RunnerAdapter: buffer, hooks and hand-over of one stage, in the order of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from connector import ConnectorError, errors
from runner_adapter import phases
from runner_adapter.arguments import (
    brings_nothing,
    check_form,
    check_inputs,
    check_kind,
    check_optional,
    error_of,
    mapping_of,
    plan_of,
)
from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.config import AdapterConfig, TransferConfig
from runner_adapter.failing import Failing
from runner_adapter.hooks import Extras, Hooks
from runner_adapter.kwargs import forward_kwargs
from runner_adapter.maps import BatchMaps, Form, gather
from runner_adapter.merge import MergeRules
from runner_adapter.outbox import Outbox
from runner_adapter.outputs import StageOutput, step_parts
from runner_adapter.owning import Owner
from runner_adapter.phases import Phase
from runner_adapter.plan import StepPlan
from runner_adapter.requests import Requests, StepChange, check_rid, rids_of, unknown
from runner_adapter.source import Source
from runner_adapter.staging import DeviceRows
from runner_adapter.talker import Talker
from runner_adapter.values import Device

#: A request's first map, by rid; None where it brings none.
Initial = Mapping[str, Mapping[Any, Any] | None]


class Received(NamedTuple):
    """What a step's input was: rids that got payloads, and rids whose input is complete."""

    fresh: set[str]
    ended: set[str]


class RunnerAdapter(Owner):
    """What a stage's runner calls, in this order in every step; one thread: the model's.

    begin_step, receive, preprocess, (stage), forward_kwargs, (the forward), postprocess, send, failures.

    `inbox` and `outbox` may be None: a first stage reads nothing, a last one sends nothing. A stage that only reads
    gives its node's `abort`, by which the others are told of a failure; a stage that sends tells them through its
    outbox. `form` is that of the maps which forward is given: "keys", "names" or "nested" (maps.py). `rows` are the
    names whose rows `stage` lays where a captured graph reads them. `width` is that of the embeds which the model's
    preprocess gives, for a runner that passes none of its own (`Hooks.preprocess`); by default the talker's. In
    migration phases 1 and 2 hooks and engines may give values that are no tensors, which become tensors (migration.md);
    in phase 3 that is a failure.

    UsageError: a stage that only reads without `abort`; a model whose preprocess gives `mtp_inputs` without a `talker`.

    A request that fails anywhere is out of the later parts of the step and of later steps, until it is finished; its
    input and output are aborted, so that the other stages hear at once. `failures` tells the runner, once each.

    Every method raises UsageError, or InvalidPayload for what is no rid, for an argument of another type.
    """

    def __init__(
        self,
        model: object,
        config: TransferConfig | None = None,
        *,
        settings: AdapterConfig | None = None,
        rules: MergeRules | None = None,
        device: Device = "cpu",
        inbox: Source | None = None,
        outbox: Outbox | None = None,
        abort: Callable[[str, str], object] | None = None,
        talker: Talker | None = None,
        rows: DeviceRows | None = None,
        width: int | None = None,
        aux_layers: Sequence[int] = (),
        form: Form = "keys",
    ) -> None:
        super().__init__()
        check_form(form)
        check_kind("rules", rules, MergeRules)
        check_kind("rows", rows, DeviceRows)
        check_kind("talker", talker, Talker)
        if inbox is not None and outbox is None and abort is None:
            raise errors.UsageError("a stage that only reads needs its node's abort, to tell the others of failures")
        if width is None and talker is not None:
            width = talker.width
        self.hooks, self.talker, self.rows = Hooks(model, width=width), talker, rows
        if self.hooks.has_talker_mtp and talker is None:
            raise errors.UsageError(
                "the model has talker_mtp, and what its preprocess gives for it would be lost: "
                "pass talker=Talker(model, max_rows=…, dtype=…, device=…)",
                model=type(model).__name__,
            )
        self.phase = Phase((settings or AdapterConfig()).migration_phase)
        plain_values = self.phase is not Phase.CLEAN
        rules = MergeRules.of(model) if rules is None else rules
        self.buffer = ModelIntermediateBuffer(config, rules=rules, device=device, plain_values=plain_values)
        self.requests = Requests()
        self.inbox, self.outbox = inbox, outbox
        self._aux_layers, self._form = tuple(aux_layers), form
        #: The last step that received.
        self._received = 0
        self._ended: set[str] = set()
        self._failed = Failing(inbox, abort if outbox is None else outbox.abort)

    # -- the beginning of a step ------------------------------------------------------------------

    def begin_step(
        self, *, finished: Iterable[str] = (), new: Initial | Iterable[str] = (), scheduled: Iterable[str] = ()
    ) -> StepChange:
        """Who leaves, enters and runs. Finished requests leave everywhere before new ones enter; `new` may map rids to
        the first map that each brings, which is merged, and for a live rid is a further input segment.

        Raises as `Requests.step` does, and ClientClosed behind `close`; then nothing has changed. A first map that is
        refused is its request's failure.
        """
        self.check_open()
        entering = rids_of("new", new)
        initial: Initial = new if isinstance(new, Mapping) else dict.fromkeys(entering)
        change = self.requests.step(finished=finished, new=entering, scheduled=scheduled)
        self._forget(change.removed)
        for rid in change.added:
            # What a row of no request failed at is not the request's that has its id now.
            self._failed.forget(rid)
            for end in (self.inbox, self.outbox):
                if end is not None:
                    end.begin(rid)
            self.buffer.add(rid)
            if not brings_nothing(initial[rid]):
                self._update(rid, self.buffer.merge, initial[rid])
        for rid in change.resegmented:
            self._update(rid, self.buffer.new_segment, initial[rid])
        return change

    def _forget(self, rids: Iterable[str]) -> None:
        for rid in rids:
            # Also for a rid that is not known here: a request may be aborted before its first step, its input there.
            if self.inbox is not None:
                self.inbox.finish(rid)
            if self.outbox is not None and rid in self.outbox:
                self.outbox.finish(rid)
            self._ended.discard(rid)
            self._failed.forget(rid)
        self.buffer.finish(rids)
        if self.talker is not None:
            self.talker.finish(rids)

    def bring(self, maps: Mapping[str, Mapping[Any, Any]], *, replace: bool = False) -> None:
        """Merge what the engine itself brings to requests that run, or with `replace` put it in their maps' place.

        What is refused is its request's failure; what is a finished request's is dropped and counted. UnknownRequest:
        a rid that is neither; what is brought to the others is merged first.
        """
        strangers = []
        for rid, update in mapping_of("maps", maps).items():
            if rid not in self._failed:
                try:
                    self._update(rid, self.buffer.replace if replace else self.buffer.merge, update)
                except errors.UnknownRequest as error:
                    strangers.append(error)
        if strangers:
            raise strangers[0]

    def _update(self, rid: str, store: Callable[[str, Any], None], update: Mapping[Any, Any] | None) -> None:
        try:
            store(rid, update)
        except errors.UnknownRequest:
            raise
        except ConnectorError as error:
            self.fail(rid, error.anew())

    def receive(self) -> Received:
        """Merge what has come for the requests of this step, new and decoding alike; does not wait.

        One merge a request and step, however many payloads came. What is refused is its request's failure: neither
        `fresh` nor `ended` names it.

        UsageError if the step has received already. Otherwise raises as `Edge.poll` does: BrokerLost once the broker
        has stayed away for longer than it takes to start one again.
        """
        if self._received == self.requests.steps:
            raise errors.UsageError("a step receives once", step=self.requests.steps)
        self._received = self.requests.steps
        if self.inbox is None:
            return Received(set(), set())
        arrived = self.inbox.pull(rid for rid in self.requests if self.requests.is_active(rid))
        refused = self.buffer.receive(self.requests.steps, arrived.payloads)
        for rid, error in arrived.failed.items():
            self._failed.add(rid, error, ended=isinstance(error, errors.RequestAborted))
        for rid, error in refused.items():
            self.fail(rid, error)
        ended = {rid for rid in arrived.ended if rid not in self._failed}
        self._ended |= ended
        return Received({rid for rid in arrived.payloads if rid not in self._failed}, ended)

    def expect(self, rids: Iterable[str]) -> None:
        """These requests are to begin here in a later step: from now on their failures elsewhere are heard, and none
        that failed is among the `waiting`. One that never begins is finished all the same."""
        for rid in rids_of("rids", rids):
            if self.inbox is not None and rid not in self.requests:
                self.inbox.begin(rid)

    def waiting(self, rids: Iterable[str]) -> set[str]:
        """Those whose next input is still to come: a scheduler leaves them out of the step, or they run without it.
        Raises as `Edge.poll` does."""
        asked = rids_of("rids", rids)
        return set() if self.inbox is None else self.inbox.waiting(asked)

    def failing(self, rids: Iterable[str]) -> dict[str, ConnectorError]:
        """Of these, none of which `waiting` names, those that failed in another stage, and why. One that has not begun
        here need not: finish it."""
        asked = rids_of("rids", rids)
        return {} if self.inbox is None else self.inbox.failing(asked)

    def wait(self, timeout: float) -> bool:
        """With nothing to run: sleep until input comes, of whichever request; False if none does within `timeout`
        seconds, or if the stage reads nothing. Raises as `Edge.wait` does: BrokerLost if the broker is away then."""
        return self.inbox is not None and self.inbox.wait(timeout)

    def input_ended(self, rid: str) -> bool:
        """Whether all of the request's input has been received, and none of it refused."""
        return check_rid(rid) in self._ended

    # -- around the forward -----------------------------------------------------------------------

    def preprocess(
        self,
        plan: StepPlan,
        input_ids: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        *,
        extras: Extras | None = None,
        seeds: Mapping[str, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The model's preprocess for each row, then talker_mtp for the decode rows: (ids [tokens], embeds [tokens,
        width] or None), written in place where they were given. See `Hooks.preprocess` and `Talker.run`."""
        check_inputs(plan_of(plan), input_ids, inputs_embeds, extras=extras, seeds=seeds)
        ids, embeds, mtp_inputs = self.hooks.preprocess(
            plan, self.buffer, input_ids, inputs_embeds, extras=extras, failures=self._failed.errors
        )
        if self.talker is not None:
            self.talker.run(mtp_inputs, self.buffer, ids, embeds, seeds=seeds, failures=self._failed.errors)
        self._settle()
        return ids, embeds

    def _settle(self) -> None:
        """Tell the other stages of what hooks failed at. What a row of no request failed at is nobody's."""
        for rid in [rid for rid in self._failed.errors if rid not in self.requests]:
            self._failed.forget(rid)
        self._failed.settle()

    def stage(self, plan: StepPlan) -> dict[str, torch.Tensor]:
        """The step's rows of the declared names, [padded rows or tokens, *shape] by name, at the addresses that a
        captured graph reads: behind preprocess, before the forward, and for a step without any request, too.

        A tensor that is not what was declared is its request's failure, and its row is zero (`DeviceRows.stage`).
        UsageError: the adapter has no `rows`; the step is larger than they are.
        """
        if self.rows is None:
            raise errors.UsageError("nothing says which rows are staged: pass rows=DeviceRows(…)")
        staged = self.rows.stage(gather(self.buffer, plan_of(plan), "names"), plan)
        for rid, error in staged.failures.items():
            self.fail(rid, error)
        return staged.views

    def gather(self, plan: StepPlan) -> BatchMaps:
        """The maps of this step's rows, in its order. Fresh: what a model writes into them stays there."""
        return gather(self.buffer, plan_of(plan), self._form)

    def forward_kwargs(
        self, plan: StepPlan, *, sampling_extra_args: Mapping[str, Mapping[str, Any] | None] | None = None
    ) -> dict[str, Any]:
        """What the model's forward is given beside its inputs; with `sampling_extra_args` by rid, those too, a dict a
        row. See `kwargs.forward_kwargs`.

        In phase 1 a map that is not empty holds `generated_len`, too: an int, for models that read it there (runner).
        """
        check_optional(sampling_extra_args=sampling_extra_args)
        maps = self.gather(plan)
        if phases.writes(phases.FORWARD_KWARG, self.phase):
            for row in plan.rows:
                if maps[row.index]:
                    maps[row.index]["generated_len"] = row.generated
        return forward_kwargs(
            maps,
            plan,
            self.phase,
            sampling_extra_args=sampling_extra_args,
            has_sampling_extra_args=sampling_extra_args is not None,
        )

    def postprocess(self, plan: StepPlan, output: object, **combined: Any) -> None:
        """The model's postprocess for each row, merged back. `combined`: as `Hooks.postprocess` takes them.

        A model without the hook may give any output. With it, one that has none of the forms of `StageOutput`, or no
        text, fails the requests of the step.
        """
        plan_of(plan)
        if not self.hooks.has_postprocess:
            return
        try:
            text, aux = StageOutput.of(output).hidden()
        except errors.InvalidPayload as error:
            self._failed.errors |= {rid: error.anew(rid=rid) for rid in plan.rids if rid not in self._failed}
        else:
            self.hooks.postprocess(plan, self.buffer, text, aux, failures=self._failed.errors, **combined)
        self._settle()

    # -- the end of a step ------------------------------------------------------------------------

    def send(
        self,
        plan: StepPlan,
        output: object,
        *,
        last: Iterable[str] = (),
        beside: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Hand the step's output on: each request's rows of what the transfer config selects, one put for the step.

        `beside`: by rid, further tensors by name that no output holds, such as `ids.thinker_input_ids`. `last`: rids
        whose output ends here. A row without tokens hands nothing on. A request whose part is refused fails alone.

        What is a finished request's is dropped, and counted as the buffer counts it. UnknownRequest, behind the put of
        all the others: a row, or a rid of `beside` or `last`, of which no request is known.
        """
        if self.outbox is None:
            return
        beside, ends = {} if beside is None else mapping_of("beside", beside), rids_of("last", last)
        live, strange = self._told_apart([*plan_of(plan).rids, *rids_of("beside", beside), *ends])
        named, failed = step_parts(
            plan,
            output,
            {rid: beside[rid] for rid in live if rid in beside},
            self.buffer.rules.row_axes,
            aux_layers=self._aux_layers,
            wanted=self.outbox.wants,
        )
        for rid, error in failed.items():
            if rid in live:
                self.fail(rid, error)
        named = {rid: parts for rid, parts in named.items() if rid in live}
        # Of requests that failed the outbox sends nothing more.
        self.outbox.send(self.requests.steps, named, [rid for rid in ends if rid in live])
        if strange:
            first, *others = strange
            error = unknown(first, self.requests, "a step hands on what is of no request; the others' parts are sent")
            raise error.anew(others=others or None)

    def _told_apart(self, rids: Iterable[str]) -> tuple[dict[str, None], list[str]]:
        """Those that are live, and those that are not known; finished ones are counted as dropped."""
        live: dict[str, None] = {}
        strange: list[str] = []
        for rid in dict.fromkeys(rids):
            if rid in self.requests:
                live[rid] = None
                continue
            try:
                # The buffer knows who has finished, and counts what comes late for them.
                self.buffer.merge(rid, {})
            except errors.UnknownRequest:
                strange.append(rid)
        return live, strange

    def fail(self, rid: str, error: Exception) -> None:
        """The request failed, here or in what the runner did with it: it is out, and the other stages are told.

        UnknownRequest if it is not live.
        """
        if check_rid(rid) not in self.requests:
            raise unknown(rid, self.requests, "only a request that is live fails")
        self._failed.add(rid, error_of(rid, error))

    def failures(self) -> dict[str, Exception]:
        """Requests that failed since the last call, each once until it is finished: the runner ends them."""
        for rid, error in (self.outbox.failures() if self.outbox is not None else {}).items():
            self._failed.add(rid, error, ended=True)
        return self._failed.fresh(self.requests)

    def validate(self) -> None:
        """InvariantBroken if the tables contradict each other."""
        self.requests.validate()
        self.buffer.validate()
        if set(self.buffer) != set(self.requests):
            raise errors.InvariantBroken("the buffer holds other requests than the runner has")
        strangers = [rid for rid in self.outbox or () if rid not in self.requests]
        if strangers:
            raise errors.InvariantBroken("the outbox sends for requests that the runner does not have", rids=strangers)
