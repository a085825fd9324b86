"""All that the demo does with the connector, and what it writes down about it.

A payload that holds anything gets a mark beside its tensors: `{rid}-sent_ns`, the monotonic clock just before put. It
travels and is counted as bytes, but it is no part of the digest.

A stage with a runner adapter has a Sender and a Receiver as well: they stand where its Outbox and Inbox want an edge,
and see all that is put and polled.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, cast

import torch

import connector
from runner_adapter import Inbox, Outbox, TransferConfig

#: Seconds that a stage waits for the broker to confirm its puts.
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


def flip_one_bit(tensors: Mapping[str, torch.Tensor]) -> Tensors:
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

    def note(self, rid: str, digest: str, nbytes: int) -> None:
        """Count one payload of `rid`."""
        self.digests.setdefault(rid, []).append(digest)
        self.nbytes += nbytes

    @property
    def payloads(self) -> int:
        """How many payloads passed."""
        return sum(len(chunks) for chunks in self.digests.values())


def mark_of(rid: str) -> str:
    """The mark's key. To a runner adapter it is an id type like any other."""
    return f"{rid}-sent_ns"


class Sender:
    """The writing end of an edge. With `tamper`, one bit of the first payload changes after it was hashed."""

    def __init__(self, edge: connector.Edge, name: str, tamper: bool) -> None:
        self.flow = Flow(name)
        self._edge = edge
        self._tamper = tamper

    def send(self, rid: str, tensors: Tensors, last: bool = False) -> None:
        """Put the next chunk of `rid`; with `last` the stream ends with it."""
        self.put(rid, tensors, last=last)

    def open(self, rid: str) -> None:
        """As `Edge.open`."""
        self._edge.open(rid)

    def put(self, rid: str, payload: Mapping[str, torch.Tensor], **options: Any) -> connector.Ticket:
        """As `Edge.put`."""
        marked = self._marked({rid: payload})[rid]
        ticket = self._edge.put(rid, marked, **options)
        self._note(rid, payload, marked)
        return ticket

    def put_many(
        self, payloads: Mapping[str, Mapping[str, torch.Tensor]], **options: Any
    ) -> dict[str, connector.Ticket]:
        """As `Edge.put_many`."""
        marked = self._marked(payloads)
        tickets = self._edge.put_many(marked, **options)
        for rid, payload in payloads.items():
            self._note(rid, payload, marked[rid])
        return tickets

    def _marked(self, payloads: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Tensors]:
        marked: dict[str, Tensors] = {}
        for rid, payload in payloads.items():
            tampers = self._tamper and bool(payload)
            self._tamper = self._tamper and not tampers
            marked[rid] = flip_one_bit(payload) if tampers else dict(payload)
        sent = torch.tensor(time.monotonic_ns())
        return {rid: {**tensors, mark_of(rid): sent} if tensors else {} for rid, tensors in marked.items()}

    def _note(self, rid: str, given: Mapping[str, torch.Tensor], put: Tensors) -> None:
        # What was put and accepted; hashed as it was given.
        self.flow.note(rid, digest(given), size_of(put))


class Receiver:
    """The reading end of an edge. What it yields are views on the connector's memory: copy what you keep."""

    def __init__(self, edge: connector.Edge, name: str) -> None:
        self.flow = Flow(name)
        self._edge = edge
        #: Since when an Inbox's reader has waited for what it polls next.
        self._asked: int | None = None

    def wait(self, timeout: float) -> bool:
        """As `Edge.wait`."""
        self._asked = time.monotonic_ns()
        return self._edge.wait(timeout)

    def expect(self, rid: str) -> None:
        """As `Edge.expect`."""
        self._edge.expect(rid)

    def poll(self) -> connector.Polled:
        """As `Edge.poll`, for an Inbox, which reads marks as what they are: an id type."""
        arrived = self._edge.poll()
        asked, self._asked = self._asked, None
        for payloads in arrived.values():
            for payload in payloads:
                self._unpack(payload, asked)
        return arrived

    def ready(self, timeout: float, failed: dict[str, str] | None = None) -> Iterator[tuple[str, Tensors, bool]]:
        """(rid, chunk, is it the last) of whatever request has arrived; nothing if none comes in `timeout` s.

        A stream that failed raises what it failed of, or, with `failed`, is noted there. A key's rid is left out.
        """
        asked = time.monotonic_ns()
        if not self._edge.wait(timeout):
            return
        arrived = self._edge.poll()
        for rid, error in arrived.failed.items():
            if failed is None:
                raise error
            failed.setdefault(rid, str(error))
        for rid, payloads in arrived.items():
            while payloads:
                # Taken off the list: a block goes back to the pool as soon as its chunk is done with.
                payload = payloads.pop(0)
                last = payload.last
                tensors = self._unpack(payload, asked)
                del payload
                yield rid, {key.removeprefix(f"{rid}-"): tensor for key, tensor in tensors.items()}, last
                asked = time.monotonic_ns()

    def _unpack(self, payload: connector.Payload, asked: int | None) -> Tensors:
        now = time.monotonic_ns()
        tensors = dict(payload)
        nbytes = size_of(tensors)
        if tensors:
            sent = int(tensors.pop(mark_of(payload.rid)))
            self.flow.handover_ns.append(now - sent)
            if asked is not None and asked <= sent:
                self.flow.idle_ns.append(now - sent)
        self.flow.note(payload.rid, digest(tensors), nbytes)
        return tensors


