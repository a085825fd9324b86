"""What arrived of one rid on one edge: payloads in order, and marks: END of a life's stream, or its failure.

Payloads come by two ways, through the broker and directly from the writer. Each names the one before it (`behind`);
what comes before that is parked. A signal's handler may end the thread that delivers anywhere: what has arrived is
delivered again then, so each step is either not yet done, or found done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from connector.arena.arena import Arena
from connector.client.requests import Answer
from connector.core.directory.effects import Descriptor
from connector.core.directory.events import Hold
from connector.core.errors import ConnectorError

if TYPE_CHECKING:
    from connector.client.payload import Opened


class Arrived(NamedTuple):
    """A payload's descriptor, the arena that it points into, how this reader holds it, and what was opened of it before
    it came, if anything was."""

    descriptor: Descriptor
    arena: Arena
    hold: Hold
    opened: Opened | None = None

    @classmethod
    def of(cls, descriptor: Descriptor, arena: Arena, opened: Opened | None = None) -> Arrived:
        hold = tuple.__new__(Hold, (descriptor.handle, descriptor.member, descriptor.reader))
        return tuple.__new__(cls, (descriptor, arena, hold, opened))


class EndMark(NamedTuple):
    life: int


class FailMark(NamedTuple):
    life: int
    error: ConnectorError

    def raised(self) -> ConnectorError:
        """The error anew: the one that is kept here must not keep its callers' frames, and their views, alive."""
        return self.error.anew()


Item = Arrived | EndMark | FailMark


@dataclass(slots=True)
class TakeWait:
    """A caller waiting on an empty queue, who is told to look; `stream`: an END is something to see, too."""

    request: int
    answer: Answer
    stream: bool


@dataclass(slots=True)
class RidQueue:
    items: deque[Item] = field(default_factory=deque)
    waits: deque[TakeWait] = field(default_factory=deque)
    #: Highest (life, index) accepted: anything not above it is a repetition.
    newest: tuple[int, int] = (0, -1)
    #: An END or failure of this life was noted.
    closed_life: int = 0
    #: There is a hole in this life: nothing of it, or of an older one, is told any more.
    broken_life: int = 0
    #: What came early, by the (life, index) that it is behind.
    parked: dict[tuple[int, int], list[Item]] | None = None

    # -- arrivals: True if it is to be given back ------------------------------------------------------

    def accept(self, arrived: Arrived) -> bool:
        """Append a payload, unless it is a repetition or behind a hole."""
        told = arrived.descriptor
        place = (told.life, told.index)
        if place <= self.newest:
            return not self.holds(arrived)
        if told.life <= self.broken_life:
            self.newest = place
            return True
        # It is there if this was interrupted before the next line but one.
        if not self.items or not _is_same(self.items[-1], arrived):
            self.items.append(arrived)
        self.newest = place
        return False

    def pass_over(self, arrived: Arrived) -> None:
        """The broker has voided it: a hole."""
        self.broken_life = max(self.broken_life, arrived.descriptor.life)
        self.newest = max(self.newest, (arrived.descriptor.life, arrived.descriptor.index))

    def mark(self, mark: EndMark | FailMark) -> None:
        if isinstance(mark, FailMark):
            self.items.append(mark)
            self.broken_life = max(self.broken_life, mark.life)
        elif self.closed_life < mark.life:
            self.items.append(mark)
        self.closed_life = max(self.closed_life, mark.life)

    def is_early(self, life: int, behind: int) -> bool:
        return behind >= 0 and self.newest < (life, behind)

    def park(self, behind: tuple[int, int], item: Item) -> None:
        if self.parked is None:
            self.parked = {}
        waiting = self.parked.setdefault(behind, [])
        if not isinstance(item, Arrived):
            # A failure at this point says that what was told behind it is none of the stream.
            waiting.insert(0, item)
        elif not any(_is_same(other, item) for other in waiting):
            waiting.append(item)

    def unpark(self, hold: Hold) -> Arrived | None:
        """What came early leaves, if it is this."""
        for behind, waiting in (self.parked or {}).items():
            for item in waiting:
                if isinstance(item, Arrived) and item.hold == hold:
                    waiting.remove(item)
                    if not waiting and self.parked is not None:
                        del self.parked[behind]
                    return item
        return None

    # -- departures -----------------------------------------------------------------------------------

    def holds(self, arrived: Arrived) -> bool:
        """Whether this very payload is here."""
        return any(_is_same(item, arrived) for item in self.items)

    def leaves(self, item: Arrived) -> None:
        """A payload is about to be taken out."""
        place = (item.descriptor.life, item.descriptor.index)
        if place > self.newest:
            self.newest = place

    def take_lives(self, life: int) -> list[Arrived]:
        """Everything of the lives up to `life` leaves; the payloads are returned."""
        dropped = [item for item in self.items if isinstance(item, Arrived) and item.descriptor.life <= life]
        for item in dropped:
            self.leaves(item)
        self.items = deque(item for item in self.items if life_of(item) > life)
        for behind in [behind for behind in self.parked or () if behind[0] <= life]:
            assert self.parked is not None
            dropped += [item for item in self.parked.pop(behind) if isinstance(item, Arrived)]
        return dropped

    def start_anew(self) -> list[Arrived]:
        """Another broker numbers lives from the start: what is here is of none of its lives. What was parked goes."""
        parked = [item for items in (self.parked or {}).values() for item in items if isinstance(item, Arrived)]
        self.newest, self.closed_life, self.broken_life, self.parked = (0, -1), 0, 0, None
        self.items = deque(_lifeless(item) for item in self.items)
        return parked


def life_of(item: Item) -> int:
    return item.descriptor.life if isinstance(item, Arrived) else item.life


def _is_same(item: Item, arrived: Arrived) -> bool:
    return isinstance(item, Arrived) and item.hold == arrived.hold


def _lifeless(item: Item) -> Item:
    if isinstance(item, Arrived):
        return Arrived.of(item.descriptor._replace(life=0), item.arena)
    return item._replace(life=0)
