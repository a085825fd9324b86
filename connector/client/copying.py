"""Puts whose bytes a device still copies: a thread waits for the copies, and seals (docs/gpu.md)."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from connector.client.verbs import Verb
from connector.core.errors import ConnectorError, InvalidPayload, NotYet
from connector.core.names import Handle

if TYPE_CHECKING:
    from connector.client.session import Session


@dataclass(slots=True, eq=False)
class UnderWay:
    """A put on its way. `settle`: seals it, or with an error gives it up; the lock is held, and the copies are over
    either way. What it refers to, the tensors among it, stays until then."""

    rids: frozenset[str]
    handle: Handle
    settle: Callable[[ConnectorError | None], None]
    #: Events behind its copies.
    begun: list[Any] = field(default_factory=list)


class Copying:
    """The session's lock guards it."""

    def __init__(self, session: Session) -> None:
        #: It has this; with a reference back, descriptors would wait for the collector.
        self._session = weakref.ref(session)
        #: In the order of their puts, in which they are sealed.
        self.under_way: deque[UnderWay] = deque()
        #: For the thread; None ends it.
        self._launched: queue.SimpleQueue[UnderWay | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Who waits until a put is settled.
        self._waits: list[tuple[UnderWay, int]] = []

    def add(self, put: UnderWay) -> None:
        """Its copies are launched, as far as they will be. Lock held."""
        self.under_way.append(put)
        self._launched.put(put)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="connector-copies", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """No put comes any more."""
        self._launched.put(None)

    def settled(self, rids: Collection[str] | None, timeout: float) -> Verb[None]:
        """Wait until nothing of these rids (None: of any) is under way. NotYet, with rids and seconds, after `timeout`
        seconds; ClientClosed."""
        if not self.under_way:
            return
        session = self._known()
        with session.lock:
            last = next((put for put in reversed(self.under_way) if rids is None or put.rids & set(rids)), None)
            if last is None:
                return
            request = session.wait_here(timeout, False)
            self._waits.append((last, request.number))
        session.push()
        try:
            came = yield request.answer
        finally:
            with session.lock:
                session.requests.drop(request.number)
        if came is False:
            raise NotYet(
                "what was put before is still being copied from its device",
                rids=sorted(last.rids)[:8],
                waited=timeout,
            )

    def _run(self) -> None:
        while (put := self._launched.get()) is not None:
            error = _over(put.begun)
            session = self._known()
            with session.lock:
                put.settle(error)
                self.under_way.popleft()
                waits, self._waits = self._waits, []
                for wait in waits:
                    if wait[0] is put:
                        session.requests.answer(wait[1], True)
                    else:
                        self._waits.append(wait)
            session.push_or_wait()
            if session.closed:
                session.wake()
            # Nothing of it stays for as long as the thread sleeps.
            del put, session

    def _known(self) -> Session:
        """Who asks, and a put that is not settled yet, keep it."""
        session = self._session()
        assert session is not None
        return session


def _over(begun: Sequence[Any]) -> ConnectorError | None:
    """Wait until the copies are over; why they came to nothing."""
    error: ConnectorError | None = None
    for event in begun:
        try:
            event.synchronize()
        except RuntimeError as failed:
            error = InvalidPayload(f"the device failed to copy the payload: {failed}")
    return error
