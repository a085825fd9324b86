"""What a stage hands to the next: one put_many a step, in the model's thread or behind it.

What the transfer config does not select is never touched. A put that fails ends its request at both ends: the rid is
aborted, so that its reader hears at once, and `failures` tells this stage. The others of the step still go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from connector import ConnectorError, Edge, Node, errors
from runner_adapter import values
from runner_adapter.config import TransferConfig
from runner_adapter.inbox import own
from runner_adapter.merge import MergeRules
from runner_adapter.naming import Naming, key_part
from runner_adapter.sending import Behind, Item, Sender, Stream
from runner_adapter.whole import Whole

logger = logging.getLogger("runner_adapter")

#: Steps that may be under way behind the model.
DEPTH = 8
CLOSE_TIMEOUT = 5.0


class Outbox:
    """What `node` puts on `edge`, which is its own: finish ends all that a node does with a rid (see inbox.py).

    One thread: the model's. `timeout`: seconds that a put waits for room (None: the broker's put_timeout). Raised
    wherever something is to be put or said: ForkedClient in a child made by fork, ClientClosed once the node is closed.

    In the model's thread `send` returns when the step's bytes are in shared memory; it waits for room. With
    `background` it returns when the step is copied, and a thread puts it; with `depth` steps under way it waits for the
    oldest. Either way its tensors may be overwritten when it returns, and a rid's chunks keep their
    order. Close it: what is queued is put then, and the thread ends.

    With `whole` a request is one payload, for a reader with `full_payload`: its steps are merged by these rules, and
    put when it ends, or when it is finished without an end.
    """

    def __init__(
        self,
        node: Node,
        edge: Edge,
        config: TransferConfig,
        *,
        background: bool = False,
        depth: int = DEPTH,
        timeout: float | None = None,
        whole: MergeRules | None = None,
    ) -> None:
        if depth < 1:
            raise errors.UsageError("depth is the number of steps that may be under way, 1 or more", depth=depth)
        own(node, self)
        self._node, self._config, self._naming = node, config, Naming(config)
        self._sender = Sender(node, edge, timeout)
        self._behind = Behind(depth) if background else None
        self._streams: dict[str, Stream] = {}
        self._whole = None if whole is None else Whole(whole)
        self._step = -1
        self._closed = False

    @property
    def background(self) -> bool:
        """Whether a thread puts the steps."""
        return self._behind is not None

    def __iter__(self) -> Iterator[str]:
        """Rids begun or sent, and not finished."""
        return iter(list(self._streams))

    def __contains__(self, rid: object) -> bool:
        return rid in self._streams

    @property
    def counters(self) -> dict[str, int]:
        """Chunks put; payloads dropped because their request had failed; requests failed; chunks sent again that
        replaced one or were ignored; steps that waited for an earlier one."""
        return {**self._sender.counters, "waited": self._behind.waited if self._behind is not None else 0}

    def wants(self, name: str) -> bool:
        """Whether the transfer config lets a tensor of this name leave the stage."""
        part = key_part(name)
        return part is not None and self._config.allows(*part)

    def sent(self, rid: str) -> int:
        """How many chunks of the request were given to `send`: the index of its next."""
        return self._streams[rid].chunks if rid in self._streams else 0

    def begin(self, rid: str) -> None:
        """A request of the rid begins in this stage, which may end it without a chunk: `finish` it in any case. An
        abort that was heard before was a former one's."""
        if rid not in self._streams:
            self._streams[rid] = Stream(rid)
            self._do(partial(self._sender.begin, rid))

    def send(self, step: int, payloads: Mapping[str, Mapping[str, torch.Tensor]], last: Iterable[str] = ()) -> None:
        """A step's tensors by rid and name; those of a rid that may leave are its next chunk. `last`: rids that end
        here, with a payload or without.

        A rid of which nothing may leave puts nothing; if it ends, an empty last payload, which is the END alone.
        A value that may leave and is no Tensor is that request's InvalidPayload, and every other refusal is its
        request's, too: see `failures`. A request that failed is dropped until `finish`.

        Each step is sent once, in rising order: UsageError otherwise, so that a step done again is not a second
        chunk. After preemption see `resend`. A config that lets nothing leave makes this do nothing.
        """
        self._check(step, last)
        self._step = step
        ends = dict.fromkeys(last)
        items: list[Item] = []
        refused: list[tuple[Stream, ConnectorError]] = []
        for rid in {**payloads, **ends} if self._config.chosen else ():
            stream = self._streams.get(rid) or Stream(rid)
            ending = rid in ends and not stream.ended
            try:
                chosen = self._chosen(stream, payloads.get(rid, {}), ending)
            except ConnectorError as error:
                refused.append((stream, error.anew()))
            else:
                if not chosen and not ending:
                    if self._whole is not None:
                        self._streams[rid] = stream
                    continue
                items.append(self._item(stream, chosen, ending))
            self._streams[rid] = stream
        if items or refused:
            streams = [item.stream for item in items]
            self._queue(partial(self._sender.put, items, refused), streams, items)

    def resend(self, rid: str, index: int, payload: Mapping[str, torch.Tensor], attempt: int) -> None:
        """Chunk `index` of a preempted request, made anew, in place of the one that was sent.

        A reader that has the first one keeps it, and this is ignored: the rows of a chunk must not change by being
        computed again. `attempt`: 1 or more, above the chunk's last one. The counters say what became of it. A
        runner that computes a prompt and its tokens again in one go has sent those rows: `sent` says how many
        chunks, and they need not be sent again.

        UsageError: the chunk was not sent yet, so that it would be a new one; attempt below 1. InvalidPayload: what may
        leave is no Tensor. What the broker refuses, an attempt that is not above the last one too, is in `failures`.
        """
        stream = self._streams.get(rid)
        if stream is None or not 0 <= index < stream.chunks:
            raise errors.UsageError(
                "only a chunk that was sent is sent again", rid=rid, index=index, sent=self.sent(rid)
            )
        if attempt < 1:
            raise errors.UsageError("an attempt to send again is 1 or more", rid=rid, index=index, attempt=attempt)
        last = stream.ended and not stream.bare_end and index == stream.chunks - 1
        item = Item(stream, self._select(rid, payload), last)
        self._do(partial(self._sender.put_again, item, index, attempt), [stream], [item])

    def failures(self) -> dict[str, ConnectorError]:
        """Requests that failed since the last call, each once: the runner ends them. What the broker refused behind
        a put is seen here, or at the next one. Also of a node that was closed."""
        self._check_process()
        self._queue(self._sender.collect)
        found: dict[str, ConnectorError] = {}
        while self._sender.failures:
            stream, error = self._sender.failures.popleft()
            # Of a request that was finished meanwhile nobody waits for it; the rid may be another one's.
            if self._streams.get(stream.rid) is stream:
                found[stream.rid] = error
        return found

    def abort(self, rid: str, reason: str) -> None:
        """The request failed in this stage: end it everywhere, at once; what is queued of it is dropped."""
        if self._whole is not None:
            self._whole.take(rid)
        self._sender.abort(self._streams.setdefault(rid, Stream(rid)), reason)

    def finish(self, rid: str) -> None:
        """The sender's half: a stream that has not ended ends here. What this stage still reads of the rid, and what
        others have not read of this, stays. Also after a failure: the rid is open again for the next request."""
        stream = self._streams.pop(rid, None)
        if self._whole is not None and stream is not None:
            named = self._whole.take(rid)
            if named and not stream.ended:
                items = [self._item(stream, self._select(rid, named), True)]
                self._do(partial(self._sender.put, items), [stream], items)
        self._do(partial(self._sender.finish, rid, stream))

    def flush(self, timeout: float = 30.0) -> None:
        """Wait until the broker has all that was sent; what it refused is in `failures`.

        Unavailable: it is not put within `timeout` seconds. BrokerLost: the broker does not answer.
        """
        self._node.check_usable()
        if self._behind is not None and not self._behind.drain(timeout):
            raise errors.Unavailable("steps are still waiting to be put", waited=timeout)
        try:
            self._node.flush(timeout)
        except (errors.BrokerLost, errors.ClientClosed, errors.ForkedClient):
            raise
        except ConnectorError as error:
            # One of the refusals that the tickets hold: every put of this node is the outbox's.
            logger.debug("flush: %s", str(error))
        self._sender.collect()

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Put what is queued, within `timeout` seconds; requests of which something is left then are aborted, and in
        `failures`. The node stays open. Idempotent. In a child made by fork it does nothing: what is queued is its
        parent's."""
        if self._closed:
            return
        self._closed = True
        try:
            self._check_process()
        except errors.ForkedClient:
            return
        if self._behind is None:
            return
        if not self._behind.drain(timeout):
            for stream in self._behind.stop():
                self._sender.fail(stream, errors.Unavailable("the outbox was closed before this was put"))
        self._behind.join()

    def _check(self, step: int, last: Iterable[str]) -> None:
        if self._closed:
            raise errors.ClientClosed("the outbox was closed", stage=self._node.stage)
        self._node.check_usable()
        if isinstance(last, str):
            raise errors.UsageError("`last` is several rids, not one str", last=last)
        if step <= self._step:
            raise errors.UsageError("a step is sent once, in rising order", step=step, sent=self._step)

    def _item(self, stream: Stream, chosen: Mapping[str, torch.Tensor], ending: bool) -> Item:
        stream.chunks += bool(chosen)
        stream.bare_end = stream.bare_end or (ending and not chosen)
        stream.ended = stream.ended or ending
        return Item(stream, chosen, ending)

    def _chosen(self, stream: Stream, named: Mapping[str, torch.Tensor], ending: bool) -> dict[str, torch.Tensor]:
        """What is put now, by key: of a request that is one payload, nothing before its end."""
        if self._whole is None:
            return self._select(stream.rid, named)
        wanted = {name: named[name] for name in named if self.wants(name)}
        if stream.ended and wanted and not stream.failed:
            raise errors.StreamEnded("the request has ended; finish it before its rid is used anew", rid=stream.rid)
        if not stream.ended and not stream.failed:
            self._whole.add(stream.rid, wanted)
        return self._select(stream.rid, self._whole.take(stream.rid)) if ending else {}

    def _select(self, rid: str, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What may leave, by key; own copies if it is put later, which what is held for the whole is already."""
        later = self._behind is not None and self._whole is None
        found: dict[str, torch.Tensor] = {}
        for name in named:
            key = self._naming.key(rid, name) if self.wants(name) else None
            if key is not None:
                found[key] = _checked(named[name], later, rid=rid, key=key, name=name)
        return found

    def _check_process(self) -> None:
        """ForkedClient in a child: the thread is its parent's, and what the child queued would never be done."""
        try:
            self._node.check_usable()
        except errors.ClientClosed:
            return

    def _do(self, work: Callable[[], None], streams: Sequence[Stream] = (), items: Sequence[Item] = ()) -> None:
        self._node.check_usable()
        self._queue(work, streams, items)

    def _queue(self, work: Callable[[], None], streams: Sequence[Stream] = (), items: Sequence[Item] = ()) -> None:
        if self._behind is None or self._closed:
            work()
            return
        tensors = [tensor for item in items for tensor in item.payload.values()]
        # The copies are made by the stream of the model's thread; another thread's must not overtake it.
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        copied = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._behind.do(partial(_after, copied, work) if copied else work, streams, bounded=bool(items))


def _checked(value: object, copy: bool, **facts: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise errors.InvalidPayload("only Tensors are handed over", type=type(value).__name__, **facts)
    return values.owned(value, **facts) if copy else value


def _after(copied: Iterable[torch.cuda.Event], work: Callable[[], None]) -> None:
    for event in copied:
        event.synchronize()
    work()
