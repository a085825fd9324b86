"""Kind H: paths, permissions, names, what another user left."""

from __future__ import annotations

import grp
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import connector
from connector.broker.rundir import RunDir
from connector.core.endpoint import default_run_dir
from connector.core.errors import BrokerLost, BrokerRunning, ConfigError, InvalidPayload
from connector.core.keys import KeyTemplate
from tests.kill.brokers import HANG, ROOT, BrokerProcess, run_directory

ROOT_USER = os.geteuid() == 0
#: A group that every system has, and two users that none has.
GROUP = grp.getgrgid(65534 if ROOT_USER else os.getegid())
BROKER_UID, WORKER_UID = 64_001, 64_002

BECOME = """
import importlib, os, pkgutil, socket, sys
import connector, connector.client, connector.broker, connector.arena, connector.core.directory, connector.wire
for package in (connector.client, connector.arena, connector.wire, *([connector.broker] if not {torch} else [])):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not found.name.endswith(("__main__", ".cuda")) and ({torch} or not found.name.endswith(".tensors")):
            importlib.import_module(found.name)
os.umask({umask})
if os.geteuid() == 0 and {uid}:
    os.setgroups([{gid}])
    os.setgid({gid})
    os.setuid({uid})
"""


def become(uid: int, umask: int = 0o022, with_torch: bool = False) -> str:
    """Code that loads all it needs and then is that user, where it may choose; and has that umask."""
    return BECOME.format(uid=uid, umask=umask, gid=GROUP.gr_gid, torch=with_torch)


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A free path in a folder that any user may write."""
    with run_directory() as path:
        os.chmod(os.path.dirname(path), 0o777)
        yield path


def move_a_tensor(endpoint: str, rid: str = "r") -> None:
    with connector.connect(stage="a", endpoint=endpoint, timeout=HANG) as node:
        edge = node.edge("a", "b")
        edge.put(rid, {"x": torch.arange(4)})
        assert edge.take(rid, timeout=HANG)["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("letter", ["x", "é", "日"])
@pytest.mark.parametrize("size", [90, 107, 108, 150])
def test_b80_a_path_beyond_the_limit_is_refused_before_a_socket_is_made(size: int, letter: str) -> None:
    """Bytes count, and the longer of the two sockets. The longest that fits serves a client."""
    base = f"/tmp/tc{os.getpid()}-"
    rest = size - len("/lifeline.sock") - len(base)
    width = len(letter.encode())
    path = base + letter * (rest // width) + "x" * (rest % width)
    assert len((path + "/lifeline.sock").encode()) == size
    if size <= 107:
        process = BrokerProcess(path, pool="1MiB")
        move_a_tensor(path)
        assert process.end() == 0
    else:
        for endpoint in (path, f"ipc://{path}/broker.sock"):
            with pytest.raises(ConfigError) as caught:
                connector.connect(stage="a", endpoint=endpoint)
            assert caught.value.facts == {"path": path, "size": size, "limit": 107}
        with pytest.raises(ConfigError) as refused:
            connector.connect(stage="a", embedded=True, window="many")
        assert "window" in str(refused.value)
    assert not os.path.exists(path)


def test_b81_a_second_broker_is_refused_and_the_first_keeps_serving(
    run_dir: str, serve: Callable[..., BrokerProcess]
) -> None:
    """No silent takeover of a live endpoint."""
    first = serve()
    with pytest.raises(BrokerRunning) as caught:
        RunDir(run_dir, None)
    assert caught.value.facts["pid"] == str(first.process.pid)
    move_a_tensor(run_dir)
    assert first.end() == 0


def test_b81_a_dead_brokers_socket_does_not_keep_the_next_from_starting(
    run_dir: str, serve: Callable[..., BrokerProcess]
) -> None:
    serve().end(signal.SIGKILL)
    assert Path(run_dir, "broker.sock").is_socket()
    second = serve()
    move_a_tensor(run_dir)
    assert second.end() == 0


@pytest.mark.parametrize("what", ["file", "link", "link to a socket"])
@pytest.mark.parametrize("name", ["broker.sock", "lifeline.sock"])
def test_b81_a_foreign_file_at_the_sockets_path_is_never_deleted(run_dir: str, name: str, what: str) -> None:
    """Nor what a link leads to."""
    os.mkdir(run_dir)
    path, target = Path(run_dir, name), Path(run_dir, "target")
    if what == "file":
        path.write_text("mine")
    elif what == "link":
        target.write_text("mine")
        path.symlink_to(target)
    else:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.bind(str(target))
        path.symlink_to(target)
    before = sorted(os.listdir(run_dir))
    with pytest.raises(BrokerLost) as caught:
        RunDir(run_dir, None)
    assert caught.value.facts["path"] == str(path)
    assert sorted(os.listdir(run_dir)) == before


def test_b84_two_users_have_two_default_directories() -> None:
    """A leftover of the one cannot lie in the other's way."""
    env: dict[str, str] = {}
    assert len({default_run_dir(uid, env) for uid in (0, 1000, 1001)}) == 3


