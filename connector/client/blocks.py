"""Blocks reserved ahead, by size class, so that a put needs no round trip.

A class that was missed is asked for in growing numbers; one that is not used any more goes back. The
broker caps it all and recalls it when someone waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from connector.arena.arena import Arena
from connector.core.names import Handle

#: Most blocks of one class reserved ahead, and how many at first; of a small one, up to SMALL bytes, so many or so many
#: bytes.
MOST_SMALL, SMALL_BYTES, MOST_AHEAD = 256, 2 << 20, 32
FIRST_SMALL, FIRST, SMALL = 8, 2, 64 << 10
#: Most blocks that streams mean to use next.
MOST_PROMISED = 256
#: Seconds without use after which a class's blocks go back.
IDLE = 5.0
#: Up to here classes are a quarter of a power of two apart, above a sixteenth.
FINE_FROM = 1 << 20
SMALLEST = 512


@dataclass(frozen=True, slots=True)
class ReservedBlock:
    """Room that this session may write: byte offset and length in `arena`."""

    arena: Arena
    handle: Handle
    length: int


@dataclass(slots=True)
class _Shelf:
    blocks: deque[ReservedBlock] = field(default_factory=deque)
    want: int = 0
    asked: int = 0
    #: When it was last seen to be used, and whether it was since.
    used: float = 0.0
    fresh: bool = True


def size_class(size: int) -> int:
    """The class that holds `size` bytes: at most a quarter larger, at most 1/16 above 1 MiB."""
    if size <= SMALLEST:
        return SMALLEST
    steps = 2 if size <= FINE_FROM else 4
    step = 1 << max((size - 1).bit_length() - 1 - steps, 6)
    return -(-size // step) * step


class BlockCache:
    """Reserved and unused blocks. The session's lock guards it."""

    def __init__(self) -> None:
        self._shelves: dict[int, _Shelf] = {}
        #: Bytes that the broker lets one session reserve ahead.
        self.limit = 0
        self.bytes = 0
        #: The class of the last pop has less than half of what it wants.
        self.low = False
        #: Blocks that streams mean to use next, each with the time at which a tick first saw it; the oldest first.
        self._promised: dict[Handle, tuple[ReservedBlock, float]] = {}

    def pop(self, size: int) -> ReservedBlock | None:
        """A block of the class, if one is at hand; a miss makes the class want more."""
        shelf = self._shelves.get(size)
        if shelf is None:
            shelf = self._shelves[size] = _Shelf()
        shelf.fresh = True
        if shelf.blocks:
            block = self._taken(shelf)
            self.bytes -= block.length
            return block
        self.low = True
        first, most = FIRST, MOST_AHEAD
        if size <= SMALL:
            first, most = FIRST_SMALL, max(min(MOST_SMALL, SMALL_BYTES // size), MOST_AHEAD)
        shelf.want = min(max(2 * shelf.want, first), most)
        return None

    def promise(self, size: int) -> ReservedBlock | None:
        """A block of the class for one who means to use it soon. It stays here: `redeem` says whether it still does."""
        if len(self._promised) >= MOST_PROMISED:
            oldest, _ = self._promised.pop(next(iter(self._promised)))
            self._shelves.setdefault(oldest.length, _Shelf()).blocks.appendleft(oldest)
        shelf = self._shelves.get(size)
        if shelf is None or not shelf.blocks:
            return None
        block = self._taken(shelf)
        self._promised[block.handle] = (block, 0.0)
        return block

    def _taken(self, shelf: _Shelf) -> ReservedBlock:
        # The last that came: its memory is the warmest.
        block = shelf.blocks.pop()
        self.low = len(shelf.blocks) + shelf.asked <= shelf.want // 2
        return block

    def is_promised(self, block: ReservedBlock) -> bool:
        """It was not given back, nor taken by another."""
        return block.handle in self._promised

    def redeem(self, block: ReservedBlock) -> bool:
        """Whether it is the caller's now."""
        promised = self._promised.pop(block.handle, None)
        if promised is None:
            return False
        self.bytes -= block.length
        shelf = self._shelves.get(block.length)
        if shelf is not None:
            shelf.fresh = True
        return True

    def to_ask(self, size: int) -> int:
        """How many to ask for now, after a pop: half of what is wanted may be missing."""
        missing = self._missing(size)
        room = (self.limit // 2 - self.bytes) // size
        if room <= 0:
            return 0
        count = min(missing, room)
        self._shelves[size].asked += count
        return count

    def make_room(self, size: int) -> list[ReservedBlock]:
        """Blocks to be given back, so that this class may ask for what it misses: of the one that has the most bytes,
        until it has no more than this one wants. So neither takes all, and they never drive each other out in turn."""
        wanted = self._missing(size) * size
        most, shelf = max(self._shelves.items(), key=lambda item: len(item[1].blocks) * item[0])
        back: list[ReservedBlock] = []
        while wanted and self.bytes + wanted > self.limit // 2 and len(shelf.blocks) * most > wanted:
            back.append(shelf.blocks.popleft())
            self.bytes -= most
        return back

    def _missing(self, size: int) -> int:
        shelf = self._shelves[size]
        missing = shelf.want - len(shelf.blocks) - shelf.asked
        return missing if missing >= (shelf.want // 2 or 1) else 0

    def add(self, size: int, asked: int, blocks: list[ReservedBlock]) -> None:
        """The answer to a reservation ahead; fewer than asked means that there is no room to spare."""
        shelf = self._shelves.setdefault(size, _Shelf())
        shelf.asked = max(shelf.asked - asked, 0)
        shelf.blocks.extend(blocks)
        self.bytes += sum(block.length for block in blocks)
        if len(blocks) < asked:
            shelf.want = max(shelf.want // 2, 1)

    def take_all(self) -> list[ReservedBlock]:
        """Everything, to be given back: someone waits for room, or the session ends."""
        blocks = self._all()
        self._shelves.clear()
        self._promised.clear()
        self.bytes = 0
        return blocks

    def _all(self) -> list[ReservedBlock]:
        promised = [block for block, _ in self._promised.values()]
        return promised + [block for shelf in self._shelves.values() for block in shelf.blocks]

    def take_idle(self, now: float) -> list[ReservedBlock]:
        """Blocks of classes that were not used lately."""
        for shelf in self._shelves.values():
            if shelf.fresh:
                shelf.fresh, shelf.used = False, now
        idle = [size for size, shelf in self._shelves.items() if now - shelf.used >= IDLE and not shelf.asked]
        blocks = [block for size in idle for block in self._shelves.pop(size).blocks]
        for handle, (block, seen) in list(self._promised.items()):
            if not seen:
                self._promised[handle] = (block, now)
            elif now - seen >= IDLE:
                del self._promised[handle]
                blocks.append(block)
        self.bytes -= sum(block.length for block in blocks)
        return blocks

    def handles(self) -> list[Handle]:
        return [block.handle for block in self._all()]

    def next_idle(self) -> float | None:
        seen = [shelf.used for shelf in self._shelves.values() if not shelf.fresh]
        seen += [seen for _, seen in self._promised.values() if seen]
        return min(seen) + IDLE if seen else None
