"""The allocator against a plain model: exact, conserving, and deaf to stale handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector.core.allocator import Allocator, Extent
from connector.core.errors import InvariantBroken, Refused
from connector.core.names import Handle

ALIGN, BEGIN, UNITS = 64, 4096, 3000
END = BEGIN + UNITS * ALIGN
# Small, near each other in one class (512 units: classes of 32), and anything.
SIZES = st.integers(0, 5 * ALIGN) | st.integers(505, 560).map(lambda n: n * ALIGN) | st.integers(0, UNITS * ALIGN)


class AllocatorMachine(RuleBasedStateMachine):
    """Reserve, free, stale free, double free and adopt beside a dict; the model finds holes by walking it."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(BEGIN, END, ALIGN)
        self.live: dict[int, tuple[int, int]] = {}
        self.dead: list[Handle] = []
        self.last = 0

    def model_holes(self) -> list[tuple[int, int]]:
        holes, at = [], BEGIN
        for offset, (length, _) in sorted(self.live.items()):
            if offset > at:
                holes.append((at, offset - at))
            at = offset + length
        return holes + [(at, END - at)] * (at < END)

    @rule(nbytes=SIZES, step=st.integers(1, 3))
    def reserve(self, nbytes: int, step: int) -> None:
        holes = self.model_holes()
        extent = self.allocator.reserve(nbytes, self.last + step)
        length = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        if extent is None:
            assert all(hole < length for _, hole in holes)
            return
        assert (extent.length, extent.generation) == (length, self.last + step)
        assert any(begin <= extent.offset and extent.end <= begin + hole for begin, hole in holes)
        self.last = extent.generation
        self.live[extent.offset] = (length, extent.generation)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        length, generation = self.live.pop(offset)
        handle = Handle(offset, generation)
        assert handle in self.allocator
        assert self.allocator.free(handle) == Extent(offset, length, generation)
        assert handle not in self.allocator
        self.dead.append(handle)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        """A handle freed before, whatever stands at its offset now."""
        handle = data.draw(st.sampled_from(self.dead))
        with pytest.raises(Refused) as caught:
            self.allocator.free(handle)
        assert caught.value.facts == {"offset": handle.offset, "generation": handle.generation}

    @precondition(lambda self: self.live)
    @rule(data=st.data(), other=st.sampled_from([-1, 1]), moved=st.sampled_from([0, ALIGN, 1]))
    def free_with_a_wrong_handle(self, data: st.DataObject, other: int, moved: int) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        with pytest.raises(Refused):
            self.allocator.free(Handle(offset + moved, self.live[offset][1] + other * 10**6))

    @rule(first=st.integers(-2, UNITS), units=st.integers(1, 600), generation=st.integers(1, 40))
    def adopt(self, first: int, units: int, generation: int) -> None:
        offset, length = BEGIN + first * ALIGN, units * ALIGN
        if any(begin <= offset and offset + length <= begin + hole for begin, hole in self.model_holes()):
            assert self.allocator.adopt(offset, length, generation) == Extent(offset, length, generation)
            self.live[offset] = (length, generation)
            self.last = max(self.last, generation)
            # Adopted generations may repeat: such a handle would name the new extent.
            self.dead = [handle for handle in self.dead if handle != (offset, generation)]
        else:
            with pytest.raises(InvariantBroken):
                self.allocator.adopt(offset, length, generation)

    @precondition(lambda self: self.last > 0)
    @rule(below=st.integers(0, 3))
    def reserve_with_an_old_generation(self, below: int) -> None:
        with pytest.raises(InvariantBroken):
            self.allocator.reserve(64, self.last - below)

    @invariant()
    def model_and_allocator_agree(self) -> None:
        allocator, holes = self.allocator, self.model_holes()
        allocator.validate()
        assert list(allocator.holes()) == holes
        assert list(allocator.live()) == [Extent(o, n, g) for o, (n, g) in sorted(self.live.items())]
        free, largest = sum(hole for _, hole in holes), max((hole for _, hole in holes), default=0)
        assert (allocator.free_bytes, allocator.largest_hole) == (free, largest)
        assert (allocator.used, allocator.capacity) == (END - BEGIN - free, END - BEGIN)
        assert (allocator.live_count, allocator.last_generation) == (len(self.live), self.last)
        assert allocator.fragmentation == (1 - largest / free if free else 0.0)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def filled(*units: int) -> tuple[Allocator, list[Extent]]:
    """An arena that is full with extents of these sizes, in this order."""
    allocator = Allocator(0, sum(units) * ALIGN, ALIGN)
    extents = [allocator.reserve(n * ALIGN, at + 1) for at, n in enumerate(units)]
    assert allocator.free_bytes == 0
    return allocator, [extent for extent in extents if extent is not None]


