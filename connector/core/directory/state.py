"""The directory's tables and the few things every rule needs: effects, timers, numbers, the story."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from connector.core.allocator import Allocator
from connector.core.directory.effects import Effect, Log, Way
from connector.core.directory.events import Member
from connector.core.directory.objects import (
    Block,
    EdgeState,
    Life,
    Session,
    Settings,
    Stream,
    Tombstone,
)
from connector.core.directory.story import Story, StoryLine
from connector.core.errors import InvariantBroken
from connector.core.names import Edge


class Timer(NamedTuple):
    """Due times are checked again when they fire: a timer is a hint, the record is the truth."""

    due: float
    order: int
    kind: str
    subject: tuple[int, int] | Stream | None


class Shelf:
    """Sealed blocks by the serial number of their first payload, in steps of 1024, so that a page is found without a
    walk. A block's payloads have numbers one behind the other."""

    STEP = 10
    #: Payloads of a block, at most.
    MOST = 1 << 17

    def __init__(self) -> None:
        self._bins: dict[int, dict[int, Block]] = {}
        #: Live payloads in all of them.
        self.payloads = 0

    def __len__(self) -> int:
        return self.payloads

    def add(self, block: Block) -> None:
        self._bins.setdefault(block.serial >> self.STEP, {})[block.serial] = block

    def remove(self, block: Block) -> None:
        bin_ = self._bins[block.serial >> self.STEP]
        del bin_[block.serial]
        if not bin_:
            del self._bins[block.serial >> self.STEP]

    def after(self, serial: int, last: int) -> Iterator[Block]:
        """Blocks that may hold payloads with `serial` < their number <= `last`, ascending."""
        begun = self._last_before(serial)
        if begun is not None:
            yield begun
        low, high = (serial + 1) >> self.STEP, last >> self.STEP
        numbers: Iterable[int] = range(low, high + 1)
        if high - low > len(self._bins):
            # Serials rise, and so do the bins: far apart blocks do not cost the way between them.
            numbers = sorted(number for number in self._bins if low <= number <= high)
        for number in numbers:
            for found, block in self._bins.get(number, {}).items():
                if serial < found <= last:
                    yield block

    def _last_before(self, serial: int) -> Block | None:
        """The last block that begins at or before `serial`: some of its payloads may lie behind."""
        number = serial >> self.STEP
        for at in range(number, max(number - (self.MOST >> self.STEP), 0) - 1, -1):
            begun = [found for found in self._bins.get(at, ()) if found <= serial]
            if begun:
                return self._bins[at][begun[-1]]
        return None


class State:
    """Everything the directory knows. Only the modules beside this one change it."""

    #: Timers that are never looked through.
    TIMERS = 1024

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now = 0.0
        self.out: list[Effect] = []
        self.allocator = Allocator(settings.begin, settings.end)
        self.blocks: dict[int, Block] = {}
        self.entries: list[int] = list(range(settings.max_blocks - 1, -1, -1))
        self.sessions: dict[int, Session] = {}
        #: Sessions with notices to send, and those that said good-bye but hold views.
        self.unheard: set[int] = set()
        self.closing: set[int] = set()
        self.edges: dict[Edge, EdgeState] = {}
        self.lives: dict[str, list[Life]] = {}
        self.tombstones: dict[str, Tombstone] = {}
        self.graves: deque[tuple[int, str]] = deque()
        #: A session that has seen less than this lags too far to be believed about unknown rids.
        self.forgotten = 0
        self.number = 0
        self.life_number = 0
        self.generation = 0
        self.ceiling = 0
        self.serial = 0
        self.shelf = Shelf()
        self.timers: list[Timer] = []
        #: So many timers, and those whose subject is gone are thrown out.
        self._timers_limit = self.TIMERS
        self._order = 0
        self.reserved_bytes = 0
        self.last_progress = 0.0
        self.deadlock_armed = False
        self.stopping = False
        #: Edges with something to send, and edges or rooms to look at before the event ends.
        self.touched: dict[tuple[Edge, int], None] = {}
        self.room_changed = False
        #: Direct ways that were offered in this event, by writer.
        self.ways: dict[int, list[Way]] = {}
        #: Sessions were asked to give back what they reserved ahead.
        self.recalling = False
        self._story = Story(settings.story)
        self.counters: dict[str, int] = {
            "payloads_sealed": 0,
            "payloads_released": 0,
            "bytes_sealed": 0,
            "blocks_reserved": 0,
            "blocks_freed": 0,
            "puts_refused": 0,
            "late_puts": 0,
            "aborts": 0,
            "redelivered": 0,
            "sessions_joined": 0,
            "sessions_died": 0,
            "deadlocks": 0,
        }

    def emit(self, effect: Effect) -> None:
        self.out.append(effect)

    def log(self, level: str, text: str, **facts: object) -> None:
        self.out.append(Log(level, text, {k: v for k, v in facts.items() if v is not None}))

    def order(self) -> int:
        self._order += 1
        return self._order

    def arm(self, due: float, kind: str, subject: tuple[int, int] | Stream | None = None) -> None:
        heapq.heappush(self.timers, Timer(due, self.order(), kind, subject))
        if len(self.timers) > self._timers_limit:
            self.timers = [timer for timer in self.timers if self._is_live(timer)]
            heapq.heapify(self.timers)
            self._timers_limit = max(self.TIMERS, 2 * len(self.timers))

    def _is_live(self, timer: Timer) -> bool:
        """Whether anything is left that the timer could be about."""
        if isinstance(timer.subject, Stream):
            stream = timer.subject
            return not stream.life.over and stream.life.streams.get(stream.edge) is stream
        if timer.subject is None:
            return True
        number, request = timer.subject
        session = self.sessions.get(number)
        if session is None:
            return False
        return request in (session.takes if timer.kind == "take" else session.rooms)

    def edge(self, edge: Edge) -> EdgeState:
        found = self.edges.get(edge)
        if found is None:
            found = self.edges[edge] = EdgeState(edge)
        return found

    def count_sealed(self, edge: EdgeState, count: int, nbytes: int) -> None:
        """So many payloads, of so many bytes together, were stored."""
        edge.payloads_sealed += count
        edge.bytes_sealed += nbytes
        self.counters["payloads_sealed"] += count
        self.counters["bytes_sealed"] += nbytes

    def count_released(self, edge: EdgeState, count: int) -> None:
        edge.payloads_released += count
        self.counters["payloads_released"] += count

    def session(self, number: int) -> Session:
        found = self.sessions.get(number)
        if found is None:
            raise InvariantBroken("an event of a session that is not known", session=number)
        return found

    def tell(self, what: str, edge: Edge, rid: str, index: int, session: int, detail: str | int = "") -> None:
        self._story.tell((self.now, what, edge, rid, index, session, detail))

    def tell_all(self, what: str, edge: Edge, members: tuple[Member, ...], session: int) -> None:
        """The same happened to all of these."""
        self._story.tell((self.now, what, edge, members, -1, session, ""))

    def story(self, rid: str, edge: Edge | None = None, index: int | None = None) -> list[StoryLine]:
        """What happened to a payload, oldest first, as far back as the story reaches."""
        return self._story.of(rid, edge, index)
