"""Prefaulting maps pages, changes no byte, can be stopped and leaves no thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from connector.arena import prefault
from connector.arena.arena import Arena, open_arena
from connector.arena.prefault import Prefault, populate
from connector.core.errors import NoSpace, UsageError

MIB = 1 << 20


def resident(arena: Arena) -> int:
    """KiB of the arena that this process has mapped in."""
    total = 0
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            here = f"{arena.segment.address:x}-" in line
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "connector-prefault"]


@pytest.mark.parametrize("write", [True, False])
def test_populate_maps_every_page_and_keeps_the_bytes(new_arena: Callable[..., Arena], write: bool) -> None:
    arena = new_arena(4 * MIB)
    arena.segment.buf[5000] = 7
    assert resident(arena) < 1024
    assert populate(arena.segment.address + 100, arena.segment.size - 100, write, step=MIB)
    assert resident(arena) * 1024 >= 4 * MIB
    assert arena.segment.buf[5000] == 7


def test_a_read_only_mapping_is_populated_by_reading(new_arena: Callable[..., Arena]) -> None:
    arena = new_arena(2 * MIB)
    opened = open_arena(arena.uuid, arena.size, readonly=True)
    work = Prefault(opened.segment).start()
    assert work.done.wait(60)
    work.stop()
    assert work.complete and resident(opened) * 1024 >= 2 * MIB
    opened.close()


def test_a_thread_populates_a_range_and_ends(new_arena: Callable[..., Arena]) -> None:
    arena = new_arena(4 * MIB)
    work = Prefault(arena.segment, begin=4096, step=MIB).start()
    assert work.done.wait(60)
    work.stop()
    work.stop()
    assert work.complete and work.progress == arena.segment.size - 4096 and work.error is None
    assert threads() == []


def test_stop_ends_it_between_two_steps(new_arena: Callable[..., Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    arena = new_arena(4 * MIB)
    entered, go = threading.Event(), threading.Event()

    def slow(address: int, count: int, write: bool) -> bool:
        entered.set()
        return go.wait(60)

    monkeypatch.setattr(prefault, "_populate_step", slow)
    work = Prefault(arena.segment, step=MIB).start()
    assert entered.wait(60)
    stopper = threading.Thread(target=work.stop)
    stopper.start()
    assert work._stopping.wait(60)
    go.set()
    stopper.join(60)
    assert work.done.is_set() and work.progress == MIB and not work.complete
    assert threads() == []


def test_a_thread_never_started_can_be_stopped(arena: Arena) -> None:
    Prefault(arena.segment).stop()
    assert threads() == []


def test_the_thread_keeps_the_mapping(new_arena: Callable[..., Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the segment under a running prefault unmaps nothing."""
    arena = new_arena(MIB)
    go = threading.Event()
    seen: list[int] = []

    def read(address: int, count: int, write: bool) -> bool:
        go.wait(60)
        seen.append(ctypes.c_uint8.from_address(address).value)
        return True

    monkeypatch.setattr(prefault, "_populate_step", read)
    arena.segment.buf[0] = 9
    work = Prefault(arena.segment).start()
    arena.close()
    go.set()
    work.stop()
    assert seen == [9]


def test_an_old_kernel_is_no_error(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "MADV_POPULATE_WRITE", 999)
    assert populate(arena.segment.address, 4096) is False
    work = Prefault(arena.segment).start()
    work.stop()
    assert work.done.is_set() and not work.complete and work.error is None


def test_pages_that_cannot_be_had_are_no_space(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range behind a mapping is ENOMEM to the kernel; the thread keeps the error."""
    hole = 0x1000
    with pytest.raises(NoSpace):
        populate(hole, 4096)

    def refuse(address: int, count: int, write: bool) -> bool:
        raise NoSpace("none", size=count)

    monkeypatch.setattr(prefault, "_populate_step", refuse)
    work = Prefault(arena.segment).start()
    work.stop()
    assert isinstance(work.error, NoSpace) and work.done.is_set()


def test_a_range_outside_of_the_segment_is_refused(arena: Arena) -> None:
    for begin, end in [(-1, None), (0, arena.segment.size + 1), (2, 1)]:
        with pytest.raises(UsageError):
            Prefault(arena.segment, begin, end)
