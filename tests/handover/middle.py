"""A stage between two, over a real broker."""

from __future__ import annotations

import torch

from runner_adapter.merge import MergeRules
from runner_adapter.outbox import Outbox
from runner_adapter.plan import StepPlan
from runner_adapter.runner import RunnerAdapter
from tests.handover.links import CONFIG, IDS, TO, Link, keyed
from tests.runner_adapter.models import HookModel, embeds_of

NEXT = "vocoder"
ROWS = MergeRules(row_axes={IDS: 0})


class Middle:
    """A stage between two: it reads what `pair.sender` puts, and `after` reads what it sends."""

    def __init__(self, pair: Link, model: object | None = None) -> None:
        self.pair = pair
        self.after = pair.node(NEXT)
        self.before = pair.out()
        out = pair.node(TO)
        self.adapter = RunnerAdapter(
            model or HookModel(),
            CONFIG,
            rules=ROWS,
            inbox=pair.inbox(),
            outbox=Outbox(out, out.edge(TO, NEXT), CONFIG),
        )

    def put(self, rid: str, *numbers: int, last: bool = False) -> None:
        self.before.put(rid, keyed(rid, *numbers), last=last)
        self.pair.settle()

    def take(self, rid: str) -> list[int]:
        """The next that the stage sent of a rid."""
        payload = self.after.edge(TO, NEXT).take(rid, timeout=10.0)
        return next(iter(payload.values())).tolist()


def only_reads(pair: Link) -> RunnerAdapter:
    return RunnerAdapter(object(), CONFIG, inbox=pair.inbox(), abort=pair.reader.abort)


def plan_of(**counts: int) -> StepPlan:
    return StepPlan.make(counts, counts)


def hidden(plan: StepPlan) -> torch.Tensor:
    """[tokens, WIDTH]: each row its own number."""
    return embeds_of(torch.arange(plan.tokens))
