"""The two processes of a run: each opens its half of a system, and does what the parent says, one command at a time."""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from connector.bench.payloads import Maker
from connector.bench.systems import Place, Reader, System, Writer, load
from connector.bench.workloads import WORKLOADS, Workload

#: One byte a payload that was read; what the reader writes and the writer waits for.
ACK = b"a"


class Written(NamedTuple):
    """`begun`: monotonic ns just before each put; `spans`: the system's own figure instead. `cpu`, `wall`: seconds of
    the process over all of them."""

    begun: list[int]
    spans: list[int] | None
    cpu: float
    wall: float


class Got(NamedTuple):
    """`had`: monotonic ns at which the reader had each payload's tensors, by number."""

    had: list[int]
    cpu: float


def serve(role: str, where: dict[str, str], ack: str, commands: Connection) -> None:
    """A side's main loop: (name, place, workload, count) opens, runs and closes; None ends. Answers ("ready", None)
    and ("done", Written | Got), or ("missing", text). Any other error ends the process with its traceback."""
    torch.set_num_threads(1)
    pipe = os.open(ack, os.O_RDWR)
    systems: dict[str, System] = {}
    try:
        while (command := commands.recv()) is not None:
            name, place, workload, payloads = command
            try:
                if name not in systems:
                    systems[name] = load(where[name])
                commands.send(("done", _run(role, systems[name], place, workload, payloads, pipe, commands)))
            except ImportError as error:
                commands.send(("missing", str(error)))
        for system in systems.values():
            system.leave()
    finally:
        os.close(pipe)


def _run(
    role: str, system: System, place: Place, name: str, count: int, pipe: int, commands: Connection
) -> Written | Got:
    workload = WORKLOADS[name]
    maker = Maker(workload)
    open_side: Any = system.writer if role == "writer" else system.reader
    side = open_side(place, workload)
    try:
        commands.send(("ready", None))
        # Both are open; the writer begins when the reader has been told, too.
        commands.recv()
        return write(side, workload, maker, count, pipe) if role == "writer" else read(side, maker, count, pipe)
    finally:
        side.close()


def write(side: Writer, workload: Workload, maker: Maker, count: int, pipe: int) -> Written:
    """Put `count` payloads; returns when the reader has read all of them."""
    chance = random.Random(1)
    under_way = 0
    begun: list[int] = []
    cpu, wall = time.process_time(), time.monotonic()

    def wait_for(room: int) -> None:
        nonlocal under_way
        while under_way > room:
            acked = len(os.read(pipe, 4096))
            under_way -= acked
            side.acked(acked)

    while len(begun) < count:
        wait_for(workload.window - workload.step)
        if workload.pause:
            time.sleep(workload.pause * (1 + chance.random() / 2))
        numbers = range(len(begun), len(begun) + workload.step)
        fresh = side.needs_fresh or workload.step > 1
        payloads = [maker.numbered(number, fresh) for number in numbers]
        start = time.monotonic_ns()
        if workload.step > 1:
            side.put_step(payloads)
        else:
            side.put(numbers[0] % workload.streams, payloads[0])
        begun += [start] * workload.step
        under_way += workload.step
    wait_for(0)
    return Written(begun, side.spans, time.process_time() - cpu, time.monotonic() - wall)


def read(side: Reader, maker: Maker, count: int, pipe: int) -> Got:
    """Take `count` payloads and check every byte of each, behind the clock's reading."""
    had = [0] * count
    left = count
    cpu = time.process_time()
    while left:
        payloads = side.get()
        now = time.monotonic_ns()
        for payload in payloads:
            number = maker.check(payload)
            if had[number]:
                raise RuntimeError(f"payload {number} came twice")
            had[number] = now
        acks = ACK * len(payloads)
        left -= len(payloads)
        del payload, payloads
        os.write(pipe, acks)
    return Got(had, time.process_time() - cpu)
