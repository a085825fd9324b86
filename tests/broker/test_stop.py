"""Stops and leftovers: what a signal, a kill and the next start leave."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import connector
from connector.core.errors import BrokerLost, BrokerStopping, ConnectorError

Start = Callable[..., Any]


def ours(running: Any, names: list[str]) -> list[str]:
    return [name for name in names if Path("/dev/shm", name).exists()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_tells_who_waits_and_leaves_nothing(start: Start, number: int) -> None:
    """Waiters get BrokerStopping; arena, table and run directory go; the exit code is 0."""
    running = start()
    segments = running.segments()
    assert len(segments) == 2
    with connector.connect(stage="b", endpoint=running.run_dir, timeout=60) as node:
        told: list[ConnectorError] = []

        def wait() -> None:
            try:
                node.edge("a", "b").take("r", timeout=60)
            except ConnectorError as error:
                told.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        with connector.connect(stage="look", endpoint=running.run_dir, timeout=60) as look:
            while not any(row["waiting_takes"] for row in look.status("sessions")["sessions"]):
                pass
        assert running.end(number) == 0, running.log()
        waiter.join(60)
        assert [type(error) for error in told] == [BrokerStopping]
    assert ours(running, segments) == []
    assert not os.path.exists(running.run_dir)


def test_a_stop_with_a_live_session_and_its_views_leaves_nothing(start: Start) -> None:
    """The session's lock file goes, too; its views stay readable."""
    running = start()
    segments = running.segments()
    with connector.connect(stage="a", endpoint=running.run_dir, timeout=60) as node:
        edge = node.edge("a", "b")
        edge.put("r", {"x": torch.arange(5)})
        payload = edge.take("r", timeout=60)
        assert running.end() == 0
        assert ours(running, segments) == []
        assert not os.path.exists(running.run_dir)
        assert torch.equal(payload["x"], torch.arange(5))
        del payload


def test_a_stop_in_a_directory_that_someone_cleared_is_clean(start: Start) -> None:
    """A cleaner of /tmp took the files; the segments go all the same."""
    running = start()
    segments = running.segments()
    for name in ("broker.sock", "lifeline.sock", "broker.lock"):
        running.path(name).unlink()
    running.path("sessions").rmdir()
    os.rmdir(running.run_dir)
    assert running.end() == 0, running.log()
    assert ours(running, segments) == []


def test_a_stop_leaves_what_others_put_there(start: Start) -> None:
    """A file beside ours, and one in our sessions directory."""
    running = start()
    running.path("notes.txt").write_text("mine")
    running.path("sessions/notes.txt").write_text("mine")
    assert running.end() == 0
    left = sorted(str(path.relative_to(running.run_dir)) for path in Path(running.run_dir).rglob("*"))
    assert left == ["notes.txt", "sessions", "sessions/notes.txt"]


#: The signal comes when the table is made and the arena is not.
SIGNAL_AT_START = """
import os, signal
import connector.broker.store as store
create = store.create_arena
def interrupted(uuid, *arguments):
    print("uuid", uuid, os.listdir("/dev/shm"), file=__import__("sys").stderr, flush=True)
    os.kill(os.getpid(), signal.{name})
    return create(uuid, *arguments)
store.create_arena = interrupted
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_during_the_start_leaves_nothing(start: Start, run_dir: str, name: str) -> None:
    """A large pool takes seconds to reserve: the operator changes their mind."""
    running = start(prelude=SIGNAL_AT_START.format(name=name))
    assert running.word == ""
    assert running.process.wait() == 0, running.log()
    assert not os.path.exists(run_dir)
    uuid = running.log().split()[1]
    assert f"tc-{uuid}-table" in running.log()
    assert [name for name in os.listdir("/dev/shm") if uuid in name] == []


def test_the_next_start_reclaims_a_killed_broker_and_says_so(start: Start) -> None:
    """Before it allocates: a line for each segment, with its path and bytes."""
    first = start()
    segments = first.segments()
    first.end(signal.SIGKILL)
    sizes = {f"/dev/shm/{name}": Path("/dev/shm", name).stat().st_size for name in segments}
    assert len(sizes) == 2
    second = start(log_format="json")
    assert second.word == "ready"
    assert ours(first, segments) == []
    lines = [json.loads(line) for line in second.log().splitlines()]
    told = {line["path"]: line["bytes"] for line in lines if line["text"] == "removed what a dead broker left"}
    assert told == sizes


def test_a_broker_reclaims_before_it_allocates(start: Start) -> None:
    """The pool fits once on the node, not twice: a killed broker's must go first."""
    order = """
import connector.broker.store as store, connector.broker.loop as loop
def told(name, call):
    def tell(*a, **k):
        print(name, file=__import__("sys").stderr, flush=True)
        return call(*a, **k)
    return tell
loop.reclaim = told("reclaim", loop.reclaim)
store.create_arena = told("allocate", store.create_arena)
"""
    running = start(prelude=order)
    assert [line for line in running.log().splitlines() if line in ("reclaim", "allocate")] == ["reclaim", "allocate"]


def test_what_another_run_directory_left_is_not_touched(start: Start) -> None:
    """It is another operator's; its own next start takes it."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder:
        other = start(folder + "/other")
        segments = other.segments()
        other.end(signal.SIGKILL)
        mine = start()
        assert mine.word == "ready"
        assert ours(other, segments) == segments
        again = start(folder + "/other")
        assert ours(other, segments) == []
        assert again.end() == 0


def test_a_client_of_a_stopped_broker_says_where_it_looked(start: Start) -> None:
    """And how long it waited; it does not hang."""
    running = start()
    assert running.end() == 0
    with pytest.raises(BrokerLost) as caught:
        connector.connect(stage="a", endpoint=running.run_dir, timeout=0.2)
    assert caught.value.facts["path"] == running.run_dir


def test_a_clean_stop_is_no_warning_of_its_clients(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """They were told; a broker that dies without a word is one."""
    for number, warnings in ((signal.SIGKILL, 1), (signal.SIGTERM, 0)):
        caplog.clear()
        running = start()
        with connector.connect(stage="a", endpoint=running.run_dir, timeout=60) as node:
            running.end(number)
            while node.session.up:
                # The link's thread hears of it; the test's time-out is the guard.
                pass
        lost = [record for record in caplog.records if "lost the broker" in record.getMessage()]
        assert len(lost) == warnings
