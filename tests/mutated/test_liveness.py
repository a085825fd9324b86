"""Without a pidfd a session is over when its stream ended and its lock is free: never by one of the two alone."""

from __future__ import annotations

import os
import socket
import tempfile

import pytest

from connector.arena import locks
from connector.broker import lifeline
from connector.broker.lifeline import Lifelines
from connector.broker.rundir import RunDir
from connector.core.endpoint import lifeline_path, session_lock_path

TOKEN = bytes(range(16))


def test_a_stream_that_ended_is_no_death_while_the_lock_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives no pidfd; the client's descriptor was closed, but its process lives on."""
    monkeypatch.setattr(lifeline, "_pidfd", lambda stream, pid: -1)
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder:
        run_dir = RunDir(folder + "/run", None)
        lines = Lifelines(run_dir, allow=frozenset({os.geteuid()}))
        lock = os.open(session_lock_path(run_dir.path, TOKEN.hex()), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            assert locks.take(lock)
            with socket.socket(socket.AF_UNIX) as stream:
                stream.connect(lifeline_path(run_dir.path))
                stream.sendall(TOKEN)
                # The first look accepts, the second reads the token.
                assert [list(lines.poll()) for _ in range(2)] == [[], []]
                assert stream.recv(1) == b"\x01"
            assert [list(lines.poll()) for _ in range(2)] == [[], []]
            locks.drop(lock)
            assert [token for token, _ in lines.poll()] == [TOKEN]
        finally:
            os.close(lock)
            lines.close()
            run_dir.remove_contents()
