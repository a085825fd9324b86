"""Sweeping: only what nobody can hold goes; everything else stays, with a reason."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from connector.arena import header, leftovers, locks
from connector.arena.arena import create_arena
from connector.arena.segment import Segment, arena_name
from connector.arena.sweep import Finding, find, remove
from connector.arena.table import Table

SIZE = 1 << 20
UUID = "0123456789abcdef" * 2

#: A broker (and, if asked, a session of another process) that says "ready" and dies when told.
BROKER = """
import os, sys
from connector.arena import locks
from connector.arena.arena import create_arena
from connector.arena.table import Table
uuid, run_dir, halves = sys.argv[1:4]
broker = os.open(run_dir + "/broker.lock", os.O_RDWR | os.O_CREAT, 0o600)
assert locks.take(broker)
if "table" in halves:
    table = Table.create(uuid, 4, 1 << 20, run_dir, epoch=1)
if "arena" in halves:
    arena = create_arena(uuid, 1 << 20, epoch=1)
print("ready", flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), 9)
"""
SESSION = """
import os, sys
from connector.arena import locks
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
assert locks.take(fd)
print("ready", flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), 9)
"""


class Bench:
    """A run directory in the test's folder, and processes that hold things."""

    def __init__(self, run_dir: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
        self.run_dir = run_dir
        self.start = start
        (run_dir / "sessions").mkdir(parents=True)

    def process(self, script: str, *arguments: object) -> subprocess.Popen[str]:
        process = self.start(script, *arguments)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    def broker(self, uuid: str, halves: str = "table,arena") -> subprocess.Popen[str]:
        return self.process(BROKER, uuid, self.run_dir, halves)

    def session(self, name: str = "one.lock") -> subprocess.Popen[str]:
        return self.process(SESSION, self.run_dir / "sessions" / name)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def bench(tmp_path: Path, child: Callable[..., subprocess.Popen[str]]) -> Bench:
    return Bench(tmp_path / "run", child)


def found(uuid: str, **named: str) -> list[Finding]:
    return [one for one in find(**named) if one.uuid == uuid]


def verdicts(uuid: str) -> set[str]:
    return {one.verdict for one in found(uuid)}


def plant(folder: Path, kind: str, data: bytes, uuid: str = UUID) -> Path:
    path = folder / f"tc-{uuid}-{kind}"
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def table_page(run_dir: Path, entries: int = 2, uuid: str = UUID) -> bytes:
    page = header.pack(header.TableHeader(uuid, entries, SIZE, 1, 1, str(run_dir)))
    return header.MAGIC.to_bytes(8, "little") + page[8:] + bytes(64 * entries)


def test_a_live_broker_keeps_its_pair(uuid: str, bench: Bench) -> None:
    broker = bench.broker(uuid)
    assert [(one.kind, one.verdict) for one in found(uuid)] == [("arena", "live"), ("table", "live")]
    assert "lock" in found(uuid)[0].reason
    assert remove(found(uuid)) == []
    kill(broker)
    assert verdicts(uuid) == {"stale"}
    assert remove(found(uuid)) == [f"/dev/shm/tc-{uuid}-arena", f"/dev/shm/tc-{uuid}-table"]
    assert found(uuid) == []


def test_a_session_alone_keeps_the_pair(uuid: str, bench: Bench) -> None:
    """The broker is dead, but a client lives on with its views: the next broker adopts."""
    kill(bench.broker(uuid))
    first, second = bench.session("a.lock"), bench.session("b.lock")
    kill(first)
    assert verdicts(uuid) == {"live"} and "b.lock" in found(uuid)[0].reason
    assert remove(found(uuid)) == []
    kill(second)
    assert len(remove(found(uuid))) == 4


def test_what_was_stale_is_judged_again_before_it_is_removed(uuid: str, bench: Bench) -> None:
    kill(bench.broker(uuid))
    stale = found(uuid)
    session = bench.session()
    assert remove(stale) == []
    kill(session)
    adopter = bench.process(
        "import sys; from connector.arena.table import Table; t = Table.open(sys.argv[1]); print('ready', flush=True);"
        "sys.stdin.read(1)",
        uuid,
    )
    assert remove(stale) == [] and verdicts(uuid) == {"live"}
    kill(adopter)
    assert remove(stale) != []


def test_a_sweep_in_the_broker_s_own_process_does_not_cost_it_its_lock(uuid: str, bench: Bench) -> None:
    """Closing any descriptor of a file drops this process's lock on it: what we hold is never opened."""
    table = Table.create(uuid, 4, SIZE, str(bench.run_dir), epoch=1)
    arena = create_arena(uuid, SIZE, epoch=1)
    assert verdicts(uuid) == {"live"} and remove(found(uuid)) == []
    assert remove([one._replace(verdict="stale") for one in found(uuid)]) == []
    probe = bench.start(
        "import sys; from connector.arena.sweep import find\n"
        "print({one.verdict for one in find() if one.uuid == sys.argv[1]})",
        uuid,
    )
    assert probe.communicate()[0].strip() == "{'live'}"
    for one in (arena, table):
        one.unlink()
        one.close()


def test_the_table_s_lock_is_held_while_the_pair_goes(uuid: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that starts at this moment must find the lock taken, not a table about to vanish."""
    kill(bench.broker(uuid))
    seen: list[str] = []
    unlink = leftovers.unlink_same

    def watched(path: str, *rest: object) -> bool:
        if uuid in path:
            script = "import sys; from connector.arena import locks; print(locks.probe(sys.argv[1]))"
            seen.append(bench.start(script, f"/dev/shm/tc-{uuid}-table").communicate()[0].strip())
        return unlink(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(leftovers, "unlink_same", watched)
    assert len(remove(found(uuid))) == 2
    assert seen == ["True", "True"]


def test_dry_run_says_the_same_and_removes_nothing(uuid: str, bench: Bench) -> None:
    kill(bench.broker(uuid))
    kill(bench.session())
    would = remove(found(uuid), dry_run=True)
    assert len(would) == 3 and all(os.path.lexists(path) for path in would)
    assert remove(found(uuid)) == would
    assert not any(os.path.lexists(path) for path in would)


def test_the_run_directory_is_cleaned_of_what_is_ours(uuid: str, bench: Bench) -> None:
    run_dir = bench.run_dir
    kill(bench.broker(uuid))
    kill(bench.session("dead.lock"))
    for name in ("broker.sock", "lifeline.sock"):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(run_dir / name))
    (run_dir / "sessions" / "notes.txt").write_text("mine")
    (run_dir / "sessions" / "link.lock").symlink_to(run_dir / "sessions" / "notes.txt")
    (run_dir / "other.sock").write_text("x")
    gone = remove(found(uuid))
    assert [Path(path).name for path in gone[2:]] == ["broker.sock", "lifeline.sock", "dead.lock"]
    assert sorted(path.name for path in run_dir.rglob("*")) == [
        "broker.lock",
        "link.lock",
        "notes.txt",
        "other.sock",
        "sessions",
    ]


def test_a_socket_s_name_on_a_plain_file_is_not_ours(uuid: str, bench: Bench) -> None:
    kill(bench.broker(uuid))
    (bench.run_dir / "broker.sock").write_text("a file")
    remove(found(uuid))
    assert (bench.run_dir / "broker.sock").read_text() == "a file"


def test_a_run_directory_with_a_new_broker_is_not_touched(uuid: str, new_uuid: Callable[[], str], bench: Bench) -> None:
    """The old arena goes; the sockets are the new broker's."""
    kill(bench.broker(uuid))
    second = new_uuid()
    broker = bench.broker(second)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bench.run_dir / "broker.sock"))
    assert verdicts(uuid) == {"stale"} and verdicts(second) == {"live"}
    assert remove(find(), dry_run=True) == remove(found(uuid))
    assert (bench.run_dir / "broker.sock").exists() and verdicts(second) == {"live"}
    kill(broker)
    remove(found(second))


