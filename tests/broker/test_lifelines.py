"""Lifelines of a real broker: who is let in, what ends a session, and that no descriptor is kept."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import connector
from connector.broker.lifeline import MOST_SILENT

MakePeer = Callable[..., Any]
ToLifeline = Callable[[str], socket.socket]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def flat(served: Any, witness: connector.Node) -> Any:
    """The module's broker, which must come back to the descriptors and sessions that it had."""
    sessions = witness.status()["sessions"]
    before = served.descriptors()
    yield served
    while witness.status()["sessions"] != sessions or served.descriptors() > before:
        # Each status is a turn of the loop; the test's time-out is the guard.
        pass
    assert len(list(served.path("sessions").glob("*.lock"))) == sessions
    assert "Traceback" not in served.log()


def refused(stream: socket.socket, data: bytes) -> bool:
    """Whether the broker closes the stream after these bytes."""
    stream.sendall(data)
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("size", [1, 15, 17, 64, 1000])
def test_a_token_of_another_size_is_refused(flat: Any, lifeline_to: ToLifeline, size: int) -> None:
    with lifeline_to(flat.run_dir) as stream:
        assert refused(stream, b"t" * size)


def test_a_token_that_is_in_use_is_refused_and_its_owner_stays(
    flat: Any, lifeline_to: ToLifeline, peer: MakePeer
) -> None:
    """Neither can a second process end the first, nor one process be two."""
    owner = peer()
    session = owner.hello().session
    with lifeline_to(flat.run_dir) as stream:
        assert refused(stream, owner.token)
    assert owner.hello().session == session


def test_a_second_token_on_a_lifeline_changes_nothing(flat: Any, peer: MakePeer) -> None:
    owner = peer()
    owner.stream.sendall(b"z" * 16)
    assert owner.hello().session > 0


def test_silent_connections_cost_nobody_anything(flat: Any, lifeline_to: ToLifeline, witness: connector.Node) -> None:
    """Far more than are kept: the oldest are closed, the newest may still speak, and a client gets in."""
    refusals = witness.status()["lifelines_refused"]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(lifeline_to(flat.run_dir)) for _ in range(MOST_SILENT + 50)]
        assert streams[0].recv(1) == b""
        streams[-1].sendall(b"n" * 16)
        assert streams[-1].recv(1) == b"\x01"
        with connector.connect(stage="late", endpoint=flat.run_dir, timeout=60) as node:
            assert node.status()["lifelines_refused"] >= refusals + 50


def test_two_thousand_connections_in_a_row_leave_the_descriptors_flat(flat: Any, lifeline_to: ToLifeline) -> None:
    """With a token, without one, and with half of one."""
    for number in range(2000):
        with lifeline_to(flat.run_dir) as stream:
            if number % 3 == 0:
                stream.sendall(number.to_bytes(16, "big"))
                assert stream.recv(1) == b"\x01"
            elif number % 3 == 1:
                stream.sendall(b"half")


def test_clients_that_come_and_go_leave_nothing(flat: Any) -> None:
    """Sessions of our own, closed in order."""
    for _ in range(20):
        connector.connect(stage="guest", endpoint=flat.run_dir, timeout=60).close()


def test_a_peer_that_leaves_before_hello_leaves_nothing(flat: Any, peer: MakePeer) -> None:
    """It gave a token, and its process lives on."""
    for _ in range(50):
        peer().stream.close()


CLIENT = """
import os, sys, connector
node = connector.connect(stage="killed", endpoint=sys.argv[1], timeout=60)
print(node.id, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_killed_client_is_gone_with_its_descriptors_and_its_lock(flat: Any) -> None:
    """By the kernel's word."""
    done = subprocess.run([sys.executable, "-c", CLIENT, flat.run_dir], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == -9
    assert int(done.stdout) > 0


def test_only_our_user_and_root_are_let_in_without_a_group(start: Callable[..., Any]) -> None:
    """By the directory's mode, and by the credentials of the connection, should the mode be opened by hand."""
    if os.geteuid() != 0:
        # Another user cannot be had: the directory is the guard that can be looked at.
        assert os.stat(start().run_dir).st_mode & 0o077 == 0
        return
    running = start()
    for folder in (running.run_dir, os.path.dirname(running.run_dir)):
        os.chmod(folder, 0o755)
    os.chmod(running.path("lifeline.sock"), 0o777)
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[1]); s.settimeout(60); print(s.recv(1))"
    )
    path = str(running.path("lifeline.sock"))
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60)
    assert done.stdout == "b''\n", done.stderr
    with connector.connect(stage="a", endpoint=running.run_dir, timeout=60) as node:
        assert node.status()["lifelines_refused"] == 1
