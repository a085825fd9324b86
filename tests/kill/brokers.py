"""Brokers as processes of their own, to be stopped, killed and started again in one run directory."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from connector import Node
from tests.kill.host import HANG, ROOT

#: Run before the broker's own main: a kernel that gives no pidfd.
NO_PIDFD = "import connector.broker.lifeline as l; l._pidfd = lambda stream, pid: -1"


class BrokerProcess:
    """A broker in `run_dir`, ready when made; `prelude` is run in it first."""

    def __init__(self, run_dir: str, prelude: str = "", **settings: Any) -> None:
        self.run_dir = run_dir
        told = json.dumps({"log_level": "error", "pool": "8MiB", **settings, "run_dir": run_dir})
        read_fd, write_fd = os.pipe()
        code = f"{prelude}\nimport sys\nfrom connector.broker.__main__ import main\nsys.exit(main(sys.argv[1:]))"
        with open(write_fd, "wb"):
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, told, str(os.getpid()), str(write_fd)], pass_fds=(write_fd,), cwd=ROOT
            )
        with open(read_fd, "rb", buffering=0) as ready:
            readable, _, _ = select.select([ready], [], [], HANG)
            word = ready.read(65536) if readable else b"nothing"
        assert word == b"ready\n", word

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal, wait for the end; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(HANG)


@contextlib.contextmanager
def run_directory() -> Iterator[str]:
    """A run directory's path in a folder that goes with the context."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder:
        yield folder + "/run"


@contextlib.contextmanager
def broker(prelude: str = "", **settings: Any) -> Iterator[BrokerProcess]:
    """A broker that is stopped in order at the end."""
    with run_directory() as run_dir:
        process = BrokerProcess(run_dir, prelude, **settings)
        try:
            yield process
        finally:
            process.end()


def eventually(found: Callable[[], object], hope: object, node: Node) -> None:
    """`found()` becomes `hope`: looked at again after each round trip to the broker."""
    until = time.monotonic() + HANG
    while (seen := found()) != hope:
        assert time.monotonic() < until, f"{seen!r} did not become {hope!r}; {node.status()}"
        node.status()


def session_locks(run_dir: str) -> list[str]:
    return sorted(path.name for path in Path(run_dir, "sessions").glob("*.lock"))


def assert_settled(node: Node, sessions: int) -> None:
    """Nothing of the dead is left: sessions, room, lock files; no byte is used but what the living reserved ahead."""
    # A failure that a test looks at refers to its frames, and they to it, with payloads in them.
    gc.collect()
    eventually(lambda: node.status()["sessions"], sessions, node)
    eventually(lambda: len(session_locks(node.endpoint)), sessions, node)
    eventually(lambda: _loose_bytes(node), 0, node)
    assert node.status()["payloads"] == 0, list(node.payloads())


def _loose_bytes(node: Node) -> int:
    """Bytes of the pool that are neither free nor reserved by a live session."""
    summary = node.status()
    rows = node.status("sessions")["sessions"]
    if summary["reserved_bytes"] != sum(row["reserved_bytes"] for row in rows):
        return -1
    return int(summary["used_bytes"] - summary["reserved_bytes"])
