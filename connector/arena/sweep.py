"""What dead brokers left in shared memory: find it, say why, remove only what nobody can hold.

A pair of segments is stale when the TABLE's lock and every session's lock in its run directory
are free. Nothing is mapped here (a short file would be SIGBUS), no link is followed, no pid
and no age is trusted, and what is not exactly ours stays.

Two sweepers, or a sweeper and a starting broker, meet at the TABLE's lock: `remove` takes it,
looks again, and unlinks under it; a broker that gets the lock looks whether the name is there.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple

from connector.arena import header, leftovers, locks
from connector.arena.segment import SHM_DIR
from connector.core.errors import ProtocolViolation

Verdict = Literal["stale", "live", "foreign", "damaged"]
_NAME = re.compile(r"tc-([0-9a-f]{32})-(table|arena)")


class Finding(NamedTuple):
    """A file of the shared-memory folder. size: bytes; kind: table or arena, "" for a name that only resembles ours;
    run_dir: from the TABLE's header, "" if unknown."""

    name: str
    size: int
    kind: str
    verdict: Verdict
    reason: str
    uuid: str = ""
    run_dir: str = ""


class _Judgement(NamedTuple):
    verdict: Verdict
    reason: str
    run_dir: str = ""


@dataclass(slots=True)
class _Pair:
    """The halves of one arena that are there and ours; `folder` is where."""

    folder: str
    uuid: str
    table: os.stat_result | None = None
    arena: os.stat_result | None = None

    def path(self, kind: str) -> str:
        return os.path.join(self.folder, f"tc-{self.uuid}-{kind}")


def find(shm_dir: str = SHM_DIR, proc: str = "/proc") -> list[Finding]:
    """Every file named like ours, judged; halves of one arena get one judgement. Changes nothing."""
    findings: list[Finding] = []
    pairs: dict[str, _Pair] = {}
    for name in sorted(os.listdir(shm_dir)):
        if not name.startswith("tc-") or not name.endswith(("-table", "-arena")):
            continue
        try:
            found = os.stat(os.path.join(shm_dir, name), follow_symlinks=False)
        except FileNotFoundError:
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            findings.append(Finding(name, found.st_size, "", "foreign", "the name is not one that we make"))
            continue
        uuid, kind = match.groups()
        if reason := _not_ours(found):
            findings.append(Finding(name, found.st_size, kind, "foreign", reason, uuid))
            continue
        pair = pairs.setdefault(uuid, _Pair(shm_dir, uuid))
        if kind == "table":
            pair.table = found
        else:
            pair.arena = found
    for pair in pairs.values():
        findings += _findings(pair, proc)
    return sorted(findings)


def remove(
    findings: Iterable[Finding],
    dry_run: bool = False,
    *,
    shm_dir: str = SHM_DIR,
    proc: str = "/proc",
    damaged: bool = False,
) -> list[str]:
    """Removes what is stale (and damaged, if so asked) after judging it again under its lock.

    Returns the paths removed, or with dry_run those that would be: segments first, then what is
    left in their run directories (sockets and free session locks), if no broker serves there.
    """
    verdicts = {"stale", "damaged"} if damaged else {"stale"}
    wanted = [found for found in findings if found.verdict in verdicts]
    gone: list[str] = []
    run_dirs: dict[tuple[str, int], None] = {}
    for uuid in dict.fromkeys(found.uuid for found in wanted):
        pair = _look(shm_dir, uuid)
        removed, run_dir = _remove_pair(pair, verdicts, proc, dry_run)
        gone += removed
        if removed and run_dir and pair.table is not None:
            run_dirs[run_dir, pair.table.st_uid] = None
    for run_dir, owner in run_dirs:
        gone += leftovers.clean(run_dir, owner, dry_run)
    return gone


def _remove_pair(pair: _Pair, verdicts: set[str], proc: str, dry_run: bool) -> tuple[list[str], str]:
    """Paths removed, and the run directory that the table named."""
    fd = -1
    with ExitStack() as stack:
        if pair.table is not None and not dry_run:
            fd = _lock_table(stack, pair.path("table"), pair.table)
            if fd < 0:
                return [], ""
        judged = _judge(pair, proc, fd)
        if judged.verdict not in verdicts:
            return [], ""
        return _unlink(pair, dry_run), judged.run_dir


