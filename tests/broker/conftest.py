"""Brokers as processes of their own, and peers that speak to them frame by frame."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import connector
from connector.core.errors import from_code
from connector.wire import codec
from connector.wire import messages as msg

ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which a test hangs.
HANG = 60.0


class Running:
    """A broker process; `word` is what it said of its start: "ready", "" if nothing, or an error as `Class: text`."""

    def __init__(self, run_dir: str, prelude: str = "", umask: int = 0o022, **settings: Any) -> None:
        self.run_dir = run_dir
        told = json.dumps({"log_level": "info", "pool": "2MiB", **settings, "run_dir": run_dir})
        code = f"{prelude}\nimport sys\nfrom connector.broker.__main__ import main\nsys.exit(main(sys.argv[1:]))"
        read_fd, write_fd = os.pipe()
        self.log_file = tempfile.TemporaryFile("w+")
        with open(write_fd, "wb"):
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, told, str(os.getpid()), str(write_fd)],
                pass_fds=(write_fd,),
                cwd=ROOT,
                umask=umask,
                stderr=self.log_file,
            )
        with open(read_fd, "rb", buffering=0) as ready:
            readable, _, _ = select.select([ready], [], [], HANG)
            said = ready.read(65536).decode().strip() if readable else "nothing"
        self.word = said
        if said.startswith("["):
            code, message, facts = json.loads(said)
            self.word = f"{code}: {from_code(code, message, facts)}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def path(self, name: str) -> Path:
        return Path(self.run_dir, name)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal, wait for the end; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(HANG)

    def log(self) -> str:
        """All that it logged so far."""
        self.log_file.seek(0)
        return self.log_file.read()

    def segments(self) -> list[str]:
        """Names of the segments that it maps."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return sorted({line.split("/dev/shm/")[1] for line in lines if "/dev/shm/tc-" in line})

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class Peer:
    """A client by hand: a DEALER, and a lifeline if asked for."""

    def __init__(
        self, context: zmq.Context[Any], run_dir: str, token: bytes | None = None, lifeline: bool = True
    ) -> None:
        self.token = secrets.token_bytes(16) if token is None else token
        self.run_dir = run_dir
        self.stream: socket.socket | None = None
        self._lock = ""
        if lifeline:
            self.stream = open_lifeline(run_dir)
            self.stream.sendall(self.token)
            assert self.stream.recv(1) == b"\x01"
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.set(zmq.ROUTING_ID, self.token)
        self.dealer.set(zmq.RCVHWM, 1)
        self.dealer.set(zmq.SNDHWM, 0)
        self.dealer.set(zmq.LINGER, 0)
        self.dealer.connect(f"ipc://{run_dir}/broker.sock")

    def say(self, *messages: msg.Message) -> None:
        self.dealer.send(codec.encode(0, messages))

    def hear(self) -> list[msg.Message]:
        """The next frame's messages."""
        assert self.dealer.poll(int(HANG * 1000)), "the broker said nothing"
        return codec.decode(self.dealer.recv(), from_broker=True, max_frame=64 << 20).messages

    def answer(self, kind: type[Any]) -> Any:
        """The next message of the kind."""
        while True:
            for message in self.hear():
                if isinstance(message, kind):
                    return message

    def hello(self, stage: str = "peer") -> msg.Welcome:
        self.say(msg.Hello(self.token, stage, "test", False, ()))
        welcome = self.answer(msg.Welcome)
        assert isinstance(welcome, msg.Welcome)
        return welcome

    def close(self) -> None:
        self.dealer.close()
        if self.stream is not None:
            self.stream.close()


def open_lifeline(run_dir: str) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Blocking: with a timeout, a full queue of newcomers is an error at once instead of a wait.
        stream.connect(f"{run_dir}/lifeline.sock")
        stream.settimeout(HANG)
    except BaseException:
        stream.close()
        raise
    return stream


@pytest.fixture(scope="session")
def lifeline_to() -> Callable[[str], socket.socket]:
    """A raw connection to a broker's lifeline."""
    return open_lifeline


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A short path that is free, in a folder that goes with the test."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder:
        yield folder + "/run"


@pytest.fixture
def start(run_dir: str) -> Iterator[Callable[..., Running]]:
    """Starts brokers, in the test's run directory unless told otherwise; they end in order at the end."""
    started: list[Running] = []

    def begin(where: str | None = None, **settings: Any) -> Running:
        started.append(Running(where or run_dir, **settings))
        return started[-1]

    yield begin
    for running in started:
        running.end()
        running.log_file.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """A broker for all tests of the module, which must not change what another would see."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder:
        running = Running(folder + "/run", max_request_bytes="64KiB")
        assert running.word == "ready", running.word
        yield running
        assert running.end() == 0, running.log()
        running.log_file.close()


@pytest.fixture(scope="module")
def witness(served: Running) -> Iterator[connector.Node]:
    """A client of that broker that must notice nothing of the others."""
    with connector.connect(stage="witness", endpoint=served.run_dir, timeout=HANG) as node:
        yield node


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[Callable[..., Peer]]:
    """Makes peers, of the module's broker unless told otherwise; closed at the end."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def make(run_dir: str | None = None, **arguments: Any) -> Peer:
            found = Peer(context, run_dir or request.getfixturevalue("served").run_dir, **arguments)
            stack.callback(found.close)
            return found

        yield make