@pytest.mark.parametrize("sizes", [(32, 33), (33, 32)])
def test_the_one_large_enough_hole_of_the_own_class_is_found(sizes: tuple[int, int]) -> None:
    """32 and 33 units share a class; only the second fits 33, whichever was freed last."""
    allocator, extents = filled(sizes[0], 1, sizes[1], 1)
    for at in (0, 2):
        allocator.free(extents[at].handle)
    wanted = extents[0 if sizes[0] == 33 else 2]
    got = allocator.reserve(33 * ALIGN, 10)
    assert got is not None
    assert (got.offset, got.length) == (wanted.offset, wanted.length)
    assert allocator.reserve(33 * ALIGN, 11) is None


def test_a_hole_of_the_own_class_is_used_before_a_larger_one_is_split() -> None:
    allocator, extents = filled(200, 1, 33, 1)
    for at in (0, 2):
        allocator.free(extents[at].handle)
    assert allocator.reserve(33 * ALIGN, 10) == Extent(extents[2].offset, 33 * ALIGN, 10)
    assert allocator.largest_hole == 200 * ALIGN


@pytest.mark.parametrize("sizes", [(64, 200), (200, 64)])
def test_the_nearest_larger_class_is_split(sizes: tuple[int, int]) -> None:
    allocator, extents = filled(sizes[0], 1, sizes[1], 1)
    for at in (0, 2):
        allocator.free(extents[at].handle)
    got = allocator.reserve(62 * ALIGN, 10)
    assert got is not None
    assert got.offset == extents[2 * sizes.index(64)].offset


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_join_whichever_is_freed_first(order: tuple[int, ...]) -> None:
    allocator, extents = filled(3, 40, 7)
    for at in order:
        allocator.free(extents[at].handle)
    assert list(allocator.holes()) == [(0, 50 * ALIGN)]
    assert allocator.reserve(50 * ALIGN, 10) == Extent(0, 50 * ALIGN, 10)


def test_sizes_are_rounded_up_and_zero_takes_one_unit() -> None:
    allocator = Allocator(0, 4 * ALIGN, ALIGN)
    assert [allocator.reserve(n, g).length for g, n in enumerate((0, 1, 64, 65), start=1) if g < 4] == [64, 64, 64]  # type: ignore[union-attr]
    assert allocator.reserve(65, 4) is None
    assert allocator.reserve(64, 4) is not None


def test_a_request_that_found_no_room_does_not_spend_its_generation() -> None:
    allocator, extents = filled(2)
    assert allocator.reserve(1, 2) is None
    allocator.free(extents[0].handle)
    assert allocator.reserve(1, 2) == Extent(0, ALIGN, 2)


def test_a_request_larger_than_the_arena_finds_no_room() -> None:
    allocator = Allocator(0, 4 * ALIGN, ALIGN)
    assert allocator.reserve(2**62, 1) is None
    assert allocator.reserve(4 * ALIGN + 1, 1) is None


def test_an_arena_of_no_bytes_is_full() -> None:
    allocator = Allocator(64, 64)
    assert allocator.reserve(0, 1) is None
    assert (allocator.capacity, allocator.largest_hole, allocator.fragmentation) == (0, 0, 0.0)
    allocator.validate()


def test_a_freed_handle_does_not_free_the_next_owner_of_its_offset() -> None:
    allocator, extents = filled(5)
    allocator.free(extents[0].handle)
    heir = allocator.reserve(5 * ALIGN, 9)
    assert heir is not None
    assert heir.offset == extents[0].offset
    with pytest.raises(Refused):
        allocator.free(extents[0].handle)
    assert heir.handle in allocator
    assert extents[0].handle not in allocator
    assert tuple(heir.handle) not in allocator