def test_a_run_directory_of_another_user_is_not_touched(tmp_path: Path) -> None:
    """The path stands in a file: root must not be led into a folder of someone else than the file's owner."""
    (tmp_path / "sessions").mkdir()
    for name in ("broker.lock", "sessions/a.lock"):
        (tmp_path / name).touch()
    assert leftovers.clean(str(tmp_path), os.getuid() + 1, dry_run=False) == []
    linked = tmp_path / "link"
    linked.symlink_to(tmp_path)
    assert leftovers.clean(str(linked), os.getuid(), dry_run=False) == []
    assert leftovers.clean(str(tmp_path), os.getuid(), dry_run=False) == [str(tmp_path / "sessions/a.lock")]


def test_a_removed_run_directory_leaves_the_decision_to_the_maps(uuid: str, bench: Bench) -> None:
    """A session's lock on a file without a name cannot be seen; its mapping can."""
    kill(bench.broker(uuid))
    for path in (bench.run_dir / "broker.lock", bench.run_dir / "sessions", bench.run_dir):
        path.unlink() if path.is_file() else path.rmdir()
    mapped = Segment.open(arena_name(uuid), readonly=True)
    assert verdicts(uuid) == {"live"} and "run directory is gone" in found(uuid)[0].reason
    mapped.close()
    del mapped
    assert verdicts(uuid) == {"stale"}
    assert len(remove(found(uuid))) == 2


