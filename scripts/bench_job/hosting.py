"""A peer's server that the first stage to open starts for all of them, and ends when the others have left it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

from connector.bench.clocks import descendants

_PR_SET_CHILD_SUBREAPER = 36


class Hosted:
    """`name`: of the server, in the run's folder. Stages open one after another, so that two never start it."""

    def __init__(self, folder: str, name: str) -> None:
        self._address = Path(folder, f"{name}.address")
        self._lock = os.open(Path(folder, f"{name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        self.host = False
        self._before: set[int] = set()

    def join(self, start: Callable[[], str]) -> str:
        """Where the server is, which `start` has begun unless another stage has."""
        if self._address.exists():
            # Held until this process has left, or has died.
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        else:
            self.host = True
            # What outlives the server that it belongs to becomes this process's own child.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._before = set(descendants(os.getpid()))
            self._address.write_text(start())
        return self._address.read_text()

    def leave(self, end: Callable[[], None]) -> None:
        """In the stage that has started the server, when all others have left, `end` it, and what it has left."""
        if self.host:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._address.unlink(missing_ok=True)
            end()
            for pid in set(descendants(os.getpid())) - self._before:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        os.close(self._lock)
