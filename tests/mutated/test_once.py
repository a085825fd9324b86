"""Each payload reaches its caller once, and a refusal that nobody was told of reaches flush."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import connector
from connector.client import reading
from connector.client.inbox import Channel
from connector.client.requests import Answer
from connector.client.rid_queue import Arrived
from connector.core.directory.effects import Descriptor
from connector.core.errors import AlreadyPut, ReadersMismatch
from connector.core.names import Edge, Handle

ROOT = Path(__file__).resolve().parents[2]
HANG = 60.0
EDGE = Edge("a", "b")

OWNER = """
import os, sys, connector
node = connector.connect(stage="a", embedded=True, pool="2MiB")
print(node.status()["pid"], node.endpoint, flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), 9)
"""


def given(answer: Answer) -> None:
    """Wait for it, as a caller that does not read itself."""
    there = threading.Event()
    answer.tell = there.set
    assert answer.done or there.wait(HANG)


def arrived(index: int, generation: int) -> Arrived:
    told = Descriptor(EDGE, 0, "r", 1, index, 0, 0, Handle(4096, generation), 128, 64, 0, b"")
    return Arrived.of(told, None)  # type: ignore[arg-type]  # nobody opens it


def test_a_descriptor_that_comes_twice_is_not_seen_twice() -> None:
    """By another road, or once more by an interrupted caller: the block that is here is kept, the same chunk in another
    one is given back."""
    channel = Channel(EDGE, 0, 1, False)
    first, second, other = arrived(0, 1), arrived(1, 2), arrived(0, 3)
    assert [channel.deliver(one)[0] for one in (first, second)] == [[], []]
    assert channel.deliver(first)[0] == []
    assert channel.deliver(other)[0] == [other.hold]
    taken = [channel.pop("r") for _ in range(3)]
    assert [one.arrived if one else None for one in taken] == [first, second, None]


def test_a_take_that_is_given_up_as_its_payload_comes_loses_nothing() -> None:
    """The caller was answered, and is cancelled before it looks: asyncio's race, without the race."""
    with connector.connect(stage="a", embedded=True, pool="2MiB") as node:
        edge = node.edge("a", "b")
        taking = reading.next_taken(node.session, edge.channel, "r", HANG, stream=False)
        subscribed = next(taking)
        given(subscribed)
        waiting = taking.send(subscribed.result())
        edge.put("r", {"x": torch.tensor([7])})
        given(waiting)
        taking.close()
        assert edge.take("r", timeout=1.0)["x"].tolist() == [7]
        node.finish("r")


def test_flush_raises_a_refusal_that_nobody_was_told_of_once() -> None:
    """The put itself had returned: the broker's no came later."""
    with connector.connect(stage="a", embedded=True, pool="2MiB") as node:
        edge = node.edge("a", "b")
        edge.put("r", {"x": torch.zeros(1)}, index=0)
        edge.put("r", {"x": torch.zeros(1)}, index=0)
        with pytest.raises(AlreadyPut):
            node.flush()
        node.flush()
        node.abort("r")


def test_each_put_on_a_poisoned_stream_raises_its_cause() -> None:
    """Not the next one alone: nothing behind the hole is ever said to be put."""
    with connector.connect(stage="a", embedded=True, pool="2MiB") as node:
        edge = node.edge("a", "b")
        edge.put("r", {"x": torch.zeros(1)}, last=False)
        edge.put("r", {"x": torch.zeros(1)}, last=False, readers=2)
        # Its answer comes behind the refusal.
        node.status()
        for _ in range(3):
            with pytest.raises(ReadersMismatch):
                edge.put("r", {"x": torch.zeros(1)}, last=False)
        node.abort("r")


def test_a_private_broker_ends_with_its_killed_owner() -> None:
    """And takes its segments and its directory with it."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        words = owner.stdout.readline().split()
        pid, run_dir = int(words[0]), words[1]
        broker = os.pidfd_open(pid)
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            segments = {line.split("/dev/shm/")[1] for line in maps.splitlines() if "/dev/shm/tc-" in line}
            owner.stdin.write("!")
            owner.stdin.flush()
            assert owner.wait(HANG) == -signal.SIGKILL
            ended = bool(select.select([broker], [], [], HANG / 2)[0])
            if not ended:
                # Nobody else will.
                signal.pidfd_send_signal(broker, signal.SIGTERM)
                select.select([broker], [], [], HANG / 2)
        finally:
            os.close(broker)
    assert ended and segments
    assert segments.isdisjoint(os.listdir("/dev/shm"))
    assert not os.path.exists(run_dir)
