"""A POSIX shared-memory segment: create it with its memory reserved, open it with its size checked.

posix_ipc has no resource tracker: a process that opens a segment and ends removes nothing.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import ExitStack

import posix_ipc

from connector.arena import locks
from connector.arena.mapping import Mapping
from connector.arena.room import check_room, human
from connector.core.errors import (
    BrokerLost,
    BrokerRunning,
    ConfigError,
    ConnectorError,
    NoSpace,
    ProtocolViolation,
    UsageError,
)

SHM_DIR = "/dev/shm"
_UUID = re.compile(r"[0-9a-f]{32}")


def check_uuid(uuid: str) -> str:
    """An arena's uuid: exactly 32 lower-case hex digits; UsageError otherwise."""
    if not isinstance(uuid, str) or _UUID.fullmatch(uuid) is None:
        raise UsageError("an arena's uuid is 32 lower-case hex digits", uuid=repr(uuid)[:80])
    return uuid


def arena_name(uuid: str) -> str:
    """Name of the segment that all map."""
    return f"/tc-{check_uuid(uuid)}-arena"


def table_name(uuid: str) -> str:
    """Name of the segment that only the broker maps."""
    return f"/tc-{check_uuid(uuid)}-table"


class Segment:
    """A mapped segment. `close` forgets it; the pages stay mapped while a view or tensor lives.

    name: with its leading slash; size: bytes; readonly: whether writes would fault;
    fd: the descriptor that holds the lock, -1 when the segment is not locked (it is closed then).
    """

    __slots__ = ("_mapping", "buf", "fd", "name", "readonly", "size", "words")

    def __init__(self, name: str, mapping: Mapping, fd: int = -1) -> None:
        self.name = name
        self.size = mapping.size
        self.readonly = mapping.readonly
        self.fd = fd
        self._mapping: Mapping | None = mapping
        #: All bytes, format B; and the same as 64-bit words, format Q: `words[i] = v` is one store.
        self.buf = mapping.view()
        self.words = self.buf[: self.size & ~7].cast("Q")

    @classmethod
    def create(cls, name: str, size: int, *, mode: int = 0o600, gid: int | None = None, lock: bool = False) -> Segment:
        """A new segment of `size` bytes, all reserved; zeros. On failure nothing stays behind.

        mode is set whatever the umask; gid, if given, becomes the group. lock=True takes the fcntl
        lock before anything else and keeps the descriptor. Raises NoSpace (need, free, limits),
        BrokerLost (the name exists, no descriptors), ConfigError (the group cannot be given).
        """
        if size <= 0:
            raise UsageError("a segment needs at least one byte", segment=name, size=size)
        check_room(size, SHM_DIR)
        with ExitStack() as undo:
            fd = _shm_open(name, posix_ipc.O_CREX, readonly=False)
            undo.callback(os.close, fd)
            undo.callback(_unlink, name)
            if lock:
                _lock(fd, name)
                undo.callback(locks.drop, fd)
            _own(fd, name, mode, gid)
            _reserve(fd, name, size)
            mapping = _map(fd, name, size, readonly=False)
            undo.pop_all()
        if not lock:
            os.close(fd)
        return cls(name, mapping, fd if lock else -1)

    @classmethod
    def open(cls, name: str, size: int | None = None, *, readonly: bool = False, lock: bool = False) -> Segment:
        """An existing segment, its size checked before it is mapped (a short one would be SIGBUS).

        Raises BrokerLost (not there, or not ours: says what to check), ProtocolViolation (another size
        than `size`, empty, no plain file), BrokerRunning (lock=True and another process has it).
        """
        locks.guard(SHM_DIR + name)
        with ExitStack() as undo:
            fd = _shm_open(name, 0, readonly=readonly and not lock)
            undo.callback(os.close, fd)
            if lock:
                _lock(fd, name)
                undo.callback(locks.drop, fd)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size <= 0 or size not in (None, found.st_size):
                raise ProtocolViolation(
                    "the segment has another size than it should", segment=name, size=found.st_size, expected=size
                )
            mapping = _map(fd, name, found.st_size, readonly)
            undo.pop_all()
        if not lock:
            os.close(fd)
        return cls(name, mapping, fd if lock else -1)

    @property
    def mapping(self) -> Mapping:
        """The mapping, for those who make windows on it. UsageError after `close`."""
        if self._mapping is None:
            raise UsageError("the segment is closed", segment=self.name)
        return self._mapping

    @property
    def address(self) -> int:
        """Where the mapping begins in this process. UsageError after `close`."""
        return self.mapping.address

    def close(self) -> None:
        """Forgets the mapping and gives the lock back. Idempotent; views that are alive stay valid."""
        if self._mapping is None:
            return
        self._mapping = None
        self.buf = memoryview(b"")
        self.words = memoryview(b"").cast("Q")
        if self.fd >= 0:
            locks.drop(self.fd)
            os.close(self.fd)
            self.fd = -1

    def unlink(self) -> None:
        """Removes the name; mappings live on. A name that is gone already is fine."""
        _unlink(self.name)

    def __repr__(self) -> str:
        state = "closed" if self._mapping is None else "read-only" if self.readonly else "read-write"
        return f"<Segment {self.name} {human(self.size)} {state}{' locked' if self.fd >= 0 else ''}>"