def test_a_lone_arena_stays_while_it_is_mapped(uuid: str, bench: Bench) -> None:
    owner = bench.broker(uuid, "arena")
    (only,) = found(uuid)
    assert (only.kind, only.verdict) == ("arena", "live") and "no table" in only.reason
    assert remove([only._replace(verdict="stale")]) == []
    kill(owner)
    assert verdicts(uuid) == {"stale"} and len(remove(found(uuid))) == 1


def test_without_leases_maps_that_cannot_be_read_prove_nothing(
    uuid: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(bench.broker(uuid, "arena"))
    monkeypatch.setattr(leftovers, "lease_is_free", lambda *_: None)
    (only,) = found(uuid, proc=str(tmp_path / "no proc"))
    assert only.verdict == "live" and "cannot be read" in only.reason
    monkeypatch.undo()
    assert len(remove(found(uuid))) == 1


def test_the_maps_name_who_has_an_arena(uuid: str, bench: Bench, tmp_path: Path) -> None:
    """By device and inode, and by name where the device's number is another (overlay file systems)."""
    owner = bench.broker(uuid, "arena")
    path = f"/dev/shm/tc-{uuid}-arena"
    for pid in (str(owner.pid), "1"):
        (tmp_path / pid).mkdir()
    (tmp_path / "1" / "maps").write_text("7f00-7f01 rw-s 00000000 00:01 5  /dev/shm/other\n7f02-7f03 rw-p 0 00:00 0\n")
    (tmp_path / str(owner.pid) / "maps").write_text(Path(f"/proc/{owner.pid}/maps").read_text())
    assert leftovers.mapped_by(str(tmp_path), path, os.stat(path)) == f"process {owner.pid} maps it"
    assert leftovers.mapped_by(str(tmp_path), path, os.stat(tmp_path)) == f"process {owner.pid} maps it"
    assert leftovers.lease_is_free(path, os.stat(path)) is False
    kill(owner)
    assert leftovers.lease_is_free(path, os.stat(path)) is True
    remove(found(uuid))


def test_maps_of_others_count_only_if_the_mode_lets_them_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plant(tmp_path, "arena", b"x")
    maps = tmp_path / "proc" / "77" / "maps"
    maps.parent.mkdir(parents=True)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    shut = path.stat()
    path.chmod(0o660)
    monkeypatch.setattr("builtins.open", refuse)
    assert "77" in leftovers.mapped_by(str(tmp_path / "proc"), str(path), path.stat())
    assert "77" in leftovers.mapped_by(str(tmp_path / "proc"), str(path), shut)
    other = os.stat_result((*shut[:4], os.getuid() + 5, *shut[5:10]))
    assert leftovers.mapped_by(str(tmp_path / "proc"), str(path), other) == ""


def test_a_lone_table_is_judged_by_its_locks(uuid: str, bench: Bench) -> None:
    broker = bench.broker(uuid, "table")
    assert verdicts(uuid) == {"live"}
    kill(broker)
    assert verdicts(uuid) == {"stale"} and len(remove(found(uuid))) == 1


@pytest.mark.parametrize("data", [b"", b"\0", bytes(63), bytes(8192)])
def test_a_table_killed_in_the_making_is_stale(tmp_path: Path, data: bytes) -> None:
    path = plant(tmp_path, "table", data)
    (only,) = find(str(tmp_path))
    assert (only.verdict, only.size) == ("stale", len(data))
    assert remove([only], shm_dir=str(tmp_path)) == [str(path)] and not path.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"x" * 63,
        b"x" * 4095,
        b"x" * 9000,
        table_page(Path("/x"))[:4096],
        table_page(Path("/x"), uuid="a" * 32),
    ],
)
def test_short_truncated_and_foreign_headers_are_damaged_and_stay(tmp_path: Path, data: bytes) -> None:
    """Never SIGBUS: nothing is mapped. They go only if damaged ones are asked for by name."""
    plant(tmp_path, "table", data)
    plant(tmp_path, "arena", b"")
    findings = find(str(tmp_path))
    assert [one.verdict for one in findings] == ["damaged"] * 2
    assert remove(findings, shm_dir=str(tmp_path)) == []
    assert len(remove(findings, shm_dir=str(tmp_path), damaged=True)) == 2


