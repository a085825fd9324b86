"""Every test is followed by a look for what it left: shared memory, threads, child processes, sockets."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SHM = Path("/dev/shm")
#: Seconds that a thread or a child gets to end by itself, all of one test together.
PATIENCE = 5.0
#: Processes of multiprocessing that live as long as the process which first needed them.
LASTING = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script: children would inherit it, and no Ctrl-C would reach them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_failed = pytest.StashKey[bool]()
_passed = pytest.StashKey[set[str]]()


class Held(NamedTuple):
    """What can be left behind, at one moment."""

    segments: frozenset[str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    #: Inodes of the sockets that this process has open.
    sockets: frozenset[str]


def _look() -> Held:
    return Held(frozenset(_segments()), frozenset(_threads()), frozenset(_children()), frozenset(_sockets()))


def _segments() -> Iterator[str]:
    if os.environ.get("TESTS_BESIDE_OTHERS") == "1":
        # The rooms without I/O, run beside the others: what is there is theirs.
        return iter(())
    return (entry.name for entry in os.scandir(SHM) if entry.name.startswith("tc-"))


def _threads() -> Iterator[threading.Thread]:
    return (t for t in threading.enumerate() if not t.daemon or t.name.startswith("connector-"))


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        for pid in _read(task / "children").split():
            if not any(name in _read(Path(f"/proc/{int(pid)}/cmdline")) for name in LASTING):
                yield int(pid)


def _sockets() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        target = _readlink(f"/proc/self/fd/{number}")
        if target.startswith("socket:["):
            yield target.removeprefix("socket:[").removesuffix("]")


def _read(path: Path) -> bytes:
    """A file of /proc, or nothing when what it tells of has just ended or is another user's."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def _readlink(path: str) -> str:
    try:
        return os.readlink(path)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _used_elsewhere(name: str) -> bool:
    """Whether another live process has the segment: a broker that outlives the test, or another run of tests."""
    path = str(SHM / name)
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        if path.encode() in _read(process / "maps"):
            return True
        fds = process / "fd"
        if os.access(fds, os.R_OK) and any(_readlink(f"{fds}/{fd}") == path for fd in _listing(fds)):
            return True
    return False


def _listing(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _settle(before: Held) -> None:
    """Lets what is ending end: collects garbage, then waits for threads and children, PATIENCE seconds in all."""
    deadline = time.monotonic() + PATIENCE
    gc.collect()
    for thread in _look().threads - before.threads - {threading.current_thread()}:
        thread.join(max(0.0, deadline - time.monotonic()))
    # This call reaps the children of multiprocessing that have ended; others are for those who started them.
    multiprocessing.active_children()
    for pid in _look().children - before.children:
        _wait_for_child(pid, deadline)
    multiprocessing.active_children()


def _wait_for_child(pid: int, deadline: float) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(pidfd)


def _describe_child(pid: int) -> str:
    command = _read(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace").strip()
    return f"child process {pid}: {command[:200] or 'ended, and nobody waited for it'}"


def _describe_socket(inode: str) -> str:
    rows = [row.split() for row in _read(Path("/proc/self/net/unix")).decode(errors="replace").splitlines()[1:]]
    path = next((row[7] for row in rows if len(row) > 7 and row[6] == inode), "no path")
    return f"open socket: {path}"


def _between_lasting_nodes(before: Held) -> set[str]:
    """Sockets of the direct path, of nodes that were there before the test: made when they are first of use, they end
    with the nodes."""
    module = sys.modules.get("connector.client.link")
    if module is None:
        return set()
    links = [found for found in gc.get_objects() if type(found) is module.Link and found.thread in before.threads]
    ends = [pair.stream for link in links for pair in link._inlet._pairs.values()]
    return {str(os.fstat(end.fileno()).st_ino) for end in ends}


def _left(before: Held) -> list[str]:
    after = _look()
    found = [f"thread: {t.name}" for t in after.threads - before.threads]
    found += [_describe_child(pid) for pid in after.children - before.children]
    opened = after.sockets - before.sockets
    if opened:
        opened -= _between_lasting_nodes(before)
    found += [_describe_socket(inode) for inode in opened]
    found += [f"{SHM}/{name}" for name in after.segments - before.segments if not _used_elsewhere(name)]
    return sorted(found)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers whether the test itself failed."""
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    if report.when == "call" and report.passed:
        item.config.stash.setdefault(_passed, set()).add(item.nodeid)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None:
        import torch  # not for every run: most tests of the rooms without I/O never load it

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves tc-* segments, threads, children or open sockets which were not there before.

    A test that failed already is not looked at: its traceback keeps alive what it had in hand.
    """
    before = _look()
    yield
    if request.node.stash.get(_failed, False) or not _left(before):
        return
    _settle(before)
    left = _left(before)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def passed_tests(request: pytest.FixtureRequest) -> set[str]:
    """Ids of the tests that have passed so far in this run."""
    return request.config.stash.get(_passed, set())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What judges the run as a whole runs last."""
    items.sort(key=lambda item: item.path.name == "test_reliability.py")
