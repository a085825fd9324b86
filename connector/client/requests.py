"""Requests under way: who waits for which answer, until when, and what to send again after a lost link."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from connector.core.errors import ConnectorError
from connector.wire.messages import Message

#: Seconds beyond a request's own deadline that the broker's answer may take: it is the broker that
#: knows why nothing came, so its word is preferred to ours.
GRACE = 2.0


class Answer:
    """What a caller waits for: a value or an error, given once, by any thread; what is given later is ignored.

    Much cheaper than a concurrent.futures.Future: one is made and given for each payload that is waited for.
    """

    __slots__ = ("_error", "_value", "done", "tell")

    def __init__(self) -> None:
        self.done = False
        self._value: Any = None
        self._error: ConnectorError | None = None
        #: Called, by whoever gives it, once it is given; set before `done` is looked at.
        self.tell: Callable[[], object] | None = None

    def give(self, value: Any, error: ConnectorError | None = None) -> None:
        if not self.done:
            self._value, self._error = value, error
            self.done = True
        # Every time: who was interrupted in here (by a signal's handler) may have told nobody.
        if self.tell is not None:
            self.tell()

    def is_done(self) -> bool:
        return self.done

    def failed(self) -> bool:
        return self._error is not None

    def result(self) -> Any:
        """The value; raises the error. It must be done."""
        if self._error is not None:
            # Anew: it would refer to this frame, which refers to it, and both to the caller's, with the payloads in it.
            raise self._error.anew()
        return self._value


@dataclass(slots=True)
class Request:
    """One question to the broker. `message` None: a wait that only this process ends."""

    number: int
    answer: Answer
    #: Monotonic seconds; then the answer is not waited for any more.
    give_up: float
    message: Message | None
    #: Rids that a waiting put carries, so that an abort can end it.
    rids: tuple[str, ...] = ()
    #: What a local wait returns when its time is over.
    default: Any = None
    since: float = 0.0


class Requests:
    """The table, by number. The session's lock guards it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.open: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.open)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self.open.values()))

    def next_number(self) -> int:
        return next(self._numbers)

    def add(self, request: Request) -> Request:
        self.open[request.number] = request
        return request

    def get(self, number: int) -> Request | None:
        return self.open.get(number)

    def answer(self, number: int, value: Any) -> bool:
        """False if nobody waits for it any more."""
        request = self.open.get(number)
        if request is None:
            return False
        request.answer.give(value)
        # Behind it: who is interrupted in between is answered again.
        self.open.pop(number, None)
        return True

    def fail(self, number: int, error: ConnectorError) -> bool:
        request = self.open.get(number)
        if request is None:
            return False
        request.answer.give(None, error)
        self.open.pop(number, None)
        return True

    def drop(self, number: int) -> bool:
        """The caller went away; True if the answer was still to come."""
        return self.open.pop(number, None) is not None

    def due(self, now: float) -> list[Request]:
        """Those whose time is over, taken out of the table."""
        over = [request for request in self.open.values() if request.give_up <= now]
        for request in over:
            del self.open[request.number]
        return over

    def next_deadline(self) -> float | None:
        return min((request.give_up for request in self.open.values()), default=None)
