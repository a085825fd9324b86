"""Kind D of the bug log: capacity, backpressure, a full /dev/shm. B51 is in tests/stress, B52 is answered in words."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import connector
from connector import Node, errors
from connector.arena.room import check_room
from tests.bugs.confined import can_mount, in_group, in_small_shm, memory_group
from tests.kill.brokers import BrokerProcess, eventually, run_directory
from tests.kill.host import HANG, ROOT

MIB = 1 << 20

#: A broker as `connector serve` runs it, in argv[1] with a pool of argv[2] bytes; stops as soon as it serves.
SERVE = """
import os, signal, sys
from connector.broker import config, serve
from connector.core.errors import ConnectorError
loaded = config.load(None, {}, {"run_dir": sys.argv[1], "pool": int(sys.argv[2])})
try:
    serve.run(loaded.config, ready=lambda: os.kill(os.getpid(), signal.SIGTERM))
except ConnectorError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""

#: 64 MiB of /dev/shm: a pool that does not fit is refused; one that does keeps its promise whatever others do.
CROWDED = """
import errno, os, sys, torch, connector
from connector import errors
MIB = 1 << 20
try:
    connector.connect(stage="a", embedded=True, pool="100MiB", log_level="error")
    sys.exit("a pool of 100 MiB was let into 64")
except errors.NoSpace as error:
    assert error.facts["free_tmpfs"] <= 64 * MIB and error.facts["need"] >= 100 * MIB, error
assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
with connector.connect(stage="a", embedded=True, pool="40MiB", log_level="error") as node:
    foreign = os.open("/dev/shm/foreign", os.O_CREAT | os.O_WRONLY)
    written = 0
    try:
        while True:
            written += os.write(foreign, bytes(MIB))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    os.close(foreign)
    assert 0 < written < 24 * MIB, written
    edge = node.edge("a", "a")
    try:
        edge.put("never", {"x": torch.zeros(100 * MIB, dtype=torch.uint8)})
        sys.exit("100 MiB were let into a pool of 40")
    except errors.PayloadTooLarge as error:
        assert error.facts["size"] > 100 * MIB and error.facts["rid"] == "never", error
    count = 0
    try:
        while True:
            edge.put(f"r{count}", {"x": torch.full((MIB,), count % 251, dtype=torch.uint8)}, timeout=0.0)
            count += 1
    except errors.PoolFull:
        pass
    node.flush()
    assert count >= 36, count
    for number in range(count):
        with edge.take(f"r{number}") as payload:
            assert torch.equal(payload["x"], torch.full((MIB,), number % 251, dtype=torch.uint8))
print("served", count)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with connector.connect(stage="a", embedded=True, pool="4MiB", log_level="error") as found:
        yield found


def _bytes(size: int, value: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.full((size,), value, dtype=torch.uint8)}


def _waiting_puts(node: Node) -> int:
    return sum(row["waiting_puts"] for row in node.status("sessions")["sessions"])


class _FakeNode:
    """A node's files, for machines where the real thing may not be made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "cgroup").mkdir()
        (folder / "self").write_text("0::/\n")
        (folder / "meminfo").write_text("MemAvailable: 1048576000 kB\n")

    def limit(self, most: int, used: int) -> None:
        (self.folder / "cgroup/memory.max").write_text(f"{most}\n")
        (self.folder / "cgroup/memory.current").write_text(f"{used}\n")

    def check(self, need: int) -> None:
        files = [str(self.folder / name) for name in ("", "cgroup", "self", "meminfo")]
        check_room(need, *files)


def test_b43_full_tmpfs_is_an_error_not_sigbus(tmp_path: Path) -> None:
    """A pool larger than /dev/shm, a payload larger than the pool, a foreign file that takes all the rest: errors with
    sizes, never a signal."""
    if not can_mount():
        free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
        with pytest.raises(errors.NoSpace) as caught:
            _FakeNode(tmp_path).check(2 * free)
        assert caught.value.facts["need"] == 2 * free
        return
    done = in_small_shm(CROWDED, 64)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("served")


