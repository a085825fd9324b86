"""Stages that use one rid again and again, in random order: each is sent what is of the use it is in, all of it.

Two senders, a stage between with a session for each of its edges, and two readers of it. They go in step, so that
nobody is in the next use before all have entered this one; or one goes ahead of the other, as far as docs/concepts.md
says: a sender is not through with a use of nothing before its readers have entered it, nor a reader before its senders.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.names import Edge

FIRST, OTHER, BEHIND = Edge("w", "m", 0), Edge("v", "m", 0), Edge("m", "r", 0)
#: By role, what it puts to: an edge, and for how many readers.
SENDS: dict[str, tuple[Edge, int]] = {"w": (FIRST, 1), "v": (OTHER, 1), "out": (BEHIND, 2)}
#: By role, what it reads: edge, reader, of how many.
READS = {"in": [(FIRST, 0, 1), (OTHER, 0, 1)], "r0": [(BEHIND, 0, 2)], "r1": [(BEHIND, 1, 2)]}
#: By reader, who sends to it.
FROM = {"in": ("w", "v"), "r0": ("out",), "r1": ("out",)}
ROLES = [*SENDS, *READS]
#: By role, from whom what it is sent comes in the end.
UPSTREAM = {
    "w": (),
    "v": (),
    **dict.fromkeys(["in", "out"], ("w", "v")),
    **dict.fromkeys(["r0", "r1"], ("w", "v", "out")),
}
#: The stage between begins and ends with both of its sessions.
BETWEEN = ("in", "out")
USES = 3


class Run:
    def __init__(self, rig: Any, seed: int, aborts: bool, ahead: bool = False) -> None:
        self.rig, self.random, self.aborts, self.ahead = rig, random.Random(seed), aborts, ahead
        self.sessions = {
            role: rig.join("between", 1) if role in BETWEEN and ahead else rig.join(role) for role in ROLES
        }
        for role, edges in READS.items():
            for edge, reader, readers in edges:
                assert rig.subscribe(self.sessions[role], edge=edge, reader=reader, readers=readers) is None
        #: The use that a role is in, or was in last; those that are in it now.
        self.use = dict.fromkeys(ROLES, 0)
        self.inside: set[str] = set()
        self.said = dict.fromkeys(ROLES, 0)
        #: By role and use, what was put, and what was sent to a reader.
        self.put: dict[tuple[str, int], list[str]] = defaultdict(list)
        self.sent: dict[tuple[str, int], list[ef.Descriptor]] = defaultdict(list)
        self.got: set[tuple[str, str]] = set()
        self.ended: set[tuple[str, int]] = set()
        #: Uses that somebody has aborted; roles that have heard an abort since they entered.
        self.aborted: set[int] = set()
        self.heard: set[str] = set()
        #: By role that is in no use, the last life of which it has heard an abort since.
        self.early: dict[str, int] = {}
        #: By role, the number of the last finish or enter that it said.
        self.last_word = dict.fromkeys(ROLES, 0)

    def look(self) -> None:
        """What the directory has said since."""
        for role, session in self.sessions.items():
            said = self.rig.said[session]
            for effect in said[self.said[role] :]:
                if isinstance(effect, ef.Deliver):
                    self.delivered(role, effect)
                elif isinstance(effect, ef.PutFailed):
                    assert self.use[role] in self.aborted, (role, effect.error)
            self.said[role] = len(said)

    def delivered(self, role: str, effect: ef.Deliver) -> None:
        for descriptor in effect.descriptors:
            use = int(descriptor.manifest.decode().split(".")[1])
            due = self.use[role] if role in self.inside else self.use[role] + 1
            # Behind aborts that are on their way a session is sent the next.
            assert due <= use and self.aborted.issuperset(range(due, use)), (role, descriptor.manifest)
            self.sent[(role, use)].append(descriptor)
            self.got.add((role, descriptor.manifest.decode()))

    def step(self) -> None:
        role = self.random.choice(ROLES)
        if role not in self.inside:
            self.random.choice([self.enter, self.enter, self.hear])(role)
        else:
            verbs = [self.hear, self.finish, self.release] if role in READS else [self.hear, self.finish, self.send]
            weights = [1, 1, 3]
            if self.aborts and role not in self.heard and self.may_abort(role):
                verbs, weights = [*verbs, self.abort], [*weights, 1]
            self.random.choices(verbs, weights)[0](role)
        self.look()

    def all_here(self, role: str) -> bool:
        """Whether nobody is still to enter the use of this role."""
        return all(self.use[other] >= self.use[role] for other in ROLES)

    def may_abort(self, role: str) -> bool:
        """In step, whether all are in the use of this role, were, or are still in the one before. Otherwise one use is
        aborted: a session that comes to its use when two were could mean either."""
        use = self.use[role]
        if self.ahead:
            return not self.aborted
        return all(self.use[other] >= use or (self.use[other] == use - 1 and other in self.inside) for other in ROLES)

    def may_finish(self, role: str) -> bool:
        if not self.ahead:
            return self.all_here(role)
        use = self.use[role]
        readers = [other for other in FROM if role in FROM[other]]
        met = all(self.use[other] >= use for other in [*readers, *FROM.get(role, ())])
        return met or use in self.aborted or (role in SENDS and bool(self.put[(role, use)]))

    def enter(self, role: str) -> None:
        behind = [other for other in (UPSTREAM[role] if self.ahead else ROLES) if self.use[other] < self.use[role]]
        if self.use[role] == USES or behind:
            return
        both, use = BETWEEN if self.ahead and role in BETWEEN else (role,), self.use[role] + 1
        # Others have begun anew: of two uses that it could mean, it leaves out the one that is aborted.
        out = self.early.keys() & set(both) and use in self.aborted and max(self.use.values()) > use
        for one in both:
            if out:
                self.use[one] = use
                self.leave_out(one)
            else:
                self.enter_alone(one)

    def leave_out(self, role: str) -> None:
        self.rig.finish(self.sessions[role], "a", aborted=self.early.pop(role, 0) > 0)
        self.last_word[role] = self.rig.numbers[self.sessions[role]]

    def enter_alone(self, role: str) -> None:
        heard = self.early.get(role, 0)
        if heard:
            # As a client that has heard of an abort does before it uses the rid anew.
            self.leave_out(role)
        self.use[role] += 1
        self.inside.add(role)
        self.rig.enter(
            self.sessions[role],
            "a",
            sends=role in SENDS,
            edge=SENDS.get(role, READS.get(role, [(FIRST,)])[0])[0],
            heard=heard,
        )
        self.last_word[role] = self.rig.numbers[self.sessions[role]]

    def send(self, role: str) -> None:
        key = (role, self.use[role])
        if key in self.ended or role in self.heard:
            return
        edge, readers = SENDS[role]
        index, last = len(self.put[key]), self.random.random() < 0.3
        self.put[key].append(f"{role}.{self.use[role]}.{index}")
        if last:
            self.ended.add(key)
        session = self.sessions[role]
        self.rig.put(session, "a", index, edge=edge, last=last, tag=self.put[key][-1], readers=readers)

    def release(self, role: str) -> None:
        mine = self.sent[(role, self.use[role])]
        if mine:
            self.rig.take(self.sessions[role], mine[0])
            self.rig.release(self.sessions[role], mine.pop(0))

    def hear(self, role: str) -> None:
        session = self.sessions[role]
        before = self.rig.seen[session]
        told = [notice for said in self.rig.said[session] if isinstance(said, ef.Notices) for notice in said.notices]
        self.rig.hear(session)
        # One that was sent before the broker knew of the last word is of a use before it, or is said again.
        news = [notice for notice in told if notice.number > before and notice.applied >= self.last_word[role]]
        if news and role in self.inside:
            self.heard.add(role)
        elif news:
            self.early[role] = max(notice.life for notice in news)

    def abort(self, role: str) -> None:
        self.aborted.add(self.use[role])
        self.heard.add(role)
        self.rig.abort(self.sessions[role], "a", mine=True)

    def finish(self, role: str) -> None:
        both = BETWEEN if self.ahead and role in BETWEEN else (role,)
        if all(self.may_finish(one) for one in both):
            for one in both:
                self.finish_alone(one)

    def finish_alone(self, role: str) -> None:
        key = (role, self.use[role])
        for sender in FROM.get(role, ()) if key[1] not in self.aborted else ():
            assert [tag for tag in self.put[(sender, key[1])] if (role, tag) not in self.got] == []
        for descriptor in self.sent[key]:
            self.rig.release(self.sessions[role], descriptor)
        self.sent[key].clear()
        self.rig.finish(self.sessions[role], "a", aborted=role in self.heard)
        self.last_word[role] = self.rig.numbers[self.sessions[role]]
        self.heard.discard(role)
        self.inside.discard(role)

    def end(self) -> None:
        """All go through the uses that are left, and nothing of the rid is left."""
        for _ in range(100):
            for role in ROLES:
                if role not in self.inside:
                    self.enter(role)
                else:
                    self.leave(role)
                self.look()
        assert not self.inside and set(self.use.values()) == {USES}, (self.use, self.inside, self.heard, self.early)
        for role in ROLES:
            self.rig.hear(self.sessions[role])
            self.rig.finish(self.sessions[role], "a")
            for (reader, _), sent in self.sent.items():
                if reader == role:
                    for descriptor in sent:
                        self.rig.release(self.sessions[role], descriptor)
        assert not self.rig.state.lives

    def leave(self, role: str) -> None:
        for _ in range(3):
            self.hear(role)
            self.look()
        assert role in self.heard or self.use[role] not in self.aborted, (role, "waits for what was aborted")
        self.finish(role)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("aborts", [False, True])
def test_each_stage_is_sent_what_is_of_its_use(make_rig: Any, aborts: bool, ahead: bool) -> None:
    for seed in range(300):
        run = Run(make_rig(), seed, aborts, ahead)
        for _ in range(60):
            run.step()
        run.end()
