"""Evidence and leftovers that a sweep meets outside of the segments: session locks, leases, maps, sockets."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from contextlib import ExitStack

from connector.arena import locks

SOCKETS = ("broker.sock", "lifeline.sock")
BROKER_LOCK = "broker.lock"
SESSIONS = "sessions"


def session_holder(folder: str) -> str:
    """Name of the first lock file in `folder` that someone holds, "" if none. OSError: it cannot be told."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(".lock") and locks.probe(os.path.join(folder, name)):
            return name
    return ""


def first_bytes(path: str, count: int) -> bytes:
    """A private copy of a file's first `count` bytes, shorter if the file is: read, never mapped."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(fd, count, 0)
    finally:
        os.close(fd)


def in_use(proc: str, path: str, found: os.stat_result) -> str:
    """Words that say who has the file open or mapped, or that it cannot be told; "" if nobody does."""
    free = lease_is_free(path, found)
    if free:
        return ""
    mapped = mapped_by(proc, path, found)
    return mapped if free is None else mapped or "a process that cannot be seen from here has it open"


def lease_is_free(path: str, found: os.stat_result) -> bool | None:
    """True if no process has the file open or mapped, False if one has, None if the kernel does not say.

    The kernel grants a write lease only to the sole user of a file: it counts every process, also
    those of other namespaces and those that we may not look into. The lease is given back at once.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not os.path.samestat(os.fstat(fd), found):
            return None
        # Who opens the file just now makes the kernel signal us: by default with SIGIO, which kills.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return False
    except OSError:  # no leases on this file system, or the file is another user's
        return None
    finally:
        os.close(fd)
    return True


def mapped_by(proc: str, path: str, found: os.stat_result) -> str:
    """Words that say which process maps the file, or that it cannot be told; "" if nobody does.

    Processes of other users that we may not look into count only if the file's mode lets them in.
    """
    shut = found.st_mode & 0o077 == 0
    try:
        pids = [name for name in os.listdir(proc) if name.isdecimal()]
    except OSError as error:
        return f"{proc} cannot be read: {error.strerror}"
    for pid in pids:
        owner = -1
        try:
            owner = os.stat(os.path.join(proc, pid)).st_uid
            with open(os.path.join(proc, pid, "maps"), encoding="utf-8", errors="surrogateescape") as lines:
                mapped = any(_is_map_of(line, path, found) for line in lines)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            if shut and owner != found.st_uid:
                continue
            return f"the maps of process {pid} cannot be read"
        if mapped:
            return f"process {pid} maps it"
    return ""


def _is_map_of(line: str, path: str, found: os.stat_result) -> bool:
    """One line of maps: range, permissions, offset, device, inode, path."""
    fields = line.rstrip("\n").split(None, 5)
    if len(fields) < 6:
        return False
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    if fields[3] == device and fields[4] == str(found.st_ino):
        return True
    return os.path.basename(fields[5].removesuffix(" (deleted)")) == os.path.basename(path)


def clean(run_dir: str, owner: int, dry_run: bool) -> list[str]:
    """Removes the sockets and the free session locks of a run directory that no broker serves.

    Only in a folder of uid `owner` (the table's), and only files of that uid: the path comes from a
    file, and root must not be led elsewhere. It happens under the broker's own lock, so that a
    broker that starts meanwhile is not robbed; without that lock file nothing is touched. Returns
    the paths removed, or with dry_run those that would be.
    """
    with ExitStack() as stack:
        folder = _open_folder(stack, run_dir, None, owner)
        if folder < 0 or not _claim(stack, folder, owner, dry_run):
            return []
        gone = [
            os.path.join(run_dir, name)
            for name in SOCKETS
            if (found := _stat(name, folder)) is not None
            and stat.S_ISSOCK(found.st_mode)
            and found.st_uid == owner
            and unlink_same(name, found, dry_run, folder)
        ]
        sessions = _open_folder(stack, SESSIONS, folder, owner)
        if sessions < 0:
            return gone
        return gone + [
            os.path.join(run_dir, SESSIONS, name)
            for name in sorted(os.listdir(sessions))
            if name.endswith(".lock")
            and (found := _stat(name, sessions)) is not None
            and stat.S_ISREG(found.st_mode)
            and found.st_uid == owner
            and not locks.probe(name, sessions)
            and unlink_same(name, found, dry_run, sessions)
        ]


def _open_folder(stack: ExitStack, path: str, parent: int | None, owner: int) -> int:
    """A descriptor of the folder if it is one (no link) of `owner`; -1 otherwise."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return -1
    stack.callback(os.close, fd)
    return fd if os.fstat(fd).st_uid == owner else -1


def _claim(stack: ExitStack, folder: int, owner: int, dry_run: bool) -> bool:
    """The broker's lock until the stack ends; with dry_run only whether it is free."""
    found = _stat(BROKER_LOCK, folder)
    if found is None or not stat.S_ISREG(found.st_mode) or found.st_uid != owner or locks.is_own(found):
        return False
    if dry_run:
        return not locks.probe(BROKER_LOCK, folder)
    try:
        fd = os.open(BROKER_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, PermissionError):
        return False
    stack.callback(os.close, fd)
    if not os.path.samestat(os.fstat(fd), found) or not locks.take(fd):
        return False
    stack.callback(locks.drop, fd)
    return True


def unlink_same(path: str, found: os.stat_result, dry_run: bool, folder: int | None = None) -> bool:
    """Unlinks `path` if it still is the file that was looked at. True if it was (or would be)."""
    now = _stat(path, folder)
    if now is None or not os.path.samestat(now, found):
        return False
    if dry_run:
        return True
    try:
        os.unlink(path, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _stat(path: str, folder: int | None = None) -> os.stat_result | None:
    try:
        return os.stat(path, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
