"""What arrived, per request, until its step comes.

Payloads come by `edge.poll`, so no rid is claimed by name. What a step does not get is copied, so that its block
goes back: nothing is pinned until a request is scheduled. It waits in this process's memory then, not in the pool.

Lives. A request is given payloads of one use of its rid only: the oldest that is here. `finish` drops that one; the
next, if it came meanwhile, waits for the next request of the rid.

Nodes. `node.finish(rid)` ends both halves of what a node does with a rid: what it reads, and what it sends. A middle
stage that is done with a request's input may still be sending its output (PR, third of the fixes: clean-up of the
receiver alone). So each Inbox and each Outbox has a node of its own, and a node that has one takes no second.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from connector import ConnectorError, Edge, Node, errors
from runner_adapter.arrivals import Arrivals, Chunk, Life

logger = logging.getLogger("runner_adapter")

#: Seconds until payloads of a rid that nobody asks for are dropped: the connector's own `unclaimed_after`.
PATIENCE = 600.0
#: Rids remembered whose payloads were dropped so.
MOST_UNCLAIMED = 4096

_owners: weakref.WeakKeyDictionary[Node, weakref.ref[object]] = weakref.WeakKeyDictionary()


def own(node: Node, owner: object) -> None:
    """Note whose node it is; UsageError if another Inbox or Outbox, which is alive, has it."""
    known = _owners.get(node)
    other = None if known is None else known()
    if other is not None:
        raise errors.UsageError(
            "the node has an Inbox or Outbox, and finish ends all that a node does with a rid: "
            "connect one more with connector.connect(stage=..., endpoint=node.endpoint)",
            stage=node.stage,
            owner=type(other).__name__,
        )
    _owners[node] = weakref.ref(owner)


class Bystander:
    """`node` of a rank that is given what another one reads: it is in the same uses of the rids on `edge`, so that its
    abort means the one that failed, and no other."""

    def __init__(self, node: Node, edge: Edge) -> None:
        own(node, self)
        self._node, self._edge = node, edge

    def begin(self, rid: str) -> None:
        self._edge.expect(rid)

    def finish(self, rid: str) -> None:
        self._node.finish(rid)


@dataclass(slots=True)
class Arrived:
    """What one step gets: payloads by rid, in order; rids whose input is complete; rids that failed, and why.

    Tensors may be views on shared memory: merge them and let go of them, and do not write to them.
    """

    payloads: dict[str, list[dict[str, torch.Tensor]]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    failed: dict[str, ConnectorError] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.payloads or self.ended or self.failed)


class Inbox:
    """What `node` reads of `edge`, which is its own; it subscribes when it is made, and raises what then is refused
    (ReaderTaken, ReadersMismatch). One thread: the model's.

    full_payload: the sender puts one payload a request, which is given once it is there whole; a second one is that
    request's InvalidPayload. Otherwise a step gets the chunks that have come. An empty last payload of a stream is
    its END alone, as an Outbox says it.

    Payloads of a rid that nobody has asked for within `patience` seconds are dropped, with a warning; whoever asks
    later is told Unclaimed.
    """

    def __init__(
        self,
        node: Node,
        edge: Edge,
        *,
        full_payload: bool = False,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        own(node, self)
        self._node, self._edge = node, edge
        self._arrivals = Arrivals(full_payload)
        self._patience, self._clock = patience, clock
        #: Since when payloads of a rid are here that nobody has asked for, oldest first.
        self._unasked: OrderedDict[str, float] = OrderedDict()
        self._unclaimed: OrderedDict[str, None] = OrderedDict()
        self._given = self._kept = 0
        self._keep(self._absorb())

    def __iter__(self) -> Iterator[str]:
        """Rids that something is known of."""
        return iter(list(self._arrivals.lives))

    def __contains__(self, rid: object) -> bool:
        return rid in self._arrivals.lives

    @property
    def counters(self) -> dict[str, int]:
        """Payloads given to a step; kept, as copies, for a later one; dropped, because their request was finished,
        had failed, or nobody asked for it."""
        return {"given": self._given, "kept": self._kept, "dropped": self._arrivals.dropped}

    def pull(self, ready: Iterable[str], most: Mapping[str, int] | None = None) -> Arrived:
        """What has come for the rids in `ready`; does not wait. A request's END or failure is given once, behind what
        came in order before it. `most`: by rid, how many payloads at most, an END or failure being one (`count`).

        Raises as `Edge.poll` does.
        """
        fresh = self._absorb()
        arrived = Arrived()
        for rid in dict.fromkeys(ready):
            life = self._asked(rid)
            if life is not None and (life.over or not self._arrivals.full):
                self._give(rid, life, None if most is None else most.get(rid, 0), arrived)
        self._keep(fresh)
        return arrived

    def waiting(self, rids: Iterable[str]) -> set[str]:
        """Those whose next payload (`full_payload`: whose one payload) is still to come. Raises as `Edge.poll` does."""
        self._keep(self._absorb())
        lives = {rid: self._asked(rid) for rid in rids}
        full = self._arrivals.full
        return {r for r, life in lives.items() if life is None or not (life.over or (life.chunks and not full))}

    def failing(self, rids: Iterable[str]) -> dict[str, ConnectorError]:
        """Those whose failure `pull` will give, whatever it gives before, and why."""
        fronts = {rid: life for rid in rids if (life := self._arrivals.front(rid)) is not None}
        return {rid: life.error.anew() for rid, life in fronts.items() if life.error is not None and life.untold}

    def wait(self, timeout: float) -> bool:
        """Sleep until something comes, for whichever rid; False if nothing does within `timeout` seconds. Raises as
        `Edge.wait` does."""
        return self._edge.wait(timeout)

    def count(self, rids: Iterable[str]) -> dict[str, int]:
        """By rid, how many `pull` would give: its payloads, and an END; -1 if it would give a failure."""
        self._keep(self._absorb())
        found = dict.fromkeys(rids, 0)
        for rid in found:
            life = self._asked(rid)
            if life is not None and (life.over or not self._arrivals.full):
                found[rid] = -1 if life.error is not None and life.untold else len(life.chunks) + life.untold
        return found

    def begin(self, rid: str) -> None:
        """A request of the rid begins in this stage: `pull` tells its abort, although nothing of it may have come."""
        if rid not in self._arrivals.lives:
            self._edge.expect(rid)

    def fail(self, rid: str, error: ConnectorError) -> None:
        """The request failed elsewhere: what is here of it, and what still comes, is dropped. `pull` gives the error,
        unless it has given an END or failure before."""
        self._arrivals.fail(rid, error)

    def finish(self, rid: str) -> None:
        """The receiver's half: what is unread of the request is dropped, here and at the broker, and counted.

        What this stage sends of the rid goes on. Meant is the oldest use of the rid that is here; a newer one is
        the next request's. Before anything has come none is known: what others still send of such a request would be
        the next one's, so let it be aborted first. Raises as `Node.finish` does.
        """
        try:
            fresh = self._absorb()
        except errors.BrokerLost:
            # Nothing comes any more. What is here is dropped all the same, and the finish is said when it is back.
            fresh = []
        self._arrivals.end_front(rid)
        self._asked(rid)
        if rid in self._arrivals.lives:
            # It is shown only when the former has ended for this node: a finish would mean the new one.
            self._note_unasked(rid)
        else:
            self._node.finish(rid)
        self._keep(fresh)

    def validate(self) -> None:
        """InvariantBroken if what is known contradicts itself."""
        self._arrivals.validate()
        if not self._unasked.keys() | self._unclaimed.keys() <= self._arrivals.lives.keys():
            raise errors.InvariantBroken("a rid is waited for that is not here")

    def _absorb(self) -> list[Chunk]:
        """Note all that has come. What is returned are views: `_keep` copies those that stay."""
        before = set(self._arrivals.lives)
        fresh = self._arrivals.note(self._edge.poll())
        for rid in [rid for rid in self._arrivals.lives if rid not in before]:
            self._note_unasked(rid)
        self._drop_unclaimed()
        return fresh

    def _keep(self, fresh: list[Chunk]) -> None:
        self._kept += sum(chunk.own() for chunk in fresh)

    def _asked(self, rid: str) -> Life | None:
        """The life of a rid that somebody asks for."""
        self._unasked.pop(rid, None)
        self._unclaimed.pop(rid, None)
        return self._arrivals.front(rid)

    def _give(self, rid: str, life: Life, most: int | None, arrived: Arrived) -> None:
        count = len(life.chunks) if most is None else min(most, len(life.chunks))
        if count:
            arrived.payloads[rid] = [life.chunks.popleft().let_go() for _ in range(count)]
            self._given += count
        if life.chunks or not life.untold or most == count:
            return
        life.told = True
        if life.error is not None:
            arrived.failed[rid] = life.error.anew()
        else:
            arrived.ended.add(rid)

    def _note_unasked(self, rid: str) -> None:
        self._unasked[rid] = self._clock()
        self._unasked.move_to_end(rid)

    def _drop_unclaimed(self) -> None:
        """No request asked for them: this stage had finished it before they came, or never has it. Without this they
        would stay for good; the broker cannot see that they are waited for in vain."""
        while self._unasked and self._clock() - next(iter(self._unasked.values())) > self._patience:
            rid, since = self._unasked.popitem(last=False)
            error = errors.Unclaimed(
                "no request asked for what came in time", rid=rid, waited=round(self._clock() - since, 1)
            )
            logger.warning("%s", str(error))
            for life in self._arrivals.lives[rid]:
                self._arrivals.break_off(life, error)
            self._node.finish(rid)
            self._unclaimed[rid] = None
            if len(self._unclaimed) > MOST_UNCLAIMED:
                del self._arrivals.lives[self._unclaimed.popitem(last=False)[0]]
