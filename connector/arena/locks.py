"""fcntl locks on whole files: how a process shows that it lives, without a pid.

A lock of this kind ends with its process, by whatever death, and a forked child does not have
it. It also ends when the process closes *any* descriptor of the file: so what this process
holds is remembered here, and `probe` and `guard` never open such a file a second time.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct

from connector.core.errors import BrokerRunning

#: (device, inode) of each file locked by us -> the pid that took it; a forked child's pid differs.
_OWN: dict[tuple[int, int], int] = {}
#: struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")


def take(fd: int) -> bool:
    """The exclusive lock on the file behind `fd`, without waiting. False if another process has it.

    `fd` must be open for writing and stay open: closing it gives the lock back.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES for "held"
        return False
    _OWN[_key(os.fstat(fd))] = os.getpid()
    return True


def drop(fd: int) -> None:
    """Gives the lock back. The caller closes `fd`."""
    _OWN.pop(_key(os.fstat(fd)), None)
    fcntl.lockf(fd, fcntl.LOCK_UN)


def is_own(found: os.stat_result) -> bool:
    """True if this very process holds the lock of the file."""
    return _OWN.get(_key(found)) == os.getpid()


def guard(path: str) -> None:
    """BrokerRunning if this process holds the lock of `path`: opening it again would lose the lock."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    if is_own(found):
        raise BrokerRunning("this process holds the lock of the file already", path=path)


def probe(path: str, folder: int | None = None) -> bool:
    """True if any process, this one included, holds a lock on the regular file `path` (in `folder`).

    A missing file and anything but a regular file hold nothing. Raises OSError when the file
    cannot be opened for reading.
    """
    try:
        found = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        return False
    if is_own(found):
        return True
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return False
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, asked)
    finally:
        os.close(fd)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
