"""What processes use: processor time by the kernel's clocks of them (all threads, ended ones too), and memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

#: What makes a clock id of a pid (linux: MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED).
_PROCESS_CLOCK = 2


def cpu_of(pid: int) -> float:
    """Seconds that a process has used."""
    return time.clock_gettime(((~pid) << 3) | _PROCESS_CLOCK)


def own() -> float:
    """Seconds that this process and those that it has started use: a peer's servers are part of its cost."""
    seconds = time.process_time()
    for pid in descendants(os.getpid()):
        # One that ended meanwhile has used little.
        with contextlib.suppress(OSError):
            seconds += cpu_of(pid)
    return seconds


def descendants(pid: int) -> Iterator[int]:
    """Processes that this one has started, and those that they have; nothing where the kernel does not tell."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                yield int(child)
                yield from descendants(int(child))


def private_bytes(pid: int) -> int:
    """Memory of a process that is its own alone: not the mapped pool."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")
