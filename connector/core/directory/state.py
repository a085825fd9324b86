"""The directory's tables and the few things every rule needs: effects, timers, numbers, the story."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
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
        for number in range((serial + 1) >> self.STEP, (last >> self.STEP) + 1):
            for found, chunk in self._bins.get(number, {}).items():
                if serial < found <= last:
                    yield chunk


class State:
    """Everything the directory knows. Only the modules beside this one change it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now = 0.0
        self.out: list[Effect] = []
        self.allocator = Allocator(settings.begin, settings.end)
        self.blocks: dict[int, Block] = {}
        self.entries: list[int] = list(range(settings.max_blocks - 1, -1, -1))
        self.sessions: dict[int, Session] = {}
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
        self._story: deque[StoryLine] = deque(maxlen=settings.story)
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

    def tell(self, what: str, edge: Edge, rid: str, index: int, session: int, detail: str = "") -> None:
        self._story.append(StoryLine(self.now, what, edge, rid, index, session, detail))

    def story(self, rid: str, edge: Edge | None = None, index: int | None = None) -> list[StoryLine]:
        """What happened to a payload, oldest first, as far back as the story reaches."""
        return [
            line
            for line in self._story
            if line.rid == rid and edge in (None, line.edge) and index in (None, line.index)
        ]
