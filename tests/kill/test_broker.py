"""The broker ends, by SIGTERM or SIGKILL, under clients that wait; it is started anew and they go on, untold."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import connector
from connector import errors
from connector.arena import cuda
from runner_adapter import Inbox, RunnerAdapter
from tests.fake_cuda import FakeCuda
from tests.kill.brokers import BrokerProcess, eventually, run_directory, session_locks
from tests.kill.host import HANG

MIB = 1 << 20


class Town:
    """A run directory, its broker of the moment, and two nodes that outlive it."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.broker = BrokerProcess(run_dir)
        self.writer = connector.connect(stage="a", endpoint=run_dir)
        self.reader = connector.connect(stage="b", endpoint=run_dir)
        self._threads: list[threading.Thread] = []

    def kill(self) -> None:
        """End the broker by SIGKILL; returns when both nodes have noticed."""
        self.broker.end(signal.SIGKILL)
        self._noticed()

    def start_again(self) -> None:
        """The next broker, once both nodes have noticed the end of the last: while they hold their session locks,
        what it left is not swept."""
        self._noticed()
        self.broker = BrokerProcess(self.run_dir)

    def _noticed(self) -> None:
        until = time.monotonic() + HANG
        while session_locks(self.run_dir):
            assert time.monotonic() < until, session_locks(self.run_dir)

    def waits(self, what: str, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` in a thread; returns when the broker has it waiting (`waiting_puts`, `waiting_takes`)."""
        future = self.calls(call)
        eventually(lambda: self._waiting(what), 1, self.writer)
        return future

    def calls(self, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` in a thread."""
        future: Future[Any] = Future()

        def body() -> None:
            try:
                future.set_result(call())
            except errors.ConnectorError as error:
                future.set_exception(error)

        thread = threading.Thread(target=body)
        self._threads.append(thread)
        thread.start()
        return future

    def _waiting(self, what: str) -> int:
        return sum(row[what] for row in self.writer.status("sessions")["sessions"])

    def fill(self) -> None:
        """Sealed payloads that leave no room for another of 2 MiB."""
        for number in range(3):
            self.writer.edge("a", "b").put(f"full{number}", {"x": torch.zeros(2 * MIB, dtype=torch.uint8)})
        self.writer.edge("a", "b").put("rest", {"x": torch.zeros(MIB, dtype=torch.uint8)})
        self.writer.flush()

    def works(self) -> None:
        """Both nodes are back, which a question shows, and a payload goes through."""
        for node in (self.writer, self.reader):
            assert node.status()["pid"] == self.broker.process.pid
        self.writer.edge("a", "b").put("after", {"x": torch.arange(9)}, timeout=HANG)
        with self.reader.edge("a", "b").take("after", timeout=HANG) as payload:
            assert torch.equal(payload["x"], torch.arange(9))

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        self.broker.end()
        for thread in self._threads:
            thread.join(HANG)


@pytest.fixture
def town() -> Iterator[Town]:
    with run_directory() as run_dir:
        found = Town(run_dir)
        yield found
        found.close()
        assert not os.path.exists(run_dir)


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("tc-*")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopping_broker_tells_all_who_wait_and_removes_all(town: Town, number: signal.Signals) -> None:
    """BrokerStopping for a take and a put, with rid and edge; then arena and run directory are gone."""
    uuid = town.writer.status()["arena"]
    town.fill()
    big = {"x": torch.zeros(2 * MIB, dtype=torch.uint8)}
    put = town.waits("waiting_puts", lambda: town.writer.edge("a", "b").put("waits", big, timeout=HANG))
    take = town.waits("waiting_takes", lambda: town.reader.edge("a", "b").take("never", timeout=HANG))
    assert town.broker.end(number) == 0
    for future, rid in ((put, "waits"), (take, "never")):
        error = future.exception(HANG)
        assert isinstance(error, errors.BrokerStopping)
        assert error.facts["rid"] == rid
        assert error.facts["edge"] == "a:b:0"
    assert not os.path.exists(town.run_dir)
    assert not [name for name in segments() if uuid in name]


def test_clients_of_a_stopped_broker_work_with_the_next(town: Town) -> None:
    """Nobody tells them: they look for it again."""
    town.works()
    old = town.writer.status()["arena"]
    town.broker.end()
    town.start_again()
    for node in (town.writer, town.reader):
        node.finish("after")
    town.works()
    assert town.writer.status()["arena"] != old


def test_who_waits_under_a_killed_broker_is_served_by_the_next(town: Town) -> None:
    """A put that waited for room, and a take of what was not there, both go through."""
    town.fill()
    big = {"x": torch.ones(2 * MIB, dtype=torch.uint8)}
    put = town.waits("waiting_puts", lambda: town.writer.edge("a", "b").put("waits", big, timeout=HANG))
    take = town.waits("waiting_takes", lambda: town.reader.edge("a", "b").take("waits", timeout=HANG))
    town.broker.end(signal.SIGKILL)
    town.start_again()
    put.result(HANG)
    with take.result(HANG) as payload:
        assert torch.equal(payload["x"], big["x"])
    town.works()


def test_what_a_device_copied_meanwhile_is_lost_and_told(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block is the old broker's; the pages stay until the copy is over, and the rid's next put says so."""
    device = FakeCuda()
    monkeypatch.setattr(cuda, "CALLS", device)
    edge = town.writer.edge("a", "b")
    ticket = edge.put("copied", {"x": device.tensor(torch.arange(512))}, last=False)
    town.broker.end(signal.SIGKILL)
    town.start_again()
    town.writer.status()
    device.run()
    with pytest.raises(errors.BrokerLost, match="started anew"):
        town.writer.flush()
    with pytest.raises(errors.BrokerLost) as caught:
        ticket.result()
    assert caught.value.facts["rid"] == "copied"
    town.writer.finish("copied")
    town.works()


def test_a_killed_broker_that_stays_away_is_named_at_the_deadline(town: Town) -> None:
    """BrokerLost with the path, for takes, puts, flushes and questions; then a new start heals all."""
    town.writer.edge("a", "b").put("known", {"x": torch.arange(3)}, last=False)
    town.writer.flush()
    town.broker.end(signal.SIGKILL)
    reader, writer = town.reader.edge("a", "b"), town.writer.edge("a", "b")
    town.writer.answer_timeout, before = 0.1, town.writer.answer_timeout
    big = {"x": torch.zeros(3 * MIB, dtype=torch.uint8)}
    for call in (
        lambda: reader.take("known", timeout=0.1),
        lambda: writer.put("more", big, timeout=0.1),
        lambda: writer.put("known", big, timeout=0.1),
        town.writer.status,
    ):
        with pytest.raises(errors.BrokerLost, match="away") as caught:
            call()
        assert town.run_dir in caught.value.facts["path"]
    town.writer.answer_timeout = before
    town.start_again()
    town.works()


def until_raised(call: Callable[[], Any]) -> errors.BrokerLost:
    """The BrokerLost that `call`, which does not wait, raises sooner or later."""
    until = time.monotonic() + HANG
    with pytest.raises(errors.BrokerLost) as caught:
        while time.monotonic() < until:
            call()
    return caught.value


def test_who_only_reads_hears_that_a_killed_broker_stays_away(town: Town) -> None:
    """BrokerLost with the path: by wait at its deadline, by poll after the node's answer_timeout. What came before is
    still polled, and a new start heals both."""
    reader = town.reader.edge("a", "b")
    reader.poll()
    town.writer.edge("a", "b").put("r", {"x": torch.arange(3)}, last=False)
    assert reader.wait(HANG)
    town.kill()
    town.reader.answer_timeout, before = 0.0, town.reader.answer_timeout
    assert list(reader.poll()) == ["r"]
    with pytest.raises(errors.BrokerLost, match="away") as caught:
        reader.wait(0.0)
    assert town.run_dir in caught.value.facts["path"]
    assert caught.value.facts["request"] == "wait"
    for _ in range(2):
        assert town.run_dir in until_raised(reader.poll).facts["path"]
    town.reader.answer_timeout = before
    town.start_again()
    town.works()
    assert not reader.poll() and not reader.wait(0.0)


def test_a_broker_that_is_started_again_is_a_pause_for_who_only_reads(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll finds nothing meanwhile, and a wait whose deadline passes meanwhile is answered by the next broker."""
    monkeypatch.setattr("connector.client.edge.GRACE", HANG)
    town.reader.answer_timeout = HANG
    reader = town.reader.edge("a", "b")
    for _ in range(2):
        reader.poll()
        town.kill()
        assert not reader.poll()
        waiting = town.calls(lambda: reader.wait(0.0))
        assert not reader.poll()
        town.start_again()
        assert waiting.result(HANG) is False
    town.writer.edge("a", "b").put("r", {"x": torch.arange(3)})
    assert reader.wait(HANG) and list(reader.poll()) == ["r"]


def test_a_stage_that_only_reads_hears_that_a_killed_broker_stays_away(town: Town) -> None:
    """By receive and by wait, whether it has requests that run or not."""
    inbox = Inbox(town.reader, town.reader.edge("a", "b"))
    adapter = RunnerAdapter(object(), inbox=inbox, abort=town.reader.abort)
    town.kill()
    town.reader.answer_timeout = 0.0
    with pytest.raises(errors.BrokerLost):
        adapter.wait(0.0)
    adapter.begin_step(new=["r"], scheduled=["r"])

    def step() -> None:
        adapter.begin_step(scheduled=["r"])
        adapter.receive()

    assert town.run_dir in until_raised(step).facts["path"]
    adapter.validate()
    # What it has of requests it can end.
    adapter.begin_step(finished=["r"])
    adapter.validate()
    assert list(inbox) == []
    town.start_again()


def test_what_a_lost_broker_had_is_reported_as_lost(town: Town) -> None:
    """A put into the dead arena is named by its ticket and by flush; a stream of the old broker goes on only after
    finish: its reader could never have it whole."""
    out = town.writer.edge("a", "b")
    out.put("r", {"x": torch.arange(3)}, last=False)
    town.writer.flush()
    town.broker.end(signal.SIGKILL)
    lost = out.put("s", {"x": torch.arange(3)})
    town.start_again()
    town.works()
    with pytest.raises(errors.BrokerLost, match="lost"):
        town.writer.flush()
    assert isinstance(lost.error, errors.BrokerLost)
    town.writer.flush()
    with pytest.raises(errors.BrokerLost, match="lost"):
        out.put("r", {"x": torch.arange(3)}, last=True)
    town.writer.finish("r")
    out.put("r", {"x": torch.arange(4)})
    with town.reader.edge("a", "b").take("r", timeout=HANG) as payload:
        assert torch.equal(payload["x"], torch.arange(4))


def test_an_abort_of_a_lost_broker_is_of_no_use_at_the_next(town: Town) -> None:
    """The reader has heard it, and not answered, when it expects the rid anew while the broker is away."""
    out, into = town.writer.edge("a", "b"), town.reader.edge("a", "b")
    into.poll()
    for number in range(5):
        # The next broker counts from the start.
        town.writer.edge("a", "elsewhere").put(f"other {number}", {"x": torch.zeros(1)})
    out.open("r")
    town.writer.abort("r", "of the old broker", mine=True)
    town.writer.finish("r")
    for node in (town.writer, town.reader, town.reader):
        node.status()
    assert town.reader.aborted("r") == "of the old broker"
    town.kill()
    into.expect("r")
    town.start_again()
    for node in (town.writer, town.reader):
        node.flush()
    for use in range(1, 4):
        out.put("r", {"x": torch.tensor([use])})
        assert into.wait(HANG)
        assert [payload["x"].tolist() for payload in into.poll()["r"]] == [[use]]
        for node in (town.writer, town.reader):
            node.finish("r")
            node.flush()


def test_views_of_a_dead_broker_stay_valid(town: Town) -> None:
    """The pages are the reader's as long as it looks at them; their release means nothing to the next broker."""
    town.writer.edge("a", "b").put("r", {"x": torch.arange(1000)})
    payload = town.reader.edge("a", "b").take("r", timeout=HANG)
    view = payload["x"]
    town.broker.end(signal.SIGKILL)
    town.start_again()
    town.works()
    assert torch.equal(view, torch.arange(1000))
    del view, payload
    town.reader.flush()


def test_a_killed_brokers_leftovers_go_at_the_next_start(town: Town) -> None:
    """One broker's segments and session locks are there, not two."""
    old = town.writer.status()["arena"]
    town.broker.end(signal.SIGKILL)
    town.start_again()
    town.works()
    new = town.writer.status()["arena"]
    assert new != old
    assert not [name for name in segments() if old in name]
    assert len(session_locks(town.run_dir)) == 2
