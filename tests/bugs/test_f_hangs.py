"""Kind F of the bug log: waits that do not end. B66 and B67 are answered in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import connector
from connector import Node, errors
from connector.client import link
from connector.wire import codec
from connector.wire import messages as msg
from tests.kill.brokers import BrokerProcess, eventually, run_directory
from tests.kill.host import HANG, ROOT, Host

MIB = 1 << 20


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with connector.connect(stage="a", embedded=True, pool="4MiB", log_level="error") as found:
        yield found


@pytest.fixture(scope="module")
def other(node: Node) -> Iterator[Node]:
    with connector.connect(stage="b", endpoint=node.endpoint) as found:
        yield found


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as found:
        yield found


@pytest.fixture
def run_dir() -> Iterator[str]:
    with run_directory() as path:
        yield path


def _int(value: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([value])}


def _waiting(node: Node, what: str) -> int:
    return sum(row[what] for row in node.status("sessions")["sessions"])


def test_b64_a_writer_that_dies_ends_its_readers_wait(node: Node, host: Host) -> None:
    """The wait for chunk 2 ends with WriterDied, and the room of the request is free."""
    writer = host.start("stopped_writer", endpoint=node.endpoint, edge=("b64", "c"), rid="r", before=0, stage="sealed")
    writer.expect("stopped")
    source = node.edge("b64", "c")
    source.take("r", timeout=HANG).release()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.take, "r", timeout=HANG)
        eventually(lambda: _waiting(node, "waiting_takes"), 1, node)
        host.end_workers()
        error = waiting.exception(HANG)
    assert isinstance(error, errors.WriterDied)
    assert (error.facts["rid"], error.facts["chunks"]) == ("r", 1)
    eventually(lambda: node.status()["payloads"], 0, node)


def test_b64_nothing_instead_of_a_chunk_is_refused_at_once(node: Node) -> None:
    """None is no payload; the reader's deadline names what it waits for."""
    edge = node.edge("b64none", "c")
    edge.put("r", _int(0), last=False)
    with pytest.raises(errors.InvalidPayload):
        edge.put("r", None, last=True)  # type: ignore[arg-type]
    edge.take("r", timeout=HANG).release()
    with pytest.raises(errors.NotYet) as caught:
        edge.take("r", timeout=0.0)
    assert caught.value.facts["waiting_for"] == 1
    edge.end("r")
    node.flush()
    with pytest.raises(errors.Gone):
        edge.take("r", timeout=0.0)


def test_b64_an_abort_ends_the_wait(node: Node, other: Node) -> None:
    """A writer that fails aborts: whoever waits is told why, at once."""
    node.edge("b64abort", "c").put("aborted", _int(0), last=False)
    source = other.edge("b64abort", "c")
    source.take("aborted", timeout=HANG).release()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.take, "aborted", timeout=HANG)
        eventually(lambda: _waiting(node, "waiting_takes"), 1, node)
        node.abort("aborted", reason="the model raised")
        error = waiting.exception(HANG)
    assert isinstance(error, errors.RequestAborted)
    assert error.facts["reason"] == "the model raised"


def test_b65_a_request_without_rows_has_a_payload_like_the_others(node: Node, other: Node) -> None:
    """Eight requests, one with no rows and one with no keys: all eight arrive and end; nobody waits for anybody."""
    step = {f"r{number}": {"rows": torch.full((number, 4), number)} for number in range(7)}
    step["none"] = {}
    source = other.edge("b65", "c")
    source.poll()
    node.edge("b65", "c").put_many(step, last=True)
    found = source.poll()
    while found.ended != set(step):
        assert source.wait(HANG)
        more = source.poll()
        found.update(more)
        found.ended |= more.ended
    assert set(found) == set(step)
    assert [tuple(found[f"r{number}"][0]["rows"].shape) for number in range(7)] == [(n, 4) for n in range(7)]
    assert dict(found["none"][0]) == {}


def test_b65_the_oldest_wait_is_shown(node: Node) -> None:
    """A stall is not invisible: the edge tells how many puts wait, and since when."""
    edge = node.edge("b65wait", "c")
    edge.put("full", {"x": torch.zeros(3 * MIB, dtype=torch.uint8)})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(edge.put, "more", {"x": torch.zeros(3 * MIB, dtype=torch.uint8)}, timeout=HANG)
        eventually(lambda: _waiting(node, "waiting_puts"), 1, node)
        (row,) = [row for row in node.status("edges")["edges"] if row["edge"] == "b65wait:c:0"]
        assert row["waiting_puts"] == 1
        assert row["oldest_wait"] >= 0
        eventually(lambda: _oldest_wait(node, "b65wait:c:0") > 0.0, True, node)
        edge.take("full").release()
        waiting.result(HANG)
    edge.take("more").release()


