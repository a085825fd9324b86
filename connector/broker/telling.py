"""How a session is told of payloads: a stream's next chunk alone in the form in which writers tell it, which its reader
may have opened before it comes; all else as descriptors."""

from __future__ import annotations

from collections.abc import Iterable

from connector.broker import translate
from connector.core.directory.effects import Deliver, Descriptor
from connector.core.names import MAX_INDEX, Edge
from connector.wire import messages as msg
from connector.wire.alike import MOST_MANIFEST, ToldAlike, Where, tail

#: Streams that are known; with more of them, all are forgotten. Chunks before this one go as descriptors: a stream may
#: have no more, or be told directly from then on.
MOST_KNOWN, FIRST = 4096, 3


class Telling:
    """Turns Deliver into messages."""

    def __init__(self) -> None:
        self._known: dict[tuple[Edge, str], tuple[int, bytes, ToldAlike]] = {}

    def messages(self, effect: Deliver) -> Iterable[msg.Deliver | msg.Next]:
        told = effect.descriptors
        if len(told) == 1 and _is_plain(told[0]):
            alike = self._alike(told[0])
            where = Where(*told[0][7:11])
            return (msg.Next(alike.head(told[0].index, where) + tail(effect.ahead)),)
        return translate.deliveries(effect)

    def _alike(self, told: Descriptor) -> ToldAlike:
        key = (told.edge, told.rid)
        found = self._known.get(key)
        if found is not None and found[0] == told.life and found[1] == told.manifest:
            return found[2]
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        alike = ToldAlike(told.edge, told.rid, told.life, told.manifest)
        self._known[key] = (told.life, told.manifest, alike)
        return alike


def _is_plain(told: Descriptor) -> bool:
    """It can be told so: the first reader's, no attempt, no flags, behind the chunk before it."""
    return (
        FIRST <= told.index <= MAX_INDEX
        and told.reader == told.attempt == told.flags == 0
        and told.behind == told.index - 1
        and told.data_offset <= MAX_INDEX
        and len(told.manifest) <= MOST_MANIFEST
    )
