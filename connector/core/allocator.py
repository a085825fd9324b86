"""Who owns which bytes of the arena: live extents by handle, and holes between them.

Holes stand in classes: each power of two is split in 16, so that a class holds sizes within 1/16
of each other. One bitmap says which classes hold a hole, and each class is a heap, largest first:
the request's own class is asked first and fits closest; any hole of a higher class fits surely.
So a reserve fails only if no hole is large enough, and its cost does not grow with what is live.

What is freed first waits in a stack, for the next reserve of just that length: most blocks are like the ones before
them, and the one that was freed last is the one that is in the cache. The stack becomes holes, joined with their
neighbours, as soon as anything else is asked for or freed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from connector.core.errors import InvariantBroken, Refused
from connector.core.names import Handle

#: log2 of the classes that a power of two is split in.
_SPLIT_BITS = 4
#: Entries of past holes that a class may keep beside as many as it has holes.
_STALE_SLACK = 16
#: Freed extents of one length that are kept for the next of that length.
MOST_STACKED = 256


class Extent(NamedTuple):
    """A live range of bytes, and the generation it was reserved under."""

    offset: int
    length: int
    generation: int

    @property
    def handle(self) -> Handle:
        """What names this extent outside: offset and generation."""
        return Handle(self.offset, self.generation)

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.length


class Allocator:
    """The bytes [begin, end), handed out in multiples of `align` (a power of two).

    Nothing here is timed or shared: one owner, one thread. A call that raises changes nothing.
    InvariantBroken if begin, end or align cannot be.
    """

    def __init__(self, begin: int, end: int, align: int = 64) -> None:
        if align < 1 or align & (align - 1) or begin % align or end % align or not 0 <= begin <= end:
            raise InvariantBroken("an arena must be an aligned range", begin=begin, end=end, align=align)
        self._begin, self._end, self._align = begin, end, align
        self._live: dict[int, Extent] = {}
        self._used = 0
        self._generation = 0
        self._holes = _Holes(align)
        #: Freed and not yet holes: begins, by length.
        self._stacks: dict[int, list[int]] = {}
        if begin < end:
            self._holes.add(begin, end)

    @property
    def capacity(self) -> int:
        """Bytes in all."""
        return self._end - self._begin

    @property
    def used(self) -> int:
        """Bytes of the live extents."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """Bytes of the holes."""
        return self.capacity - self._used

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole, and so of the largest extent that could be reserved now."""
        self._join()
        return self._holes.largest()

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes outside the largest hole: 0.0 if they are one hole, or none."""
        return 1.0 - self.largest_hole / self.free_bytes if self.free_bytes else 0.0

    @property
    def live_count(self) -> int:
        """Live extents."""
        return len(self._live)

    @property
    def last_generation(self) -> int:
        """The highest generation seen; the next reserve must be given a higher one."""
        return self._generation

    def __contains__(self, handle: object) -> bool:
        if not isinstance(handle, Handle):
            return False
        extent = self._live.get(handle.offset)
        return extent is not None and extent.generation == handle.generation

    def live(self) -> Iterator[Extent]:
        """The live extents in offset order."""
        return iter(sorted(self._live.values()))

    def holes(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of the holes in offset order."""
        self._join()
        return ((begin, end - begin) for begin, end in sorted(self._holes.end_of.items()))

    def reserve(self, nbytes: int, generation: int) -> Extent | None:
        """A new extent of at least `nbytes` (rounded up to `align`, at least `align`).

        None if no hole is large enough; the generation is then not spent. InvariantBroken if
        nbytes is negative or the generation is not above all that were seen.
        """
        if nbytes < 0 or generation <= self._generation:
            raise InvariantBroken(
                "a reserve needs a size and a higher generation",
                size=nbytes,
                generation=generation,
                last_generation=self._generation,
            )
        length = max(self._align, (nbytes + self._align - 1) & -self._align)
        stack = self._stacks.get(length)
        if stack:
            extent = Extent(stack.pop(), length, generation)
            self._keep(extent)
            return extent
        if stack is None and self._stacks:
            self._join()
        begin = self._holes.find(length)
        if begin is None:
            return None
        return self._take(begin, Extent(begin, length, generation))

    def free(self, handle: Handle) -> Extent:
        """End the extent of this handle and return it; Refused if none is live under offset and generation."""
        extent = self._live.get(handle.offset)
        if extent is None or extent.generation != handle.generation:
            raise Refused("no live block has this handle", offset=handle.offset, generation=handle.generation)
        del self._live[extent.offset]
        self._used -= extent.length
        stack = self._stacks.get(extent.length)
        if stack is None:
            self._join()
            stack = self._stacks[extent.length] = []
        stack.append(extent.offset)
        if len(stack) > MOST_STACKED:
            self._join()
        return extent

    def adopt(self, offset: int, length: int, generation: int) -> Extent:
        """Mark a range as live that an earlier owner handed out.

        Adopt in rising offset order: the hole is then found at once, otherwise all holes may be
        looked at. Generations may come in any order, from 1 up; later reserves must be above them all.
        InvariantBroken if the range is not aligned, not inside, or not wholly free.
        """
        extent = Extent(offset, length, generation)
        facts = {"offset": offset, "length": length, "generation": generation}
        if offset % self._align or length % self._align or length <= 0 or generation < 1:
            raise InvariantBroken("an adopted extent is not aligned, or has no generation", **facts, align=self._align)
        self._join()
        hole = self._holes.around(offset, extent.end)
        if hole is None:
            raise InvariantBroken("an adopted extent is not wholly free", **facts, begin=self._begin, end=self._end)
        return self._take(hole, extent)

    def validate(self) -> None:
        """InvariantBroken unless live extents and holes tile the range and all tables agree. Costs a full pass."""
        if any(offset != extent.offset for offset, extent in self._live.items()):
            raise InvariantBroken("a live extent stands under another offset")
        live = [(extent.offset, extent.end, True) for extent in self._live.values()]
        stacked = [(begin, begin + length, True) for length, stack in self._stacks.items() for begin in stack]
        tiles = sorted(live + stacked + [(begin, end, False) for begin, end in self._holes.end_of.items()])
        at = self._begin
        for begin, end, _ in tiles:
            if begin != at or end <= begin or begin % self._align:
                raise InvariantBroken("extents and holes do not tile the arena", offset=begin, end=end, expected=at)
            at = end
        if at != self._end:
            raise InvariantBroken("extents and holes do not reach the arena's end", end=at, expected=self._end)
        for left, right in pairwise(tiles):
            if not left[2] and not right[2]:
                raise InvariantBroken("two holes touch", offset=left[0], end=right[1])
        if self._used != sum(extent.length for extent in self._live.values()):
            raise InvariantBroken("used bytes are not those of the live extents", used=self._used)
        if any(extent.generation > self._generation for extent in self._live.values()):
            raise InvariantBroken("a live generation is above all that were seen", last_generation=self._generation)
        self._holes.validate()

    def _take(self, hole: int, extent: Extent) -> Extent:
        self._holes.carve(hole, extent.offset, extent.end)
        self._keep(extent)
        return extent

    def _keep(self, extent: Extent) -> None:
        self._live[extent.offset] = extent
        self._used += extent.length
        if extent.generation > self._generation:
            self._generation = extent.generation

    def _join(self) -> None:
        """What is stacked becomes holes."""
        stacks, self._stacks = self._stacks, {}
        for length, stack in stacks.items():
            for begin in stack:
                self._holes.add(begin, begin + length)