def _oldest_wait(node: Node, edge: str) -> float:
    return next(float(row["oldest_wait"]) for row in node.status("edges")["edges"] if row["edge"] == edge)


def test_b68_a_dead_reader_of_three_does_not_block_the_writer(run_dir: str, host: Host) -> None:
    """Two readers are done, the third died with the payload in hand: after the edge's patience its room is free, and
    the put that waited for it goes through."""
    broker = BrokerProcess(run_dir, pool="4MiB", unclaimed_after=0.5)
    node = connector.connect(stage="a", endpoint=run_dir)
    body = {"x": torch.zeros(3 * MIB, dtype=torch.uint8)}
    out = node.edge("b68", "c", readers=3)
    second = connector.connect(stage="b", endpoint=run_dir)
    victim = host.start(
        "streaming_reader", endpoint=run_dir, edge=("b68", "c"), rid="never", reader=2, readers=3, quiet=True
    )
    victim.expect("ready")
    # Behind what takes long: the edge's patience begins here.
    out.put("r", body, readers=3)
    for reader, session in enumerate((node, second)):
        session.edge("b68", "c", reader=reader, readers=3).take("r", timeout=HANG).release()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(out.put, "next", body, readers=3, timeout=2 * HANG)
        host.end_workers()
        assert waiting.result(2 * HANG).rid == "next"
    second.close()
    node.close()
    assert broker.end() == 0


def test_b68_close_wakes_a_blocked_writer(node: Node) -> None:
    """A shutdown does not wait for room: the put ends with ClientClosed."""
    own = connector.connect(stage="w", endpoint=node.endpoint)
    edge = own.edge("b68close", "c")
    edge.put("full", {"x": torch.zeros(3 * MIB, dtype=torch.uint8)})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(edge.put, "more", {"x": torch.zeros(3 * MIB, dtype=torch.uint8)}, timeout=600.0)
        eventually(lambda: _waiting(node, "waiting_puts"), 1, node)
        own.close()
        assert isinstance(waiting.exception(HANG), errors.ClientClosed)
    node.edge("b68close", "c").take("full", timeout=HANG).release()


def test_b68_a_close_waits_for_nothing_that_nobody_owes_it(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    """Once everything is acknowledged it is over; a broker that ended would be listened to for LAST_WORDS."""
    monkeypatch.setattr(link, "LAST_WORDS", 2_000_000)
    own = connector.connect(stage="w", endpoint=node.endpoint)
    ticket = own.edge("b68last", "c").put("r", _int(1))
    own.close(timeout=1000.0)
    assert ticket.outcome == "stored"
    node.edge("b68last", "c").take("r", timeout=HANG).release()


def test_b69_no_wake_up_is_lost(node: Node, other: Node) -> None:
    """A take that begins just before, just after or while its payload comes never sleeps on it: a thousand times."""
    out, source = node.edge("b69", "c"), other.edge("b69", "c")
    with ThreadPoolExecutor(1) as pool:
        for number in range(1000):
            waiting = pool.submit(source.take, f"r{number}", timeout=HANG)
            out.put(f"r{number}", _int(number))
            with waiting.result(2 * HANG) as payload:
                assert payload["x"].tolist() == [number]
            del waiting, payload


def test_b70_a_payload_that_fails_its_check_frees_its_room(node: Node, other: Node) -> None:
    """Every tenth block is damaged behind the broker's back: those rids raise Broken, all the others are right, and
    nothing stays occupied."""
    out, source = node.edge("b70", "c"), other.edge("b70", "c")
    arena = node._link.session.arena
    assert arena is not None
    for number in range(60):
        out.put(f"r{number}", _int(number))
    node.flush()
    rows = {row["rid"]: row for row in node.payloads(edge="b70:c:0")}
    for number in range(0, 60, 10):
        arena.segment.words[rows[f"r{number}"]["offset"] >> 3] ^= 1 << 40
    for number in range(60):
        if number % 10:
            with source.take(f"r{number}", timeout=HANG) as payload:
                assert payload["x"].tolist() == [number]
            continue
        with pytest.raises(errors.Broken) as caught:
            source.take(f"r{number}", timeout=HANG)
        assert caught.value.facts["rid"] == f"r{number}"
    eventually(lambda: list(node.payloads(edge="b70:c:0")), [], node)


def test_b71_a_call_after_a_time_out_gets_its_own_answer(run_dir: str) -> None:
    """The broker stands still; a take and a question give up; it goes on, and the next calls are right: no late
    answer is taken for another, and what came late is not lost."""
    broker = BrokerProcess(run_dir)
    node = connector.connect(stage="a", endpoint=run_dir)
    edge = node.edge("b71", "c")
    edge.put("before", _int(1))
    edge.take("before", timeout=HANG).release()
    os.kill(broker.process.pid, signal.SIGSTOP)
    try:
        edge.put("during", _int(2))
        with pytest.raises(errors.BrokerLost):
            edge.take("during", timeout=0.1)
        with pytest.raises(errors.BrokerLost):
            node.flush(timeout=0.1)
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)
    for number in range(20):
        edge.put(f"r{number}", _int(number))
        with edge.take(f"r{number}", timeout=HANG) as payload:
            assert payload["x"].tolist() == [number]
    with edge.take("during", timeout=HANG) as payload:
        assert payload["x"].tolist() == [2]
    node.close()
    assert broker.end() == 0


