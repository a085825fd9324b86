"""A part of a lot: whatever is said of it is what it would be of its payloads one by one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.directory import events as ev
from connector.core.directory import lots
from connector.core.directory.objects import Chunk, Lot
from connector.core.errors import ProtocolViolation
from connector.core.names import Handle

COUNT = 8
RIDS = [f"r{place}" for place in range(COUNT)]
SIZE, DATA, STRIDE = 2048, 128, 192


class Town:
    """A writer and its reader; steps of COUNT streams."""

    def __init__(self, make: Any, **settings: Any) -> None:
        self.rig = make(**settings)
        self.joined = 100
        self.writer, self.reader = self.join("thinker"), self.join("talker")
        assert self.rig.subscribe(self.reader) is None
        self.steps = 0

    def join(self, stage: str) -> int:
        self.joined += 1
        number = self.joined
        self.rig.handle(ev.Joined(self.rig.now, number, stage, number, 0, True))
        self.rig.seen[number] = self.rig.state.sessions[number].seen
        return number

    def step(self, told: bool = False, stride: int = STRIDE, last: bool = False, data: int = DATA) -> Handle:
        handle: Handle = self.rig.room(self.writer, SIZE)
        self.seal(handle, told, stride, last, data)
        return handle

    def seal(
        self, handle: Handle, told: bool = False, stride: int = STRIDE, last: bool = False, data: int = DATA
    ) -> Any:
        rig = self.rig
        members = tuple(rig.member(rid, self.steps, last=last) for rid in RIDS)
        self.steps += 1
        spoken = (ev.Told(0, COUNT, self.reader),) if told else ()
        number, seen = rig.number(self.writer), rig.seen[self.writer]
        return rig.handle(
            ev.Sealed(rig.now, self.writer, number, seen, rig.edge, handle, data, members, spoken, stride)
        )

    def take(self, spans: Iterable[ev.Span]) -> None:
        self.rig.handle(ev.Taken(self.rig.now, self.reader, tuple(spans)))

    def release(self, spans: Iterable[ev.Span]) -> None:
        number = self.rig.number(self.reader)
        self.rig.handle(ev.Released(self.rig.now, self.reader, number, tuple(spans)))

    def lots(self, handle: Handle) -> list[tuple[int, int]]:
        """Of a block: where each of its lots begins, and of how many it is; all are in order."""
        found = [(lot.first, len(lot.members)) for lot in self.rig.state.blocks[handle.offset].lots]
        assert found == sorted(found)
        return found

    def places(self, handle: Handle) -> list[int]:
        """Of the block's live payloads, in the order of the listing."""
        return [chunk.member for chunk in lots.look(self.rig.state.blocks[handle.offset])]

    def facts(self) -> Any:
        """What anyone may see of it."""
        state = self.rig.state
        said = {
            number: [repr(effect) for effect in said if not isinstance(effect, ef.Acked)]
            for number, said in self.rig.said.items()
        }
        sessions = {
            n: (s.applied, s.reserved_bytes, s.held, s.held_bytes, dict(s.pushed), dict(s.holds_in))
            for n, s in state.sessions.items()
        }
        live = [(chunk.serial, chunk.data_offset, chunk.shares) for chunk in self.live()]
        return said, sessions, dict(state.counters), state.shelf.payloads, live

    def live(self) -> list[Chunk]:
        return [chunk for block in self.rig.state.blocks.values() for chunk in lots.look(block)]


def one_by_one(spans: Iterable[ev.Span]) -> list[ev.Span]:
    return [
        span._replace(first=place, count=1) for span in spans for place in range(span.first, span.first + span.count)
    ]


