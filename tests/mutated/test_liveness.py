"""What proves a death, what a death leaves, and whom a client serves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from connector.arena import blocks, locks
from connector.broker import config, lifeline
from connector.broker.lifeline import Lifelines
from connector.broker.rundir import RunDir
from connector.broker.service import Service
from connector.broker.store import Store
from connector.core.directory.events import Flags, Member
from connector.core.endpoint import lifeline_path, session_lock_path
from connector.core.errors import ProtocolViolation
from connector.core.names import Edge, Handle
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.manifest import pack_meta
from connector.wire.message import SPEAKS

ROOT = Path(__file__).resolve().parents[2]
TOKEN = bytes(range(16))
EDGE = Edge("a", "b")

FORK = """
import os, connector
with connector.connect(stage="a", embedded=True, pool="2MiB") as node:
    child = os.fork()
    if child == 0:
        try:
            node.edge("a", "b")
        except connector.errors.ForkedClient:
            os._exit(7)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_stream_that_ended_is_no_death_while_the_lock_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives no pidfd; the client's descriptor was closed, but its process lives on."""
    monkeypatch.setattr(lifeline, "_pidfd", lambda stream, pid: -1)
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder:
        run_dir = RunDir(folder + "/run", None)
        lines = Lifelines(run_dir, frozenset({os.geteuid()}), lambda token, frame: None)
        lock = os.open(session_lock_path(run_dir.path, TOKEN.hex()), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            assert locks.take(lock)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
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


def test_what_a_process_said_before_its_death_is_heard_first() -> None:
    """More than one turn reads of a lifeline: the rest lies there when the kernel tells of the death."""
    frames = [b"%d" % number for number in range(2 * lifeline.TURN)]
    heard: list[bytes] = []
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder:
        run_dir = RunDir(folder + "/run", None)
        lines = Lifelines(run_dir, frozenset({os.geteuid()}), lambda token, frame: heard.append(frame))
        try:
            child = os.fork()
            if child == 0:
                stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stream.connect(lifeline_path(run_dir.path))
                stream.send(TOKEN + SPEAKS)
                stream.recv(1)
                for frame in frames:
                    stream.send(frame)
                os._exit(0)
            while lines.find(TOKEN) is None:
                assert list(lines.poll(60.0)) == []
            os.waitpid(child, 0)
            dead: list[tuple[bytes, str]] = []
            while not dead:
                dead = list(lines.poll(60.0))
            assert heard == frames and [token for token, _ in dead] == [TOKEN]
        finally:
            lines.close()
            run_dir.remove_contents()


def test_a_forked_child_is_refused() -> None:
    """It inherits the mapping; only the parent's life protects views."""
    done = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "7\n", done.stderr


def nothing(token: bytes) -> None:
    return


class Serving:
    """A service without its sockets: `said` is what it answered to whoever spoke. `vouched`: a lifeline stands."""

    def __init__(self, run_dir: RunDir, stream: socket.socket, vouched: bool) -> None:
        self.store = Store(run_dir, 1 << 20, 8)
        self.said: list[msg.Message | None] = []
        line = lifeline.Lifeline(stream, os.getpid(), os.geteuid(), -1, TOKEN) if vouched else None
        settings = config.load(None, {}, {"run_dir": run_dir.path, "pool": "1MiB"}).config
        said = (self._send, nothing, nothing, self._gone, self._pass_on)
        self.service = Service(settings, self.store, *said, lambda _: line, time.monotonic)

    def _send(self, token: bytes, message: msg.Message | None) -> None:
        self.said.append(message)

    def _pass_on(self, token: bytes, message: msg.Peer, passed: socket.socket) -> None:
        passed.close()

    def _gone(self, token: bytes, applied: int) -> None:
        self.said.append(None)

    def hear(self, *messages: msg.Message) -> None:
        self.service.frame(TOKEN, codec.encode(0, [msg.Hello(TOKEN, "a", "test", False, ()), *messages]))


@pytest.fixture
def serve() -> Iterator[Callable[[bool], Serving]]:
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as stream:
        run_dir = RunDir(folder + "/run", None)
        made: list[Serving] = []

        def start(vouched: bool) -> Serving:
            made.append(Serving(run_dir, stream, vouched))
            return made[-1]

        yield start
        for serving in made:
            serving.store.remove()
        run_dir.remove_contents()


def write(serving: Serving, handle: Handle, rid: str, begun: int) -> None:
    """A block's header, as a writer writes it."""
    meta = pack_meta(EDGE, [Member(rid, 0, 0, Flags.LAST, 1, b"", 0)], begun)
    blocks.write_header(serving.store.arena, *handle, 1, 0, meta, 1, 256, 0)


def test_what_a_dead_writer_sealed_in_a_use_that_it_had_not_said_is_none_of_the_one_before(
    serve: Callable[[bool], Serving],
) -> None:
    """Its second finish was not heard: what it put behind that would go into the wrong use."""
    serving = serve(True)
    serving.hear(msg.Finish(1, "r", False), msg.Reserve(1, EDGE, (512, 512), 0.0, (), True))
    (granted,) = [word for word in serving.said if isinstance(word, msg.Grant)]
    for (handle, _), begun in zip(granted.blocks, (2, 1), strict=True):
        write(serving, handle, f"r{begun}", begun)
        blocks.seal(serving.store.arena, *handle)
    serving.service.died(TOKEN, "killed")
    assert list(serving.service.directory.state.lives) == ["r1"]
    assert list(serving.service.directory.state.blocks) == [granted.blocks[1][0].offset]


def test_what_a_dead_writer_had_sealed_and_not_said_is_there(serve: Callable[[bool], Serving]) -> None:
    """The ready word, not the message, makes a payload exist; a block without it was none."""
    serving = serve(True)
    serving.hear(msg.Reserve(1, EDGE, (512, 512), 0.0, (), True))
    (granted,) = [word for word in serving.said if isinstance(word, msg.Grant)]
    (sealed, _), (bare, _) = granted.blocks
    for handle, rid in ((sealed, "r"), (bare, "s")):
        write(serving, handle, rid, 0)
    blocks.seal(serving.store.arena, *sealed)
    serving.service.died(TOKEN, "killed")
    assert list(serving.service.directory.state.lives) == ["r"]
    assert list(serving.service.directory.state.blocks) == [sealed.offset]


def test_hello_without_a_lifeline_is_no_session(serve: Callable[[bool], Serving]) -> None:
    """The kernel must vouch for a process before it may hold anything."""
    serving = serve(False)
    serving.hear()
    (failure,) = serving.said
    assert isinstance(failure, msg.Failure) and isinstance(failure.error, ProtocolViolation)
    assert not serving.service.directory.state.sessions


def test_a_malformed_frame_costs_its_sender_an_error_and_nothing_else(serve: Callable[[bool], Serving]) -> None:
    """The session and what it holds stay."""
    serving = serve(True)
    serving.hear(msg.Reserve(1, EDGE, (512,), 0.0, (), True))
    before = len(serving.said)
    serving.service.frame(TOKEN, b"\xc1 no msgpack")
    (failure,) = serving.said[before:]
    assert isinstance(failure, msg.Failure) and isinstance(failure.error, ProtocolViolation)
    assert len(serving.service.directory.state.blocks) == 1
