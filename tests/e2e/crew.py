"""Three stage processes that stay for many runs, and what comes out of each run.

To be imported with the demo's modules on the path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from main import collect
from pipelines import PIPELINES, Request
from processes import Crew, tell
from transport import Station

from tests.e2e.stages import work

PIPELINE = PIPELINES["qwen3-omni-tiny"]
#: Seconds after which something hangs.
HANG = 100.0


@dataclass
class Story:
    """One run: of each completed request its codes, int64 [groups, frames]; why the others failed."""

    codes: dict[str, torch.Tensor]
    failed: dict[str, str]
    #: By stage, what it reports.
    reports: dict[str, Any]
    #: Payloads that the broker keeps when all is over.
    left: int


class StoryCrew(Crew):
    """The demo's crew with other stage processes; `station` has the private broker, and reads the last edge."""

    BODY = staticmethod(work)

    def __init__(self, station: Station, folder: Path) -> None:
        self._station, self._receiver = station, station.receiver(PIPELINE.stages[-1])
        self._reports: dict[str, Any] = {}
        super().__init__(PIPELINE, station.endpoint, [], folder, None)

    def run(self, how: str, requests: Sequence[Request], fails: Mapping[str, int] | None = None) -> Story:
        """All requests through the three stages, one of which may go another way; see stages.py."""
        self.settle(HANG)
        self._reported.clear()
        self.failed.clear()
        named = [replace(request, rid=f"{how}/{request.rid}") for request in requests]
        failing = {f"{how}/{rid}": step for rid, step in (fails or {}).items()}
        for pipe in self._pipes.values():
            tell(pipe, run={"how": how, "requests": [asdict(request) for request in named], "fails": failing})
        watch: Any = SimpleNamespace(heard=lambda *told: None, say=lambda line: None)
        outcomes, failed = collect(self._receiver, self, named, watch)
        self.settle(HANG)
        for request in named:
            self._station.finish(request.rid)
        left = self._station.counters()["payloads_live"]
        codes = {rid: outcome.codes[0] for rid, outcome in outcomes.items() if outcome.codes is not None}
        return Story(*(_without(f"{how}/", told) for told in (codes, failed, self._reports)), left)

    def _note(self, stage: str, message: dict[str, Any]) -> None:
        super()._note(stage, message)
        self._reports[stage] = message["report"]


def _without(prefix: str, value: Any) -> Any:
    """The same, with rids as the test has them."""
    if isinstance(value, dict):
        return {_without(prefix, key): _without(prefix, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without(prefix, inner) for inner in value]
    return value.removeprefix(prefix) if isinstance(value, str) else value
