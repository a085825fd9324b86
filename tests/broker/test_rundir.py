"""The run directory of a real broker: modes, the lock, what lies in the way, what is left."""

from __future__ import annotations

import grp
import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import connector
from connector.broker.rundir import RunDir
from connector.core.errors import BrokerLost, BrokerRunning, ConfigError

Start = Callable[..., Any]
GROUP = grp.getgrgid(os.getegid()).gr_name


def modes(running: Any) -> dict[str, str]:
    """Path in the run directory, or segment's kind -> mode in octal."""
    root = Path(running.run_dir)
    found = {str(path.relative_to(root)): path for path in [root, *root.rglob("*")]}
    found |= {name[-5:]: Path("/dev/shm", name) for name in running.segments()}
    return {name: oct(stat.S_IMODE(path.lstat().st_mode)) for name, path in found.items()}


PRIVATE = {
    ".": "0o700", "sessions": "0o700", "broker.sock": "0o600", "lifeline.sock": "0o600", "broker.lock": "0o600",
    "table": "0o600", "arena": "0o600",
}  # fmt: skip
SHARED = {
    ".": "0o750", "sessions": "0o2770", "broker.sock": "0o660", "lifeline.sock": "0o660", "broker.lock": "0o660",
    "table": "0o660", "arena": "0o660",
}  # fmt: skip


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o777])
@pytest.mark.parametrize(("group", "expected"), [(None, PRIVATE), (GROUP, SHARED)])
def test_modes_do_not_depend_on_the_umask(
    start: Start, umask: int, group: str | None, expected: dict[str, str]
) -> None:
    """Neither open to others, nor closed to ourselves."""
    running = start(umask=umask, group=group)
    assert running.word == "ready"
    assert modes(running) == expected


def test_a_directory_that_was_there_gets_the_mode(start: Start, run_dir: str) -> None:
    """systemd or an operator made it, open to all."""
    os.mkdir(run_dir)
    os.chmod(run_dir, 0o777)
    assert modes(start())["."] == "0o700"


def test_an_unknown_group_is_refused_and_leaves_nothing(start: Start, run_dir: str) -> None:
    running = start(group="no-such-group-here")
    assert running.word.startswith("ConfigError: no such group")
    assert running.process.wait() == 1
    assert not os.path.exists(run_dir)