def _shm_open(name: str, flags: int, readonly: bool) -> int:
    """The descriptor (close-on-exec; glibc follows no symlink)."""
    try:
        return int(posix_ipc.SharedMemory(name, flags=flags, mode=0o600, size=0, read_only=readonly).fd)
    except posix_ipc.ExistentialError:
        if flags:
            raise BrokerLost("the segment exists already: `connector sweep` removes leftovers", segment=name) from None
        raise BrokerLost(
            "the segment does not exist: the broker removed it, or this process sees another /dev/shm"
            " (containers must share it: --ipc=host, or one volume at /dev/shm)",
            segment=name,
        ) from None
    except posix_ipc.PermissionsError:
        raise BrokerLost(
            "the segment may not be opened: broker and worker must run as one user, or share the broker's group",
            segment=name,
            uid=os.geteuid(),
        ) from None
    except OSError as error:
        raise _refused(error, name) from error


def _lock(fd: int, name: str) -> None:
    """The lock, on a file that still has its name: a sweeper unlinks only under the lock."""
    if not locks.take(fd):
        raise BrokerRunning("another process holds the segment's lock", segment=name)
    if os.fstat(fd).st_nlink == 0:
        locks.drop(fd)
        raise BrokerLost("the segment was removed while it was opened", segment=name)


def _own(fd: int, name: str, mode: int, gid: int | None) -> None:
    # Group before mode: the group's bits must never be open to the group that the file had first.
    if gid is not None:
        try:
            os.fchown(fd, -1, gid)
        except PermissionError as error:
            raise ConfigError(
                "the segment cannot be given to the group: be root or its member", segment=name, gid=gid
            ) from error
    os.fchmod(fd, mode)


def _reserve(fd: int, name: str, size: int) -> None:
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise _refused(error, name, need=size) from error


def _map(fd: int, name: str, size: int, readonly: bool) -> Mapping:
    try:
        return Mapping(fd, size, readonly)
    except OSError as error:
        raise _refused(error, name, need=size) from error


def _refused(error: OSError, name: str, **facts: int) -> ConnectorError:
    """The typed error for what the kernel said."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
        room = os.statvfs(SHM_DIR)
        free = room.f_bavail * room.f_frsize
        return NoSpace(f"no room for the segment: {error.strerror}", segment=name, free_tmpfs=free, **facts)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return BrokerLost("no file descriptor is left: raise `ulimit -n`", segment=name, **facts)
    if error.errno == errno.ELOOP:
        return ProtocolViolation("the segment's name is a symbolic link", segment=name, **facts)
    return BrokerLost(f"the segment cannot be used: {error.strerror}", segment=name, **facts)


def _unlink(name: str) -> None:
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return
    except posix_ipc.PermissionsError as error:
        raise BrokerLost("the segment may not be removed by this user", segment=name, uid=os.geteuid()) from error
