"""Python scripts in a /dev/shm or a memory cgroup of a size that the test chooses, where this machine allows it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.kill.host import HANG, ROOT

CGROUPS = Path("/sys/fs/cgroup")


def can_mount() -> bool:
    """Whether a private mount namespace with a tmpfs of its own can be made."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], capture_output=True
    )
    return tried.returncode == 0


def in_small_shm(script: str, mebibytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with a /dev/shm of `mebibytes` that nobody else sees."""
    mount = f"mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm && exec "
    return _run(["unshare", "-m", "sh", "-c", mount + '"$0" -c "$@"', sys.executable, script, *arguments])


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """A cgroup (v1 or v2) with a memory limit in bytes; None where none can be made."""
    made = next((folder for folder in map(_group, (CGROUPS / "memory", CGROUPS)) if folder is not None), None)
    if made is None:
        yield None
        return
    try:
        v1 = made / "memory.limit_in_bytes"
        (v1 if v1.exists() else made / "memory.max").write_text(str(limit))
        yield made
    finally:
        made.rmdir()


def _group(parent: Path) -> Path | None:
    """A new group below `parent`, if the memory controller is at work there."""
    made = parent / f"tc-test-{uuid.uuid4().hex[:8]}"
    try:
        made.mkdir()
    except OSError:
        return None
    if any((made / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        return made
    made.rmdir()
    return None


def in_group(script: str, group: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script as a member of the cgroup."""
    enter = f'echo $$ > {group}/cgroup.procs && exec "$0" -c "$@"'
    return _run(["sh", "-c", enter, sys.executable, script, *arguments])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * HANG, check=False)
