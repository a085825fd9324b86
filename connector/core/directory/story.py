"""What happened to payloads, as far back as a bound reaches: lines for people, one or one a lot."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from connector.core.directory.events import Member
from connector.core.names import Edge


class StoryLine(NamedTuple):
    """One step in a payload's life."""

    at: float
    what: str
    edge: Edge
    rid: str
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    session: int
    detail: str


#: As StoryLine, without making one; a lot's members instead of a rid. A detail that is a number is one of bytes.
_Line = tuple[float, str, Edge, "str | tuple[Member, ...]", int, int, "str | int"]


class Story:
    """The last `limit` steps."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: deque[_Line] = deque()
        self._steps = 0

    def tell(self, line: _Line) -> None:
        self._lines.append(line)
        members = line[3]
        self._steps += 1 if type(members) is str else len(members)
        while self._steps > self._limit:
            members = self._lines.popleft()[3]
            self._steps -= 1 if type(members) is str else len(members)

    def of(self, rid: str, edge: Edge | None, index: int | None) -> list[StoryLine]:
        """What happened to payloads of the rid, oldest first."""
        found: list[StoryLine] = []
        for at, what, where, who, number, session, detail in self._lines:
            if edge not in (None, where):
                continue
            steps = [(who, number, detail)] if isinstance(who, str) else _steps_of(who, what)
            for name, place, told in steps:
                if name == rid and index in (None, place):
                    said = told if isinstance(told, str) else f"{told} B"
                    found.append(StoryLine(at, what, where, name, place, session, said))
        return found


def _steps_of(members: tuple[Member, ...], what: str) -> list[tuple[str, int, str | int]]:
    return [(member.rid, member.index, member.nbytes if what == "sealed" else "") for member in members]
