"""The sender's half: a key is put once, confirmed by the broker, and never overwritten; a lost chunk stops its stream.

vLLM-Omni 0.30 only logs that a put failed, and gives the lost chunk's key to the next chunk: the reader would see a
stream without a hole. So what failed once fails the chunks behind it, until the stream is cleaned up or starts anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from connector import errors
from runner_adapter.adapters.vllm_omni import codec
from runner_adapter.adapters.vllm_omni.keys import CLEANED, LEFT, Key, Place

if TYPE_CHECKING:
    import torch

    from connector import Node, Ticket

log = logging.getLogger(__name__)

#: Requests whose puts are remembered; an older one's second use of a key waits behind the first.
MOST_STREAMS = 4096
#: Seconds between two tries of one put.
AGAIN = 0.05
#: Seconds that the broker's word on a put is waited for, at least.
CONFIRM_SECONDS = 2.0
#: Seconds that a reader's word of having taken a payload may be on its way.
SETTLE_SECONDS = 0.5


class _Book:
    """What was put of one stream (a request at its stage)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: Highest chunk number put, by edge (from_stage, to_stage).
        self.tops: dict[tuple[str, str], int] = {}
        #: Number and error of the first chunk that was lost, by edge.
        self.lost: dict[tuple[str, str], tuple[int, errors.ConnectorError]] = {}


class Sender:
    """Threads may share it. One node for all edges of the process."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._lock = threading.Lock()
        self._books: OrderedDict[str, _Book] = OrderedDict()

    def put(self, place: Place, data: object, timeout: float) -> int:
        """Hand over data and return its bytes; the broker has it then. Tries for `timeout` seconds where that helps.

        Raises AlreadyPut (nobody has taken what the key holds), StreamPoisoned (an earlier chunk was lost), PoolFull,
        PoolDeadlock, PayloadTooLarge, InvalidPayload, UnsupportedTensor, RequestAborted, BrokerLost.
        """
        key = Key.parse(place.key)
        book = self._book(key)
        with book.lock:
            try:
                self._admit(place, key, book)
                payload = codec.encode(data, place.key)
                self._hand_over(place, payload, time.monotonic() + timeout)
            except errors.AlreadyPut:
                # Nothing is lost: the key holds the payload that was put first.
                raise
            except errors.ConnectorError as error:
                if key.chunked:
                    book.lost.setdefault(place[:2], (key.number, error.anew()))
                raise
            book.tops[place[:2]] = max(key.number, book.tops.get(place[:2], 0))
        return codec.size_of(payload)

    def clean(self, text: str) -> None:
        """End whatever the key holds, on every edge, and let its stream be used anew."""
        with self._lock:
            book = self._books.get(Key.parse(text).stream)
        if book is None:
            rows = self.node.payloads(rid_prefix=f"{text}@")
            places = {place for row in rows if (place := Place.of_row(row)) is not None and place.key == text}
        else:
            with book.lock:
                book.lost.clear()
                # A request's chunks are cleaned up one by one, most of them long taken: those are left alone.
                places = {place for stages in book.tops if self._is_live(place := Place(*stages, text))}
        for place in sorted(places):
            self._end(place, CLEANED)

    def _book(self, key: Key) -> _Book:
        with self._lock:
            book = self._books.setdefault(key.stream, _Book())
            self._books.move_to_end(key.stream)
            while len(self._books) > MOST_STREAMS:
                self._books.popitem(last=False)
            return book

    def _admit(self, place: Place, key: Key, book: _Book) -> None:
        """AlreadyPut or StreamPoisoned if the put must not be. A stream's first chunk starts it anew."""
        top = book.tops.get(place[:2])
        if top is not None and key.number <= top:
            self._must_be_free(place)
            # Whoever took the former payload by name aborted it: that is over.
            self.node.finish(place.rid)
        number, cause = book.lost.get(place[:2], (0, None))
        if cause is not None and key.number >= number:
            raise errors.StreamPoisoned(
                "an earlier chunk of this request was not handed over, so none behind it is",
                key=place.key,
                edge=f"{place.from_stage}:{place.to_stage}",
                lost=number,
                cause=str(cause),
            )
        if key.number == 0:
            book.lost.pop(place[:2], None)
            if top:
                self._drop_rest(place, key.stream)
                book.tops[place[:2]] = 0

    def _must_be_free(self, place: Place) -> None:
        until = time.monotonic() + SETTLE_SECONDS
        while self._is_live(place):
            if time.monotonic() >= until:
                raise errors.AlreadyPut(
                    "the key holds a payload that nobody has taken yet; it is not overwritten",
                    key=place.key,
                    edge=f"{place.from_stage}:{place.to_stage}",
                )
            time.sleep(AGAIN)

    def _drop_rest(self, first: Place, stream: str) -> None:
        """Chunks that nobody took of the stream's former use: its next reader must not find them."""
        rows = self.node.payloads(edge=f"{first.from_stage}:{first.to_stage}", rid_prefix=f"{stream}_")
        places = {place for row in rows if (place := Place.of_row(row)) is not None}
        left = sorted(place for place in places if Key.parse(place.key).stream == stream)
        for place in left:
            self._end(place, LEFT)
        if left:
            log.warning("dropped %d untaken chunks of a former use: from %s to %s", len(left), left[0], left[-1])

    def _hand_over(self, place: Place, payload: Mapping[str, torch.Tensor], until: float) -> None:
        edge = self.node.edge(place.from_stage, place.to_stage)
        while True:
            try:
                ticket = edge.put(place.rid, payload, timeout=max(until - time.monotonic(), 0.0))
                self._confirm(ticket, until)
                return
            except (errors.PoolDeadlock, errors.BrokerLost):
                # A deadlock passes, a broker comes back.
                if time.monotonic() >= until:
                    raise
            finally:
                # Nothing more comes under this key. What is unread stays.
                self.node.finish(place.rid)
            time.sleep(AGAIN)

    def _confirm(self, ticket: Ticket, until: float) -> None:
        """Wait for the broker's word on this put. What it refuses later than that, nobody would hear of."""
        try:
            self.node.flush(max(until - time.monotonic(), CONFIRM_SECONDS))
        except errors.ConnectorError:
            # Another put's refusal is in that one's ticket, and raised there.
            if not ticket.done():
                raise
        ticket.result()

    def _is_live(self, place: Place) -> bool:
        try:
            self.node.inspect(self.node.edge(place.from_stage, place.to_stage).name, place.rid).release()
        except errors.UnknownRequest:
            return False
        return True

    def _end(self, place: Place, reason: str) -> None:
        self.node.abort(place.rid, reason)
        self.node.finish(place.rid)
