"""A run of Seals is what they are one by one, whatever has become of their streams."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.directory import events as ev
from connector.core.errors import RequestAborted

RIDS = ("p", "q", "r")


class Town:
    """A writer that tells a reader of its chunks, and what it has not sealed yet."""

    def __init__(self, make: Any) -> None:
        self.rig = make(window=12)
        self.writer, self.reader, self.other = (self.join(stage) for stage in ("thinker", "talker", "else"))
        assert self.rig.subscribe(self.reader) is None
        self.next = dict.fromkeys(RIDS, 0)
        for rid in RIDS:
            self.put(rid, told=False)
        self.told: list[ev.Sealed] = []

    def join(self, stage: str) -> int:
        number = 100 + len(self.rig.state.sessions)
        self.rig.handle(ev.Joined(self.rig.now, number, stage, number, 0, True))
        self.rig.seen[number] = self.rig.state.sessions[number].seen
        return number

    def sealed(self, rid: str, told: bool) -> ev.Sealed:
        rig, index = self.rig, self.next[rid]
        self.next[rid] += 1
        spoken = (ev.Told(0, 1, self.reader),) if told else ()
        block, number, seen = rig.room(self.writer), rig.number(self.writer), rig.seen[self.writer]
        return ev.Sealed(rig.now, self.writer, number, seen, rig.edge, block, 64, (rig.member(rid, index),), spoken)

    def put(self, rid: str, told: bool) -> None:
        event = self.sealed(rid, told)
        if told:
            self.told.append(event)
        else:
            self.rig.handle(event)

    def say(self, as_run: bool) -> None:
        told, self.told = self.told, []
        if not as_run:
            for event in told:
                self.rig.handle(event)
        elif told:
            self.rig.handle(run(told))

    def word(self, kind: type[ev.Event], event: ev.Sealed) -> None:
        """The reader's, of what it was told."""
        span = (ev.Span(event.handle, 0, 1, 0),)
        rig = self.rig
        if kind is ev.Taken:
            rig.handle(ev.Taken(rig.now, self.reader, span))
        else:
            rig.handle(ev.Released(rig.now, self.reader, rig.number(self.reader), span))

    def facts(self) -> Any:
        """What anyone may see of it."""
        state = self.rig.state
        said = {
            number: [repr(effect) for effect in said if not isinstance(effect, ef.Acked)]
            for number, said in self.rig.said.items()
        }
        sessions = {n: (s.applied, s.reserved_bytes, dict(s.pushed)) for n, s in state.sessions.items()}
        return said, sessions, dict(state.counters), state.shelf.payloads, state.reserved_bytes


def run(events: list[ev.Sealed]) -> ev.SealedRun:
    first = events[0]
    member = first.members[0]
    chunks = tuple(ev.Sealing(e.members[0].rid, e.members[0].index, e.handle) for e in events)
    return ev.SealedRun(
        first.now, first.session, first.number, first.seen, first.edge, first.data_offset, member.readers,
        member.manifest, member.nbytes, first.told[0].session, chunks,
    )  # fmt: skip


def play(town: Town, chance: random.Random, as_run: bool) -> None:
    everything: list[ev.Sealed] = []
    for _ in range(60):
        act = chance.choice(["put"] * 8 + ["say", "say", "take", "release", "release", "broker", "abort", "finish"])
        rid = chance.choice(RIDS)
        if act == "put":
            town.put(rid, told=True)
            everything.append(town.told[-1])
        elif act in ("take", "release") and everything:
            event = everything.pop(chance.randrange(len(everything)))
            town.word(ev.Taken if act == "take" else ev.Released, event)
        elif act in ("say", "broker", "finish"):
            town.say(as_run)
            if act == "broker":
                town.put(rid, told=False)
            elif act == "finish" and chance.random() < 0.3:
                town.rig.finish(town.writer, rid)
                town.next[rid] = 0
        elif act == "abort" and chance.random() < 0.3:
            town.rig.abort(town.other, rid)
    town.say(as_run)


@pytest.mark.parametrize("seed", range(60))
def test_a_run_is_what_its_seals_are_one_by_one(make_rig: Any, seed: int) -> None:
    towns = [Town(make_rig), Town(make_rig)]
    for as_run, town in enumerate(towns):
        play(town, random.Random(seed), bool(as_run))
    assert towns[0].facts() == towns[1].facts()


def test_each_of_a_run_is_refused_by_its_own_number(make_rig: Any) -> None:
    town = Town(make_rig)
    for rid in ("p", "q", "p"):
        town.put(rid, told=True)
    numbers = [event.number for event in town.told]
    town.rig.abort(town.other, "p")
    town.say(as_run=True)
    refused = town.rig.heard(town.writer, ef.PutFailed)
    assert [(said.number, said.member, type(said.error)) for said in refused] == [
        (numbers[0], 0, RequestAborted),
        (numbers[2], 0, RequestAborted),
    ]


def test_a_run_that_comes_again_changes_nothing(make_rig: Any) -> None:
    town = Town(make_rig)
    town.put("p", told=True)
    town.put("q", told=True)
    town.say(as_run=True)
    before = town.facts()
    town.rig.again()
    assert town.facts() == before


def test_of_a_run_that_is_known_in_part_the_rest_counts(make_rig: Any) -> None:
    town = Town(make_rig)
    for rid in RIDS:
        town.put(rid, told=True)
    told, town.told = town.told, []
    town.rig.handle(told[0])
    town.rig.handle(run(told))
    assert town.rig.state.sessions[town.writer].applied == told[-1].number
    assert town.rig.state.shelf.payloads == 2 * len(RIDS)
    assert not town.rig.heard(town.writer, ef.PutFailed)


def test_a_run_behind_a_gap_is_asked_for_again(make_rig: Any) -> None:
    town = Town(make_rig)
    for rid in RIDS:
        town.put(rid, told=True)
    told = town.told
    applied = town.rig.state.sessions[town.writer].applied
    effects = town.rig.handle(replace(run(told[1:])))
    assert [said.number for said in effects if isinstance(said, ef.AskResend)] == [applied + 1]
    assert town.rig.state.sessions[town.writer].applied == applied


def test_blocks_that_are_none_of_the_writer_s_are_refused_one_by_one(make_rig: Any) -> None:
    town = Town(make_rig)
    town.put("p", told=True)
    town.put("q", told=True)
    stray = town.told[0].handle._replace(generation=99)
    town.told[0] = replace(town.told[0], handle=stray)
    town.say(as_run=True)
    (refused,) = town.rig.heard(town.writer, ef.PutFailed)
    assert "not reserved by this session" in refused.error.message
    assert town.rig.state.counters["payloads_sealed"] == len(RIDS) + 1
