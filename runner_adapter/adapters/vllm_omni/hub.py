"""One hub for each process and endpoint: vLLM-Omni makes two or three connectors a stage, and they share its nodes."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import connector
from connector import errors
from runner_adapter.adapters.vllm_omni.keys import OURS, TAKEN, Place
from runner_adapter.adapters.vllm_omni.sending import Sender
from runner_adapter.adapters.vllm_omni.taking import Taker

if TYPE_CHECKING:
    import torch

#: Seconds to wait for the broker's answer to a question.
ANSWER_SECONDS = 2.0
#: What has lain here for longer may have been aborted meanwhile: the broker is asked before it is handed out.
FRESH_SECONDS = 0.05
#: Aborted keys that are remembered.
MOST_ENDED = 4096
#: Seconds until an edge that another process reads is asked for again.
TAKEN_SECONDS = 1.0


class Found(NamedTuple):
    """A payload by key. Call `done` once it is copied: with that it is consumed."""

    payload: Mapping[str, torch.Tensor]
    done: Callable[[], None]


class Hub:
    """Sender and taker of one process at one broker. Threads may share it. Raises what connect raises."""

    def __init__(self, endpoint: str | None, stage: str) -> None:
        self.pid = os.getpid()
        self.endpoint, self.stage = endpoint, stage
        #: Connectors that use it and were neither closed nor collected.
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self.node = connector.connect(stage=stage, endpoint=endpoint)
        self.node.answer_timeout = ANSWER_SECONDS
        self.sender = Sender(self.node)
        self._lock = threading.Lock()
        self._taker: Taker | None = None
        #: Edges that another process reads, and until when they are read by name.
        self._by_name: dict[tuple[str, str], float] = {}
        #: Keys that were aborted, or failed, while this process was there: they are read by name.
        self._ended: set[Place] = set()

    def put(self, place: Place, data: object, timeout: float) -> int:
        """As Sender.put."""
        size = self.sender.put(place, data, timeout)
        if self._taker is not None:
            self._taker.expect(place)
        return size

    def take(self, place: Place, seconds: float) -> Found | None:
        """What the key holds; None if there is nothing, after at most `seconds`.

        Raises, once a key: RequestAborted (by others than this adapter), Broken, Unclaimed; and BrokerLost.
        """
        stages = (place.from_stage, place.to_stage)
        if place in self._ended or time.monotonic() < self._by_name.get(stages, 0.0):
            return self._take_by_name(place)
        try:
            return self._take_claimed(place, seconds)
        except errors.ReaderTaken:
            # A second replica, or a second rank: it reads what the first one has not claimed.
            self._by_name[stages] = time.monotonic() + TAKEN_SECONDS
        except (errors.RequestAborted, errors.PeerFailed) as error:
            # The taker's session takes nothing under the key until it finishes it, and that would drop what was put
            # since. So it is told once, and from now on the key is read by name.
            if len(self._ended) >= MOST_ENDED:
                self._ended.clear()
            self._ended.add(place)
            if error.facts.get("reason") not in OURS:
                raise
        return self._take_by_name(place)

    def drop(self, key: str) -> None:
        """Nobody asks for the key any more."""
        if self._taker is not None:
            self._taker.drop(key)

    def tidy(self) -> None:
        """Forget claims that came to nothing. Asks nobody, raises nothing."""
        if self._taker is not None:
            self._taker.tidy(time.monotonic())

    def close(self) -> None:
        with self._lock:
            if self._taker is not None:
                self._taker.close()
        self.node.close()

    def _started(self) -> Taker:
        with self._lock:
            if self._taker is None:
                self._taker = Taker(self.stage, self.endpoint)
            return self._taker

    def _take_claimed(self, place: Place, seconds: float) -> Found | None:
        taker = self._started()
        got = taker.get(place, seconds)
        while got is not None and time.monotonic() - got[1] > FRESH_SECONDS and self._is_over(place, got[0].life):
            got[0].release()
            got = taker.get(place, 0.0)
        return None if got is None else Found(got[0], got[0].release)

    def _name(self, place: Place) -> Any:
        return self.node.edge(place.from_stage, place.to_stage).name

    def _is_over(self, place: Place, life: int) -> bool:
        """Whether the key's use was ended after its payload came here."""
        try:
            seen = self.node.inspect(self._name(place), place.rid)
        except errors.UnknownRequest:
            return True
        seen.release()
        return seen.life != life

    def _take_by_name(self, place: Place) -> Found | None:
        """Look at the payload as an operator would, and end the key: no subscription, a round trip a try."""
        try:
            seen = self.node.inspect(self._name(place), place.rid)
        except errors.UnknownRequest:
            return None

        def done() -> None:
            seen.release()
            self.node.abort(place.rid, TAKEN)
            self.node.finish(place.rid)

        return Found(seen, done)


class _Hubs:
    """The hubs of this process. A forked child starts with none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_endpoint: weakref.WeakValueDictionary[str | None, Hub] = weakref.WeakValueDictionary()


_hubs = _Hubs()
#: A child keeps its parent's hubs alive and untouched: their threads and sockets are the parent's.
_inherited: list[object] = []


def _after_fork() -> None:
    global _hubs
    _inherited.extend([_hubs, *_hubs.by_endpoint.values()])
    _hubs = _Hubs()


os.register_at_fork(after_in_child=_after_fork)


def join(endpoint: str | None, stage: str, user: object) -> Hub:
    """The process's hub at the endpoint, made for its first user. Raises what connect raises."""
    with _hubs.lock:
        hub = _hubs.by_endpoint.get(endpoint)
        if hub is None:
            hub = _hubs.by_endpoint[endpoint] = Hub(endpoint, stage)
        hub.users.add(user)
        return hub


def leave(hub: Hub, user: object) -> None:
    """The last user closes the hub. One that was collected instead has left, too; then so do the hub's nodes."""
    if hub.pid != os.getpid():
        return
    with _hubs.lock:
        hub.users.discard(user)
        if hub.users:
            return
        if _hubs.by_endpoint.get(hub.endpoint) is hub:
            del _hubs.by_endpoint[hub.endpoint]
    hub.close()
