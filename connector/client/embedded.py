"""A private broker: a child process in a run directory of its own, ended with its owner by whatever death."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from connector.arena import sweep
from connector.core import errors
from connector.core.endpoint import check_run_dir
from connector.core.errors import BrokerLost

#: Seconds until the broker must be ready: a large pool is reserved at about 1.4 GiB/s.
START_TIMEOUT = 120.0


class EmbeddedBroker:
    """Started by `connect(embedded=True)`. `overrides`: fields of the broker's configuration."""

    def __init__(self, overrides: dict[str, Any]) -> None:
        self.run_dir = check_run_dir(tempfile.mkdtemp(prefix="tc-", dir="/tmp"))
        settings = {"log_level": "warning", **overrides, "run_dir": self.run_dir}
        read_fd, write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "connector.broker", json.dumps(settings), str(os.getpid()), str(write_fd)],
                pass_fds=(write_fd,),
                stdin=subprocess.DEVNULL,
                # Ctrl-C at a terminal goes to the owner, who ends the broker in order.
                start_new_session=True,
            )
        finally:
            os.close(write_fd)
        try:
            self._await_ready(read_fd)
        finally:
            os.close(read_fd)

    def _await_ready(self, read_fd: int) -> None:
        readable, _, _ = select.select([read_fd], [], [], START_TIMEOUT)
        word = os.read(read_fd, 65536).decode(errors="replace") if readable else ""
        if word == "ready\n":
            return
        self.end(0.0)
        facts = {"pid": self._process.pid, "code": self._process.returncode}
        try:
            code, message, told = json.loads(word)
        except ValueError:
            raise BrokerLost("the embedded broker did not start", **facts) from None
        raise errors.from_code(code, message, {**told, **facts})

    @property
    def pid(self) -> int:
        return self._process.pid

    def end_soon(self) -> None:
        """Ask it to stop; does not wait (a finaliser calls this)."""
        if self._process.poll() is None:
            self._process.terminate()

    def end(self, timeout: float) -> None:
        """Stop it and wait; killed if it does not end within `timeout` + its stop_grace."""
        self.end_soon()
        try:
            self._process.wait(timeout + 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if os.path.isdir(self.run_dir):
            self._sweep()

    def ended(self) -> bool:
        """True once its process has ended: it is nobody's but ours, so none comes back."""
        return self._process.poll() is not None

    def _sweep(self) -> None:
        """What a killed broker left. Its arena stays while another process may hold views on it."""
        ours = [found for found in sweep.find() if found.run_dir == self.run_dir]
        sweep.remove(ours)
        if not any(found.verdict == "live" for found in sweep.find() if found.run_dir == self.run_dir):
            shutil.rmtree(self.run_dir, ignore_errors=True)
