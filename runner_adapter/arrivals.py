"""What came for each request, by life, until it is given: the store behind an Inbox.

Each use of a rid is a life, numbered by the broker. `Polled` names the life of a payload, but not of an END or a
failure: they belong to the life that is open. A life is shown only when those before it have ended here. An Outbox
says every END with a payload, so that two uses of a rid which end between two polls are told apart; of a writer that
ends both without one, the second END is taken for the first's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from connector import ConnectorError, Payload, Polled, errors
from runner_adapter import values


class Chunk:
    """A payload that was not given yet; no tensors once it was given or dropped."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def let_go(self) -> dict[str, torch.Tensor]:
        given, self.tensors = self.tensors, {}
        return given

    def own(self) -> bool:
        """Copy the tensors, so that their block goes back; whether there are any."""
        self.tensors = {key: values.owned(tensor, key=key) for key, tensor in self.tensors.items()}
        return bool(self.tensors)


@dataclass(slots=True)
class Life:
    """`number` 0: it brought no payload. None: failed here before its first payload, whose number it takes."""

    number: int | None
    chunks: deque[Chunk] = field(default_factory=deque)
    #: Nothing more comes.
    closed: bool = False
    error: ConnectorError | None = None
    #: Its END or failure was given.
    told: bool = False

    @property
    def over(self) -> bool:
        return self.closed or self.error is not None

    @property
    def untold(self) -> bool:
        return self.over and not self.told


class Arrivals:
    """Lives by rid, the oldest first. `full`: a stream is one payload."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.lives: dict[str, deque[Life]] = {}
        self.dropped = 0

    def front(self, rid: str) -> Life | None:
        """The oldest life that is here."""
        lives = self.lives.get(rid)
        return lives[0] if lives else None

    def note(self, polled: Polled) -> list[Chunk]:
        """All that has come. The chunks returned are views still."""
        fresh: list[Chunk] = []
        for rid in {**polled, **polled.failed, **dict.fromkeys(polled.ended)}:
            fresh += self._note_rid(rid, polled)
        return fresh

    def _note_rid(self, rid: str, polled: Polled) -> Iterator[Chunk]:
        # An END that no payload says: of the life before, if another one begins here, else of the last.
        bare = rid in polled.ended
        for payload in polled.get(rid, ()):
            life = self._open(rid, payload.life)
            if life is None:
                closed = self._close_before(rid, bare)
                bare = bare and not closed
                life = self._begin(rid, payload.life)
            yield from self._add(rid, life, payload)
            if payload.last:
                self._close(rid, life)
                bare = False
        if rid in polled.failed:
            self._close(rid, self._open(rid) or self._begin(rid, 0), polled.failed[rid].anew())
        elif bare:
            self._close(rid, self._open(rid) or self._begin(rid, 0))

    def _open(self, rid: str, number: int | None = None) -> Life | None:
        """The rid's open life, if it is the one of this number."""
        lives = self.lives.get(rid)
        if not lives or lives[-1].closed:
            return None
        if number is not None:
            if lives[-1].number not in (number, None):
                return None
            lives[-1].number = number
        return lives[-1]

    def _close_before(self, rid: str, ended: bool) -> bool:
        """Another life begins, so the open one is over, if there is one: `ended`, or else without a word, as when the
        broker was started anew."""
        life = self._open(rid)
        if life is not None:
            lost = errors.WriterDied("the rid was used anew before this stream's END", rid=rid)
            self._close(rid, life, None if ended else lost)
        return life is not None

    def _begin(self, rid: str, number: int) -> Life:
        life = Life(number)
        self.lives.setdefault(rid, deque()).append(life)
        return life

    def _close(self, rid: str, life: Life, error: ConnectorError | None = None) -> None:
        life.closed = True
        if error is None and self.full and not life.chunks:
            error = errors.InvalidPayload("the stream ended without its payload", rid=rid)
        life.error = life.error or error

    def _add(self, rid: str, life: Life, payload: Payload) -> Iterator[Chunk]:
        if life.error is not None:
            self.dropped += 1
        elif self.full and life.chunks and payload.last and not payload:
            # The END alone of a sender that did not know at its payload that it was the last.
            return
        elif self.full and (life.chunks or payload.index):
            self.dropped += 1
            why = "a full payload is one chunk, and the sender streams: one of the two stages is set up wrongly"
            self.break_off(life, errors.InvalidPayload(why, rid=rid, edge=str(payload.edge), index=payload.index))
        elif payload or not payload.last or self.full:
            # In a stream an empty last payload is the END alone.
            life.chunks.append(Chunk(dict(payload)))
            yield life.chunks[-1]

    def fail(self, rid: str, error: ConnectorError) -> None:
        """The request failed elsewhere: what is here of it goes, and what still comes."""
        life = self.front(rid)
        if life is None:
            life = Life(None)
            self.lives[rid] = deque([life])
        if not life.told:
            self.break_off(life, error)

    def break_off(self, life: Life, error: ConnectorError) -> None:
        """Its payloads go, and the first error stays."""
        self.drop(life)
        life.error = life.error or error

    def drop(self, life: Life) -> None:
        self.dropped += len(life.chunks)
        while life.chunks:
            life.chunks.popleft().let_go()

    def end_front(self, rid: str) -> Life | None:
        """Take the oldest life out, its payloads dropped."""
        lives = self.lives.get(rid)
        if not lives:
            return None
        life = lives.popleft()
        self.drop(life)
        if not lives:
            del self.lives[rid]
        return life

    def validate(self) -> None:
        """InvariantBroken if what is known contradicts itself."""
        for rid, lives in self.lives.items():
            if not lives or any(not life.closed for life in list(lives)[:-1]):
                raise errors.InvariantBroken("a life that is open lies before another", rid=rid)
            if any(life.told and (life.chunks or not life.over) for life in lives):
                raise errors.InvariantBroken("an end was given that is none", rid=rid)