def test_b84_another_users_directory_is_named_with_its_owner(run_dir: str) -> None:
    """And left as it is."""
    foreign = run_dir if ROOT_USER else "/usr"
    if ROOT_USER:
        os.mkdir(run_dir, 0o700)
        os.chown(run_dir, WORKER_UID, -1)
    before = os.stat(foreign)
    with pytest.raises(BrokerLost) as caught:
        RunDir(foreign, None)
    assert caught.value.facts == {"path": foreign, "owner": before.st_uid}
    now = os.stat(foreign)
    assert (now.st_mode, now.st_uid, now.st_mtime_ns) == (before.st_mode, before.st_uid, before.st_mtime_ns)


def test_b84_another_users_lock_is_named_with_its_owner(
    run_dir: str, serve: Callable[..., BrokerProcess], start_worker: Callable[..., subprocess.Popen[str]]
) -> None:
    """A fixed name that someone else made first."""
    os.mkdir(run_dir)
    lock = Path(run_dir, "broker.lock")
    if ROOT_USER:
        lock.touch(0o600)
        os.chown(lock, WORKER_UID, -1)
    else:
        lock.symlink_to("/etc/passwd")
    with pytest.raises(BrokerLost) as caught:
        RunDir(run_dir, None)
    assert caught.value.facts == {"path": str(lock), "owner": os.lstat(lock).st_uid}
    assert os.path.lexists(lock)


WORKER = """
import torch
node = connector.connect(stage="a", endpoint=sys.argv[1], timeout=60)
edge = node.edge("a", "b")
edge.put("r", {"x": torch.arange(3)})
node.flush(60)
print("put", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def serve(run_dir: str) -> Iterator[Callable[..., BrokerProcess]]:
    """Starts a broker in the run directory; it is ended at the end, if the test did not."""
    started: list[BrokerProcess] = []

    def begin(prelude: str = "", **settings: object) -> BrokerProcess:
        started.append(BrokerProcess(run_dir, prelude, **settings))
        return started[-1]

    yield begin
    for process in started:
        process.end()


@pytest.fixture
def start_worker(run_dir: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a client that is that user; it has put a payload when the call returns."""
    started: list[subprocess.Popen[str]] = []

    def begin(uid: int, umask: int = 0o022) -> subprocess.Popen[str]:
        code = "import torch\n" + become(uid, umask, with_torch=True) + WORKER
        worker = subprocess.Popen(
            [sys.executable, "-c", code, run_dir], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(worker)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "put\n"
        return worker

    yield begin
    for worker in started:
        worker.kill()
        worker.communicate()


def owners(folder: str, prefix: str = "") -> set[int]:
    return {path.lstat().st_uid for path in Path(folder).iterdir() if path.name.startswith(prefix)}


def segments_of(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "/dev/shm/tc-" in line})


@pytest.mark.parametrize("umask", [pytest.param(0o022, marks=pytest.mark.long), 0o777])
def test_b85_what_a_killed_worker_of_another_user_left_is_removed(
    run_dir: str, umask: int, serve: Callable[..., BrokerProcess], start_worker: Callable[..., subprocess.Popen[str]]
) -> None:
    """Workers create no segment, and the broker can look at and remove the lock that they do create."""
    process = serve(become(BROKER_UID), group=GROUP.gr_name, log_level="error")
    worker = start_worker(WORKER_UID, umask)
    segments = segments_of(process.process.pid)
    assert set(segments_of(worker.pid)) <= set(segments)
    assert {os.stat(path).st_uid for path in segments} == owners(run_dir, "broker.sock")
    assert len(os.listdir(f"{run_dir}/sessions")) == 1
    worker.kill()
    worker.communicate()
    while os.listdir(f"{run_dir}/sessions"):
        # The test's time-out is the guard.
        assert process.process.poll() is None
    assert process.end() == 0
    assert not os.path.exists(run_dir)
    assert [path for path in segments if os.path.exists(path)] == []


