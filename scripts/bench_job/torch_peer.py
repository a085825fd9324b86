"""torch.multiprocessing's queue as a system of the benchmark, with torch's default sharing strategy and the other one.

Its two ends meet by a connection instead of a parent's pipe, since the stages here are not made with it; what goes
through it, and the thread that feeds it, are the queue's own.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch.multiprocessing as tmp

from connector.bench.payloads import Tensors
from connector.bench.systems import Place, TwoSides
from connector.bench.workloads import Workload


class _Side:
    def __init__(self, place: Place, strategy: str) -> None:
        # One file descriptor a tensor that is under way.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        tmp.set_sharing_strategy(strategy)
        self._address = f"{place.folder}/{place.name}.queue"

    def _queue(self, reader: Connection | None, writer: Connection | None) -> Any:
        made = tmp.get_context("spawn").Queue()
        # What it has is shared between processes that inherit it; one end of it is another's here.
        made._reader.close()
        made._writer.close()
        locks = (made._rlock, made._wlock, made._sem)
        made.__setstate__((False, made._maxsize, reader or writer, writer or reader, *locks, os.getpid()))
        return made


class _Writer(_Side):
    # Its thread sends later.
    needs_fresh = True
    spans: list[int] | None = None

    def __init__(self, place: Place, workload: Workload, strategy: str) -> None:
        super().__init__(place, strategy)
        self._connection = Client(self._address, "AF_UNIX")
        self._queue_ = self._queue(None, self._connection)

    def put(self, stream: int, payload: Tensors) -> None:
        self._queue_.put(dict(payload))

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        for stream, payload in enumerate(payloads):
            self.put(stream, payload)

    def acked(self, count: int) -> None:
        return

    def close(self, given_up: bool = False) -> None:
        if given_up:
            self._queue_.cancel_join_thread()
        self._queue_.close()
        if not given_up:
            self._queue_.join_thread()


class _Reader(_Side):
    def __init__(self, place: Place, workload: Workload, strategy: str) -> None:
        super().__init__(place, strategy)
        self._listener = Listener(self._address, "AF_UNIX")
        self._queue_: Any = None

    def get(self) -> list[Tensors]:
        if self._queue_ is None:
            # The writer's connection waits since it was opened.
            self._queue_ = self._queue(self._listener.accept(), None)
        # The writer counts down in its process what this end gives back in its own.
        self._queue_._sem.acquire(block=False)
        found: Tensors = self._queue_.get()
        return [found]

    def close(self, given_up: bool = False) -> None:
        self._listener.close()
        if self._queue_ is not None:
            self._queue_.close()


DESCRIPTORS = TwoSides(partial(_Writer, strategy="file_descriptor"), partial(_Reader, strategy="file_descriptor"))
FILES = TwoSides(partial(_Writer, strategy="file_system"), partial(_Reader, strategy="file_system"))
