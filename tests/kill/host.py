"""Real worker processes, quickly: one server has torch loaded and forks; each child makes its own client after it.

A worker runs a function of roles.py. Test and worker talk JSON lines over a Unix socket: the worker tells
events, the test sends words. A worker that fails tells its traceback, which fails the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Seconds until something that does not come is a hang. A guard, never a measure.
HANG = 60.0


class Pipe:
    """JSON lines over a stream, from either side."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._lines = stream.makefile("r", encoding="utf-8")

    def tell(self, event: str, **facts: Any) -> None:
        self._stream.sendall(json.dumps([event, facts]).encode() + b"\n")

    def hear(self) -> tuple[str, dict[str, Any]]:
        """The next (event, facts); EOFError if the other end is gone."""
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            line = ""
        if not line:
            raise EOFError("the other end is gone")
        event, facts = json.loads(line)
        return event, facts

    def close(self) -> None:
        self._lines.close()
        self._stream.close()


class Worker(Pipe):
    """A worker as its test sees it."""

    def __init__(self, stream: socket.socket, pid: int) -> None:
        stream.settimeout(HANG)
        super().__init__(stream)
        self.pid = pid
        self.gone = False

    def expect(self, event: str) -> dict[str, Any]:
        """The next event, which must be this one; its facts."""
        found, facts = self.hear()
        assert found == event, f"worker told {found!r} instead of {event!r}: {facts.get('trace', facts)}"
        return facts

    def kill(self) -> None:
        """SIGKILL, and wait for the end; one that has ended by itself is fine."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.await_end()

    def await_end(self) -> None:
        """Read what is left until the stream ends with its process."""
        try:
            while True:
                self.hear()
        except EOFError:
            self.gone = True

    def leave(self) -> None:
        """Let the worker end by itself."""
        self.tell("leave")
        self.await_end()


class Host:
    """The server and its workers; a context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tc-host-")
        path = os.path.join(self._folder.name, "s")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._listener.settimeout(HANG)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.kill.host", path], stdin=subprocess.PIPE, cwd=ROOT, text=True
        )
        self.workers: list[Worker] = []

    def start(self, role: str, **arguments: Any) -> Worker:
        """A new process that runs roles.ROLES[role](pipe, **arguments)."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([role, arguments]) + "\n")
        self._server.stdin.flush()
        stream, _ = self._listener.accept()
        pid = Pipe(stream).hear()[1]["pid"]
        worker = Worker(stream, pid)
        self.workers.append(worker)
        return worker

    def end_workers(self, but: tuple[Worker, ...] = ()) -> None:
        """Kill whoever is left, for the next test."""
        for worker in [worker for worker in self.workers if worker not in but]:
            if not worker.gone:
                worker.kill()
            worker.close()
            self.workers.remove(worker)

    def close(self) -> None:
        self.end_workers()
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(HANG)
        self._listener.close()
        self._folder.cleanup()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _child(path: str, role: str, arguments: dict[str, Any]) -> None:
    import traceback

    from tests.kill import roles

    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path)
    pipe = Pipe(stream)
    pipe.tell("started", pid=os.getpid())
    code = 0
    try:
        roles.ROLES[role](pipe, **arguments)
    except BaseException:
        pipe.tell("failed", trace=traceback.format_exc())
        code = 1
    os._exit(code)


def serve(path: str) -> None:
    """Fork a worker for each line of stdin; ends with it."""
    import torch

    from tests.kill import roles

    assert torch.zeros(1).item() == 0
    assert roles.ROLES
    # Nobody waits for the children: the kernel buries them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):
        role, arguments = json.loads(line)
        if os.fork() == 0:
            _child(path, role, arguments)


if __name__ == "__main__":
    serve(sys.argv[1])
