"""Random steps, pulls, finishes, aborts and resubmissions over a real broker, against a plain record of them."""

from __future__ import annotations

import gc
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from connector import errors
from tests.handover.links import Link, ids, read

RIDS = ("a-1", "b", "c.24")
SOME = st.sets(st.sampled_from(RIDS))
ONE = st.sampled_from(RIDS)
#: So that no run meets what another left at the broker.
RUNS = itertools.count()


@dataclass
class Use:
    """One use of a rid: what was put of it, and how it ended. `given`: how much of it its request got."""

    chunks: list[list[int]] = field(default_factory=list)
    over: str = ""
    given: int = 0
    told: bool = False


class Handover(RuleBasedStateMachine):
    """`uses[rid]`: what was begun and not finished by the receiver, oldest first; the record's whole knowledge."""

    endpoint: str
    background: bool

    @initialize()
    def start(self) -> None:
        run = next(RUNS)
        self.names = {rid: f"{rid}/{run}" for rid in RIDS}
        self.link = Link(self.endpoint)
        self.outbox = self.link.outbox(background=self.background)
        self.inbox = self.link.inbox()
        self.uses: dict[str, deque[Use]] = {rid: deque() for rid in RIDS}
        #: The sender's use of a rid under way.
        self.open: dict[str, Use] = {}
        #: Rids aborted since the sender finished them: whoever puts on them fails, once; False: it knows already.
        self.dead: dict[str, bool] = {}
        self.step = itertools.count(1)
        self.number = itertools.count()

    def sync(self) -> None:
        """All that was put has come. A newer use of a rid comes when the former has ended."""
        self.outbox.flush()
        known: Any = None
        while known != (known := (list(self.inbox), self.inbox.counters)):
            self.link.settle()
            self.inbox.waiting(())
        self.inbox.validate()

    # -- sender -----------------------------------------------------------------------------------

    @rule(rids=SOME, ends=SOME)
    def send(self, rids: set[str], ends: set[str]) -> None:
        self.sync()
        ended = {rid for rid, use in self.open.items() if use.over == "ended"}
        rids, ends = rids - ended, ends - ended
        step = {rid: [next(self.number) for _ in range(1 + len(ends))] for rid in sorted(rids)}
        payloads = {self.names[rid]: ids(*rows) for rid, rows in step.items()}
        self.outbox.send(next(self.step), payloads, last=[self.names[rid] for rid in sorted(ends)])
        self.outbox.flush()
        failed = self.outbox.failures()
        assert {rid: type(error) for rid, error in failed.items()} == {
            self.names[rid]: errors.RequestAborted for rid in sorted(rids | ends) if self.dead.get(rid)
        }
        for rid in rids | ends:
            if rid in self.dead:
                self.dead[rid] = False
            else:
                self._record(rid, step.get(rid), rid in ends)

    def _record(self, rid: str, rows: list[int] | None, ends: bool) -> None:
        use = self.open.get(rid)
        if use is None:
            use = self.open[rid] = Use()
            self.uses[rid].append(use)
        if rows is not None:
            use.chunks.append(rows)
        if ends:
            use.over = "ended"

    @rule(rid=ONE)
    def sender_finishes(self, rid: str) -> None:
        self.outbox.finish(self.names[rid])
        use = self.open.pop(rid, None)
        if use is not None and not use.over:
            use.over = "ended"
        self.dead.pop(rid, None)

    # -- receiver ---------------------------------------------------------------------------------

    @rule(ready=st.permutations(RIDS), count=st.integers(0, 3))
    def pull(self, ready: list[str], count: int) -> None:
        self.sync()
        arrived = self.inbox.pull([self.names[rid] for rid in ready[:count]])
        expected = {}
        ended, failed = set(), {}
        for rid in ready[:count]:
            if not self.uses[rid]:
                continue
            use = self.uses[rid][0]
            if use.given < len(use.chunks):
                expected[self.names[rid]] = use.chunks[use.given :]
                use.given = len(use.chunks)
            if use.over and not use.told:
                use.told = True
                if use.over == "ended":
                    ended.add(self.names[rid])
                else:
                    failed[self.names[rid]] = errors.RequestAborted
        assert read(arrived.payloads) == expected
        assert arrived.ended == ended
        assert {rid: type(error) for rid, error in arrived.failed.items()} == failed

    @rule(rid=ONE)
    def receiver_finishes(self, rid: str) -> None:
        self.sync()
        self.inbox.finish(self.names[rid])
        if self.uses[rid]:
            use = self.uses[rid].popleft()
            if self.open.get(rid) is use and not use.over:
                # What the sender still puts of it is nobody's.
                self.open[rid] = Use()

    @rule(rid=ONE, sender=st.booleans())
    def abort(self, rid: str, sender: bool) -> None:
        self.sync()
        if sender:
            self.outbox.abort(self.names[rid], "why")
        else:
            self.link.reader.abort(self.names[rid], "why")
        use = self.open.get(rid)
        if use is not None and not use.over:
            use.over = "failed"
        self.dead[rid] = self.dead.get(rid, True) and not sender

    def teardown(self) -> None:
        for name in self.names.values():
            self.outbox.finish(name)
            self.sync()
            while name in self.inbox:
                self.inbox.finish(name)
                self.sync()
        gc.collect()
        self.link.settle()
        assert list(self.inbox) == []
        assert list(self.outbox) == []
        assert list(self.link.sender.payloads()) == []
        self.link.close()


@pytest.mark.parametrize("background", [False, True], ids=["inline", "background"])
def test_no_chunk_is_lost_doubled_or_mixed(endpoint: str, background: bool) -> None:
    machine = type("Bound", (Handover,), {"endpoint": endpoint, "background": background})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
