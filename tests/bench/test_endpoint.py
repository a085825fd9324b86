"""`connector bench --endpoint` through a broker that serves others, too: it may be busy, or full."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import connector
from connector import Node

ROOT = Path(__file__).parents[2]


@contextmanager
def shared(**settings: Any) -> Iterator[Node]:
    """A broker that is running already, and somebody else who uses it."""
    with connector.connect(stage="host", embedded=True, **settings) as node:
        yield node


def bench(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "connector.cli", "bench", "--quick", "--endpoint", node.endpoint, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def left(node: Node) -> tuple[int, ...]:
    told = node.status()
    return tuple(int(told[name]) for name in ("sessions", "payloads", "lives", "used_bytes", "reserved_bytes"))


def test_it_measures_through_the_broker_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    limits = tmp_path / "none.json"
    limits.write_text("{}")
    with shared(pool="64MiB") as node:
        before, put = left(node), node.status()["payloads_sealed"]
        done = bench(node, "--workload", "step", "--limits", str(limits))
        assert done.returncode == 0, done.stderr
        assert int(node.status()["payloads_sealed"]) - int(put) >= 640
        assert left(node) == before


def test_a_broker_with_too_little_room_is_told_with_sizes_and_left_as_it_was() -> None:
    with shared(pool="4MiB") as node:
        before = left(node)
        done = bench(node, "--workload", "prefill")
        assert done.returncode == 1
        assert "never fit" in done.stderr and "limit=4194304" in done.stderr and "size=" in done.stderr
        assert left(node) == before


def filled(node: Node, held: ExitStack) -> None:
    """The pool is somebody else's, down to less than a step's chunks."""
    edge = node.edge("host", "nobody")
    edge.put("large", {"x": torch.zeros(16 * 1024 * 1024 - 65536, dtype=torch.uint8)})
    node.flush()


def crowded(node: Node, held: ExitStack) -> None:
    """Every session but one is somebody else's."""
    for number in range(4):
        held.enter_context(connector.connect(stage=f"other-{number}", endpoint=node.endpoint))


@pytest.mark.parametrize(
    ("occupy", "settings", "said"),
    [
        (filled, {"pool": "16MiB", "put_timeout": 0.5}, ("no room", "size=", "limit=16777216")),
        (crowded, {"pool": "16MiB", "max_sessions": 6}, ("too many sessions", "limit=6")),
    ],
)
def test_a_broker_that_others_fill_is_told_with_the_limit_and_left_as_it_was(
    occupy: Callable[[Node, ExitStack], None], settings: dict[str, Any], said: tuple[str, ...]
) -> None:
    with shared(**settings) as node, ExitStack() as held:
        occupy(node, held)
        before = left(node)
        done = bench(node, "--workload", "step")
        assert done.returncode == 1, done.stderr
        assert [text for text in said if text not in done.stderr] == []
        assert left(node) == before


def test_a_broker_that_is_away_is_told() -> None:
    command = [sys.executable, "-m", "connector.cli", "bench", "--quick", "--endpoint", "/tmp/no-broker-is-here"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "/tmp/no-broker-is-here" in done.stderr
