"""The parent's hold on the two sides: starts them once, gives both each command, puts their answers together."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from connector.bench import sides
from connector.bench.systems import Place

#: Seconds that one run may take.
LIMIT = 120.0
#: What makes a clock id of a pid (linux: MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED).
_PROCESS_CLOCK = 2
_names = itertools.count()


class Run(NamedTuple):
    """One system under one workload, once. Spans in µs, CPU and wall in seconds."""

    spans: list[float]
    #: Of the two sides, and of the broker's process.
    writer_cpu: float
    reader_cpu: float
    broker_cpu: float
    wall: float


class Failed(Exception):
    """A side met an error; its process has printed the traceback."""


class Missing(Exception):
    """A system needs what is not installed."""


class Pair:
    """Two processes, and the folder where they meet. `where`: systems by name."""

    def __init__(self, folder: str, endpoint: str, broker_pid: int, where: dict[str, str]) -> None:
        self._folder, self._endpoint, self._broker = folder, endpoint, broker_pid
        ack = str(Path(folder, "acks"))
        os.mkfifo(ack)
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for role in ("reader", "writer"):
            ours, theirs = context.Pipe()
            process = context.Process(target=sides.serve, args=(role, where, ack, theirs), name=f"bench-{role}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, system: str, workload: str, payloads: int) -> Run:
        """Hand over so many payloads. Raises Failed, or Missing if the system is not installed."""
        place = Place(self._folder, f"{os.getpid()}-{next(_names)}-{system}", self._endpoint)
        for pipe in self._pipes:
            pipe.send((system, place, workload, payloads))
            self._answer(pipe, "ready")
        before = cpu_of(self._broker)
        for pipe in self._pipes:
            pipe.send("go")
        got, written = self._answer(self._pipes[0], "done"), self._answer(self._pipes[1], "done")
        broker = cpu_of(self._broker) - before
        spans = written.spans or [had - begun for begun, had in zip(written.begun, got.had, strict=True)]
        return Run([span / 1000 for span in spans], written.cpu, got.cpu, broker, written.wall)

    def _answer(self, pipe: Any, kind: str) -> Any:
        if not pipe.poll(LIMIT):
            self._kill()
            raise Failed(f"a side said nothing for {LIMIT} s")
        try:
            told, value = pipe.recv()
        except EOFError:
            self._kill()
            raise Failed("a side has ended with an error, which it has printed") from None
        if told == "missing":
            raise Missing(value)
        assert told == kind
        return value

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                continue
        for process in self._processes:
            process.join(10.0)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()


def cpu_of(pid: int) -> float:
    """Seconds of processor time that a process has used, all its threads, ended ones too: the kernel's clock of it."""
    return time.clock_gettime(((~pid) << 3) | _PROCESS_CLOCK)