def play(town: Town, chance: random.Random, singly: bool) -> None:
    """Spans of steps in any order, some again and some beyond what there is."""
    handles: list[Handle] = []
    for _ in range(60):
        act = chance.choice(
            ["step", "told", "early", "take", "take", "release", "release", "release", "abort", "again"]
        )
        first, count = chance.randrange(COUNT), chance.randrange(1, COUNT + 2)
        chosen, reader = chance.random(), chance.choice([0] * 9 + [-1, 1])
        lucky = chance.random() < 0.1
        if act in ("step", "told", "early"):
            if len(handles) - len([h for h in handles if h.offset not in town.rig.state.blocks]) > 6:
                continue
            handle = town.rig.room(town.writer, SIZE)
            handles.append(handle)
            if act == "early":
                spans = [ev.Span(handle, first, count, 0)]
                town.release(one_by_one(spans) if singly else spans)
            town.seal(handle, act != "step")
        elif act in ("take", "release") and handles:
            spans = [ev.Span(handles[int(chosen * len(handles))], first, count, reader)]
            {"take": town.take, "release": town.release}[act](one_by_one(spans) if singly else spans)
        elif act == "abort" and lucky:
            town.rig.abort(town.writer, RIDS[first])
            town.rig.hear(town.reader)
        elif act == "again" and lucky:
            town.rig.again()


@pytest.mark.parametrize("seed", range(60))
def test_what_is_said_of_parts_is_what_is_said_of_each(make_rig: Any, seed: int) -> None:
    towns = [Town(make_rig), Town(make_rig)]
    for singly, town in enumerate(towns):
        play(town, random.Random(seed), bool(singly))
    assert towns[0].facts() == towns[1].facts()


@pytest.fixture
def town(make_rig: Any) -> Town:
    return Town(make_rig)


def test_parts_are_lots_of_their_own(town: Town) -> None:
    """In the order of their places, however they came about; the last that goes frees the block."""
    handle = town.step()
    assert town.lots(handle) == [(0, 8)]
    town.take([ev.Span(handle, 5, 2, 0)])
    assert town.lots(handle) == [(0, 5), (5, 2), (7, 1)]
    town.take([ev.Span(handle, 1, 5, 0)])
    assert town.lots(handle) == [(0, 1), (1, 4), (5, 1), (6, 1), (7, 1)]
    for first, count, rest in ((2, 2, [0, 1, 4, 5, 6, 7]), (7, 9, [0, 1, 4, 5, 6]), (1, 4, [0, 5, 6])):
        town.release([ev.Span(handle, first, count, 0)])
        assert town.places(handle) == rest
    town.release([ev.Span(handle, 0, 8, 0)])
    assert handle.offset not in town.rig.state.blocks
    assert town.rig.state.shelf.payloads == 0


def test_a_part_makes_no_records(town: Town) -> None:
    handle = town.step()
    town.release([ev.Span(handle, 3, 1, 0)])
    block = town.rig.state.blocks[handle.offset]
    assert not block.members
    for rid, place in zip(RIDS, range(COUNT), strict=True):
        (life,) = town.rig.state.lives[rid]
        found = life.streams[town.rig.edge].live.get(0)
        if place == 3:
            assert found is None
        else:
            assert isinstance(found, Lot) and found.first <= place < found.first + len(found.members)


def test_credits_of_a_part_return_once(make_rig: Any) -> None:
    """A part that was taken, and then released, and the rest that was only released."""
    town = Town(make_rig, window=COUNT)
    handle = town.step()
    other = town.step()
    assert [d.handle for d in town.rig.arrived(town.reader)] == [handle] * COUNT
    town.take([ev.Span(handle, 2, 3, 0)])
    assert [d.handle for d in town.rig.arrived(town.reader)] == [other] * 3
    town.release([ev.Span(handle, 2, 3, 0)])
    assert town.rig.arrived(town.reader) == []
    town.release([ev.Span(handle, 0, 8, 0)])
    assert [d.handle for d in town.rig.arrived(town.reader)] == [other] * 5


def test_the_reader_s_death_leaves_what_it_had_not_released(town: Town) -> None:
    handle = town.step()
    town.take([ev.Span(handle, 4, 4, 0)])
    town.release([ev.Span(handle, 1, 2, 0)])
    town.rig.die(town.reader)
    # What it had released is nobody's; the rest is the next reader's.
    town.reader = town.join("talker")
    town.rig.subscribe(town.reader)
    assert [d.member for d in town.rig.arrived(town.reader)] == [0, 3, 4, 5, 6, 7]
    town.release([ev.Span(handle, 0, 8, 0)])
    assert handle.offset not in town.rig.state.blocks


