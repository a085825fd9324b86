"""Segments: made whole or not at all, opened only if they are what they should be."""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from connector.arena import locks
from connector.arena import segment as module
from connector.arena.segment import Segment, arena_name, table_name
from connector.core.errors import BrokerLost, BrokerRunning, ConfigError, NoSpace, ProtocolViolation, UsageError

PAGE = 4096


@pytest.fixture
def name(uuid: str) -> str:
    return arena_name(uuid)


def maps(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


def test_two_mappings_show_the_same_bytes(name: str) -> None:
    made = Segment.create(name, 2 * PAGE)
    opened = Segment.open(name, 2 * PAGE)
    made.words[3] = 0x0102030405060708
    assert bytes(opened.buf[24:32]) == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert made.address != opened.address and made.size == opened.size == 2 * PAGE
    for one in (made, opened):
        one.close()
    made.unlink()
    made.unlink()


@pytest.mark.parametrize("umask", [0o077, 0o002, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_mode_is_set_whatever_the_umask(name: str, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        made = Segment.create(name, PAGE, mode=mode, gid=os.getegid())
    finally:
        os.umask(before)
    found = os.stat(f"/dev/shm{name}")
    made.unlink()
    made.close()
    assert stat.S_IMODE(found.st_mode) == mode
    assert found.st_gid == os.getegid()


def test_memory_is_reserved_at_creation(name: str) -> None:
    made = Segment.create(name, 64 * PAGE)
    assert os.stat(f"/dev/shm{name}").st_blocks * 512 >= 64 * PAGE
    made.unlink()
    made.close()


def test_no_descriptor_stays_open_unless_locked(name: str) -> None:
    """Not even inside the mapping: closing a hidden duplicate would drop a lock."""
    before = len(os.listdir("/proc/self/fd"))
    made = Segment.create(name, PAGE)
    assert len(os.listdir("/proc/self/fd")) == before
    made.unlink()
    made.close()


def test_a_failure_leaves_nothing_behind(name: str, uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for lock in (False, True):
        with pytest.raises(NoSpace) as caught:
            Segment.create(name, PAGE, lock=lock)
        assert caught.value.facts["need"] == PAGE and caught.value.facts["segment"] == name
        assert not os.path.exists(f"/dev/shm{name}")
        assert len(os.listdir("/proc/self/fd")) == before


def test_more_than_the_node_has_is_refused_before_anything_is_made(name: str) -> None:
    with pytest.raises(NoSpace) as caught:
        Segment.create(name, 1 << 60)
    assert caught.value.facts["need"] == 1 << 60
    assert not os.path.exists(f"/dev/shm{name}")


def test_a_group_that_cannot_be_given_is_a_config_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, uid: int, gid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(ConfigError, match="group") as caught:
        Segment.create(name, PAGE, gid=12)
    assert caught.value.facts["gid"] == 12


def test_a_name_that_exists_is_left_alone(name: str) -> None:
    made = Segment.create(name, PAGE)
    made.buf[0] = 7
    with pytest.raises(BrokerLost, match="exists already"):
        Segment.create(name, PAGE)
    again = Segment.open(name)
    assert again.buf[0] == 7
    for one in (made, again):
        one.close()
    made.unlink()


def test_an_absent_segment_says_what_to_check(name: str) -> None:
    with pytest.raises(BrokerLost, match="containers must share it") as caught:
        Segment.open(name)
    assert caught.value.facts["segment"] == name


@pytest.mark.parametrize("planted", [0, 1, PAGE - 1, PAGE + 1])
def test_another_size_is_refused_before_mapping(name: str, planted: int) -> None:
    path = Path(f"/dev/shm{name}")
    path.write_bytes(b"x" * planted)
    with pytest.raises(ProtocolViolation) as caught:
        Segment.open(name, PAGE)
    assert caught.value.facts["size"] == planted
    assert not maps(name)
    path.unlink()


def test_symbolic_links_and_folders_are_refused(name: str, tmp_path: Path) -> None:
    path = Path(f"/dev/shm{name}")
    target = tmp_path / "target"
    target.write_bytes(b"x" * PAGE)
    path.symlink_to(target)
    with pytest.raises(ProtocolViolation, match="symbolic link"):
        Segment.open(name, PAGE)
    path.unlink()
    path.mkdir()
    with pytest.raises(ProtocolViolation):
        Segment.open(name, readonly=True)
    path.rmdir()


def test_permission_is_another_error_than_absence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise module.posix_ipc.PermissionsError("denied")

    monkeypatch.setattr(module.posix_ipc, "SharedMemory", refuse)
    with pytest.raises(BrokerLost, match="one user") as caught:
        Segment.open(name)
    assert caught.value.facts["uid"] == os.geteuid()


def test_a_read_only_mapping_takes_no_store(name: str) -> None:
    made = Segment.create(name, PAGE)
    opened = Segment.open(name, readonly=True)
    made.words[1] = 9
    assert opened.words[1] == 9
    with pytest.raises(TypeError):
        opened.words[1] = 1
    for one in (made, opened):
        one.close()
    made.unlink()


def test_close_keeps_what_is_still_viewed_and_then_unmaps(name: str) -> None:
    made = Segment.create(name, PAGE)
    made.unlink()
    view = made.buf
    part = view[8:16]
    made.words[1] = 5
    made.close()
    made.close()
    assert "closed" in repr(made)
    with pytest.raises(UsageError):
        _ = made.address
    assert part[0] == 5 and maps(name)
    del view, part
    gc.collect()
    assert not maps(name)


def test_repr_tells_size_state_and_lock(uuid: str) -> None:
    made = Segment.create(table_name(uuid), 2 * PAGE, lock=True)
    assert "8.0 KiB" in repr(made) and "read-write" in repr(made) and "locked" in repr(made)
    made.unlink()
    made.close()


def test_the_resource_tracker_never_hears_of_our_names(name: str) -> None:
    """Other shared memory in the process is tracked; ours stays when trackers clean up."""
    told: list[str] = []
    original = resource_tracker.register

    def listen(name: str, kind: str) -> None:
        told.append(name)
        original(name, kind)

    resource_tracker.register = listen
    try:
        other = shared_memory.SharedMemory(create=True, size=PAGE)
        made = Segment.create(name, PAGE)
        opened = Segment.open(name)
    finally:
        resource_tracker.register = original
    other.close()
    other.unlink()
    assert len(told) == 1 and name not in told
    assert os.path.exists(f"/dev/shm{name}")
    for one in (made, opened):
        one.close()
    made.unlink()


def test_a_process_that_opens_and_ends_removes_nothing(name: str, child: Callable[..., object]) -> None:
    made = Segment.create(name, PAGE)
    made.words[0] = 11
    script = "import sys; from connector.arena.segment import Segment; print(Segment.open(sys.argv[1]).words[0])"
    assert child(script, name).communicate()[0].strip() == "11"  # type: ignore[attr-defined]
    assert child(script, name).communicate()[0].strip() == "11"  # type: ignore[attr-defined]
    made.unlink()
    made.close()


def test_names_come_from_a_uuid_only() -> None:
    for wrong in ("", "../x", "A" * 32, "a" * 31, "a" * 32 + "\n", "g" * 32):
        with pytest.raises(UsageError):
            arena_name(wrong)
    assert table_name("0" * 32) == "/tc-" + "0" * 32 + "-table"


def test_opening_what_we_hold_is_refused_and_keeps_the_lock(uuid: str, child: Callable[..., object]) -> None:
    """A second descriptor, closed, would give the lock away silently."""
    name = table_name(uuid)
    made = Segment.create(name, PAGE, lock=True)
    for lock in (False, True):
        with pytest.raises(BrokerRunning, match="this process"):
            Segment.open(name, lock=lock)
    script = "import sys; from connector.arena import locks; print(locks.probe(sys.argv[1]))"
    path = f"/dev/shm{name}"
    assert child(script, path).communicate()[0].strip() == "True"  # type: ignore[attr-defined]
    assert locks.probe(path)
    made.close()
    assert child(script, path).communicate()[0].strip() == "False"  # type: ignore[attr-defined]
    made.unlink()


def test_a_lock_ends_with_its_process_and_is_not_inherited_by_fork(uuid: str, child: Callable[..., object]) -> None:
    """The forked grandchild lives on with the descriptor, yet the lock is free."""
    script = """
import os, signal, sys
from connector.arena.segment import Segment
made = Segment.create(sys.argv[1], 4096, lock=True)
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
signal.pause()
"""
    name = table_name(uuid)
    process = child(script, name)
    assert process.stdout.readline() == "ready\n"  # type: ignore[attr-defined]
    with pytest.raises(BrokerRunning):
        Segment.open(name, lock=True)
    process.kill()  # type: ignore[attr-defined]
    process.wait()  # type: ignore[attr-defined]
    taken = Segment.open(name, lock=True)
    taken.unlink()
    taken.close()


def test_a_locker_notices_that_the_name_was_swept(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = table_name(uuid)
    original = locks.take

    def swept(fd: int) -> bool:
        os.unlink(f"/dev/shm{name}")
        return original(fd)

    monkeypatch.setattr(locks, "take", swept)
    with pytest.raises(BrokerLost, match="removed while"):
        Segment.create(name, PAGE, lock=True)
