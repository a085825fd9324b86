"""The reader's half: a key is claimed when it is first asked for, and the broker's push answers the claim.

vLLM-Omni polls: every millisecond, every key that some request waits for. Only the first look goes to the broker;
until the answer comes, `get` looks at a future. What nobody has asked for stays with the broker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import connector
from connector import errors
from runner_adapter.adapters.vllm_omni.keys import Place

if TYPE_CHECKING:
    from connector import AsyncNode, Payload

log = logging.getLogger(__name__)

#: Seconds that a claim stands; whoever still polls claims anew.
CLAIM_SECONDS = 30.0
#: Seconds that the first look may take; it is a round trip, unless the broker is away.
LOOK_SECONDS = 1.0
#: Seconds that a payload lies here for who claimed it and does not come.
LIE_SECONDS = 600.0


class _Started(NamedTuple):
    """What the thread made: it owns the loop, and the loop the node."""

    node: AsyncNode
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event


class _Claim:
    """One key on its way here."""

    def __init__(self) -> None:
        #: Done when the broker has said that there is nothing yet.
        self.looked: Future[None] = Future()
        self.found: Future[Payload | None]
        self.done_at = 0.0
        #: This very process has put it: it is on its way.
        self.expected = False


class Taker:
    """Claims of one process, over an event loop in a thread. Threads may share it.

    Raises what connect raises.
    """

    def __init__(self, stage: str, endpoint: str | None) -> None:
        self._lock = threading.Lock()
        self._claims: dict[Place, _Claim] = {}
        #: No first look is waited for until then: the broker was away.
        self._away_until = 0.0
        ready: Future[_Started] = Future()
        # The thread must not keep this object alive: what is not closed is collected.
        self._thread = threading.Thread(
            target=_serve, args=(stage, endpoint, ready), name="connector-omni-taker", daemon=True
        )
        self._thread.start()
        self._started = ready.result()
        ending = weakref.finalize(self, _stop_soon, self._started, os.getpid())
        # At the interpreter's end the node says good-bye itself.
        ending.atexit = False

    def get(self, place: Place, seconds: float) -> tuple[Payload, float] | None:
        """What the key holds, and since when it lies here; None if nothing came within `seconds`.

        Raises ReaderTaken (another process reads the edge), BrokerLost; RequestAborted, Broken, Unclaimed and other
        failures of the peer: those again and again.
        """
        claim, new = self._claim(place)
        if new and time.monotonic() >= self._away_until:
            either: list[Future[Any]] = [claim.looked, claim.found]
            wait(either, LOOK_SECONDS, FIRST_COMPLETED)
        if claim.expected:
            claim.expected, seconds = False, max(seconds, LOOK_SECONDS)
        if seconds > 0:
            wait([claim.found], seconds)
        if not claim.found.done():
            return None
        with self._lock:
            if self._claims.get(place) is not claim:
                return None
            del self._claims[place]
        try:
            payload = claim.found.result()
        except CancelledError:
            return None
        except errors.BrokerLost:
            self._away_until = time.monotonic() + LOOK_SECONDS
            raise
        return None if payload is None else (payload, claim.done_at)

    def expect(self, place: Place) -> None:
        """The key was put by this process, and the broker has it: the next get is worth a wait."""
        with self._lock:
            claim = self._claims.get(place)
            if claim is not None:
                claim.expected = True

    def drop(self, key: str) -> None:
        """Nobody asks for the key any more, on whatever edge."""
        with self._lock:
            dropped = [self._claims.pop(place) for place in list(self._claims) if place.key == key]
        for claim in dropped:
            claim.found.cancel()

    def tidy(self, now: float) -> None:
        """Forget claims that came to nothing, and payloads that lie here too long. Asks nobody, raises nothing."""
        with self._lock:
            done = [(place, claim) for place, claim in self._claims.items() if claim.found.done()]
            for place, claim in done:
                error = None if claim.found.cancelled() else claim.found.exception()
                empty = claim.found.cancelled() or (error is None and claim.found.result() is None)
                if empty or now - claim.done_at >= LIE_SECONDS:
                    del self._claims[place]
                if not empty and place not in self._claims:
                    log.warning("nobody came within %d s for %s: %s", LIE_SECONDS, place, str(error or "a payload"))

    def close(self) -> None:
        """Give up what is claimed, leave the broker, end the thread. Idempotent."""
        with self._lock:
            # Views must die before the node can leave.
            self._claims.clear()
        _stop_soon(self._started, os.getpid())
        self._thread.join()

    def _claim(self, place: Place) -> tuple[_Claim, bool]:
        with self._lock:
            claim = self._claims.get(place)
            if claim is not None:
                return claim, False
            claim = self._claims[place] = _Claim()
            claim.found = asyncio.run_coroutine_threadsafe(_take(self._started.node, place, claim), self._started.loop)
            return claim, True


async def _take(node: AsyncNode, place: Place, claim: _Claim) -> Payload | None:
    """One look, then one claim: a payload, or None when its time is over."""
    try:
        found = await _one(node, place, 0.0)
        if found is None:
            claim.looked.set_result(None)
            found = await _one(node, place, CLAIM_SECONDS)
        return found
    finally:
        claim.done_at = time.monotonic()


async def _one(node: AsyncNode, place: Place, timeout: float) -> Payload | None:
    try:
        return await node.edge(place.from_stage, place.to_stage).take(place.rid, timeout=timeout)
    except errors.Unavailable:
        return None


def _serve(stage: str, endpoint: str | None, ready: Future[_Started]) -> None:
    try:
        asyncio.run(_until_stopped(stage, endpoint, ready))
    finally:
        if not ready.done():
            ready.set_exception(errors.BrokerLost("the reader's thread ended before it had connected"))


async def _until_stopped(stage: str, endpoint: str | None, ready: Future[_Started]) -> None:
    try:
        node = await connector.connect_async(stage=stage, endpoint=endpoint)
    except errors.ConnectorError as error:
        ready.set_exception(error)
        return
    async with node:
        stop = asyncio.Event()
        ready.set_result(_Started(node, asyncio.get_running_loop(), stop))
        await stop.wait()


def _stop_soon(started: _Started, pid: int) -> None:
    """Finaliser: the taker was not closed. A forked child leaves its parent's loop alone."""
    if os.getpid() == pid and not started.loop.is_closed():
        started.loop.call_soon_threadsafe(started.stop.set)