def test_an_abort_behind_a_cut_is_of_one_payload(town: Town) -> None:
    handle = town.step()
    town.take([ev.Span(handle, 0, 4, 0)])
    town.rig.abort(town.writer, "r5")
    (dropped,) = town.rig.heard(town.reader, ef.DropHolds)
    assert dropped.holds == (ev.Hold(handle, 5, 0),)
    assert town.lots(handle) == [(0, 4)]
    assert town.places(handle) == list(range(COUNT))
    assert [chunk.member for chunk in town.live() if chunk.void] == [5]
    town.release([ev.Span(handle, 3, 3, 0)])
    assert town.places(handle) == [0, 1, 2, 6, 7]
    town.release([ev.Span(handle, 0, 8, 0)])
    assert handle.offset not in town.rig.state.blocks


@pytest.mark.parametrize("told", [True, False], ids=["told", "by the broker"])
def test_words_before_the_seal_count_in_parts(town: Town, told: bool) -> None:
    """If its writer told it; what a reader speaks of, its writer has told, whatever the Seal says."""
    town.step()
    town.rig.read(town.reader)
    handle = town.rig.room(town.writer, SIZE)
    town.take([ev.Span(handle, 1, 3, 0)])
    town.release([ev.Span(handle, 2, 1, 0), ev.Span(handle, 5, 2, 0)])
    town.seal(handle, told)
    assert town.places(handle) == [0, 1, 3, 4, 7]
    come = {d.member for d in town.rig.arrived(town.reader)}
    assert come == (set() if told else {0, 4, 7})
    town.release([ev.Span(handle, 0, 8, 0)])
    assert handle.offset not in town.rig.state.blocks


def test_words_of_others_cut_nothing(town: Town) -> None:
    handle = town.step()
    stranger = town.join("else")
    for kind in (ev.Span(handle, 2, 2, 0), ev.Span(handle, 2, 2, 1), ev.Span(handle, 2, 2, -1)):
        town.rig.handle(ev.Taken(town.rig.now, stranger, (kind,)))
        town.rig.handle(ev.Released(town.rig.now, stranger, town.rig.number(stranger), (kind,)))
    for reader in (1, -1):
        town.take([ev.Span(handle, 2, 2, reader)])
        town.release([ev.Span(handle, 2, 2, reader)])
    assert town.lots(handle) == [(0, 8)]


# -- where each one's data begins -------------------------------------------------------------------


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "one by one"])
def test_each_payload_s_data_is_a_stride_behind_the_last_one_s(make_rig: Any, alike: bool) -> None:
    """Sent at once, or one by one, to a reader with less than a window."""
    town = Town(make_rig, window=COUNT if alike else COUNT // 2)
    handle = town.step()
    assert bool(town.rig.state.blocks[handle.offset].lots) is alike
    found = town.rig.arrived(town.reader)
    while len(found) < COUNT:
        town.take([ev.Span(handle, 0, 8, 0)])
        found += town.rig.arrived(town.reader)
    assert [(d.member, d.data_offset) for d in found] == [(at, DATA + at * STRIDE) for at in range(COUNT)]
    assert {d.length for d in found} == {SIZE}


def test_without_a_stride_all_count_from_one_place(town: Town) -> None:
    town.step(stride=0)
    assert {d.data_offset for d in town.rig.arrived(town.reader)} == {DATA}


def test_who_looks_at_a_payload_is_told_where_it_is(town: Town) -> None:
    town.step()
    shown = town.rig.inspect(town.writer, "r3")
    assert isinstance(shown, ef.Descriptor) and shown.data_offset == DATA + 3 * STRIDE


LARGEST = (SIZE - DATA) // (COUNT - 1) // 64 * 64


@pytest.mark.parametrize(("stride", "good"), [(LARGEST, True), (LARGEST + 64, False), (96, False), (1 << 40, False)])
def test_a_stride_that_leaves_the_block_is_refused(town: Town, stride: int, good: bool) -> None:
    handle = town.step(stride=stride)
    refused = town.rig.put_failures(town.writer)
    if good:
        assert not refused and len(town.places(handle)) == COUNT
    else:
        assert len(refused) == COUNT and all(isinstance(error, ProtocolViolation) for error in refused)
        assert not town.live()
