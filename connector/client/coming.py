"""What is about to be told, by a writer itself or through the broker: the block of a stream's next chunk is named
beforehand (wire/alike.py), and the reader opens that, warm from the last one, before it sleeps. Woken, it compares and
has it.

A guess: what comes otherwise is read as ever, and what was opened in vain is dropped, without a trace at the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connector.arena.arena import Arena
from connector.client.rid_queue import Arrived
from connector.core.directory.effects import Descriptor
from connector.core.errors import ConnectorError
from connector.wire.alike import MOST_KNOWN, TAIL, Told, ToldAlike

#: payload.open_ahead, which a client that only asks the broker does without, as without torch.
Opener = Callable[[Descriptor, Arena, Arena], Arrived]


class Coming:
    """Of one socket; guarded as that is."""

    __slots__ = ("_opened", "told")

    def __init__(self) -> None:
        self.told = Told()
        #: By the frame that would tell it, but what that names ahead.
        self._opened: dict[bytes, tuple[ToldAlike, Arrived]] = {}

    def open(self, open_one: Opener, arena: Arena, mapped: Arena) -> None:
        """Open what was announced. `mapped`: where this reader has its views of `arena`."""
        announced = self.told.announced
        while announced:
            alike, (index, where) = announced.popitem()
            try:
                arrived = open_one(alike.descriptor(index, where), arena, mapped)
            except ConnectorError:
                # Whoever takes it, if it comes, is told what is wrong with it.
                continue
            if len(self._opened) >= MOST_KNOWN:
                self._opened.clear()
            self._opened[alike.head(index, where)] = (alike, arrived)

    def read(self, frame: bytes) -> Sequence[Descriptor | Arrived]:
        """What the frame tells of, opened if it was. ProtocolViolation: it cannot be read."""
        found = self._opened.pop(frame[:-TAIL], None)
        if found is not None:
            alike, arrived = found
            # One that ends wrongly is refused as any other.
            if self.told.announce(alike, arrived.descriptor, frame):
                return [arrived]
        return self.told.read(frame)
