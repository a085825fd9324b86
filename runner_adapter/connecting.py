"""A stage's adapter, joined to the stages before and after it as its section of a stage file says."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import connector
from connector import Node, errors
from runner_adapter.config import AdapterConfig, TransferConfig
from runner_adapter.inbox import Bystander, Inbox
from runner_adapter.merge import MergeRules
from runner_adapter.outbox import Outbox
from runner_adapter.ranks import BroadcastInbox, EachRank
from runner_adapter.runner import RunnerAdapter
from runner_adapter.source import Source
from runner_adapter.stagefile import stage_of

StageFile = str | Path

logger = logging.getLogger("runner_adapter")


def connect_adapter(
    model: object,
    file: StageFile | TransferConfig,
    stage_id: int | str | None = None,
    *,
    stage: str,
    reads: str | None = None,
    sends: str | None = None,
    endpoint: str | None = None,
    full_payload: bool = False,
    whole: MergeRules | None = None,
    readers: int = 1,
    group: dist.ProcessGroup | None = None,
    group_device: torch.device | str = "cpu",
    **options: Any,
) -> RunnerAdapter:
    """The adapter of `stage`, which reads what the stage `reads` hands over, and hands over to the stage `sends`; one
    of the two may be None. Close it, or use it as a context manager: it owns its nodes.

    `file`: a stage file, whose stage `stage_id` says what may leave (`transfer_config`) and how the adapter works
    (`runner_adapter`), or a transfer config alone; a warning is logged if the stage `sends` and nothing may leave.
    `endpoint`: as `connector.connect` takes it. `full_payload`: the sender puts one payload a request (Inbox); `whole`:
    so does this one (Outbox). `readers`: how many ranks of the next stage read. `options`: as RunnerAdapter takes them.

    `group`: this stage's tensor-parallel ranks, all of which call this; `ranks` in `runner_adapter` says whether rank 0
    reads and broadcasts, with tensors that `group_device` can move, or each rank reads. Rank 0 sends.

    ConfigError as `stage_of` raises it; UsageError without `reads` and `sends`, and as RunnerAdapter raises it; what
    `connector.connect` and the first poll raise: BrokerLost, ReaderTaken, ReadersMismatch.
    """
    if reads is None and sends is None:
        raise errors.UsageError("a stage reads from one before, sends to one behind, or both", stage=stage)
    config, settings = (file, AdapterConfig()) if isinstance(file, TransferConfig) else stage_of(file, stage_id)[1:]
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    with ExitStack() as owned:

        def node() -> Node:
            return owned.enter_context(connector.connect(stage=stage, endpoint=endpoint))

        inbox: Source | None = None
        # Also of a rank that reads nothing itself: its model's failures are told by it.
        before = node() if reads is not None else None
        if reads is not None and before is not None:
            inbox = _source(before, reads, stage, settings, full_payload, group, group_device)
        outbox = None
        if sends is not None and rank == 0:
            if not config.sends:
                logger.warning(
                    "the transfer_config of stage %s lets nothing leave: %s is handed nothing, and waits", stage, sends
                )
            after = node()
            edge = after.edge(stage, sends, readers=readers)
            outbox = Outbox(after, edge, config, background=settings.background_send, whole=whole)
            owned.callback(outbox.close)
        # Others may have begun the next use of a rid, while this stage fails in the last one.
        abort = None if before is None else partial(before.abort, mine=True)
        made = RunnerAdapter(model, config, settings=settings, inbox=inbox, outbox=outbox, abort=abort, **options)
        made.owns(owned.pop_all())
    return made


def _source(
    node: Node,
    reads: str,
    stage: str,
    settings: AdapterConfig,
    full_payload: bool,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> Source:
    """What this rank reads by. One that is given what rank 0 reads has `node` for its abort."""
    if group is None:
        return Inbox(node, node.edge(reads, stage), full_payload=full_payload)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if settings.ranks == "each":
        edge = node.edge(reads, stage, reader=rank, readers=ranks)
        return EachRank(Inbox(node, edge, full_payload=full_payload), group, device=device)
    edge = node.edge(reads, stage)
    here = Inbox(node, edge, full_payload=full_payload) if rank == 0 else Bystander(node, edge)
    return BroadcastInbox(here, group, device=device)
