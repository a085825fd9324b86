"""One copy in, none out: told by torch's dispatcher and by the anonymous memory of both processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import connector

ROOT = Path(__file__).resolve().parents[2]
#: What a hand-over of 64 MiB may cost either process beside the pool.
LIMIT_KIB = 4096
COPIES = ("clone", "contiguous", "_to_copy", "aten.to", "copy_", "cat", "empty")


def _ran(role: str, endpoint: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.client.one_copy", role, endpoint],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What the writer and then the reader found."""
    with connector.connect(stage="host", embedded=True, pool="96MiB") as host:
        yield _ran("put", host.endpoint), _ran("take", host.endpoint)


def test_neither_process_holds_a_second_copy(told: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """64 MiB go over; neither writer nor reader grows by 4 MiB of its own memory."""
    writer, reader = told
    assert reader["fine"]
    assert writer["grown"] < LIMIT_KIB and reader["grown"] < LIMIT_KIB


def test_no_tensor_is_copied_on_the_way(told: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """torch is asked for no clone, contiguous, to or new memory, at put and at take."""
    for side in told:
        assert [name for name in side["dispatched"] if any(copy in name for copy in COPIES)] == []


def test_the_look_at_the_dispatcher_would_see_a_copy() -> None:
    """Else the test above could not fail."""
    import torch

    from tests.client.one_copy import Seen

    seen = Seen()
    with seen:
        torch.zeros(2).clone()
        torch.zeros(2, 2).t().contiguous()
        torch.zeros(2).to(torch.int64)
    assert sum(any(copy in name for copy in COPIES) for name in seen.names) >= 3