def _lock_table(stack: ExitStack, path: str, found: os.stat_result) -> int:
    """A descriptor with the lock of the very file that was looked at, until the stack ends; -1 if someone has it."""
    if locks.is_own(found):
        return -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return -1
    stack.callback(os.close, fd)
    if not os.path.samestat(os.fstat(fd), found) or not locks.take(fd):
        return -1
    stack.callback(locks.drop, fd)
    return fd


def _unlink(pair: _Pair, dry_run: bool) -> list[str]:
    """The arena first: killed in between, a table without an arena is found and judged by its locks."""
    gone = []
    for kind, found in (("arena", pair.arena), ("table", pair.table)):
        path = pair.path(kind)
        if found is not None and leftovers.unlink_same(path, found, dry_run):
            gone.append(path)
    return gone


def _look(shm_dir: str, uuid: str) -> _Pair:
    """The pair as it is now: halves that are gone, or not ours, are None."""
    pair = _Pair(shm_dir, uuid)
    for kind in ("table", "arena"):
        try:
            found = os.stat(pair.path(kind), follow_symlinks=False)
        except FileNotFoundError:
            continue
        if _not_ours(found):
            continue
        if kind == "table":
            pair.table = found
        else:
            pair.arena = found
    return pair


def _findings(pair: _Pair, proc: str) -> list[Finding]:
    judged = _judge(pair, proc)
    return [
        Finding(
            os.path.basename(pair.path(kind)),
            found.st_size,
            kind,
            judged.verdict,
            judged.reason,
            pair.uuid,
            judged.run_dir,
        )
        for kind, found in (("table", pair.table), ("arena", pair.arena))
        if found is not None
    ]


def _not_ours(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    if os.geteuid() not in (0, found.st_uid):
        return f"belongs to uid {found.st_uid}"
    return ""


def _judge(pair: _Pair, proc: str, fd: int = -1) -> _Judgement:
    """The verdict on a pair; `fd`: the descriptor by which this process holds the TABLE's lock for the sweep."""
    if pair.table is None:
        return _judge_lone_arena(pair, proc)
    path = pair.path("table")
    try:
        if fd < 0 and locks.probe(path):
            return _Judgement("live", "a broker holds the table's lock")
        # Under the lock never open the file again: closing that descriptor would give the lock back.
        page = os.pread(fd, header.HEADER_BYTES, 0) if fd >= 0 else leftovers.first_bytes(path, header.HEADER_BYTES)
    except PermissionError as error:
        return _Judgement("live", f"the table cannot be read: {error.strerror}")
    except FileNotFoundError:
        return _Judgement("live", "it was removed meanwhile")
    if header.unfinished(page) and pair.arena is None:
        # MAGIC comes before the arena, and sessions after both: nobody was ever told of it.
        return _Judgement("stale", "its creation was never finished")
    try:
        found = header.parse(page, pair.uuid, pair.table.st_size)
    except ProtocolViolation as error:
        user = leftovers.in_use(proc, pair.path("arena"), pair.arena) if pair.arena else ""
        if user:
            return _Judgement("live", f"{error.message}, but {user}")
        return _Judgement("damaged", f"{error.message}; its sessions cannot be told")
    return _judge_sessions(pair, found.run_dir, proc)


def _judge_sessions(pair: _Pair, run_dir: str, proc: str) -> _Judgement:
    folder = os.path.join(run_dir, "sessions")
    try:
        holder = leftovers.session_holder(folder)
    except FileNotFoundError:
        # Someone removed the run directory under sessions that may live on, with locks on files without a name.
        user = leftovers.in_use(proc, pair.path("arena"), pair.arena) if pair.arena else ""
        if user:
            return _Judgement("live", f"the run directory is gone, but {user}", run_dir)
        return _Judgement("stale", "no broker, the run directory is gone, and no process has the arena", run_dir)
    except OSError as error:
        return _Judgement("live", f"the session locks cannot be looked at: {error.strerror}", run_dir)
    if holder:
        return _Judgement("live", f"a session holds its lock: {holder}", run_dir)
    return _Judgement("stale", "no broker and no session holds a lock", run_dir)


def _judge_lone_arena(pair: _Pair, proc: str) -> _Judgement:
    if pair.arena is None:
        return _Judgement("live", "it was removed meanwhile")
    user = leftovers.in_use(proc, pair.path("arena"), pair.arena)
    if user:
        return _Judgement("live", f"it has no table, but {user}")
    return _Judgement("stale", "it has no table, and no process has it open")
