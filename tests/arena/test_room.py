"""check_room on folders made for the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from connector.arena.room import check_room, human, margin, tightest
from connector.core.errors import NoSpace

MIB = 1 << 20


class Node:
    """A fake node: cgroup files, meminfo, and this machine's tmp folder as the tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = path / "cgroup"
        self.root.mkdir()
        (path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1048576000 kB\n")
        (path / "self").write_text("")

    def group(self, where: str, **files: object) -> None:
        folder = self.root / where
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".", 1)).write_text(f"{text}\n")

    def check(self, need: int) -> None:
        check_room(need, str(self.path), str(self.root), str(self.path / "self"), str(self.path / "meminfo"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_no_files_mean_no_limit(node: Node) -> None:
    node.check(MIB)
    assert tightest(str(node.root), str(node.path / "nothing")) is None


def test_a_full_tmpfs_names_need_and_free(node: Node) -> None:
    free = os.statvfs(node.path).f_bavail * os.statvfs(node.path).f_frsize
    with pytest.raises(NoSpace, match="are needed") as caught:
        node.check(free * 2)
    assert caught.value.facts["need"] == free * 2
    assert caught.value.facts["free_tmpfs"] > 0
    assert human(free * 2) in str(caught.value)


def test_the_tightest_parent_of_a_v2_group_counts(node: Node) -> None:
    (node.path / "self").write_text("0::/a/b\n")
    node.group("a/b", memory__max="max", memory__current=0)
    node.group("a", memory__max=100 * MIB, memory__current=60 * MIB)
    node.group("", memory__max=900 * MIB, memory__current=0)
    node.check(24 * MIB)
    with pytest.raises(NoSpace) as caught:
        node.check(25 * MIB)
    assert caught.value.facts["cgroup_limit"] == 100 * MIB
    assert caught.value.facts["cgroup_usage"] == 60 * MIB
    assert caught.value.facts["cgroup"] == str(node.root / "a")
    assert "100.0 MiB" in str(caught.value)


def test_file_cache_that_the_kernel_drops_is_not_usage(node: Node) -> None:
    (node.path / "self").write_text("0::/\n")
    node.group("", memory__max=100 * MIB, memory__current=90 * MIB, memory__stat=f"anon 1\ninactive_file {70 * MIB}")
    node.check(64 * MIB)
    with pytest.raises(NoSpace):
        node.check(65 * MIB)


def test_a_v1_memory_group_is_found_by_its_controller(node: Node) -> None:
    (node.path / "self").write_text("9:cpu,cpuacct:/x\n4:memory:/box/job\n0::/\n")
    node.group("memory/box/job", memory__limit_in_bytes=64 * MIB, memory__usage_in_bytes=16 * MIB)
    node.check(32 * MIB)
    with pytest.raises(NoSpace) as caught:
        node.check(33 * MIB)
    assert caught.value.facts["cgroup_limit"] == 64 * MIB


def test_v1_writes_no_limit_as_a_huge_number(node: Node) -> None:
    (node.path / "self").write_text("4:memory:/\n")
    node.group("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    assert tightest(str(node.root), str(node.path / "self")) is None


@pytest.mark.parametrize("path", ["/docker/0123", "/../outside"])
def test_in_a_container_the_mount_root_is_the_group(node: Node, path: str) -> None:
    """/proc names the path as the host sees it; the files are at the mount's root."""
    (node.path / "self").write_text(f"0::{path}\n")
    node.group("", memory__max=32 * MIB, memory__current=0)
    with pytest.raises(NoSpace):
        node.check(20 * MIB)


def test_memory_that_is_not_available_is_no_room(node: Node) -> None:
    (node.path / "meminfo").write_text(f"MemAvailable: {40 * 1024} kB\n")
    node.check(24 * MIB)
    with pytest.raises(NoSpace) as caught:
        node.check(25 * MIB)
    assert caught.value.facts["mem_available"] == 40 * MIB


def test_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match="cannot be looked at"):
        check_room(1, str(tmp_path / "nowhere"))


def test_margin_and_words() -> None:
    assert margin(1) == 16 * MIB
    assert margin(100 << 30) == 1 << 30
    assert [human(n) for n in (5, 1536, 16 * MIB, 3 << 29, 5 << 40)] == [
        "5 B",
        "1.5 KiB",
        "16.0 MiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
