"""Stages that use one rid again and again, in random order: each is sent what is of the use that it is in, all of it.

Two senders, a stage between with a session for each of its edges, and two readers of it. The premise of entering is
kept (docs/concepts.md): nobody is in the next use before all have entered this one.
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
USES = 3


class Run:
    def __init__(self, rig: Any, seed: int, aborts: bool) -> None:
        self.rig, self.random, self.aborts = rig, random.Random(seed), aborts
        self.sessions = {role: rig.join(role) for role in ROLES}
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
        #: By role, the number of the last finish that it said.
        self.last_finish = dict.fromkeys(ROLES, 0)

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
            # Behind an abort that is on its way a session is sent the next.
            assert use == due or (use == due + 1 and due in self.aborted), (role, descriptor.manifest)
            self.sent[(role, use)].append(descriptor)
            self.got.add((role, descriptor.manifest.decode()))

    def step(self) -> None:
        role = self.random.choice(ROLES)
        if role not in self.inside:
            self.random.choice([self.enter, self.enter, self.hear])(role)
        else:
            verbs = [self.hear, self.finish, self.release] if role in READS else [self.hear, self.finish, self.send]
            weights = [1, 1, 3]
            if self.aborts and role not in self.heard and self.all_come(role):
                verbs, weights = [*verbs, self.abort], [*weights, 1]
            self.random.choices(verbs, weights)[0](role)
        self.look()

    def all_here(self, role: str) -> bool:
        """Whether nobody is still to enter the use of this role."""
        return all(self.use[other] >= self.use[role] for other in ROLES)

    def all_come(self, role: str) -> bool:
        """Whether all are in the use of this role, were, or are still in the one before."""
        use = self.use[role]
        return all(self.use[other] >= use or (self.use[other] == use - 1 and other in self.inside) for other in ROLES)

    def enter(self, role: str) -> None:
        if self.use[role] == USES or not self.all_here(role):
            return
        heard = self.early.pop(role, 0)
        if heard:
            # As a client that has heard of an abort does before it uses the rid anew.
            self.rig.finish(self.sessions[role], "a", aborted=True)
            self.last_finish[role] = self.rig.numbers[self.sessions[role]]
        self.use[role] += 1
        self.inside.add(role)
        self.rig.enter(self.sessions[role], "a", sends=role in SENDS, heard=heard)

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
        # One that was sent before the broker knew of the last finish is of a use before it.
        news = [notice for notice in told if notice.number > before and notice.applied >= self.last_finish[role]]
        if news and role in self.inside:
            self.heard.add(role)
        elif news:
            self.early[role] = max(notice.life for notice in news)

    def abort(self, role: str) -> None:
        self.aborted.add(self.use[role])
        self.heard.add(role)
        self.rig.abort(self.sessions[role], "a", mine=True)

    def finish(self, role: str) -> None:
        if not self.all_here(role):
            return
        key = (role, self.use[role])
        for sender in FROM.get(role, ()) if key[1] not in self.aborted else ():
            assert [tag for tag in self.put[(sender, key[1])] if (role, tag) not in self.got] == []
        for descriptor in self.sent[key]:
            self.rig.release(self.sessions[role], descriptor)
        self.sent[key].clear()
        self.rig.finish(self.sessions[role], "a", aborted=role in self.heard)
        self.last_finish[role] = self.rig.numbers[self.sessions[role]]
        self.heard.discard(role)
        self.inside.discard(role)

    def end(self) -> None:
        """All leave, in their order, and nothing of the rid is left."""
        for role in sorted(self.inside, key=ROLES.index):
            for _ in range(3):
                self.hear(role)
                self.look()
            assert role in self.heard or self.use[role] not in self.aborted, (role, "waits for what was aborted")
            self.finish(role)
            self.look()
        for role in ROLES:
            self.rig.hear(self.sessions[role])
            self.look()
            self.rig.finish(self.sessions[role], "a")
            for (reader, _), sent in self.sent.items():
                if reader == role:
                    for descriptor in sent:
                        self.rig.release(self.sessions[role], descriptor)
        assert not self.rig.state.lives


@pytest.mark.parametrize("aborts", [False, True])
def test_each_stage_is_sent_what_is_of_its_use(make_rig: Any, aborts: bool) -> None:
    for seed in range(400):
        run = Run(make_rig(), seed, aborts)
        for _ in range(60):
            run.step()
        run.end()
