"""The step loop around a RunnerAdapter: requests enter, run together and leave, each at its own time.

A step runs every request that has all its next step needs. One whose input has not come is left out; the others do not
wait for it. With nothing to run, the loop waits on the edge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pipelines import Request
from transport import Station

from connector import errors
from runner_adapter import AdapterConfig, BatchMaps, MergeRules, RunnerAdapter, StepPlan, Talker, TransferConfig
from runner_adapter.hooks import isolated

STAGES_FILE = Path(__file__).with_name("omni_stages.yaml")
#: Requests that enter in one step: a prompt is many tokens, and the others decode beside it.
NEW_A_STEP = 1
#: Whether each decode row has a forward of its own. Packed ones give the same bits (transformers adapter, packing.py).
EXACT = False
#: How long a stage sleeps when nothing has come, in seconds; then it hears what the demo has to say.
TICK = 0.2


class StepOutput(NamedTuple):
    """What a forward gives: an output in a form that StageOutput takes, and the rids whose output ends with it.

    Requests that it failed on have no rows in the output.
    """

    output: object
    ended: set[str]
    failed: Mapping[str, Exception] = MappingProxyType({})


class StageRunner(ABC):
    """One stage's runner. A stage says when a request can run, how many tokens that is, and what its forward does.

    A request leaves when its output has ended, and its input, too, so that all that was put is read; or when it has
    failed, here or in another stage, while the others go on. An abort reaches readers of streams that have begun; the
    stages that a request has not come to hear it from the demo, which has given it to all of them.
    """

    #: Whether the stage before sends one payload a request, when it has all of it.
    FULL_PAYLOAD = False

    def __init__(
        self,
        station: Station,
        requests: Iterable[Request],
        model: object,
        rules: MergeRules,
        *,
        source: str | None,
        target: str,
        talker: Talker | None = None,
    ) -> None:
        self.requests = {request.rid: request for request in requests}
        #: Steps that each live request has run.
        self.generated: dict[str, int] = {}
        #: Requests that failed here, and why.
        self.failed: dict[str, Exception] = {}
        self._station = station
        config = TransferConfig.from_yaml(STAGES_FILE, station.stage)
        inbox, self._receiver = None, None
        if source is not None:
            inbox, self._receiver = station.inbox(source, self.FULL_PAYLOAD)
        self.adapter = RunnerAdapter(
            model,
            config,
            settings=AdapterConfig.from_yaml(STAGES_FILE, station.stage),
            rules=rules,
            inbox=inbox,
            outbox=station.outbox(target, config),
            talker=talker,
            form="names",
        )
        #: Not entered yet, in order.
        self._coming = dict.fromkeys(self.requests)
        #: Live ones whose output has ended; and those that the adapter is still to be told of as finished.
        self._over: set[str] = set()
        self._gone: list[str] = []

    # -- what a stage says ------------------------------------------------------------------------

    def enter(self, rid: str) -> Mapping[str, torch.Tensor]:
        """A new request comes; what it brings along, by name. What this raises is the request's failure."""
        return {}

    @abstractmethod
    def ready(self, rid: str) -> bool:
        """Whether all is there that the next step of a live request needs."""

    @abstractmethod
    def tokens(self, rid: str) -> int:
        """How many tokens the next step of a request that is ready feeds."""

    def last_ids(self, rid: str) -> torch.Tensor:
        """What the request's next step feeds, int64 [tokens], where the model's preprocess reads it."""
        return torch.zeros(self.tokens(rid), dtype=torch.int64)

    @abstractmethod
    def forward(
        self, plan: StepPlan, embeds: Mapping[str, torch.Tensor], model_intermediate_buffer: BatchMaps, **step: Any
    ) -> StepOutput:
        """Run the plan's rows. `embeds`: [tokens, width] by rid, as preprocess left them, if the model has one; the
        others are those of `RunnerAdapter.forward_kwargs`."""

    @abstractmethod
    def forget(self, rid: str) -> None:
        """The request leaves; it need not have run."""

    def rests(self, rid: str) -> bool:
        """Whether the request is preempted in this step."""
        return False

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until every request has left."""
        while self._coming or self.generated or self._gone:
            self._hear()
            rids = self._scheduled()
            if rids or self._gone:
                self._step(rids)
            elif self._receiver is not None:
                self._receiver.wait(TICK)

    def _hear(self) -> None:
        """Requests that failed elsewhere, which this stage may not have met yet."""
        for rid, reason in self._station.failed_elsewhere().items():
            error = errors.RequestAborted(reason, rid=rid)
            if rid in self.generated:
                self.adapter.fail(rid, error)
            elif rid in self._coming:
                del self._coming[rid]
                self.failed[rid] = error
                self._gone.append(rid)
        self._drop_failed()

    def _scheduled(self) -> list[str]:
        """Requests that can run, or for which something has come; new ones last."""
        awake = [rid for rid in self.generated if not self.rests(rid)]
        waiting = self.adapter.waiting([*awake, *self._coming])
        entering = [rid for rid in self._coming if rid not in waiting][:NEW_A_STEP]
        return [rid for rid in awake if self._runs(rid) or self._comes(rid, waiting)] + entering

    def _runs(self, rid: str) -> bool:
        return rid not in self._over and self.ready(rid)

    def _comes(self, rid: str, waiting: set[str]) -> bool:
        return self._receiver is not None and rid not in waiting and not self.adapter.input_ended(rid)

    def _step(self, rids: list[str]) -> None:
        self._begin(rids)
        ended = self.adapter.receive().ended
        for rid in ended:
            if not self.adapter.buffer[rid]:
                self.adapter.fail(rid, errors.InvalidPayload("the input ended before there was any", rid=rid))
        self._drop_failed()
        plan = self._plan(rid for rid in rids if rid in self.generated and self._runs(rid))
        if plan.rows:
            self._run(plan)
            self._drop_failed()
        for rid in [rid for rid in self._over if self._receiver is None or self.adapter.input_ended(rid)]:
            self._end(rid)

    def _begin(self, rids: list[str]) -> None:
        maps: dict[str, Mapping[str, torch.Tensor] | None] = {rid: None for rid in rids if rid in self._coming}
        broken: dict[str, Exception] = {}
        for rid in maps:
            with isolated(broken, [rid], "enter"):
                maps[rid] = self.enter(rid)
        gone, self._gone = self._gone, []
        self.adapter.begin_step(finished=gone, new=maps, scheduled=rids)
        for rid in maps:
            del self._coming[rid]
            self.generated[rid] = 0
        for rid, error in broken.items():
            self.adapter.fail(rid, error)

    def _plan(self, rids: Iterable[str]) -> StepPlan:
        counts = {rid: self.tokens(rid) for rid in rids}
        starting = {rid for rid in counts if not self.generated[rid]}
        return StepPlan.make(counts, counts, generated=self.generated, prefill=starting)

    def _run(self, plan: StepPlan) -> None:
        """Preprocess, forward, postprocess, send."""
        ids = torch.cat([self.last_ids(rid) for rid in plan.rids])
        _, step_embeds = self.adapter.preprocess(plan, ids, extras=self._extras(plan))
        embeds = {} if step_embeds is None else {row.rid: step_embeds[row.start : row.stop] for row in plan.rows}
        if self._drop_failed():
            plan = self._plan(rid for rid in plan.rids if rid in self.generated)
        if not plan.rows:
            return
        starting = sum(row.prefill for row in plan.rows)
        self._station.steps.append((starting, len(plan.rows) - starting))
        output, ended, failed = self.forward(plan, embeds, **self.adapter.forward_kwargs(plan))
        for rid, error in failed.items():
            self.adapter.fail(rid, error)
        if failed:
            plan = _without(plan, failed)
        if not plan.rows:
            return
        self.adapter.postprocess(plan, output)
        self.adapter.send(plan, output, last=ended)
        for rid in plan.rids:
            self.generated[rid] += 1
        self._over |= ended

    def _extras(self, plan: StepPlan) -> dict[str, dict[str, Any]]:
        """What the model's preprocess is given beside a row's map."""
        ended = self.adapter.input_ended
        return {row.rid: {"generated": row.generated, "input_ended": ended(row.rid)} for row in plan.rows}

    def _drop_failed(self) -> bool:
        found = self.adapter.failures()
        self.failed |= found
        for rid, error in found.items():
            self._station.tell_failed(rid, f"{type(error).__name__}: {error}")
            self._end(rid)
        return bool(found)

    def _end(self, rid: str) -> None:
        del self.generated[rid]
        self._over.discard(rid)
        self._gone.append(rid)
        self.forget(rid)


def _without(plan: StepPlan, rids: Container[str]) -> StepPlan:
    """The plan of the other rows, each with the tokens that it had."""
    rows = [row for row in plan.rows if row.rid not in rids]
    generated = {row.rid: row.generated for row in rows}
    starting = {row.rid for row in rows if row.prefill}
    counts = {row.rid: row.tokens for row in rows}
    return StepPlan.make(counts, counts, generated=generated, prefill=starting)
