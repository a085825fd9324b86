"""A client that stops reading costs the broker a bounded amount of memory, and disturbs no one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import connector
from connector import Edge, Node
from tests.kill.brokers import eventually
from tests.kill.host import HANG, Host
from tests.kill.roles import chunk

MIB = 1 << 20
#: Chunks of one step, and of one rid before it ends.
STEP, LIFE = 64, 64


@pytest.fixture
def node() -> Iterator[Node]:
    with connector.connect(stage="writer", embedded=True, pool="32MiB", log_level="error") as found:
        yield found


def _rss(node: Node) -> int:
    """Bytes of memory that the broker has now, the arena apart, which it has from the start."""
    status = Path(f"/proc/{node.status()['pid']}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def _flow(out: Edge, source: Edge, start: int, steps: int) -> None:
    """Steps of 64 chunks, each read at once, for its place and its content. Every 64th step ends its rids."""
    for step in range(start, start + steps):
        life, index = divmod(step, LIFE)
        last = index == LIFE - 1
        out.put_many(
            {f"{life}/{row}": {"x": torch.tensor([step, row])} for row in range(STEP)}, last=last, timeout=HANG
        )
        seen: set[str] = set()
        while len(seen) < STEP:
            assert source.wait(HANG)
            for rid, payloads in source.poll().items():
                assert [(payload.index, payload["x"].tolist()) for payload in payloads] == [
                    (index, [step, int(rid.split("/")[1])])
                ]
                seen.add(rid)
        assert all(rid.startswith(f"{life}/") for rid in seen)


@pytest.mark.parametrize(
    "chunks",
    [20_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
)
def test_b51_a_stopped_reader_costs_little_and_disturbs_no_one(node: Node, chunks: int) -> None:
    """One client is stopped with payloads owed to it; `chunks` others flow past it on another edge, in order, every
    bit right, while rids end and are aborted; the broker grows by at most 16 MiB. Then the client goes on."""
    steps = -(-chunks // STEP)
    warm_up = 2 * LIFE
    with Host() as host, connector.connect(stage="reader", endpoint=node.endpoint) as reader:
        out, source = node.edge("busy", "lane"), reader.edge("busy", "lane")
        source.poll()
        # The record of the last events and the allocator's own needs fill up once, stopped reader or not.
        _flow(out, source, 0, warm_up)
        stopped = host.start("paced_reader", endpoint=node.endpoint, edge=("slow", "lane"), rid="slow")
        stopped.tell("go", count=3)
        slow = node.edge("slow", "lane")
        for index in range(3):
            slow.put("slow", chunk("slow", index), last=False)
        assert stopped.expect("took")["count"] == 3
        os.kill(stopped.pid, signal.SIGSTOP)
        before = _rss(node)
        for index in range(3, 603):
            slow.put("slow", chunk("slow", index), last=False)
        for number in range(20):
            node.abort(f"never/{number}")
        _flow(out, source, warm_up, steps)
        grown = _rss(node) - before
        print(f"grown by {grown / MIB:.1f} MiB over {steps * STEP} chunks")
        assert grown <= 16 * MIB
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.tell("go", count=600)
        assert stopped.expect("took")["count"] == 603
        node.abort("slow")
        eventually(lambda: node.status()["payloads"], 0, node)
