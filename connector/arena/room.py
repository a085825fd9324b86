"""Is there room for a segment? Asked before memory is reserved.

tmpfs pages count against the tmpfs and against the cgroup that touches them first. A full
tmpfs answers `posix_fallocate` with ENOSPC, but a full cgroup answers with the OOM killer:
so the look comes before the reservation, and it looks at every limit on the way up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from connector.core.errors import NoSpace

MIB = 1 << 20
#: What must stay free beside the need: this much, or 1 % of the need if that is more.
MARGIN = 16 * MIB
#: cgroup v1 writes "no limit" as the highest page multiple of a signed 64-bit number.
_V1_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Group:
    """A cgroup with a memory limit, in bytes. `reclaimable` is file cache that the kernel drops first."""

    path: str
    limit: int
    usage: int
    reclaimable: int

    @property
    def free(self) -> int:
        """Bytes that can still be charged to the group."""
        return max(0, self.limit - max(0, self.usage - self.reclaimable))


def human(size: int) -> str:
    """`size` bytes as people write it: 512 B, 16.0 MiB, 1.5 GiB."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def margin(need: int) -> int:
    """Bytes to keep spare beside `need`."""
    return max(MARGIN, need // 100)


def check_room(
    need: int,
    shm_dir: str = "/dev/shm",
    cgroup_root: str = "/sys/fs/cgroup",
    proc_cgroup: str = "/proc/self/cgroup",
    meminfo: str = "/proc/meminfo",
) -> None:
    """NoSpace unless `need` bytes and a margin fit the tmpfs, every cgroup above us and the node.

    A limit whose file is absent is no limit. The facts hold need, margin and the numbers of the
    limit that is too tight: free_tmpfs, or cgroup_limit and cgroup_usage, or mem_available.
    """
    spare = margin(need)
    free = _free_tmpfs(shm_dir)
    if need + spare > free:
        raise NoSpace(
            f"{shm_dir} has {human(free)} free; {human(need)} and {human(spare)} spare are needed"
            " (in a container: --shm-size; otherwise: a smaller pool, or `connector sweep`)",
            need=need,
            margin=spare,
            free_tmpfs=free,
        )
    group = tightest(cgroup_root, proc_cgroup)
    if group is not None and need + spare > group.free:
        raise NoSpace(
            f"the cgroup allows {human(group.free)} more of its limit {human(group.limit)};"
            f" {human(need)} and {human(spare)} spare are needed",
            need=need,
            margin=spare,
            free_tmpfs=free,
            cgroup=group.path,
            cgroup_limit=group.limit,
            cgroup_usage=group.usage,
        )
    available = _mem_available(meminfo)
    if available is not None and need + spare > available:
        raise NoSpace(
            f"the node has {human(available)} of memory available; {human(need)} and {human(spare)} spare are needed",
            need=need,
            margin=spare,
            free_tmpfs=free,
            mem_available=available,
        )


def tightest(cgroup_root: str = "/sys/fs/cgroup", proc_cgroup: str = "/proc/self/cgroup") -> Group | None:
    """The cgroup with the least room among ours and its parents, v1 and v2; None without a limit."""
    groups = [group for group in map(_group, _folders(cgroup_root, proc_cgroup)) if group is not None]
    return min(groups, key=lambda group: group.free, default=None)


def _folders(cgroup_root: str, proc_cgroup: str) -> list[Path]:
    """Folders of our memory cgroup and its parents.

    The path in /proc may be one that this mount does not show (a container sees its own group
    as the root): folders that do not exist fall out later, the mount's root always stays.
    """
    found: list[Path] = []
    for line in _text(Path(proc_cgroup)).splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        controllers, path = parts[1].split(","), parts[2]
        if parts[0] == "0" and parts[1] == "":
            tops = [Path(cgroup_root), Path(cgroup_root, "unified")]
        elif "memory" in controllers:
            tops = [Path(cgroup_root, "memory"), Path(cgroup_root)]
        else:
            continue
        for top in tops:
            found += _upwards(top, path)
    return found


def _upwards(top: Path, path: str) -> list[Path]:
    """`top`/a/b/c, `top`/a/b, `top`/a, `top`; a path that leaves the mount ("/../x") gives `top` alone."""
    names = [name for name in path.split("/") if name]
    if ".." in names:
        names = []
    return [top.joinpath(*names[:count]) for count in range(len(names), -1, -1)]


def _group(folder: Path) -> Group | None:
    for limit_name, usage_name, stat_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(folder / limit_name)
        usage = _number(folder / usage_name)
        if limit is None or usage is None or limit >= _V1_NO_LIMIT:
            continue
        return Group(str(folder), limit, usage, _stat(folder / "memory.stat", stat_key))
    return None


def _free_tmpfs(shm_dir: str) -> int:
    try:
        found = os.statvfs(shm_dir)
    except OSError as error:
        raise NoSpace(f"{shm_dir} cannot be looked at: {error.strerror}", path=shm_dir) from error
    return found.f_bavail * found.f_frsize


def _mem_available(meminfo: str) -> int | None:
    kib = _stat(Path(meminfo), "MemAvailable:", absent=-1)
    return None if kib < 0 else kib * 1024


def _number(path: Path) -> int | None:
    """The decimal number in a file; None for "max" and for a file that is not there."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _stat(path: Path, key: str, absent: int = 0) -> int:
    """The number behind `key` in a file of "key number" lines."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == key and words[1].isdecimal():
            return int(words[1])
    return absent


def _text(path: Path) -> str:
    # A group may be removed between two reads (ENODEV), hidden by the mount (ENOENT) or not ours to
    # read (EACCES): all mean that no limit can be seen there.
    try:
        return path.read_text()
    except OSError:
        return ""