@pytest.mark.parametrize("length", [93, 94, 135])
@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_path_too_long_for_a_socket_is_refused_with_its_size(
    start: Start, tmp_path: Path, length: int, letter: str
) -> None:
    """107 bytes with /lifeline.sock behind it, in bytes and not in characters; the longest that fits works."""
    base = f"/tmp/tc-{os.getpid()}-"
    rest = length - len(base)
    path = base + letter * (rest // len(letter.encode())) + "x" * (rest % len(letter.encode()))
    assert len(path.encode()) == length
    running = start(path)
    if length == 93:
        assert running.word == "ready"
        connector.connect(stage="a", endpoint=path, timeout=60).close()
    else:
        assert running.word.startswith("ConfigError")
        assert f"size={length + 14} limit=107" in running.word or f"{length + 14} bytes" in running.word
        assert running.process.wait() == 1
    running.end()
    assert not os.path.exists(path)


def test_a_second_broker_is_refused_with_the_pid_and_changes_nothing(start: Start) -> None:
    """Even its group: the first keeps its modes, its sockets and its clients."""
    first = start()
    with connector.connect(stage="a", endpoint=first.run_dir, timeout=60) as node:
        before = modes(first)
        inodes = {name: first.path(name).stat().st_ino for name in ("broker.sock", "lifeline.sock", "broker.lock")}
        second = start(group=GROUP)
        assert second.word.startswith("BrokerRunning"), second.word
        assert f"pid='{first.pid}'" in second.word
        assert first.run_dir in second.word
        assert second.process.wait() == 1
        assert modes(first) == before
        assert inodes == {name: first.path(name).stat().st_ino for name in inodes}
        assert node.status()["pid"] == first.pid
    connector.connect(stage="b", endpoint=first.run_dir, timeout=60).close()


def test_a_killed_brokers_sockets_are_healed(start: Start) -> None:
    """The files are there, nobody listens."""
    first = start()
    first.end(signal.SIGKILL)
    assert first.path("broker.sock").is_socket()
    assert first.path("lifeline.sock").is_socket()
    second = start()
    assert second.word == "ready"
    with connector.connect(stage="a", endpoint=second.run_dir, timeout=60) as node:
        assert node.status()["pid"] == second.pid


def put_in_the_way(path: Path, what: str, tmp_path: Path) -> None:
    if what == "file":
        path.write_text("mine")
    elif what == "link":
        path.symlink_to(tmp_path / "target")
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("what", ["file", "link", "fifo", "folder"])
@pytest.mark.parametrize("name", ["broker.sock", "lifeline.sock", "broker.lock", "sessions"])
def test_what_is_not_ours_stops_the_start_and_stays(run_dir: str, tmp_path: Path, what: str, name: str) -> None:
    """Named with its path; nothing else is left in the directory."""
    path = Path(run_dir, name)
    if (what, name) in (("file", "broker.lock"), ("folder", "sessions")):
        # These are what a broker itself has there.
        what = "link"
    Path(run_dir).mkdir()
    (tmp_path / "target").write_text("mine")
    put_in_the_way(path, what, tmp_path)
    before = path.lstat()
    with pytest.raises(BrokerLost) as caught:
        RunDir(run_dir, None)
    assert caught.value.facts["path"] == str(path)
    assert os.path.samestat(path.lstat(), before)
    assert os.listdir(run_dir) == [name]
    assert (tmp_path / "target").read_text() == "mine"


def test_a_real_broker_says_what_lies_at_its_socket(start: Start, run_dir: str) -> None:
    """The same through the process: an error with the path, exit code 1, no segment."""
    os.mkdir(run_dir)
    Path(run_dir, "broker.sock").write_text("mine")
    running = start()
    assert running.word.startswith("BrokerLost: something that is not our socket")
    assert f"{run_dir}/broker.sock" in running.word
    assert running.process.wait() == 1
    assert Path(run_dir, "broker.sock").read_text() == "mine"


@pytest.mark.parametrize("what", ["file", "link", "fifo"])
def test_a_run_directory_that_is_none_is_refused(run_dir: str, tmp_path: Path, what: str) -> None:
    """A link to a directory, too: its owner could change where it leads."""
    put_in_the_way(Path(run_dir), what, tmp_path)
    with pytest.raises(BrokerLost) as caught:
        RunDir(run_dir, None)
    assert caught.value.facts["path"] == run_dir


def test_the_lock_is_given_back_and_its_file_goes(run_dir: str) -> None:
    """In this process: a second one is refused while the first lives, and works after it."""
    first = RunDir(run_dir, None)
    with pytest.raises(BrokerRunning):
        RunDir(run_dir, None)
    first.remove_contents()
    assert not os.path.exists(run_dir)
    second = RunDir(run_dir, None)
    second.remove_contents()
    assert not os.path.exists(run_dir)


def test_no_room_leaves_nothing(start: Start, run_dir: str) -> None:
    """NoSpace names need and free; no directory, no segment, no socket stays."""
    running = start(pool="64TiB")
    assert running.word.startswith("NoSpace"), running.word
    assert running.process.wait() == 1
    assert not os.path.exists(run_dir)


def test_a_failed_start_leaves_the_locks_of_live_sessions(start: Start, run_dir: str) -> None:
    """They guard the arena of the broker before; a free one goes."""
    first = start()
    first.end(signal.SIGKILL)
    sessions = first.path("sessions")
    held, free = sessions / f"{'a' * 32}.lock", sessions / f"{'b' * 32}.lock"
    free.touch()
    with open(held, "w") as stream:
        os.lockf(stream.fileno(), os.F_LOCK, 0)
        assert start(pool="64TiB").word.startswith("NoSpace")
        assert held.exists()
        assert not free.exists()
    second = start()
    assert second.word == "ready"
    assert second.end() == 0
    assert not os.path.exists(run_dir)


def test_the_group_must_be_known_before_anything_is_made(run_dir: str) -> None:
    with pytest.raises(ConfigError):
        RunDir(run_dir, "no-such-group-here")
    assert not os.path.exists(run_dir)


def test_a_socket_of_ours_that_is_dead_goes_and_foreign_files_stay(run_dir: str) -> None:
    """What a stop leaves: what is not ours keeps its directory."""
    os.mkdir(run_dir)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{run_dir}/broker.sock")
    Path(run_dir, "notes.txt").write_text("mine")
    found = RunDir(run_dir, None)
    assert not os.path.exists(f"{run_dir}/broker.sock")
    found.remove_contents()
    assert os.listdir(run_dir) == ["notes.txt"]