def test_b43_serve_on_a_small_shm_says_so_and_exits(tmp_path: Path) -> None:
    """Too small by one margin: refused before anything is made. With room: it serves, and leaves nothing."""
    if not can_mount():
        free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
        with pytest.raises(errors.NoSpace):
            _FakeNode(tmp_path).check(free)
        return
    refused = in_small_shm(SERVE, 32, str(tmp_path / "run"), str(24 * MIB))
    assert refused.returncode == 1
    assert "NoSpace: /dev/shm has 3" in refused.stderr
    assert "24.0 MiB and 16.0 MiB spare are needed" in refused.stderr
    served = in_small_shm(SERVE, 32, str(tmp_path / "run"), str(8 * MIB))
    assert served.returncode == 0, served.stderr
    assert not (tmp_path / "run").exists()


def test_b43_serve_in_a_small_cgroup_says_so_and_exits(tmp_path: Path) -> None:
    """A cgroup's limit would be the OOM killer's: it is looked at first, and named."""
    with memory_group(160 * MIB) as group:
        if group is None:
            fake = _FakeNode(tmp_path)
            fake.limit(160 * MIB, 30 * MIB)
            fake.check(8 * MIB)
            with pytest.raises(errors.NoSpace) as caught:
                fake.check(400 * MIB)
            assert caught.value.facts["cgroup_limit"] == 160 * MIB
            return
        refused = in_group(SERVE, group, str(tmp_path / "run"), str(400 * MIB))
        assert refused.returncode == 1, refused
        assert "NoSpace: the cgroup allows" in refused.stderr
        assert f"cgroup_limit={160 * MIB}" in refused.stderr
        served = in_group(SERVE, group, str(tmp_path / "run"), str(8 * MIB))
        assert served.returncode == 0, served.stderr


def test_b44_a_put_that_fails_raises_with_rid_edge_and_sizes(node: Node) -> None:
    """No False that nobody looks at: the blocking put raises, and nothing of it is left."""
    edge = node.edge("b44", "c")
    edge.put("first", _bytes(3 * MIB))
    with pytest.raises(errors.PoolFull) as caught:
        edge.put("second", _bytes(3 * MIB), timeout=0.0)
    facts = caught.value.facts
    assert (facts["rid"], facts["edge"]) == ("second", "b44:c:0")
    assert facts["size"] >= 3 * MIB > facts["free"]
    with pytest.raises(errors.UnknownRequest):
        edge.take("second", timeout=0.0)
    with edge.take("first") as payload:
        assert payload["x"].numel() == 3 * MIB
    edge.put("second", _bytes(3 * MIB), timeout=HANG)
    edge.take("second").release()


def test_b44_an_awaited_put_that_fails_raises_too(node: Node) -> None:
    """The asyncio put is the same verb: PoolFull comes out of the await."""

    async def scene() -> None:
        async with await connector.connect_async(stage="async", endpoint=node.endpoint) as own:
            edge = own.edge("b44async", "c")
            await edge.put("first", _bytes(3 * MIB))
            with pytest.raises(errors.PoolFull) as caught:
                await edge.put("second", _bytes(3 * MIB), timeout=0.0)
            assert caught.value.facts["rid"] == "second"
            (await edge.take("first")).release()
            await own.flush()

    asyncio.run(scene())


def test_b44_what_the_broker_refuses_later_reaches_writer_and_reader(node: Node) -> None:
    """The ticket, the flush and the waiting reader all get the cause."""
    edge = node.edge("b44late", "c")
    edge.put("late", _bytes(8), last=False)
    ticket = edge.put("late", _bytes(8), last=True, readers=2)
    with pytest.raises(errors.ReadersMismatch) as told:
        node.flush()
    assert isinstance(ticket.error, errors.ReadersMismatch)
    assert edge.take("late").index == 0
    with pytest.raises(errors.ReadersMismatch) as read:
        edge.take("late", timeout=HANG)
    assert read.value.facts["rid"] == told.value.facts["rid"] == "late"
    node.abort("late")


