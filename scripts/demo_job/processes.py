"""The stage processes: started by spawn, watched, and gone when the demo ends, however it ends.

A stage talks to the demo over a pipe of JSON messages: {"report"} when its work is done, or {"error"}; and
{"failed": [rid, why]} of a request, which the demo hands on to the other stages. Tensors never take that way.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from pipelines import PIPELINES, Pipeline, Request
from transport import Flow, Station

from connector.core.errors import ConnectorError

#: Seconds that a stage gets to leave by itself, and then after SIGTERM.
LEAVE, TERM = 20.0, 5.0

#: What a pipe raises whose other end has ended; a reset, if that end had not read all of it.
ENDED = (EOFError, BrokenPipeError, ConnectionResetError)


class StageFailed(Exception):
    """A stage process failed, died or stood still; the text says which, and why."""


class _Telling(AbstractContextManager[None]):
    """Tells the demo of an error that ends the stage; swallows none."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        tell(self._pipe, error=f"{type(error).__name__}: {error}")
        if isinstance(error, ConnectorError):
            # It says all there is to say; a traceback, as for other errors, would only bury it.
            raise SystemExit(1) from None


def _end_with_the_demo() -> None:
    """A stage outlives a restart of its broker, so even a killed demo has to take it along."""
    demo = multiprocessing.parent_process()
    assert demo is not None
    demo.join()
    os.kill(os.getpid(), signal.SIGTERM)


def tell(pipe: Connection, **message: Any) -> None:
    pipe.send_bytes(json.dumps(message).encode())


def hear_failed(pipe: Connection) -> dict[str, str]:
    """What the demo has said since: requests that failed in another stage, and why."""
    failed: dict[str, str] = {}
    try:
        while pipe.poll():
            rid, why = json.loads(pipe.recv_bytes())["failed"]
            failed[rid] = why
    except ENDED:
        # The demo has ended, and this process is about to.
        return failed
    return failed


def join_failures(station: Station, pipe: Connection) -> None:
    """Let a stage tell and hear of requests that failed."""
    station.tell_failed = lambda rid, why: tell(pipe, failed=[rid, why])
    station.failed_elsewhere = lambda: hear_failed(pipe)


@contextmanager
def stage_process(pipe: Connection) -> Iterator[None]:
    """Around what a stage process does: one thread for the model, an end with the demo, and word of what ended it."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
    with _Telling(pipe):
        yield


def run_stage(
    name: str, stage: str, endpoint: str, pipe: Connection, requests: list[Request], folder: str, tamper: str | None
) -> None:
    """The body of a stage process."""
    with stage_process(pipe):
        work = PIPELINES[name].load().STAGES[stage]
        with Station(stage, endpoint, tamper) as station:
            # The weights may still be on their way to `folder`; the demo says when they are there.
            pipe.recv_bytes()
            join_failures(station, pipe)
            work(station, requests, Path(folder))
            tell(pipe, report=station.report())


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Children started here ignore Ctrl-C, which reaches the whole group: the demo itself ends them, in order."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Crew(AbstractContextManager["Crew"]):
    """All stage processes of one run. Leaving it ends those that still run."""

    #: What a stage process does.
    BODY = staticmethod(run_stage)

    def __init__(
        self, pipeline: Pipeline, endpoint: str, requests: list[Request], folder: Path, tamper: str | None
    ) -> None:
        """Start a process per stage; each loads its libraries and then waits for `go`."""
        self.pids: dict[str, int] = {}
        #: By edge, what its writer and its reader saw; there when the stage has reported.
        self.sent: dict[str, Flow] = {}
        self.received: dict[str, Flow] = {}
        #: By stage, the rows of each of its steps.
        self.steps: dict[str, list[list[int]]] = {}
        #: Requests that failed in a stage, and why.
        self.failed: dict[str, str] = {}
        self._reported: set[str] = set()
        self._processes: dict[str, SpawnProcess] = {}
        self._pipes: dict[str, Connection] = {}
        context = multiprocessing.get_context("spawn")
        for stage in pipeline.stages:
            ours, theirs = context.Pipe()
            given = (pipeline.name, stage, endpoint, theirs, requests, str(folder), tamper)
            process = context.Process(target=self.BODY, args=given, name=stage, daemon=True)
            self._processes[stage], self._pipes[stage] = process, ours
            with interrupts_ignored():
                process.start()
            self.pids[stage] = process.pid or 0
            theirs.close()

    def go(self) -> None:
        """What the stages load is in place."""
        for stage, pipe in self._pipes.items():
            try:
                pipe.send_bytes(b"go")
            except ENDED:
                raise StageFailed(self._loss(stage)) from None

    def check(self) -> bool:
        """Take in what the stages say; True when all have reported. StageFailed if one failed or died."""
        # The exit codes first: what a dead process had to say is in its pipe by then.
        dead = [stage for stage, process in self._processes.items() if process.exitcode is not None]
        errors = [error for stage in self._processes if (error := self._listen(stage)) is not None]
        # A stage that was killed says nothing, and is why the others failed.
        silent = [stage for stage in dead if stage not in self._reported]
        errors = [self._loss(stage) for stage in silent if not any(e.startswith(f"{stage} ") for e in errors)] + errors
        if errors:
            raise StageFailed("; ".join(errors))
        return self._reported == self._processes.keys()

    def _listen(self, stage: str) -> str | None:
        """Read the stage's messages so far; its error, if it tells of one."""
        pipe = self._pipes[stage]
        try:
            while pipe.poll():
                message = json.loads(pipe.recv_bytes())
                if "error" in message:
                    return f"{stage} failed: {message['error']}"
                if "failed" in message:
                    self._spread(stage, *message["failed"])
                else:
                    self._note(stage, message)
        except ENDED:
            # The exit code tells more.
            return None
        return None

    def _spread(self, stage: str, rid: str, why: str) -> None:
        """A request failed in a stage: once, the others are told."""
        if rid in self.failed:
            return
        self.failed[rid] = f"{stage}: {why}"
        for other, pipe in self._pipes.items():
            try:
                if other != stage:
                    tell(pipe, failed=[rid, self.failed[rid]])
            except ENDED:
                # It has done its part, or its exit code tells more.
                continue

    def _note(self, stage: str, message: dict[str, Any]) -> None:
        for end in ("sent", "received"):
            flows = [Flow(**flow) for flow in message["report"][end]]
            getattr(self, end).update({flow.edge: flow for flow in flows})
        self.steps[stage] = message["report"]["steps"]
        self._reported.add(stage)

    def _loss(self, stage: str) -> str:
        self._processes[stage].join(TERM)
        code = self._processes[stage].exitcode
        why = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"{stage} died without a word: {why}"

    def settle(self, seconds: float) -> None:
        """Until every stage has reported; StageFailed otherwise."""
        deadline = time.monotonic() + seconds
        while not self.check():
            if time.monotonic() > deadline:
                missing = ", ".join(self._processes.keys() - self._reported)
                raise StageFailed(f"no report from {missing} in {seconds:.0f} s")
            wait(list(self._pipes.values()), timeout=0.5)

    def wait(self, seconds: float) -> None:
        """Until every stage has reported and left in order; StageFailed otherwise."""
        self.settle(seconds)
        for stage, process in self._processes.items():
            process.join(LEAVE)
            if process.exitcode != 0:
                raise StageFailed(f"{stage} did its work, but did not leave in order: exit code {process.exitcode}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        alive = [process for process in self._processes.values() if process.is_alive()]
        for process in alive:
            process.terminate()
        for process in alive:
            process.join(TERM)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes.values():
            pipe.close()
