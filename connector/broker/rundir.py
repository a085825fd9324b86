"""The run directory: made with its mode whatever the umask, locked by one broker, cleaned at the end.

Nothing in it is deleted that is not ours: a socket only if it is a socket of our uid, a lock only while
we hold it or nobody does.
"""

from __future__ import annotations

import contextlib
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
        """Raises BrokerRunning, BrokerLost and ConfigError; a directory made until then is removed again."""
        self.path = path
        self.gid = _gid(group)
        self._lock_fd = -1
        with contextlib.ExitStack() as undo:
            made, self._lock_fd = _enter(path, self.file_mode)
            if made:
                undo.callback(_rmdir, path)
            undo.callback(self._give_lock_back)
            # Under the lock: another broker's directory keeps the mode that it gave it.
            self._settle(path, 0o700 if self.gid is None else 0o750)
            if _make(self.sessions):
                undo.callback(_rmdir, self.sessions)
            # Session locks of other users get the group, so that the broker can look at them.
            self._settle(self.sessions, 0o700 if self.gid is None else 0o2770)
            for name in (socket_path(path), lifeline_path(path)):
                _remove_stale_socket(name)
            undo.pop_all()

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

    def _settle(self, path: str, mode: int) -> None:
        # The mode last: a change of group clears the bit that hands it on.
        if self.gid is not None:
            os.chown(path, -1, self.gid)
        os.chmod(path, mode)

    def remove_contents(self, *, started: bool = True) -> None:
        """Clean stop: sockets, session locks and the directories go; what is not ours stays.

        A broker that never `started` leaves the locks that live sessions of the one before hold: they guard its arena.
        """
        for name in (socket_path(self.path), lifeline_path(self.path)):
            if _is_our_socket(name):
                _unlink(name)
        for name in _listing(self.sessions):
            path = os.path.join(self.sessions, name)
            found = _lstat(path)
            if found is None or not name.endswith(".lock") or not stat.S_ISREG(found.st_mode):
                continue
            if started or not locks.probe(path):
                unlink_same(path, found, dry_run=False)
        _rmdir(self.sessions)
        self._give_lock_back()
        _rmdir(self.path)

    def _give_lock_back(self) -> None:
        """The lock file's name goes while its lock is held: whoever opened it looks again."""
        if self._lock_fd < 0:
            return
        path = lock_path(self.path)
        unlink_same(path, os.fstat(self._lock_fd), dry_run=False)
        locks.drop(self._lock_fd)
        os.close(self._lock_fd)
        self._lock_fd = -1


def _make(path: str) -> bool:
    """True if the directory was made here. BrokerLost: it is none, another user's, or cannot be made."""
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
    if made:
        # Whatever the umask took away.
        os.chmod(path, 0o700)
    return made


def _listing(path: str) -> list[str]:
    """Sorted names; none if someone removed the directory."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


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


def _enter(path: str, mode: int) -> tuple[bool, int]:
    """Whether the directory was made here, and its lock. A broker that stops meanwhile removes it: then anew."""
    while True:
        made = _make(path)
        try:
            return made, _take_lock(lock_path(path), mode)
        except FileNotFoundError:
            continue


def _take_lock(path: str, mode: int) -> int:
    """The broker's lock. A lock file that is removed between open and lock is tried again."""
    while True:
        locks.guard(path)
        fd = _open_lock(path)
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


def _open_lock(path: str) -> int:
    """A descriptor of the lock file. BrokerLost: what lies there is no file of ours; it was left alone.

    FileNotFoundError: its directory is gone.
    """
    found = _lstat(path)
    if found is not None and (not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid()):
        raise BrokerLost(
            "something that is not our lock lies at the lock's path; it was left alone", path=path, owner=found.st_uid
        )
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BrokerLost(f"the broker's lock cannot be opened: {error.strerror}", path=path) from error


def _is_our_socket(path: str) -> bool:
    found = _lstat(path)
    return found is not None and stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def _remove_stale_socket(path: str) -> None:
    """A dead broker's socket goes; anything else at this path is not ours and stops us."""
    found = _lstat(path)
    if found is None:
        return
    if not _is_our_socket(path):
        raise BrokerLost(
            "something that is not our socket lies at the socket's path; it was left alone",
            path=path,
            owner=found.st_uid,
        )
    _unlink(path)
