"""Who is measured: each opens a writer in one process and a reader in another, and hands payloads over."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from connector.bench.payloads import Tensors
from connector.bench.workloads import Workload


class Place(NamedTuple):
    """Where the two sides of one hop meet, the same for both. `name` is of this hop in this run alone."""

    folder: str
    name: str
    #: Run directory of the broker.
    endpoint: str
    #: The stages at both ends.
    source: str
    target: str


class Writer(Protocol):
    #: Whether a payload must stay as it is after `put`, because it is sent later.
    needs_fresh: bool
    #: Spans in ns, one a payload, that are this system's figure instead of put to the reader's hands; or None.
    spans: list[int] | None

    def put(self, stream: int, payload: Tensors) -> None: ...
    def put_step(self, payloads: Sequence[Tensors]) -> None:
        """One payload for each of the streams 0, 1, …"""

    def acked(self, count: int) -> None:
        """The reader has read so many more."""

    def close(self, given_up: bool = False) -> None:
        """After the last one was read. `given_up`: before that; the other side may be gone, nothing may stay."""


class Reader(Protocol):
    def get(self) -> list[Tensors]:
        """Wait for payloads; whole ones, of any stream. They are used until the next call, or until `close`."""

    def close(self, given_up: bool = False) -> None: ...


class System(Protocol):
    """Opens both sides, the reader first. One object serves one process, run after run; a stage in the middle opens
    a reader of one hop and a writer of the next."""

    #: Whether it goes on between runs. A server that is there for one system must not run beside another.
    stays: bool

    def writer(self, place: Place, workload: Workload) -> Writer: ...
    def reader(self, place: Place, workload: Workload) -> Reader: ...
    def leave(self) -> None:
        """No run comes any more in this process, or, unless it `stays`, one has ended. May be called again."""


class TwoSides(NamedTuple):
    """A system without anything that outlives a run: what makes its writer, and its reader."""

    writer: Callable[[Place, Workload], Writer]
    reader: Callable[[Place, Workload], Reader]
    stays: bool = True

    def leave(self) -> None:
        return


#: Name -> where its System is: module:attribute.
OWN = {
    "connector": "connector.bench.ours:BROKER_PATH",
    "memcpy": "connector.bench.ring:COPY",
    "ring_sem": "connector.bench.ring:SEMAPHORE",
    "zmq_hop": "connector.bench.hop:HOP",
}


def load(where: str) -> System:
    """The system at module:attribute. ImportError says what is not installed."""
    module, _, attribute = where.partition(":")
    system: System = getattr(importlib.import_module(module), attribute)
    return system
