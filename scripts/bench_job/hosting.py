"""A peer's server that the first stage to open starts for all of them, and ends when the others have left it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


class Hosted:
    """`name`: of the server, in the run's folder. Stages open one after another, so that two never start it."""

    def __init__(self, folder: str, name: str) -> None:
        self._address = Path(folder, f"{name}.address")
        self._lock = os.open(Path(folder, f"{name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        self.host = False

    def join(self, start: Callable[[], str]) -> str:
        """Where the server is, which `start` has begun unless another stage has."""
        if self._address.exists():
            # Held until this process has left, or has died.
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        else:
            self.host = True
            self._address.write_text(start())
        return self._address.read_text()

    def leave(self) -> bool:
        """True in the stage that has to end the server: all others have left."""
        if self.host:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._address.unlink(missing_ok=True)
        os.close(self._lock)
        return self.host