def test_a_damaged_table_whose_arena_is_in_use_is_live(uuid: str, bench: Bench) -> None:
    kill(bench.broker(uuid))
    with open(f"/dev/shm/tc-{uuid}-table", "r+b") as file:
        file.write(b"damaged!")
    damaged = found(uuid)
    assert {one.verdict for one in damaged} == {"damaged"}
    mapped = Segment.open(arena_name(uuid))
    assert verdicts(uuid) == {"live"} and remove(damaged, damaged=True) == []
    mapped.close()
    del mapped
    assert len(remove(damaged, damaged=True)) == 2


def test_truncated_arenas_go_with_their_table(tmp_path: Path) -> None:
    (tmp_path / "run" / "sessions").mkdir(parents=True)
    plant(tmp_path, "table", table_page(tmp_path / "run"))
    plant(tmp_path, "arena", b"")
    findings = find(str(tmp_path))
    assert {(one.verdict, one.run_dir) for one in findings} == {("stale", str(tmp_path / "run"))}
    assert len(remove(findings, shm_dir=str(tmp_path))) == 2


def test_everything_that_is_not_ours_stays(tmp_path: Path) -> None:
    names = [
        "psm_x",
        "torch_1_2",
        "tc-table",
        f"tc-{UUID}-arena.bak",
        f"tc-{UUID[:-1]}-arena",
        f"tc-{UUID.upper()}-table",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    target = tmp_path / "target"
    target.write_bytes(table_page(tmp_path))
    (tmp_path / f"tc-{'a' * 32}-table").symlink_to(target)
    (tmp_path / f"tc-{'b' * 32}-arena").mkdir()
    os.mkfifo(tmp_path / f"tc-{'c' * 32}-table")
    findings = find(str(tmp_path))
    assert {one.verdict for one in findings} == {"foreign"} and all(one.reason for one in findings)
    assert len(findings) == 6
    before = sorted(path.name for path in tmp_path.iterdir())
    forged = [one._replace(verdict="stale") for one in findings if one.uuid]
    assert remove(forged, shm_dir=str(tmp_path), damaged=True) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_another_user_s_segments_are_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, "table", table_page(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 17)
    (only,) = find(str(tmp_path))
    assert only.verdict == "foreign" and f"uid {os.getuid()}" in only.reason


def test_age_does_not_matter(uuid: str, bench: Bench) -> None:
    """A long job's segment, days old by its time, is live."""
    broker = bench.broker(uuid)
    for one in found(uuid):
        os.utime(f"/dev/shm/{one.name}", (0, 0))
    assert verdicts(uuid) == {"live"}
    kill(broker)
    remove(found(uuid))


def test_a_probe_of_links_folders_and_nothing_holds_nothing(tmp_path: Path) -> None:
    real = tmp_path / "real"
    fd = os.open(real, os.O_RDWR | os.O_CREAT, 0o600)
    assert locks.take(fd)
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "fifo")
    assert locks.probe(str(real))
    assert not any(locks.probe(str(tmp_path / name)) for name in ("link", "fifo", "none", "."))
    locks.drop(fd)
    os.close(fd)
    assert not locks.probe(str(real)) and stat.S_ISREG(os.stat(real).st_mode)
