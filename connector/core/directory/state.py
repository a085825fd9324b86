"""The directory's tables and the few things every rule needs: effects, timers, numbers, the story."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from connector.core.allocator import Allocator
from connector.core.directory.effects import Effect, Log
from connector.core.directory.objects import (
    Block,
    Chunk,
    EdgeState,
    Life,
    Session,
    Settings,
    Stream,
    Tombstone,
)
from connector.core.errors import InvariantBroken
from connector.core.names import Edge


class Timer(NamedTuple):
    """Due times are checked again when they fire: a timer is a hint, the record is the truth."""

    due: float
    order: int
    kind: str
    subject: tuple[int, int] | Stream | None


class StoryLine(NamedTuple):
    """One step in a payload's life."""

    at: float
    what: str
    edge: Edge
    rid: str
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    session: int
    detail: str


class Shelf:
    """Live payloads by serial number, in steps of 1024, so that a page is found without a walk."""

    STEP = 10

    def __init__(self) -> None:
        self._bins: dict[int, dict[int, Chunk]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, chunk: Chunk) -> None:
        self._bins.setdefault(chunk.serial >> self.STEP, {})[chunk.serial] = chunk
        self._count += 1

    def remove(self, chunk: Chunk) -> None:
        bin_ = self._bins[chunk.serial >> self.STEP]
        del bin_[chunk.serial]
        if not bin_:
            del self._bins[chunk.serial >> self.STEP]
        self._count -= 1

    def after(self, serial: int, last: int) -> Iterator[Chunk]:
        """Chunks with `serial` < their serial <= `last`, ascending."""
        low, high = (serial + 1) >> self.STEP, last >> self.STEP
        numbers: Iterable[int] = range(low, high + 1)
        if high - low > len(self._bins):
            # Serials rise, and so do the bins: far apart payloads do not cost the way between them.
            numbers = [number for number in self._bins if low <= number <= high]
        for number in numbers:
            for found, chunk in self._bins.get(number, {}).items():
                if serial < found <= last:
                    yield chunk


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
        #: Sessions were asked to give back what they reserved ahead.
        self.recalling = False
        #: As StoryLine, without making one: several lines a chunk. A detail that is a number is one of bytes.
        self.story_lines: deque[tuple[float, str, Edge, str, int, int, str | int]] = deque(maxlen=settings.story)
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

    def session(self, number: int) -> Session:
        found = self.sessions.get(number)
        if found is None:
            raise InvariantBroken("an event of a session that is not known", session=number)
        return found

    def tell(self, what: str, edge: Edge, rid: str, index: int, session: int, detail: str | int = "") -> None:
        self.story_lines.append((self.now, what, edge, rid, index, session, detail))

    def story(self, rid: str, edge: Edge | None = None, index: int | None = None) -> list[StoryLine]:
        """What happened to a payload, oldest first, as far back as the story reaches."""
        return [
            StoryLine(*line[:6], line[6] if isinstance(line[6], str) else f"{line[6]} B")
            for line in self.story_lines
            if line[3] == rid and edge in (None, line[2]) and index in (None, line[4])
        ]
