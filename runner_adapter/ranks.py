"""Input for tensor-parallel ranks: all of them get the same at the same step.

| | reads | its sender puts |
|---|---|---|
| `BroadcastInbox` | rank 0 of the group | for one reader |
| `EachRank` | every rank, as reader i of n | for n readers: `node.edge(..., readers=n)` |

`pull`, `waiting` and `failing` are collective: every rank calls them, in the same order. What comes between two steps
waits for the next. Nothing is unpickled: a header travels as JSON, tensors as bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from connector import ConnectorError, errors
from runner_adapter.inbox import Arrived, Bystander, Inbox

#: Each tensor begins at a multiple of this in the bytes that travel: of any dtype's size.
_ALIGNMENT = 64
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


class BroadcastInbox:
    """`inbox` at rank 0 of the group (None: all processes); at the others a Bystander if they abort by a node of their
    own, or else None. `device`: what the group's backend moves, and where the other ranks get their tensors; "cpu" with
    gloo.

    An error that rank 0 raises is raised by all; if it is no ConnectorError, the others raise InvariantBroken.
    UsageError at each rank that has an inbox and should not, or the other way round.
    """

    def __init__(
        self,
        inbox: Inbox | Bystander | None,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        if (dist.get_rank(group) == 0) is not isinstance(inbox, Inbox):
            raise errors.UsageError("rank 0 of the group has the inbox, no other", rank=dist.get_rank(group))
        self._inbox = inbox if isinstance(inbox, Inbox) else None
        self._here, self._group, self._device = inbox, group, torch.device(device)
        self._source = 0 if group is None else dist.get_global_rank(group, 0)

    def pull(self, ready: Iterable[str]) -> Arrived:
        """As `Inbox.pull`, for the `ready` of rank 0."""
        return self._shared(lambda inbox: inbox.pull(ready))

    def waiting(self, rids: Iterable[str]) -> set[str]:
        """As `Inbox.waiting`, for the `rids` of rank 0."""
        return self._shared(lambda inbox: Arrived(ended=inbox.waiting(rids))).ended

    def failing(self, rids: Iterable[str]) -> dict[str, ConnectorError]:
        """As `Inbox.failing`, for the `rids` of rank 0."""
        return self._shared(lambda inbox: Arrived(failed=inbox.failing(rids))).failed

    def wait(self, timeout: float) -> bool:
        """As `Inbox.wait`, at rank 0; the others do not wait: their next pull waits for rank 0's. What it raises, that
        pull raises, at all ranks."""
        return self._inbox is None or _wait(self._inbox, timeout)

    def begin(self, rid: str) -> None:
        """As `Inbox.begin`; each rank does it for its own node."""
        if self._here is not None:
            self._here.begin(rid)

    def fail(self, rid: str, error: ConnectorError) -> None:
        """As `Inbox.fail`. Rank 0's word counts, and is told by the next pull; the others' does nothing."""
        if self._inbox is not None:
            self._inbox.fail(rid, error)

    def finish(self, rid: str) -> None:
        """As `Inbox.finish`; each rank does it for its own node."""
        if self._here is not None:
            self._here.finish(rid)

    def _shared(self, read: Callable[[Inbox], Arrived]) -> Arrived:
        if self._inbox is None:
            return self._hear()
        error: ConnectorError | None = errors.InvariantBroken("rank 0 failed; what it raised there says why")
        arrived = Arrived()
        try:
            arrived = read(self._inbox)
            error = None
        except ConnectorError as raised:
            error = raised
            raise
        finally:
            # Whatever happened: the others wait for a word.
            self._tell(arrived, error)
        return arrived

    def _tell(self, arrived: Arrived, error: ConnectorError | None) -> None:
        packed: list[torch.Tensor] = []
        size = 0

        def place(key: str, tensor: torch.Tensor) -> list[Any]:
            nonlocal size
            begin, size = size, size + math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
            packed.append(tensor.reshape(-1).view(torch.uint8))
            packed.append(torch.zeros(size - begin - tensor.nbytes, dtype=torch.uint8))
            return [key, str(tensor.dtype), list(tensor.shape), begin]

        header = {
            "payloads": [
                [rid, [[place(key, tensor) for key, tensor in payload.items()] for payload in payloads]]
                for rid, payloads in arrived.payloads.items()
            ],
            "ended": sorted(arrived.ended),
            "failed": [[rid, _as_words(failed)] for rid, failed in arrived.failed.items()],
            "error": None if error is None else _as_words(error),
        }
        words = torch.frombuffer(bytearray(json.dumps(header, default=str).encode()), dtype=torch.uint8)
        self._send(torch.tensor([len(words), size]))
        self._send(words)
        if size:
            self._send(torch.cat(packed))

    def _hear(self) -> Arrived:
        length, size = self._send(torch.zeros(2, dtype=torch.int64)).tolist()
        header = json.loads(bytes(self._send(torch.empty(length, dtype=torch.uint8)).tolist()))
        data = torch.empty(size, dtype=torch.uint8)
        data = self._send(data) if size else data
        if header["error"] is not None:
            raise errors.from_code(*header["error"])
        payloads = {
            rid: [{key: _tensor(data, *told) for key, *told in payload} for payload in payloads]
            for rid, payloads in header["payloads"]
        }
        failed = {rid: errors.from_code(*words) for rid, words in header["failed"]}
        return Arrived(payloads, set(header["ended"]), failed)

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(self._device)
        dist.broadcast(moved, self._source, group=self._group)
        return moved


class EachRank:
    """Every rank's own Inbox, reader i of n; a step gets what all ranks have.

    Readers hear at different times: a chunk that has not come to one rank waits at the others. A request that failed
    for one rank fails for all, at once and without what came before. The ranks' `ready` must be the same, in the same
    order. If one rank cannot read, it raises why, and the others PeerFailed.
    """

    def __init__(
        self, inbox: Inbox, group: dist.ProcessGroup | None = None, *, device: torch.device | str = "cpu"
    ) -> None:
        self._inbox, self._group, self._device = inbox, group, torch.device(device)

    def pull(self, ready: Iterable[str]) -> Arrived:
        """As `Inbox.pull`."""
        rids = list(dict.fromkeys(ready))
        agreed = dict(zip(rids, self._least(rids, self._inbox.count), strict=True))
        for rid in [rid for rid, count in agreed.items() if count < 0]:
            self._inbox.fail(rid, _of_another(rid))
            agreed[rid] = 1
        return self._inbox.pull(rids, agreed)

    def waiting(self, rids: Iterable[str]) -> set[str]:
        """As `Inbox.waiting`: those that any rank waits for."""
        rids = list(dict.fromkeys(rids))
        there = self._least(rids, lambda asked: dict.fromkeys(asked, 1) | dict.fromkeys(self._inbox.waiting(asked), 0))
        return {rid for rid, one in zip(rids, there, strict=True) if not one}

    def failing(self, rids: Iterable[str]) -> dict[str, ConnectorError]:
        """As `Inbox.failing`: those that failed for any rank."""
        rids = list(dict.fromkeys(rids))
        own = self._inbox.failing(rids)
        counts = self._least(rids, lambda asked: {rid: -1 if rid in own else 0 for rid in asked})
        failed = [rid for rid, count in zip(rids, counts, strict=True) if count < 0]
        return {rid: own.get(rid) or _of_another(rid) for rid in failed}

    def wait(self, timeout: float) -> bool:
        """As `Inbox.wait`; what it raises, the next pull raises, at all ranks."""
        return _wait(self._inbox, timeout)

    def begin(self, rid: str) -> None:
        """As `Inbox.begin`; each rank does it for its own reader."""
        self._inbox.begin(rid)

    def fail(self, rid: str, error: ConnectorError) -> None:
        """As `Inbox.fail`; the other ranks hear it at the next pull."""
        self._inbox.fail(rid, error)

    def finish(self, rid: str) -> None:
        """As `Inbox.finish`; each rank does it for its own reader."""
        self._inbox.finish(rid)

    def _least(self, rids: Sequence[str], read: Callable[[Sequence[str]], dict[str, int]]) -> list[int]:
        """The least that any rank reads for each rid."""
        # The first says whether this rank could read: the others wait for its numbers whatever happened.
        told = [-1] * (len(rids) + 1)
        try:
            found = read(rids)
            told = [0, *(found[rid] for rid in rids)]
        finally:
            least = torch.tensor(told, device=self._device)
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        able, *agreed = least.tolist()
        if able < 0:
            raise errors.PeerFailed("another rank could not read its input", rank=dist.get_rank(self._group))
        return agreed


def _of_another(rid: str) -> ConnectorError:
    return errors.PeerFailed("the input of another rank failed", rid=rid)


def _wait(inbox: Inbox, timeout: float) -> bool:
    """A rank that raised here would leave the others in the next pull, which all must call."""
    try:
        return inbox.wait(timeout)
    except ConnectorError:
        return True


def _as_words(error: ConnectorError) -> list[Any]:
    return [type(error).__name__, error.message, error.facts]


def _tensor(data: torch.Tensor, dtype: str, shape: list[int], begin: int) -> torch.Tensor:
    found = _DTYPES[dtype]
    return data[begin : begin + math.prod(shape) * found.itemsize].view(found).view(shape)
