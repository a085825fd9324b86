"""The parent's hold on the stages: starts each once, gives all the same command, puts their answers together."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from connector.bench import sides
from connector.bench.clocks import cpu_of, descendants
from connector.bench.systems import Place
from connector.bench.workloads import WORKLOADS

#: Seconds that one run may take, and that a stage may take to end.
LIMIT, GRACE = 120.0, 10.0
#: Seconds after which all that was said of the payloads of a run has come to the broker.
LAST_WORDS = 0.05
#: The stages, from the first writer to the last reader; `middle` takes part where a workload has two hops.
ROLES = ("writer", "middle", "reader")
_names = itertools.count()


class Run(NamedTuple):
    """One system under one workload, once. Spans in µs, CPU and wall in seconds."""

    spans: list[float]
    #: Of the stages together, with what they started, and of the broker's process.
    stages_cpu: float
    broker_cpu: float
    wall: float


class Failed(Exception):
    """A stage met an error; its process has printed the traceback."""


class Missing(Exception):
    """A system needs what is not installed."""


class Line:
    """Processes in a row, and the folder where they meet. `where`: systems by name. A process starts when a workload
    first needs it."""

    def __init__(self, folder: str, endpoint: str, broker_pid: int, where: Mapping[str, str]) -> None:
        self._folder, self._endpoint, self._broker = folder, endpoint, broker_pid
        self._where = dict(where)
        #: What all names in shared memory begin with, or have in them.
        self._prefix = f"bench-{os.getpid()}-"
        self._stages: dict[str, tuple[Connection, BaseProcess]] = {}

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(given_up=kind is not None)

    def run(self, system: str, workload: str, payloads: int) -> Run:
        """Hand over so many payloads. Raises Failed, Missing if the system is not installed, and the connector's
        errors that a stage met."""
        roles = ROLES if WORKLOADS[workload].hops > 1 else (ROLES[0], ROLES[-1])
        for role in roles:
            self._start(role)
        name = f"{self._prefix}{next(_names)}-{system}"
        links = [
            Place(self._folder, f"{name}-{number}", self._endpoint, *(f"bench-{role}" for role in ends))
            for number, ends in enumerate(itertools.pairwise(roles))
        ]
        self._open(roles, links, system, workload, payloads)
        before = cpu_of(self._broker)
        for role in reversed(roles):
            self._stages[role][0].send("go")
        answers = [self._answer(role, "done") for role in roles]
        # The last payloads' words are on their way to the broker still.
        time.sleep(LAST_WORDS)
        broker = cpu_of(self._broker) - before
        for role in roles:
            self._stages[role][0].send("close")
        for role in roles:
            self._answer(role, "closed")
        written, got = answers[0], answers[-1]
        spans = written.spans or [had - begun for begun, had in zip(written.begun, got.had, strict=True)]
        return Run([span / 1000 for span in spans], sum(one.cpu for one in answers), broker, written.wall)

    def _open(self, roles: Sequence[str], links: Sequence[Place], system: str, workload: str, payloads: int) -> None:
        """From the end: a reader is there before its writer."""
        opened: list[str] = []
        for number, role in reversed(list(enumerate(roles))):
            incoming = links[number - 1] if number else None
            outgoing = links[number] if number < len(links) else None
            self._stages[role][0].send((system, incoming, outgoing, workload, payloads))
            try:
                self._answer(role, "ready")
            except Missing:
                for other in opened:
                    self._stages[other][0].send("no")
                    self._answer(other, "off")
                raise
            opened.append(role)

    def _start(self, role: str) -> None:
        if role in self._stages:
            return
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (role, self._where, self._folder, theirs)
        process = context.Process(target=sides.serve, args=arguments, name=f"bench-{role}")
        process.start()
        theirs.close()
        self._stages[role] = (ours, process)

    def _answer(self, role: str, kind: str) -> Any:
        pipe = self._stages[role][0]
        if not pipe.poll(LIMIT):
            raise Failed(f"the {role} said nothing for {LIMIT:.0f} s")
        try:
            told, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise Failed(f"the {role} has ended with an error, which it has printed") from None
        if told == "missing":
            raise Missing(value)
        if told == "failed":
            raise value
        assert told == kind
        return value

    def close(self, given_up: bool = False) -> None:
        """End the processes. `given_up`: in the middle of a run, which they leave as well as they can."""
        for pipe, _ in self._stages.values():
            # One that has ended has closed its end.
            with contextlib.suppress(OSError):
                pipe.send(None)
        until = time.monotonic() + GRACE
        processes = [process for _, process in self._stages.values()]
        while (alive := [one for one in processes if one.is_alive()]) and time.monotonic() < until:
            if given_up:
                # Again and again: what it raises is lost where it meets a finaliser. A stage heeds the first.
                for process in alive:
                    process.terminate()
            alive[0].join(1.0)
        for process in processes:
            _kill(process)
        # What a killed stage, or a system that keeps something for its next user, has left.
        for left in Path("/dev/shm").glob(f"*{self._prefix}*"):
            left.unlink(missing_ok=True)


def _kill(process: BaseProcess) -> None:
    """With all that it has started."""
    if process.pid is None or not process.is_alive():
        return
    started = list(descendants(process.pid))
    process.kill()
    process.join()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