class _Holes:
    """Free ranges, coalesced, by both ends and by size class.

    A heap entry is (-length, begin). Taking a hole leaves its entry behind; it is stale once
    `end_of` contradicts it, and goes when it surfaces or when stale entries outnumber the holes.
    """

    def __init__(self, align: int) -> None:
        self._align = align
        self.end_of: dict[int, int] = {}
        self._begin_of: dict[int, int] = {}
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        self._counts: dict[int, int] = {}
        # Bit c is set if class c holds a hole. An int has as many bits as it needs: both levels in one.
        self._bitmap = 0

    def add(self, begin: int, end: int) -> None:
        """A range became free: join it with the holes it touches."""
        left, right = self._begin_of.get(begin), self.end_of.get(end)
        if left is not None:
            self._drop(left)
            begin = left
        if right is not None:
            self._drop(end)
            end = right
        self._insert(begin, end)

    def carve(self, hole: int, begin: int, end: int) -> None:
        """Take [begin, end) out of the hole that begins at `hole` and holds it."""
        hole_end = self._drop(hole)
        if hole < begin:
            self._insert(hole, begin)
        if end < hole_end:
            self._insert(end, hole_end)

    def find(self, length: int) -> int | None:
        """The begin of a hole of at least `length` bytes; None only if there is none."""
        own = self._class(length)
        if own in self._counts:
            size, begin = self._top(own)
            if size >= length:
                return begin
        higher = self._bitmap >> (own + 1)
        if not higher:
            return None
        lowest = (higher & -higher).bit_length() - 1
        return self._top(own + 1 + lowest)[1]

    def around(self, begin: int, end: int) -> int | None:
        """The begin of the hole that holds [begin, end); newest first, None if there is none."""
        for hole, hole_end in reversed(self.end_of.items()):
            if hole <= begin and end <= hole_end:
                return hole
        return None

    def largest(self) -> int:
        """Bytes of the largest hole, 0 if there is none."""
        return self._top(self._bitmap.bit_length() - 1)[0] if self._bitmap else 0

    def validate(self) -> None:
        """InvariantBroken unless ends, classes, heaps and bitmap describe the same holes."""
        if self._begin_of != {end: begin for begin, end in self.end_of.items()}:
            raise InvariantBroken("holes by begin and by end differ")
        entries: dict[int, set[tuple[int, int]]] = {}
        for begin, end in self.end_of.items():
            entries.setdefault(self._class(end - begin), set()).add((begin - end, begin))
        if self._counts != {at: len(found) for at, found in entries.items()} or entries.keys() != self._heaps.keys():
            raise InvariantBroken("hole counts by class differ from the holes")
        for at, heap in self._heaps.items():
            if {entry for entry in heap if self._current(entry)} != entries[at]:
                raise InvariantBroken("a class does not hold its holes", size_class=at)
            if any(heap[(child - 1) // 2] > heap[child] for child in range(1, len(heap))):
                raise InvariantBroken("a class is no heap", size_class=at)
        if self._bitmap != sum(1 << at for at in entries):
            raise InvariantBroken("the bitmap differs from the classes", bitmap=bin(self._bitmap))

    def _class(self, length: int) -> int:
        units = length // self._align
        shift = max(0, units.bit_length() - 1 - _SPLIT_BITS)
        return (shift << _SPLIT_BITS) + (units >> shift)

    def _current(self, entry: tuple[int, int]) -> bool:
        return self.end_of.get(entry[1]) == entry[1] - entry[0]

    def _top(self, at: int) -> tuple[int, int]:
        """(length, begin) of the largest hole of a class that holds one."""
        heap = self._heaps[at]
        while not self._current(heap[0]):
            heapq.heappop(heap)
        return -heap[0][0], heap[0][1]

    def _insert(self, begin: int, end: int) -> None:
        at = self._class(end - begin)
        self.end_of[begin] = end
        self._begin_of[end] = begin
        count = self._counts[at] = self._counts.get(at, 0) + 1
        heap = self._heaps.setdefault(at, [])
        heapq.heappush(heap, (begin - end, begin))
        if len(heap) > 2 * count + _STALE_SLACK:
            heap[:] = sorted({entry for entry in heap if self._current(entry)})
        self._bitmap |= 1 << at

    def _drop(self, begin: int) -> int:
        end = self.end_of.pop(begin)
        del self._begin_of[end]
        at = self._class(end - begin)
        self._counts[at] -= 1
        if not self._counts[at]:
            del self._counts[at], self._heaps[at]
            self._bitmap ^= 1 << at
        return end
