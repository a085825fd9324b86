"""Three stage processes that stay for many runs, and what comes out of each run."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from connector import ConnectorError

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scripts" / "demo_job"
STAGES = ("thinker", "talker", "code2wav")
#: Seconds after which something hangs.
HANG = 100.0


@dataclass
class Story:
    """One run: of each completed request its codes, int64 [groups, frames]; why the others failed; what stages saw."""

    codes: dict[str, torch.Tensor]
    failed: dict[str, ConnectorError]
    seen: dict[str, Any]
    #: Payloads that the broker keeps when all is over.
    left: int


class Crew(AbstractContextManager["Crew"]):
    """The stage processes, at the private broker of a Station, which reads the last edge. `demo`: its modules."""

    def __init__(self, demo: SimpleNamespace, station: Any, folder: Path) -> None:
        self._demo, self._station = demo, station
        self._receiver = station.receiver(STAGES[-1])
        self._stages: dict[str, subprocess.Popen[str]] = {}
        for stage in STAGES:
            line = [sys.executable, "-m", "tests.e2e.stages", stage, station.endpoint, str(folder)]
            paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(DEMO)])}
            pipe = subprocess.PIPE
            self._stages[stage] = subprocess.Popen(line, cwd=ROOT, env=paths, stdin=pipe, stdout=pipe, text=True)

    def ready(self) -> None:
        """Wait until every stage has loaded its model."""
        for stage in STAGES:
            self._answer(stage)

    def run(self, how: str, requests: Sequence[Any], fails: Mapping[str, int] | None = None) -> Story:
        """All requests through the three stages, one of which may go another way; see stages.py."""
        named = [replace(request, rid=f"{how}/{request.rid}") for request in requests]
        failing = {f"{how}/{rid}": step for rid, step in (fails or {}).items()}
        command = json.dumps({"how": how, "requests": [asdict(request) for request in named], "fails": failing})
        for process in self._stages.values():
            assert process.stdin is not None
            print(command, file=process.stdin, flush=True)
        watch = SimpleNamespace(heard=lambda *told: None, say=lambda line: None)
        outcomes, failed = self._demo.main.collect(self._receiver, self, named, watch)
        seen = {stage: self._answer(stage) for stage in STAGES}
        for request in named:
            self._station.finish(request.rid)
        left = self._station.counters()["payloads_live"]
        codes = {rid: outcome.codes[0] for rid, outcome in outcomes.items()}
        return Story(*(_without(f"{how}/", told) for told in (codes, failed, seen)), left)

    def check(self) -> None:
        """What the demo asks of its own crew: nobody has died."""
        dead = {stage: process.returncode for stage, process in self._stages.items() if process.poll() is not None}
        assert not dead, dead

    def _answer(self, stage: str) -> Any:
        stdout = self._stages[stage].stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], HANG)
        assert readable, f"{stage} does not answer"
        line = stdout.readline()
        assert line, f"{stage} has died"
        return json.loads(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._stages.values():
            # The end of its input ends a stage between runs; one in a run does not see it.
            if error is not None:
                process.kill()
            process.communicate(timeout=HANG)


def _without(prefix: str, value: Any) -> Any:
    """The same, with rids as the test has them."""
    if isinstance(value, dict):
        return {_without(prefix, key): _without(prefix, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without(prefix, inner) for inner in value]
    return value.removeprefix(prefix) if isinstance(value, str) else value