def test_b45_a_slow_consumer_slows_its_producer_and_never_overfills(node: Node) -> None:
    """Ten times the pool passes through it, chunk by chunk, whatever the reader's pace; then it is empty."""
    chunks = 10 * 4 * 8
    with connector.connect(stage="w", endpoint=node.endpoint) as writer:
        out, source = writer.edge("b45", "c"), node.edge("b45", "c")

        def produce() -> None:
            for index in range(chunks):
                out.put("r", _bytes(MIB // 8, index % 251), last=index == chunks - 1, timeout=2 * HANG)

        thread = threading.Thread(target=produce)
        thread.start()
        eventually(lambda: _waiting_puts(node), 1, node)
        most = node.status()["used_bytes"]
        for index, payload in enumerate(source.stream("r", timeout=HANG)):
            assert payload.index == index
            assert int(payload["x"][-1]) == index % 251
            del payload
            if index % 8 == 0:
                summary = node.status()
                most = max(most, summary["used_bytes"])
                assert summary["used_bytes"] <= summary["pool_bytes"]
        thread.join(HANG)
        assert index == chunks - 1
        assert most > 3 * MIB
    eventually(lambda: node.status()["payloads"], 0, node)


def test_b46_puts_whose_working_set_fits_go_through(node: Node) -> None:
    """Five writers of a quarter of the pool each, readers that release at once: all is done, nobody is refused."""
    edges = [node.edge(f"b46-{number}", "c") for number in range(5)]

    def produce(number: int) -> None:
        for turn in range(8):
            edges[number].put(f"{number}/{turn}", _bytes(MIB - 4096, number), timeout=2 * HANG)

    def consume(number: int) -> None:
        for turn in range(8):
            with edges[number].take(f"{number}/{turn}", timeout=2 * HANG) as payload:
                assert int(payload["x"][0]) == number

    with ThreadPoolExecutor(10) as pool:
        for done in [pool.submit(work, number) for number in range(5) for work in (produce, consume)]:
            done.result(4 * HANG)


def test_b46_a_retry_is_idempotent_and_what_never_fits_is_refused_at_once(node: Node) -> None:
    """The same chunk again changes nothing; a payload above the pool does not wait for its deadline."""
    edge = node.edge("b46-retry", "c")
    edge.put("r", _bytes(16, 1), index=0, last=True)
    with pytest.raises(errors.AlreadyPut):
        edge.put("r", _bytes(16, 2), index=0, last=True)
    again = edge.put("r", _bytes(16, 1), index=0, last=True, attempt=1)
    node.flush()
    assert again.result() == "replaced"
    with edge.take("r") as payload:
        assert payload["x"].tolist() == [1] * 16
    with pytest.raises(errors.PayloadTooLarge) as caught:
        edge.put("huge", _bytes(5 * MIB), timeout=1e6)
    assert caught.value.facts["limit"] == 4 * MIB


def test_b48_the_pool_is_the_brokers_whatever_others_write(tmp_path: Path) -> None:
    """Memory is reserved at the start: another program that fills the same tmpfs gets the error, the pool does not."""
    if not can_mount():
        fake = _FakeNode(tmp_path)
        fake.limit(100 * MIB, 80 * MIB)
        with pytest.raises(errors.NoSpace):
            fake.check(10 * MIB)
        return
    done = in_small_shm(CROWDED, 64)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 36


def test_b48_headers_and_rounding_count_as_used(node: Node) -> None:
    """A payload of one byte uses its block, and the sum of all blocks is what the pool says."""
    edge = node.edge("b48", "c")
    before = node.status()
    for number in range(300):
        edge.put(f"r{number}", _bytes(1))
    node.flush()
    summary = node.status()
    blocks = sum(row["length"] for row in node.payloads(edge="b48:c:0"))
    assert blocks >= 300 * 64
    loose = summary["used_bytes"] - summary["reserved_bytes"] - before["used_bytes"] + before["reserved_bytes"]
    assert loose == blocks
    for number in range(300):
        edge.take(f"r{number}").release()


#: 1000 live payloads, 500 of them held, with at most 256 descriptors; then none left for another connection.
FEW_DESCRIPTORS = """
import os, resource, sys, torch, connector
from connector import errors
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
def descriptors():
    return len(os.listdir("/proc/self/fd"))
with connector.connect(stage="a", endpoint=sys.argv[1]) as node:
    edge = node.edge("b49", "c")
    edge.put("warm", {"x": torch.zeros(1)})
    edge.take("warm").release()
    before = descriptors()
    for number in range(1000):
        edge.put(f"r{number}", {"x": torch.full((4,), number)})
    held = [edge.take(f"r{number}") for number in range(500)]
    assert descriptors() == before, (before, descriptors())
    assert all(int(payload["x"][0]) == number for number, payload in enumerate(held))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        connector.connect(stage="b", endpoint=sys.argv[1])
        sys.exit("connected without descriptors")
    except errors.BrokerLost as error:
        assert "ulimit -n" in str(error) and error.facts["limit"] == 256, error
    assert int(edge.take("r500")["x"][0]) == 500
    for fd in taken:
        os.close(fd)
    with connector.connect(stage="b", endpoint=sys.argv[1]) as other:
        assert other.status()["sessions"] >= 2
    del held
    for number in range(501, 1000):
        edge.take(f"r{number}").release()
print("done")
"""


def test_b49_descriptors_do_not_grow_with_payloads(node: Node) -> None:
    """One mapping a process: no descriptor a payload. Without descriptors, connect says what to raise."""
    command = [sys.executable, "-c", FEW_DESCRIPTORS, node.endpoint]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * HANG, check=False)
    assert done.stdout == "done\n", done.stderr


def test_b49_a_broker_without_descriptors_lives_and_recovers() -> None:
    """Newcomers wait outside; those who are in are served; a descriptor that is closed lets the next one in."""
    import socket

    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))"
    with run_directory() as run_dir:
        broker = BrokerProcess(run_dir, few, log_level="error")
        node = connector.connect(stage="a", endpoint=run_dir)
        lines = []
        for _ in range(60):
            lines.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            lines[-1].connect(run_dir + "/lifeline.sock")
        eventually(lambda: _open_descriptors(broker.process.pid), 48, node)
        edge = node.edge("b49", "c")
        edge.put("r", _bytes(8, 7))
        assert edge.take("r")["x"].tolist() == [7] * 8
        for line in lines:
            line.close()
        with connector.connect(stage="b", endpoint=run_dir, timeout=HANG) as other:
            assert other.status()["sessions"] == 2
        node.close()
        assert broker.end() == 0


