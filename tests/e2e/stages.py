"""Stage processes for the tests: the demo's stages, run after run, and some that go another way on purpose.

To be imported with the demo's modules on the path. A report holds what was seen, too: requests that failed, and of a
talker the rids of each step and the thinker's rows that were there at each prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import omni_stages
from omni_model import load_part
from omni_runner import StepOutput
from omni_stages import ACCEPTED, EMBEDDINGS, KINDS, OUTPUT_IDS, TalkerStage, ThinkerStage
from omni_talker import TalkerModel
from pipelines import Request
from processes import join_failures, stage_process, tell
from transport import Station

from runner_adapter import Arrived, Inbox, MergeRules, StageOutput, StepPlan, cut
from runner_adapter.outputs import TEXT

#: Payloads that a talker's prompt needs: the thinker's prompt, and the first generated row.
OF_THE_PROMPT = 2
#: Where a preempted request rests, in its steps, and for how many steps of the others.
RESTS_AT, RESTS_FOR = 5, 3


class WatchedTalker(TalkerStage):
    """The demo's talker; notes what it does."""

    def __init__(self, station: Station, requests: Iterable[Request], folder: Path) -> None:
        super().__init__(station, requests, folder)
        self.ran: list[list[str]] = []
        self.starts: dict[str, int] = {}

    @property
    def seen(self) -> dict[str, Any]:
        return {"ran": self.ran, "starts": self.starts}

    def forward(self, plan: StepPlan, *args: Any, **kwargs: Any) -> StepOutput:
        self.ran.append(list(plan.rids))
        starting = [row.rid for row in plan.rows if row.prefill]
        self.starts |= {rid: len(self.adapter.buffer.names(rid)[EMBEDDINGS]) for rid in starting}
        return super().forward(plan, *args, **kwargs)


class Deaf:
    """An inbox whose later payloads are lost: only what a request's prompt needs comes through (PR, root cause)."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._given: dict[str, int] = {}

    def pull(self, ready: Iterable[str]) -> Arrived:
        arrived = self._inbox.pull(ready)
        for rid, payloads in list(arrived.payloads.items()):
            given = self._given.get(rid, 0)
            self._given[rid] = given + len(payloads)
            arrived.payloads[rid] = payloads[: max(0, OF_THE_PROMPT - given)]
        return arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)


class DeafTalker(WatchedTalker):
    """Nothing reaches its requests while they decode."""

    def __init__(self, station: Station, requests: Iterable[Request], folder: Path) -> None:
        super().__init__(station, requests, folder)
        assert isinstance(self.adapter.inbox, Inbox)
        self.adapter.inbox = Deaf(self.adapter.inbox)


class WholeThinker(ThinkerStage):
    """Sends a request's rows once, when it has all of them."""

    ROWS = (EMBEDDINGS, ACCEPTED, OUTPUT_IDS)
    RULES = MergeRules(accumulated=ROWS, row_axes={**ThinkerStage.RULES.row_axes, EMBEDDINGS: 0, ACCEPTED: 0})

    def forward(self, plan: StepPlan, *args: Any, **kwargs: Any) -> StepOutput:
        (text, aux), ended = super().forward(plan, *args, **kwargs)
        parts, _ = cut(StageOutput(text, aux), plan, self.RULES.row_axes, wanted=lambda name: name != TEXT)
        for rid, named in parts.items():
            self.adapter.buffer.merge(rid, named)
        whole = {rid: self.adapter.buffer.names(rid) for rid in ended}
        names = {name for found in whole.values() for name in found}
        return StepOutput((text, {name: {rid: whole[rid].get(name) for rid in ended} for name in names}), ended)


class WholeTalker(WatchedTalker):
    FULL_PAYLOAD = True


class RestingTalker(WatchedTalker):
    """Its first request is preempted in the middle, for some steps of the others."""

    def __init__(self, station: Station, requests: Iterable[Request], folder: Path) -> None:
        super().__init__(station, requests, folder)
        self._rid, self._until = next(iter(self.requests)), 0

    def rests(self, rid: str) -> bool:
        if rid != self._rid or self.generated[rid] != RESTS_AT:
            return False
        if not self._until:
            self.model.runner.preempt(rid)
            self._until = len(self.ran) + RESTS_FOR
        return len(self.ran) < self._until


class FailingModel(TalkerModel):
    #: rid -> the step in which its preprocess raises.
    FAILS: dict[str, int] = {}

    def preprocess(self, *, request_id: str, generated: int, **given: Any) -> Any:
        if self.FAILS.get(request_id) == generated:
            raise ValueError("made to fail")
        return super().preprocess(request_id=request_id, generated=generated, **given)


class FailingTalker(WatchedTalker):
    MODEL = FailingModel


#: By how a run goes, the stages that are not the demo's.
OTHERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "deaf": {"talker": DeafTalker},
    "full payload": {"thinker": WholeThinker, "talker": WholeTalker},
    "preempted": {"talker": RestingTalker},
    "failing": {"talker": FailingTalker},
}


def work(
    name: str, stage: str, endpoint: str, pipe: Connection, requests: list[Request], folder: str, tamper: str | None
) -> None:
    """The body of a stage process, in the place of the demo's own: run after run, until it is ended."""
    # Loaded once: a run's requests leave nothing in it.
    omni_stages.load_part = cache(load_part)
    with stage_process(pipe):
        omni_stages.load_part(stage, Path(folder))
        tell(pipe, report={"sent": [], "received": [], "steps": [], "seen": {}})
        while True:
            command = json.loads(pipe.recv_bytes())
            # Else it is a request that failed when this stage had done its part.
            if "run" in command:
                tell(pipe, report=run(stage, endpoint, pipe, Path(folder), **command["run"]))


def run(
    stage: str, endpoint: str, pipe: Connection, folder: Path, how: str, requests: list[Any], fails: dict[str, int]
) -> dict[str, Any]:
    """One run of the stage: its report, and what was seen."""
    FailingModel.FAILS = fails
    kinds = {**KINDS, "talker": WatchedTalker, **OTHERS[how]}
    with Station(stage, endpoint) as station:
        join_failures(station, pipe)
        runner = kinds[stage](station, [Request(**request) for request in requests], folder)
        runner.run()
        failed = {rid: str(error) for rid, error in runner.failed.items()}
        return {**station.report(), "seen": {"failed": failed, **getattr(runner, "seen", {})}}
