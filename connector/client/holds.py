"""What this process has of what it was sent: taken, and not yet released; and how the broker is told of both.

A block is free when all of it is released, and a step is one block: what is released of it waits for the rest, for at
most PART. The session's lock guards all but `free`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from connector.core.directory.events import Hold, Span
from connector.core.names import Handle
from connector.wire import messages as msg

#: Spans in one Release or Took.
BATCH = 2000
#: Seconds that the release of a part of a block waits for the rest.
PART = 0.02


class Holds:
    """`uuid`: the arena that holds are of; those of an older one are forgotten."""

    def __init__(self) -> None:
        self.uuid = ""
        self.held: set[Hold] = set()
        #: How many are held of each block.
        self._in: dict[Handle, int] = {}
        self._taken: deque[Hold] = deque()
        #: Finalisers append to it, at any point of any thread.
        self._freed: deque[tuple[str, Hold]] = deque()
        #: Released parts of blocks of which more is held, since when the oldest of them.
        self._parts: dict[Handle, list[Hold]] = {}
        self._since = 0.0

    def start_anew(self, uuid: str) -> None:
        """Another broker's arena: nothing is held of it."""
        self.uuid = uuid
        self.held.clear()
        self._in.clear()
        self._taken.clear()
        self._parts.clear()

    def take(self, uuid: str, hold: Hold) -> None:
        """A caller has the payload."""
        if uuid == self.uuid:
            self.look(hold)
            self._taken.append(hold)

    def look(self, hold: Hold) -> None:
        """A caller looks at the payload, without taking it."""
        self.held.add(hold)
        self._in[hold[0]] = self._in.get(hold[0], 0) + 1

    def free(self, uuid: str, hold: Hold) -> None:
        """A payload's last view died, or it was never taken. No lock, no send, no log."""
        self._freed.append((uuid, hold))

    def next_part(self) -> float | None:
        """Monotonic seconds at which released parts are said alone."""
        return self._since + PART if self._parts else None

    def has_words(self) -> bool:
        return bool(self._freed or self._taken or (self._parts and time.monotonic() >= self._since + PART))

    def is_empty(self) -> bool:
        """Nothing is held, and nothing is left to say."""
        return not (self.held or self._freed or self._parts)

    def say(self, post: Callable[[msg.Message], object], everything: bool = False) -> None:
        """Post the word of what was taken and released since the last one; `everything`: parts of blocks, too.

        Interrupted by a signal's handler it says some of it again the next time, which changes nothing.
        """
        # At one go each: finalisers may append meanwhile.
        freed, taken = list(self._freed), list(self._taken)
        self._sort(freed)
        gone = self._gone(everything)
        released = set(gone)
        for spans in spans_of([hold for hold in taken if hold not in released]):
            post(msg.Took(spans))
        for spans in spans_of(gone):
            post(msg.Release(0, spans))
        for hold in gone:
            self._parts.pop(hold[0], None)
        for _ in taken:
            self._taken.popleft()
        for _ in freed:
            self._freed.popleft()

    def _sort(self, freed: list[tuple[str, Hold]]) -> None:
        if freed and not self._parts:
            self._since = time.monotonic()
        for uuid, hold in freed:
            if uuid != self.uuid:
                continue
            handle = hold[0]
            if hold in self.held:
                self.held.discard(hold)
                left = self._in.get(handle, 0) - 1
                if left > 0:
                    self._in[handle] = left
                else:
                    self._in.pop(handle, None)
            self._parts.setdefault(handle, []).append(hold)

    def _gone(self, everything: bool) -> list[Hold]:
        if not self._parts:
            return []
        due = everything or time.monotonic() >= self._since + PART
        return [hold for handle, part in self._parts.items() if due or handle not in self._in for hold in part]


def spans_of(holds: list[Hold]) -> Iterator[tuple[Span, ...]]:
    """Holds as spans, so many for one message: a step's payloads stand one behind the other."""
    found: list[Span] = []
    for handle, member, reader in sorted(holds) if len(holds) > 1 else holds:
        last = found[-1] if found else None
        if last is not None and last.reader == reader and last.handle == handle and last.first + last.count == member:
            found[-1] = Span(handle, last.first, last.count + 1, reader)
        else:
            found.append(Span(handle, member, 1, reader))
    for start in range(0, len(found), BATCH):
        yield tuple(found[start : start + BATCH])