def test_b86_a_client_that_cannot_see_the_arena_says_so_when_it_connects(
    run_dir: str, serve: Callable[..., BrokerProcess]
) -> None:
    """A container with its own /dev/shm: the handshake maps the arena, and names what hides it."""
    process = serve()
    (arena,) = [path for path in segments_of(process.process.pid) if path.endswith("-arena")]
    os.rename(arena, arena + ".hidden")
    try:
        with pytest.raises(BrokerLost) as caught:
            connector.connect(stage="a", endpoint=run_dir, timeout=1.0)
    finally:
        os.rename(arena + ".hidden", arena)
    assert "/dev/shm" in str(caught.value)
    assert "--ipc=host" in str(caught.value)
    assert caught.value.facts["path"] == run_dir
    move_a_tensor(run_dir)
    assert process.end() == 0


def test_b86_a_client_that_may_not_enter_says_so(run_dir: str, serve: Callable[..., BrokerProcess]) -> None:
    """Another user, without a group in common."""
    process = serve()
    code = (
        become(WORKER_UID)
        + "try:\n    connector.connect(stage='a', endpoint=sys.argv[1], timeout=0.5)\n"
        + "except connector.errors.BrokerLost as error:\n    print(error)\n"
    )
    if not ROOT_USER:
        os.chmod(run_dir, 0)
    done = subprocess.run([sys.executable, "-c", code, run_dir], cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    os.chmod(run_dir, 0o700)
    assert "Permission denied" in done.stdout, done.stderr
    assert run_dir in done.stdout
    assert process.end() == 0


@pytest.mark.parametrize("umask", [0o077, pytest.param(0o002, marks=pytest.mark.long), 0o777])
def test_b86_no_umask_hides_the_arena_or_opens_it(
    run_dir: str, umask: int, serve: Callable[..., BrokerProcess], start_worker: Callable[..., subprocess.Popen[str]]
) -> None:
    """Modes are set, not left to chance, on both sides."""
    process = serve(become(0, umask))
    worker = start_worker(0, umask)
    move_a_tensor(run_dir, "mine")
    assert {os.stat(path).st_mode & 0o777 for path in segments_of(process.process.pid)} == {0o600}
    worker.communicate("\n", timeout=HANG)
    assert worker.returncode == 0
    assert process.end() == 0


HOSTILE_RIDS = [
    "x" * 300, "a/b", "..", "../../etc/passwd", "日本語", "with\nnewline", "nul\0byte", "{rid}", "%s", " ", "~", "-",
    "x" * 255 + "A", "x" * 255 + "B", "case", "CASE", "é", "e\u0301", "tc-" + "0" * 32 + "-arena",
]  # fmt: skip


def test_b87_any_rid_is_carried_and_shown_as_it_is() -> None:
    """None becomes a path or a segment's name, so none collides and none is too long for one."""
    with connector.connect(stage="a", embedded=True, pool="2MiB") as node:
        segments = set(os.listdir("/dev/shm"))
        edge = node.edge("a", "b")
        for number, rid in enumerate(HOSTILE_RIDS):
            edge.put(rid, {rid: torch.tensor(number)})
        node.flush(HANG)
        assert [row["rid"] for row in node.payloads()] == HOSTILE_RIDS
        for number, rid in enumerate(HOSTILE_RIDS):
            (row,) = node.payloads(rid=rid)
            assert row["tensors"] == [[rid, "int64", [], 8]]
            payload = edge.take(rid, timeout=HANG)
            assert {key: int(value) for key, value in payload.items()} == {rid: number}
            del payload
        assert {name for name in set(os.listdir("/dev/shm")) - segments if str(node.id) == name} == set()


@pytest.mark.parametrize("rid", ["", "x" * 1025, "é" * 513, "\ud800"])
def test_b87_a_rid_that_is_none_is_refused_with_its_size(rid: str) -> None:
    """At once, by the client."""
    with connector.connect(stage="a", embedded=True, pool="2MiB") as node:
        with pytest.raises(InvalidPayload):
            node.edge("a", "b").put(rid, {"x": torch.zeros(1)})
        with pytest.raises(InvalidPayload):
            node.edge("a", "b").take(rid, timeout=1.0)


def test_b87_a_rid_that_looks_like_a_key_does_not_clash() -> None:
    """rid "x-24" with layer 1 is not rid "x" with a layer "24-1"."""
    template = KeyTemplate("{rid}-{layer_id}")
    keys = {template.format(rid=rid, layer_id=layer) for rid in ("x", "x-24", "x-24-1", "x-") for layer in (1, 24)}
    assert len(keys) == 8
    assert template.parse("x-24-1") == {"rid": "x-24", "layer_id": "1"}