def test_extents_adopted_in_any_order_are_those_that_were_live() -> None:
    first, extents = filled(3, 1, 40, 2, 600)
    kept = [extents[at] for at in (4, 0, 2)]
    second = Allocator(0, first.capacity, ALIGN)
    for extent in kept:
        assert second.adopt(*extent) == extent
    second.validate()
    assert list(second.live()) == sorted(kept)
    assert list(second.holes()) == [(extents[1].offset, ALIGN), (extents[3].offset, 2 * ALIGN)]
    with pytest.raises(InvariantBroken):
        second.reserve(1, 5)
    assert second.reserve(1, 6) is not None


@pytest.mark.parametrize(
    ("offset", "length", "generation"),
    [(1, 64, 1), (64, 63, 1), (64, 0, 1), (64, -64, 1), (64, 64, 0), (-64, 64, 1), (1024, 64, 1), (960, 128, 1)],
)
def test_an_extent_that_cannot_be_is_not_adopted(offset: int, length: int, generation: int) -> None:
    allocator = Allocator(0, 1024, 64)
    with pytest.raises(InvariantBroken) as caught:
        allocator.adopt(offset, length, generation)
    assert caught.value.facts["offset"] == offset
    assert (allocator.used, allocator.last_generation) == (0, 0)
    allocator.validate()


@pytest.mark.parametrize(
    ("begin", "end", "align"), [(1, 64, 64), (0, 65, 64), (128, 64, 64), (-64, 64, 64), (0, 96, 48), (0, 64, 0)]
)
def test_a_range_that_is_no_arena_is_refused(begin: int, end: int, align: int) -> None:
    with pytest.raises(InvariantBroken):
        Allocator(begin, end, align)


@pytest.mark.parametrize(("nbytes", "generation"), [(-1, 5), (64, 1), (64, 0), (64, -1)])
def test_a_reserve_with_a_negative_size_or_a_generation_not_above_is_refused(nbytes: int, generation: int) -> None:
    allocator = Allocator(0, 1024)
    assert allocator.reserve(64, 1) is not None
    with pytest.raises(InvariantBroken):
        allocator.reserve(nbytes, generation)
    assert allocator.used == 64


def test_many_turns_over_one_class_stay_valid_and_small() -> None:
    """One hole stays the largest of its class, so the entries of holes that come and go below it never surface."""
    allocator, extents = filled(33, 1, 32, 1, 1)
    allocator.free(extents[0].handle)
    for _ in range(500):
        for extent in extents[2:4]:
            allocator.free(extent.handle)
            allocator.validate()
        for extent in extents[2:4]:
            allocator.adopt(*extent)
    assert list(allocator.holes()) == [(0, 33 * ALIGN)]
    assert sum(len(heap) for heap in allocator._holes._heaps.values()) < 50


def _break(allocator: Allocator, name: str) -> None:
    holes: Any = allocator._holes
    extent, (first, _) = next(allocator.live()), next(allocator.holes())
    actions: dict[str, Callable[[], Any]] = {
        "used": lambda: setattr(allocator, "_used", allocator.used + 64),
        "lost extent": lambda: allocator._live.pop(extent.offset),
        "overlap": lambda: allocator._live.update({extent.offset: extent._replace(length=extent.length + 64)}),
        "misplaced": lambda: allocator._live.update({extent.offset: extent._replace(offset=extent.offset + 64)}),
        "generation": lambda: setattr(allocator, "_generation", 0),
        "bitmap": lambda: setattr(holes, "_bitmap", holes._bitmap ^ 1),
        "counts": lambda: holes._counts.update({5: 1}),
        "ends": lambda: holes._begin_of.popitem(),
        "heap": lambda: next(iter(holes._heaps.values())).clear(),
        "no heap": lambda: next(iter(holes._heaps.values())).insert(0, (0, 0)),
        "lost hole": lambda: holes._drop(first),
        "split hole": lambda: (holes.carve(first, first, first + 64), holes._insert(first, first + 64)),
        "short": lambda: setattr(allocator, "_end", allocator._end + 64),
    }
    actions[name]()


@pytest.mark.parametrize(
    "name",
    "used,lost extent,overlap,misplaced,generation,bitmap,counts,ends,heap,no heap,lost hole,split hole,short".split(
        ","
    ),
)
def test_validate_sees_a_table_that_contradicts_another(name: str) -> None:
    """A check that the machine above relies on must itself be able to fail."""
    allocator, extents = filled(4, 1, 4, 1)
    allocator.free(extents[0].handle)
    allocator.free(extents[2].handle)
    allocator.validate()
    _break(allocator, name)
    with pytest.raises(InvariantBroken):
        allocator.validate()
