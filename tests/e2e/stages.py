"""Stage processes for the tests: the demo's stages, run after run, and some that go another way on purpose.

To be imported with the demo's modules on the path. A report holds what was seen, too: requests that failed, and of a
talker the rids of each step, and how many rows of the thinker were there at each step of a request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import omni_stages
from omni_model import load_part
from omni_runner import StepOutput
from omni_stages import ACCEPTED, EMBEDDINGS, KINDS, OUTPUT_IDS, TalkerStage, ThinkerStage
from omni_talker import TalkerModel
from pipelines import Request
from processes import join_failures, stage_process, tell
from transport import Station

from connector import Edge
from runner_adapter import Arrived, BatchMaps, Inbox, MergeRules, Outbox, StepPlan, TransferConfig

#: Payloads that a talker's prompt needs: the thinker's prompt, and the first generated row.
OF_THE_PROMPT = 2
#: Where a preempted request rests, in its steps, and for how many steps of the others.
RESTS_AT, RESTS_FOR = 3, 3
#: Of a thinker that sends one payload a request: what grows by the rows of each step.
WHOLE = MergeRules(accumulated=(EMBEDDINGS, ACCEPTED, OUTPUT_IDS))


class StoryStation(Station):
    """A stage's place in a run of the story, which hears of requests that failed."""

    #: How the outbox merges a request's steps into one payload, if it does.
    whole: MergeRules | None = None

    def __init__(self, stage: str, endpoint: str, pipe: Connection) -> None:
        super().__init__(stage, endpoint)
        join_failures(self, pipe)
        self._pipe = pipe

    def listen(self, timeout: float) -> None:
        """Sleep until there is a word of another stage's failure, or for `timeout` seconds."""
        self._pipe.poll(timeout)

    def outbox(self, to_stage: str, config: TransferConfig) -> Outbox:
        node = self._another()
        sender = cast(Edge, self.sender(to_stage, node))
        self._outboxes.append(Outbox(node, sender, config, whole=self.whole))
        return self._outboxes[-1]


class OneAStep:
    """An inbox that gives a request what its prompt needs, when that is there, and then a payload a step, however far
    ahead its sender is: each later row comes to a request that decodes, in the step that needs it."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._begun: set[str] = set()

    def pull(self, ready: Iterable[str]) -> Arrived:
        most = {rid: 1 if rid in self._begun else OF_THE_PROMPT for rid in ready}
        self._begun |= most.keys()
        return self._inbox.pull(most, most)

    def waiting(self, rids: Iterable[str]) -> set[str]:
        rids = list(rids)
        there = self._inbox.count(rid for rid in rids if rid not in self._begun)
        short = {rid for rid, count in there.items() if 0 <= count < OF_THE_PROMPT}
        return self._inbox.waiting(rids) | short

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)


class WatchedTalker(TalkerStage):
    """The demo's talker, fed a row a step; notes what it does."""

    def __init__(self, station: Station, requests: Iterable[Request], folder: Path) -> None:
        super().__init__(station, requests, folder)
        if not self.FULL_PAYLOAD:
            assert isinstance(self.adapter.inbox, Inbox)
            self.adapter.inbox = OneAStep(self.adapter.inbox)
        self.ran: list[list[str]] = []
        #: By rid, the thinker's rows that each of its forwards was given.
        self.rows: dict[str, list[int]] = {}

    @property
    def seen(self) -> dict[str, Any]:
        return {"ran": self.ran, "rows": self.rows}

    def forward(
        self, plan: StepPlan, embeds: Mapping[str, Any], model_intermediate_buffer: BatchMaps, **step: Any
    ) -> StepOutput:
        self.ran.append(list(plan.rids))
        for rid in plan.rids:
            self.rows.setdefault(rid, []).append(len(model_intermediate_buffer[rid][EMBEDDINGS]))
        return super().forward(plan, embeds, model_intermediate_buffer, **step)


class Deaf:
    """An inbox whose later payloads are lost: only what a request's prompt needs comes through (PR, root cause)."""

    def __init__(self, inbox: Any) -> None:
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
        self.adapter.inbox = Deaf(self.adapter.inbox)


class WholeThinker(ThinkerStage):
    """Sends a request's rows once, when it has all of them."""

    def __init__(self, station: StoryStation, requests: Iterable[Request], folder: Path) -> None:
        station.whole = WHOLE
        super().__init__(station, requests, folder)


class WholeTalker(WatchedTalker):
    FULL_PAYLOAD = True


class RestingTalker(WatchedTalker):
    """Its first request is preempted in the middle, for some steps of the others."""

    def __init__(self, station: Station, requests: Iterable[Request], folder: Path) -> None:
        super().__init__(station, requests, folder)
        self._rid, self._until = next(iter(self.requests)), 0

    @property
    def seen(self) -> dict[str, Any]:
        return {**super().seen, "rested": (RESTS_AT, RESTS_FOR)}

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
    with StoryStation(stage, endpoint, pipe) as station:
        runner = kinds[stage](station, [Request(**request) for request in requests], folder)
        runner.run()
        failed = {rid: str(error) for rid, error in runner.failed.items()}
        return {**station.report(), "seen": {"failed": failed, **getattr(runner, "seen", {})}}
