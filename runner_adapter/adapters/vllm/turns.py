"""Which requests of a stage that reads may be in the next step: what its runner has said of their input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from runner_adapter.adapters.vllm.telling import Asked, Fed


class Turns:
    """Requests by the engine's ids. An id that is used again is another request: what is said of the one before, in
    steps that were made before this one was added, is nothing to it."""

    def __init__(self) -> None:
        #: Whether the runner reads; None before its first word, until which nobody has input.
        self.reads: bool | None = None
        #: Steps made so far.
        self.made = 0
        self._fed = Fed()
        #: By request that was added lately, the steps made before.
        self._added: dict[str, int] = {}
        #: Those that the runner was told of; whose first input is there; that were in a step.
        self._told: set[str] = set()
        self._ready: set[str] = set()
        self._begun: set[str] = set()
        #: Steps that hold a request and whose output is not back.
        self._under_way: Counter[str] = Counter()

    def add(self, engine_id: str) -> None:
        self._added[engine_id] = self.made
        for known in (self._told, self._ready, self._begun):
            known.discard(engine_id)

    def may_run(self, request: Any) -> bool:
        engine_id = request.request_id
        if engine_id not in self._begun:
            # Whatever else it waits for: the engine may run it in the step in which that is there.
            return engine_id in self._ready
        if request.status.name not in ("WAITING", "RUNNING", "PREEMPTED"):
            # It waits for something of the engine's.
            return True
        if request.is_prefill_chunk or engine_id in self._fed.whole:
            return True
        # Of a step that is under way nobody knows yet what it leaves.
        return engine_id in self._fed.here and not self._under_way[engine_id]

    def ask(self, kept: Iterable[Any]) -> list[Asked]:
        """Of those that are kept back, the ones that the runner was not told of: they wait to begin."""
        new = [one for one in kept if one.request_id not in self._told and one.request_id not in self._begun]
        self._told.update(one.request_id for one in new)
        return [Asked(one.request_id, getattr(one, "external_req_id", None)) for one in new]

    def schedule(self, held: Iterable[str], live: Collection[str]) -> int:
        """A step was made that holds these; its number."""
        self.made += 1
        self._under_way.update(held)
        self._begun.update(held)
        if len(self._begun) + len(self._told) > 4 * len(live) + 256:
            for known in (self._told, self._ready, self._begun):
                known.intersection_update(live)
        return self.made

    def hear(self, made: int, held: Iterable[str], fed: Fed | None) -> set[str]:
        """The output of this step is back, and says who is `fed`. Requests that were added since: what else it says
        under their ids is of others."""
        self._under_way -= Counter(held)
        new = {engine_id for engine_id, before in self._added.items() if before >= made}
        self._added = {engine_id: self._added[engine_id] for engine_id in new}
        if fed is not None:
            self.reads = True
            self._fed = Fed(fed.here - new, fed.whole - new)
            self._ready |= self._fed.here - self._begun
        elif self.reads is None:
            self.reads = False
        return new