def _open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_b50_many_keys_travel_and_too_many_are_refused(node: Node) -> None:
    """A key set of more than 1 MiB is a message like any other; one above the documented limit is PayloadTooLarge."""
    edge = node.edge("b50", "c")
    scalar = torch.tensor(1, dtype=torch.uint8)
    wide = {f"{number:05d}{'k' * 75}": scalar for number in range(12_000)}
    edge.put("wide", wide, timeout=HANG)
    with edge.take("wide", timeout=HANG) as payload:
        assert list(payload) == list(wide)
        assert all(int(tensor) == 1 for tensor in payload.values())
    limit = node.session.limits["max_request_bytes"] // 2
    with pytest.raises(errors.PayloadTooLarge) as caught:
        edge.put("wider", {f"{number:05d}{'k' * 995}": scalar for number in range(5000)})
    assert caught.value.facts["limit"] == limit < caught.value.facts["size"]


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32 + 1])
def test_b50_sizes_beyond_32_bits_are_counted_right(node: Node, size: int) -> None:
    """No size wraps: what does not fit is refused with its true size."""
    with pytest.raises(errors.PayloadTooLarge) as caught:
        node.edge("b50", "c").put("r", {"x": torch.zeros(1, dtype=torch.uint8).expand(size)})
    assert size <= caught.value.facts["size"] < size + 8192