def test_b71_who_knocks_at_a_stopped_broker_gets_in_when_it_goes_on(run_dir: str) -> None:
    """The first tries time out; the broker finds several streams of one client, and serves the one that is alive."""
    broker = BrokerProcess(run_dir)
    os.kill(broker.process.pid, signal.SIGSTOP)
    before = _streams(run_dir)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(connector.connect, stage="a", endpoint=run_dir, timeout=HANG)
        while _streams(run_dir) < before + 2:
            assert not joining.done()
            threading.Event().wait(0.05)
        os.kill(broker.process.pid, signal.SIGCONT)
        node = joining.result(HANG)
    assert node.status()["sessions"] == 1
    edge = node.edge("b71", "c")
    edge.put("r", _int(3))
    with edge.take("r", timeout=HANG) as payload:
        assert payload["x"].tolist() == [3]
    node.close()
    assert broker.end() == 0


def _streams(run_dir: str) -> int:
    """Ends of the broker's lifeline socket that the kernel knows: its listener, and streams not yet closed by it."""
    with open("/proc/net/unix") as file:
        return sum(line.rstrip().endswith(run_dir + "/lifeline.sock") for line in file)


ABSENT = """
import sys, connector
print("connecting", flush=True)
connector.connect(stage="a", endpoint=sys.argv[1], timeout=float(sys.argv[2]))
"""

UNSENT = """
import sys, torch, connector
node = connector.connect(stage="a", endpoint=sys.argv[1])
edge = node.edge("b72", "c")
print("ready", flush=True)
sys.stdin.readline()
for number in range(2):
    try:
        edge.put(f"r{number}", {"x": torch.zeros(8)}, timeout=0.1)
    except connector.errors.BrokerLost:
        pass
sys.exit(7)
"""


def _script(text: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_b72_an_absent_broker_is_named_and_the_process_ends(run_dir: str) -> None:
    """connect gives up at its time-out with the path it tried; nothing keeps the process."""
    with _script(ABSENT, run_dir, "0.2") as process:
        _, told = process.communicate(timeout=HANG)
        assert process.returncode == 1
    assert "BrokerLost" in told
    assert run_dir in told


def test_b72_a_worker_whose_broker_is_gone_ends_by_itself(run_dir: str) -> None:
    """Unsent messages do not hold the exit, and do not hide the exit code."""
    broker = BrokerProcess(run_dir)
    with _script(UNSENT, run_dir) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        broker.end(signal.SIGKILL)
        process.communicate("go\n", timeout=HANG)
        assert process.returncode == 7
    BrokerProcess(run_dir).end()


def test_b72_an_interrupt_ends_a_connect_that_waits(run_dir: str) -> None:
    """Ctrl-C while nobody answers."""
    with _script(ABSENT, run_dir, "600") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connecting\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=HANG)
        assert process.returncode != 0
    assert "KeyboardInterrupt" in told


def _lose_once(monkeypatch: pytest.MonkeyPatch, node: Node, kind: type[msg.Message]) -> list[msg.Message]:
    """The next message of the kind that the node sends is lost; what was lost is in the list returned."""
    session = node._link.session
    lost: list[msg.Message] = []
    collect = session.collect

    def lossy_collect() -> list[msg.Message]:
        kept = []
        for message in collect():
            if not lost and type(message) is kind:
                lost.append(message)
                session.out.waiting.remove(message)
            else:
                kept.append(message)
        return kept

    monkeypatch.setattr(session, "collect", lossy_collect)
    return lost


@pytest.fixture
def own(node: Node) -> Iterator[Node]:
    """A client whose messages may get lost."""
    with connector.connect(stage="lossy", endpoint=node.endpoint) as found:
        yield found


