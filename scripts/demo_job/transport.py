"""All that the demo does with the connector, and what it writes down about it.

A payload gets a mark beside its tensors: `sent_ns`, the monotonic clock just before put. It travels and is
counted as bytes, but it is no part of the digest.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

import torch

import connector

SENT = "sent_ns"
#: Seconds that a stage waits for the next chunk of a stream, or for the broker to confirm its puts.
PATIENCE = 60.0

Tensors = dict[str, torch.Tensor]


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order: uint8 [nbytes]; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash over keys, dtypes, shapes and bytes, whatever the order of the keys."""
    state = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors):
        tensor = tensors[key]
        state.update(repr((key, str(tensor.dtype), tuple(tensor.shape))).encode())
        state.update(raw_bytes(tensor).numpy().data)
    return state.hexdigest()


def size_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def flip_one_bit(tensors: Tensors) -> Tensors:
    """The same payload with one bit changed, in a copy of the first tensor that holds any."""
    key = next(k for k, t in tensors.items() if t.numel())
    copy = tensors[key].detach().clone(memory_format=torch.contiguous_format)
    raw_bytes(copy)[0] ^= 1
    return {**tensors, key: copy}


@dataclass
class Flow:
    """What one end of one edge saw: a digest per chunk, in order, by rid; bytes; hand-over times (reader only).

    `idle_ns` are the hand-over times of those payloads that the reader was already waiting for when they were put.
    """

    edge: str
    digests: dict[str, list[str]] = field(default_factory=dict)
    nbytes: int = 0
    handover_ns: list[int] = field(default_factory=list)
    idle_ns: list[int] = field(default_factory=list)

    def note(self, rid: str, tensors: Tensors, nbytes: int) -> None:
        """Count one payload of `rid`."""
        self.digests.setdefault(rid, []).append(digest(tensors))
        self.nbytes += nbytes

    @property
    def payloads(self) -> int:
        """How many payloads passed."""
        return sum(len(chunks) for chunks in self.digests.values())


class Sender:
    """The writing end of an edge. With `tamper`, one bit of the first payload changes after it was hashed."""

    def __init__(self, edge: connector.Edge, name: str, tamper: bool) -> None:
        self.flow = Flow(name)
        self._edge = edge
        self._tamper = tamper

    def send(self, rid: str, tensors: Tensors, last: bool = False) -> None:
        """Put the next chunk of `rid`; with `last` the stream ends with it."""
        mark = torch.tensor(0)
        self.flow.note(rid, tensors, size_of({**tensors, SENT: mark}))
        if self._tamper:
            self._tamper = False
            tensors = flip_one_bit(tensors)
        mark.fill_(time.monotonic_ns())
        self._edge.put(rid, {**tensors, SENT: mark}, last=last)

    def end(self, rid: str) -> None:
        """The stream of `rid` ends with the chunk that was sent last."""
        self._edge.end(rid)


class Receiver:
    """The reading end of an edge. What it yields are views on the connector's memory: copy what you keep."""

    def __init__(self, edge: connector.Edge, name: str) -> None:
        self.flow = Flow(name)
        self._edge = edge

    def stream(self, rid: str) -> Iterator[Tensors]:
        """The chunks of one rid, to the stream's end; blocks for each."""
        asked = time.monotonic_ns()
        for payload in self._edge.stream(rid, timeout=PATIENCE):
            yield self._unpack(payload, asked)
            asked = time.monotonic_ns()

    def ready(self, timeout: float) -> Iterator[tuple[str, Tensors, bool]]:
        """(rid, chunk, is it the last) of whatever request has arrived; nothing if none comes in `timeout` s.

        A stream that failed raises what it failed of.
        """
        asked = time.monotonic_ns()
        if not self._edge.wait(timeout):
            return
        arrived = self._edge.poll()
        for error in arrived.failed.values():
            raise error
        for rid, payloads in arrived.items():
            while payloads:
                # Taken off the list: a block goes back to the pool as soon as its chunk is done with.
                payload = payloads.pop(0)
                last = payload.last
                tensors = self._unpack(payload, asked)
                del payload
                yield rid, tensors, last
                asked = time.monotonic_ns()

    def _unpack(self, payload: connector.Payload, asked: int) -> Tensors:
        now = time.monotonic_ns()
        tensors = dict(payload)
        nbytes = size_of(tensors)
        sent = int(tensors.pop(SENT))
        self.flow.handover_ns.append(now - sent)
        if asked <= sent:
            self.flow.idle_ns.append(now - sent)
        self.flow.note(payload.rid, tensors, nbytes)
        return tensors


class Station(AbstractContextManager["Station"]):
    """One process's place at the connector; leaving it closes the session."""

    def __init__(self, stage: str, endpoint: str | None, tamper: str | None = None) -> None:
        """Join the broker at `endpoint`; None starts a private broker that ends with this process."""
        self.stage = stage
        self._tamper = tamper
        self._node = connector.connect(stage=stage, endpoint=endpoint, embedded=endpoint is None)
        self._senders: list[Sender] = []
        self._receivers: list[Receiver] = []

    @property
    def endpoint(self) -> str:
        """Where the other stages find the broker."""
        return self._node.endpoint

    def sender(self, to_stage: str) -> Sender:
        """The writing end of the edge from this stage to `to_stage`."""
        name = f"{self.stage}:{to_stage}"
        self._senders.append(Sender(self._node.edge(self.stage, to_stage), name, self._tamper == name))
        return self._senders[-1]

    def receiver(self, from_stage: str) -> Receiver:
        """The reading end of the edge from `from_stage` to this stage."""
        self._receivers.append(Receiver(self._node.edge(from_stage, self.stage), f"{from_stage}:{self.stage}"))
        return self._receivers[-1]

    def finish(self, rid: str) -> None:
        """This stage has nothing more to do with `rid`."""
        self._node.finish(rid)

    def report(self) -> dict[str, Any]:
        """Wait until the broker has confirmed every put; then what passed here, as plain data."""
        self._node.flush(timeout=PATIENCE)
        return {
            "sent": [asdict(s.flow) for s in self._senders],
            "received": [asdict(r.flow) for r in self._receivers],
        }

    def counters(self) -> dict[str, Any]:
        """The broker's own counters, once it has heard of all that was put and released here."""
        self._node.flush(timeout=PATIENCE)
        return self._node.counters()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.close()
