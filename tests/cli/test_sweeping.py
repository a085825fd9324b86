"""`connector sweep`, on a folder of its own: other tests' segments are none of its business."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
STALE, DAMAGED = "1" * 32, "2" * 32


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """An arena without a table, a table that is garbage, a name that is not ours, and a bystander."""
    (tmp_path / f"tc-{STALE}-arena").write_bytes(bytes(8192))
    (tmp_path / f"tc-{DAMAGED}-table").write_bytes(b"\xff" * 8192)
    (tmp_path / f"tc-{DAMAGED}-arena").write_bytes(bytes(4096))
    (tmp_path / "tc-mine-table").write_bytes(b"x")
    (tmp_path / "other").write_bytes(b"x")
    return tmp_path


def names(shm: Path) -> list[str]:
    return sorted(path.name for path in shm.iterdir())


def test_dry_run_lists_and_removes_nothing(run: Run, shm: Path) -> None:
    """Verdict and reason for each finding."""
    before = names(shm)
    done = run("sweep", "--dry-run", "--shm-dir", str(shm))
    assert done.code == 0
    verdicts = {row.split()[0]: row.split()[3:5] for row in done.rows if row.startswith("tc-")}
    assert verdicts == {
        f"tc-{STALE}-arena": ["stale", "would"],
        f"tc-{DAMAGED}-arena": ["damaged", "left"],
        f"tc-{DAMAGED}-table": ["damaged", "left"],
        "tc-mine-table": ["foreign", "left"],
    }
    assert done.out.splitlines()[-1] == "would go: 1 segments (8.0 KiB), 0 sockets and locks"
    assert names(shm) == before


def test_only_the_stale_go(run: Run, shm: Path) -> None:
    """And only what went is counted; a second sweep finds nothing to do."""
    before = names(shm)
    told = run("sweep", "--json", "--shm-dir", str(shm)).json()
    assert [row["name"] for row in told["findings"] if row["removed"]] == [f"tc-{STALE}-arena"]
    assert told["paths"] == [str(shm / f"tc-{STALE}-arena")]
    assert all(row["reason"] for row in told["findings"])
    assert names(shm) == [name for name in before if STALE not in name]
    again = run("sweep", "--shm-dir", str(shm))
    assert (again.code, again.out.splitlines()[-1]) == (0, "removed: 0 segments (0 B), 0 sockets and locks")


def test_what_lives_stays(run: Run, node: Any) -> None:
    """The broker of this file, by its real folder, without touching others."""
    told = run("sweep", "--dry-run", "--json").json()
    mine = [row for row in told["findings"] if row["uuid"] == node.status()["arena"]]
    assert [(row["kind"], row["verdict"]) for row in mine] == [("arena", "live"), ("table", "live")]
    assert told["dry_run"] is True
    assert not any(row["removed"] for row in told["findings"])


def test_what_cannot_be_removed_is_not_counted(run: Run, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that forbids it: one line, no traceback; exit code 1."""

    def forbids(path: str, dir_fd: int | None = None) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "unlink", forbids)
    done = run("sweep", "--shm-dir", str(shm))
    monkeypatch.undo()
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: the sweep stopped: Operation not permitted: {shm}/tc-{STALE}-arena\n"
    assert f"tc-{STALE}-arena" in names(shm)
