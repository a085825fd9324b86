"""A stage's process: it opens its ends of a system, and does what the parent says, one command at a time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

import connector
from connector.bench import clocks
from connector.bench.payloads import Maker, number_of
from connector.bench.systems import Place, Reader, System, Writer, load
from connector.bench.workloads import WORKLOADS, Workload

#: One byte a payload that was read; what a reader writes and its writer waits for.
ACK = b"a"
_PR_SET_PDEATHSIG = 1


class Written(NamedTuple):
    """`begun`: monotonic ns just before each put; `spans`: the system's own figure instead. `cpu`, `wall`: seconds of
    the process over all of them."""

    begun: list[int]
    spans: list[int] | None
    cpu: float
    wall: float


class Passed(NamedTuple):
    """What a stage in the middle tells."""

    cpu: float


class Got(NamedTuple):
    """`had`: monotonic ns at which the reader had each payload's tensors, by number."""

    had: list[int]
    cpu: float


class _Off(Exception):
    """A run that was opened and does not take place."""


def serve(role: str, where: dict[str, str], folder: str, commands: Connection[Any, Any]) -> None:
    """A stage's main loop: (system, incoming, outgoing, workload, count) opens, "go" runs and "close" closes; None
    ends. Answers ("ready", None), ("done", Written | Passed | Got) and ("closed", None), or ("missing", text),
    ("failed", connector's error) and ("off", None). Any other error ends the process with its traceback."""
    torch.set_num_threads(1)
    # Ctrl-C reaches all of a terminal's processes; the parent says what that means for this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _give_up)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # What a system makes for a while goes with the folder, whatever becomes of this process.
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    systems: dict[str, System] = {}
    told = False
    try:
        while (command := commands.recv()) is not None:
            name, *rest = command
            try:
                if name not in systems:
                    systems[name] = load(where[name])
                _one(systems[name], *rest, commands)
                answer: tuple[str, Any] = ("closed", None)
            except ImportError as error:
                answer = ("missing", str(error))
            except _Off:
                answer = ("off", None)
            except connector.ConnectorError as error:
                answer = ("failed", error)
            commands.send(answer)
        told = True
    finally:
        for system in systems.values():
            system.leave()
        if not told and _alone(commands):
            # The parent was killed, and cannot remove it any more.
            shutil.rmtree(folder, ignore_errors=True)


def _alone(commands: Connection[Any, Any]) -> bool:
    """The pipe has come to its end. One that is alive says something before it sends SIGTERM; that it is no longer
    this process's parent would be true only a moment after its death is told."""
    try:
        if commands.poll(1.0):
            commands.recv()
    except (EOFError, ConnectionResetError):
        return True
    return False


def _one(system: System, *command: Any) -> None:
    try:
        _run(system, *command)
    finally:
        if not system.stays:
            system.leave()


def _give_up(number: int, frame: object) -> None:
    # Once: what is being closed is not disturbed again.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def _run(
    system: System, incoming: Place | None, outgoing: Place | None, name: str, count: int, commands: Connection
) -> None:
    workload, maker = WORKLOADS[name], _maker(name)
    with contextlib.ExitStack() as ends:
        reader = ends.enter_context(_end(system.reader, incoming, workload)) if incoming else None
        writer = ends.enter_context(_end(system.writer, outgoing, workload)) if outgoing else None
        commands.send(("ready", None))
        # All are open; the writer begins when the others have been told, too.
        if commands.recv() != "go":
            raise _Off
        commands.send(("done", _hand_over(reader, writer, workload, maker, count)))
        # What follows is of no payload; the broker's time is read before it.
        if commands.recv() != "close":
            raise _Off


def _hand_over(
    reader: tuple[Reader, int] | None, writer: tuple[Writer, int] | None, workload: Workload, maker: Maker, count: int
) -> Written | Passed | Got:
    if reader is None:
        assert writer is not None
        return write(*writer, workload, maker, count)
    if writer is None:
        return read(*reader, maker, count)
    return pass_on(*reader, *writer, workload, count)


@cache
def _maker(name: str) -> Maker:
    """Large payloads take a while to make, and the systems of a round run the same workload one after another."""
    return Maker(WORKLOADS[name])


@contextlib.contextmanager
def _end(open_end: Any, place: Place, workload: Workload) -> Iterator[tuple[Any, int]]:
    """An end of a system, and the pipe of the hop's acknowledgements."""
    pipe = Path(place.folder, f"{place.name}.acks")
    with contextlib.suppress(FileExistsError):
        os.mkfifo(pipe)
    acks = os.open(pipe, os.O_RDWR)
    try:
        end = open_end(place, workload)
        whole = False
        try:
            yield end, acks
            whole = True
        finally:
            end.close(given_up=not whole)
    finally:
        os.close(acks)


class _Window:
    """What a writer has under way."""

    def __init__(self, side: Writer, acks: int) -> None:
        self._side, self._acks = side, acks
        self.count = 0

    def wait_for(self, most: int) -> None:
        """Until at most so many are under way."""
        while self.count > most:
            acked = len(os.read(self._acks, 4096))
            self.count -= acked
            self._side.acked(acked)


def write(side: Writer, acks: int, workload: Workload, maker: Maker, count: int) -> Written:
    """Put `count` payloads; returns when the next stage has read all of them."""
    chance = random.Random(1)
    window = _Window(side, acks)
    begun: list[int] = []
    cpu, wall = clocks.own(), time.monotonic()
    while len(begun) < count:
        window.wait_for(workload.window - workload.step)
        if workload.pause:
            time.sleep(workload.pause * (1 + chance.random() / 2))
        numbers = range(len(begun), len(begun) + workload.step)
        payloads = [maker.numbered(number, side.needs_fresh, place) for place, number in enumerate(numbers)]
        start = time.monotonic_ns()
        if workload.step > 1:
            side.put_step(payloads)
        else:
            side.put(numbers[0] % workload.streams, payloads[0])
        begun += [start] * workload.step
        window.count += workload.step
    window.wait_for(0)
    took = time.monotonic() - wall
    return Written(begun, side.spans, clocks.own() - cpu, took)


def pass_on(source: Reader, done: int, target: Writer, acks: int, workload: Workload, count: int) -> Passed:
    """Take `count` payloads and put each on, in its stream."""
    window = _Window(target, acks)
    cpu = clocks.own()
    left = count
    while left:
        payloads = source.get()
        for payload in payloads:
            window.wait_for(workload.window - 1)
            target.put(number_of(payload) % workload.streams, payload)
            window.count += 1
        acked = ACK * len(payloads)
        left -= len(payloads)
        del payload, payloads
        os.write(done, acked)
    window.wait_for(0)
    return Passed(clocks.own() - cpu)


def read(side: Reader, done: int, maker: Maker, count: int) -> Got:
    """Take `count` payloads and check every byte of each, behind the clock's reading."""
    had = [0] * count
    left = count
    cpu = clocks.own()
    while left:
        payloads = side.get()
        now = time.monotonic_ns()
        for payload in payloads:
            number = maker.check(payload)
            if had[number]:
                raise RuntimeError(f"payload {number} came twice")
            had[number] = now
        acked = ACK * len(payloads)
        left -= len(payloads)
        del payload, payloads
        os.write(done, acked)
    return Got(had, clocks.own() - cpu)