class Station(AbstractContextManager["Station"]):
    """One process's place at the connector; leaving it closes the session."""

    def __init__(self, stage: str, endpoint: str | None, tamper: str | None = None) -> None:
        """Join the broker at `endpoint`; None starts a private broker that ends with this process."""
        self.stage = stage
        #: Of a stage with a runner adapter: the rows of each step, (in prefill, decoding).
        self.steps: list[tuple[int, int]] = []
        #: Tells the demo that a request failed here, and why.
        self.tell_failed: Callable[[str, str], None] = lambda rid, reason: None
        #: Requests that the demo says have failed elsewhere, and why; each once.
        self.failed_elsewhere: Callable[[], dict[str, str]] = dict
        self._tamper = tamper
        self._node = connector.connect(stage=stage, endpoint=endpoint, embedded=endpoint is None)
        self._stack = ExitStack()
        self._stack.enter_context(self._node)
        self._senders: list[Sender] = []
        self._receivers: list[Receiver] = []
        self._outboxes: list[Outbox] = []

    @property
    def endpoint(self) -> str:
        """Where the other stages find the broker."""
        return self._node.endpoint

    def sender(self, to_stage: str, node: connector.Node | None = None) -> Sender:
        """The writing end of the edge from this stage to `to_stage`, on the station's node or on another."""
        name = f"{self.stage}:{to_stage}"
        self._senders.append(Sender((node or self._node).edge(self.stage, to_stage), name, self._tamper == name))
        return self._senders[-1]

    def receiver(self, from_stage: str, node: connector.Node | None = None) -> Receiver:
        """The reading end of the edge from `from_stage` to this stage, on the station's node or on another."""
        edge = (node or self._node).edge(from_stage, self.stage)
        self._receivers.append(Receiver(edge, f"{from_stage}:{self.stage}"))
        return self._receivers[-1]

    def inbox(self, from_stage: str, full_payload: bool = False) -> tuple[Inbox, Receiver]:
        """A runner adapter's way in, and what to wait on."""
        node = self._another()
        receiver = self.receiver(from_stage, node)
        return Inbox(node, cast(connector.Edge, receiver), full_payload=full_payload), receiver

    def outbox(self, to_stage: str, config: TransferConfig) -> Outbox:
        """A runner adapter's way out."""
        node = self._another()
        sender = self.sender(to_stage, node)
        self._outboxes.append(Outbox(node, cast(connector.Edge, sender), config))
        return self._outboxes[-1]

    def _another(self) -> connector.Node:
        # Finish ends all that a node does with a rid, and a stage is done with its input first.
        node = connector.connect(stage=self.stage, endpoint=self.endpoint)
        return self._stack.enter_context(node)

    def finish(self, rid: str) -> None:
        """This stage has nothing more to do with `rid`."""
        self._node.finish(rid)

    def report(self) -> dict[str, Any]:
        """Wait until the broker has confirmed every put; then what passed here, as plain data."""
        self._node.flush(timeout=PATIENCE)
        for outbox in self._outboxes:
            outbox.flush(PATIENCE)
        return {
            "steps": self.steps,
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
        self._stack.close()