@pytest.mark.parametrize("kind", [msg.Seal, msg.Release])
def test_b74_a_lost_numbered_message_is_said_again(
    monkeypatch: pytest.MonkeyPatch, own: Node, node: Node, kind: type[msg.Message]
) -> None:
    """A seal or a release is lost: the next numbered message shows the gap, and each is applied once, in order."""
    edge = own.edge(f"b74{kind.__name__}", "c")
    edge.put("r", _int(0), last=False)
    edge.take("r", timeout=HANG).release()
    own.flush()
    lost = _lose_once(monkeypatch, own, kind)
    for index in range(1, 6):
        edge.put("r", _int(index), last=index == 5)
    got = [(payload.index, payload["x"].item()) for payload in edge.stream("r", timeout=HANG)]
    edge.put("after", _int(9))
    edge.take("after", timeout=HANG).release()
    own.flush()
    assert got == [(index, index) for index in range(1, 6)]
    assert len(lost) == 1
    eventually(lambda: node.status()["payloads"], 0, node)


def test_b74_a_lost_grant_fails_one_put_and_no_other(monkeypatch: pytest.MonkeyPatch, own: Node) -> None:
    """The put that waited for the lost answer ends at its deadline, typed; the next one works."""
    session = own._link.session
    lost: list[msg.Message] = []
    receive = session.receive

    def lossy_receive(envelope: codec.Envelope) -> None:
        kept = []
        for message in envelope.messages:
            asked = session.requests.get(message.request) if isinstance(message, msg.Grant) else None
            if not lost and asked is not None and isinstance(asked.message, msg.Reserve) and not asked.message.ahead:
                lost.append(message)
            else:
                kept.append(message)
        receive(envelope._replace(messages=kept))

    monkeypatch.setattr(session, "receive", lossy_receive)
    edge = own.edge("b74grant", "c")
    with pytest.raises(errors.BrokerLost):
        edge.put("r", {"x": torch.zeros(9000)}, timeout=0.1)
    assert len(lost) == 1
    edge.put("next", _int(5), timeout=HANG)
    with edge.take("next", timeout=HANG) as payload:
        assert payload["x"].tolist() == [5]


def test_b74_a_lost_acknowledgement_is_made_good_by_the_next(monkeypatch: pytest.MonkeyPatch, own: Node) -> None:
    """Acknowledgements are cumulative: a ticket whose own was lost is stored by the following one."""
    session = own._link.session
    lost: list[int] = []
    receive: Callable[[codec.Envelope], None] = session.receive

    def lossy_receive(envelope: codec.Envelope) -> None:
        if not lost and envelope.counter:
            lost.append(envelope.counter)
            envelope = envelope._replace(counter=0)
        receive(envelope)

    monkeypatch.setattr(session, "receive", lossy_receive)
    edge = own.edge("b74ack", "c")
    tickets = [edge.put(f"r{number}", _int(number)) for number in range(3)]
    for number in range(3):
        edge.take(f"r{number}", timeout=HANG).release()
    own.flush()
    assert lost
    assert [ticket.result() for ticket in tickets] == ["stored"] * 3


def test_b75_a_reader_that_stands_still_keeps_its_block_and_no_other(run_dir: str, host: Host) -> None:
    """A stopped reader of an aborted request: its bytes are quarantined and shown, others are served, and its answer
    brings them back. No time-out gives a block away that it may still read."""
    broker = BrokerProcess(run_dir, pool="4MiB", heartbeat=0.1, suspect_after=0.2)
    node = connector.connect(stage="a", endpoint=run_dir)
    edge = node.edge("b75", "c")
    body = {"x": torch.ones(MIB, dtype=torch.uint8)}
    edge.put("r", body)
    reader = host.start("holding_reader", endpoint=run_dir, edge=("b75", "c"), rid="r")
    reader.expect("holding")
    os.kill(reader.pid, signal.SIGSTOP)
    report = node.abort("r")
    assert (report["held"], report["payloads"]) == (1, 0)
    eventually(lambda: node.status()["quarantined_bytes"], MIB, node)
    assert "suspect" in [row["state"] for row in node.status("sessions")["sessions"]]
    for number in range(30):
        node.edge("b75other", "c").put(f"r{number}", body, timeout=HANG)
        with node.edge("b75other", "c").take(f"r{number}", timeout=HANG) as payload:
            assert torch.equal(payload["x"], body["x"])
    assert node.status()["quarantined_bytes"] == MIB
    os.kill(reader.pid, signal.SIGCONT)
    reader.tell("go")
    reader.expect("released")
    eventually(lambda: node.status()["payloads"], 0, node)
    assert node.status()["quarantined_bytes"] == 0
    host.end_workers()
    node.close()
    assert broker.end() == 0
