"""Requests that a scheduler keeps back until their input is there: expected, looked after, and ended if they fail."""

from __future__ import annotations

from collections.abc import Sequence

from connector import ConnectorError
from runner_adapter.adapters.vllm.ids import Ids
from runner_adapter.adapters.vllm.telling import Asked, Fed
from runner_adapter.runner import RunnerAdapter


class Held:
    """One runner's. All ranks do the same, in the same order: what comes is looked at together."""

    def __init__(self, adapter: RunnerAdapter, ids: Ids) -> None:
        self._adapter, self._ids = adapter, ids
        #: Whose input is there, of those that run and those that wait to begin; None if nobody asked.
        self.fed: Fed | None = None
        #: Those of this step that will not begin, and why, by the engine's ids.
        self.refused: dict[str, ConnectorError] = {}
        self._asked: Sequence[Asked] | None = None

    @property
    def asked(self) -> bool:
        """Whether the scheduler keeps requests back in this step."""
        return self._asked is not None

    def begin_step(self, asked: Sequence[Asked] | None) -> None:
        """`asked`: those that wait to begin, and were not told of before; None if the scheduler keeps nobody back."""
        self.fed, self.refused = None, {}
        self._asked = asked if self._adapter.inbox is not None else None

    def expect(self) -> None:
        """They will begin here: should they fail elsewhere before, this stage is to hear."""
        rids = []
        for one in self._asked or ():
            try:
                rids.append(self._ids.hold(one.req_id, one))
            except ConnectorError as error:
                self.refused[one.req_id] = error.anew()
        self._adapter.expect([rid for rid in rids if rid is not None])

    def look(self) -> None:
        """Say who is fed, and who failed before it began."""
        if not self.asked:
            return
        running = {engine_id: self._ids.rid(engine_id) for engine_id in self._ids}
        held = self._ids.held
        waiting = self._adapter.waiting([*running.values(), *held.values()])
        there = {engine_id: rid for engine_id, rid in held.items() if rid not in waiting}
        failing = self._adapter.failing(there.values()) if there else {}
        self.refused |= {engine_id: failing[rid] for engine_id, rid in there.items() if rid in failing}
        here = [engine_id for engine_id, rid in running.items() if rid not in waiting]
        self.fed = Fed(
            frozenset([*here, *(there.keys() - self.refused.keys())]),
            frozenset(engine_id for engine_id, rid in running.items() if self._adapter.input_ended(rid)),
        )

    @property
    def has_news(self) -> bool:
        return bool(self.refused) or (self.fed is not None and bool(self.fed.here))
