"""Many payloads of every kind through one broker: four producers, eight requests each, two consumers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import connector

ROOT = Path(__file__).resolve().parents[2]
PRODUCERS = 4
#: Each consumer reads two producers.
CONSUMERS = ((0, 1), (2, 3))
PATIENCE = 1800.0


def _start(role: str, endpoint: str, payloads: int, *numbers: int) -> subprocess.Popen[str]:
    arguments = [role, endpoint, str(payloads), str(PRODUCERS), *map(str, numbers)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stress.roles", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def _told(process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    out, _ = process.communicate(timeout=deadline - time.monotonic())
    assert process.returncode == 0, out
    found: dict[str, Any] = json.loads(out)
    return found


def hand_over(payloads: int) -> None:
    """`payloads` in all, each compared with what its seed gives, in strict order; then nothing is left anywhere."""
    with connector.connect(stage="host", embedded=True, pool="32MiB") as host:
        running = [_start("consume", host.endpoint, payloads, *numbers) for numbers in CONSUMERS]
        running += [_start("produce", host.endpoint, payloads, number) for number in range(PRODUCERS)]
        deadline = time.monotonic() + PATIENCE
        try:
            told = [_told(process, deadline) for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        assert [line for row in told for line in row.get("wrong", [])] == []
        assert sum(row.get("put", 0) for row in told) == sum(row.get("taken", 0) for row in told) == payloads
        _nothing_is_left(host, payloads)


def _nothing_is_left(host: connector.Node, payloads: int) -> None:
    deadline = time.monotonic() + 60
    while host.status()["sessions"] > 1 and time.monotonic() < deadline:
        pass
    status = host.status()
    left = ("used_bytes", "reserved_bytes", "quarantined_bytes", "blocks", "payloads", "lives")
    assert {name: status[name] for name in left} == dict.fromkeys(left, 0)
    counters = host.counters()
    assert counters["payloads_sealed"] == counters["payloads_released"] == payloads
    assert counters["blocks_reserved"] == counters["blocks_freed"]
    refused = ("puts_refused", "late_puts", "aborts", "redelivered", "sessions_died", "deadlocks", "payloads_live")
    assert {name: counters[name] for name in refused} == dict.fromkeys(refused, 0)
    assert len(counters["edges"]) == PRODUCERS


def test_twenty_five_hundred_payloads() -> None:
    """The short form of the one below."""
    hand_over(2_500)


@pytest.mark.long
@pytest.mark.timeout(PATIENCE + 120)
def test_a_hundred_thousand_payloads() -> None:
    """100 000 payloads of random shape, dtype, layout and size."""
    hand_over(100_000)
