"""A signal's handler that raises: whatever the moment, its exception is what the caller gets, and nothing breaks."""

from __future__ import annotations

import threading

import pytest

import connector
from connector.client import wakers
from tests.client.interrupting import interrupted

#: Where a thread waits, and may be at any opcode of it when the signal comes; Thread.join takes care of that itself.
WAITING = {wakers.__file__, threading.__file__}
CAREFUL = {threading.Thread.join.__code__, threading.Thread._wait_for_tstate_lock.__code__}  # type: ignore[attr-defined]


def test_in_the_middle_of_closing(host: connector.Node) -> None:
    at, came = 0, True
    while came:
        node = connector.connect(stage="talker", endpoint=host.endpoint)
        came = interrupted(node.close, at, WAITING, CAREFUL)
        node.close(timeout=0.0)
        assert [row["stage"] for row in host.status("sessions")["sessions"]] == ["host"]
        at += 1
    # The last one was not met any more; the first ones were.
    assert at > 10


def test_in_the_middle_of_waiting_for_another_thread_to_open() -> None:
    at, came = 0, True
    while came:
        gate = wakers.Gate()
        came = interrupted(lambda gate=gate: gate.wait(0.0), at, WAITING, CAREFUL)  # type: ignore[misc]
        gate.open()
        gate.open()
        assert gate.wait(0.0)
        at += 1
    assert at > 5


@pytest.mark.parametrize("times", [1, 2])
def test_a_gate_that_is_opened_lets_all_pass(times: int) -> None:
    gate = wakers.Gate()
    assert not gate.is_open()
    assert not gate.wait(0.0)
    for _ in range(times):
        gate.open()
    assert gate.is_open()
    assert [gate.wait(0.0) for _ in range(3)] == [True] * 3
