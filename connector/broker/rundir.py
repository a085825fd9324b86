"""The run directory: made with its mode whatever the umask, locked by one broker, cleaned at the end.

Nothing in it is deleted that is not ours: a socket only if it is a socket of our uid, a lock only while
we hold it or nobody does.
"""

from __future__ import annotations

import grp
import os
import stat

from connector.arena import locks
from connector.arena.leftovers import unlink_same
from connector.core.endpoint import lifeline_path, lock_path, socket_path
from connector.core.errors import BrokerLost, BrokerRunning, ConfigError


class RunDir:
    """A locked run directory. `gid`: the group that may enter, or None."""

    def __init__(self, path: str, group: str | None) -> None:
        self.path = path
        self.gid = _gid(group)
        self.made = self._make(path, 0o700 if self.gid is None else 0o750)
        self._make(self.sessions, 0o700 if self.gid is None else 0o770)
        self._lock_fd = _take_lock(lock_path(path), self.file_mode)
        try:
            for name in (socket_path(path), lifeline_path(path)):
                _remove_stale_socket(name)
        except BrokerLost:
            self.close()
            raise

    @property
    def sessions(self) -> str:
        return self.path + "/sessions"

    @property
    def file_mode(self) -> int:
        return 0o600 if self.gid is None else 0o660

    def own(self, path: str) -> None:
        """Give a file of ours its mode and group, regardless of umask."""
        os.chmod(path, self.file_mode)
        if self.gid is not None:
            os.chown(path, -1, self.gid)

    def _make(self, path: str, mode: int) -> bool:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.mkdir(path, 0o700)
            made = True
        except FileExistsError:
            made = False
        except OSError as error:
            raise BrokerLost(f"the run directory cannot be made: {error.strerror}", path=path) from error
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode):
            raise BrokerLost("the run directory's path is no directory", path=path)
        if found.st_uid != os.geteuid():
            raise BrokerLost("the run directory belongs to another user", path=path, owner=found.st_uid)
        os.chmod(path, mode)
        if self.gid is not None:
            os.chown(path, -1, self.gid)
        return made

    def remove_contents(self) -> None:
        """Clean stop: sockets, free session locks and the directories go; foreign files keep theirs."""
        for name in (socket_path(self.path), lifeline_path(self.path)):
            _remove_stale_socket(name)
        for name in sorted(os.listdir(self.sessions)):
            path = os.path.join(self.sessions, name)
            found = os.lstat(path)
            if name.endswith(".lock") and stat.S_ISREG(found.st_mode):
                unlink_same(path, found, dry_run=False)
        _rmdir(self.sessions)
        if self._lock_fd >= 0:
            os.unlink(lock_path(self.path))
        self.close()
        _rmdir(self.path)

    def close(self) -> None:
        """Give the lock back; leaves the files."""
        if self._lock_fd >= 0:
            locks.drop(self._lock_fd)
            os.close(self._lock_fd)
            self._lock_fd = -1


def _rmdir(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        # Something in it is not ours, or the directory is the service manager's: it stays.
        return


def _gid(group: str | None) -> int | None:
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError("no such group", group=group) from None


def _take_lock(path: str, mode: int) -> int:
    """The broker's lock. A lock file that is removed between open and lock is tried again."""
    while True:
        locks.guard(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not locks.take(fd):
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise BrokerRunning("another broker serves this run directory", path=path, pid=holder or "unknown")
        try:
            same = os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            same = False
        if same:
            os.fchmod(fd, mode)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
        locks.drop(fd)
        os.close(fd)


def _remove_stale_socket(path: str) -> None:
    """A dead broker's socket goes; anything else at this path is not ours and stops us."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise BrokerLost(
            "something that is not our socket lies at the socket's path; it was left alone",
            path=path,
            owner=found.st_uid,
        )
    os.unlink(path)
