"""The command's outermost door: exit codes, errors in one line, broken pipes, Ctrl-C, what it loads."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import connector
from connector.cli import sweeping
from connector.cli.tables import age, as_json, size

Run = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[str]"]
ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
CLIENT_VERBS = [["status"], ["ls"], ["show", "r"], ["rm", "r"], ["abort", "r"]]


@pytest.fixture
def deaf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, socket.socket]]:
    """A run directory whose lifeline listens and never says a word."""
    folder = tmp_path_factory.mktemp("deaf")
    (folder / "sessions").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "lifeline.sock"))
        listener.listen()
        listener.settimeout(PATIENCE)
        yield folder, listener


@pytest.mark.parametrize("verb", CLIENT_VERBS, ids=lambda verb: verb[0])
def test_without_a_broker_the_path_tried_is_told(run: Run, tmp_path: Path, verb: list[str]) -> None:
    """In one line, with where the path came from, after the time-out."""
    done = run(*verb, "--endpoint", str(tmp_path / "none"), "--timeout", "0.2")
    assert (done.code, done.out, done.err.count("\n")) == (3, "", 1)
    assert done.err.startswith("error: cannot reach a broker")
    assert f"path='{tmp_path}/none' path_from='argument'" in done.err
    assert "connector serve" in done.err


def test_the_path_of_the_environment_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CONNECTOR_ENDPOINT, where no argument names another."""
    monkeypatch.setenv("CONNECTOR_ENDPOINT", str(tmp_path / "none"))
    done = run("ls", "--timeout", "0.2")
    assert done.code == 3
    assert f"path='{tmp_path}/none' path_from='$CONNECTOR_ENDPOINT'" in done.err


def test_a_broker_that_does_not_answer_is_away(run: Run, deaf: tuple[Path, socket.socket]) -> None:
    """Connected, but deaf."""
    done = run("status", "--endpoint", str(deaf[0]), "--timeout", "0.2")
    assert (done.code, done.err.count("\n")) == (3, 1)
    assert f"path='{deaf[0]}'" in done.err


def test_a_broker_whose_queue_of_newcomers_is_full_is_told_as_that(run: Run, deaf: tuple[Path, socket.socket]) -> None:
    """Not as a resource that is unavailable."""
    deaf[1].listen(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        first.connect(str(deaf[0] / "lifeline.sock"))
        done = run("status", "--endpoint", str(deaf[0]), "--timeout", "0.2")
    assert (done.code, done.err.count("\n")) == (3, 1)
    assert "more processes than it can queue are connecting at once" in done.err


def test_ctrl_c_while_it_connects(start: Start, deaf: tuple[Path, socket.socket]) -> None:
    """130, one line, no traceback."""
    child = start("ls", "--endpoint", str(deaf[0]), "--timeout", "600")
    peer, _ = deaf[1].accept()
    with peer:
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=PATIENCE)
    assert (child.returncode, out, err) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["ls", "--nonsense"],
        ["ls", "--edge", "a"],
        ["ls", "--state", "lost"],
        ["ls", "--limit", "0"],
        ["ls", "--timeout", "0"],
        ["ls", "--endpoint", "tcp://127.0.0.1:1"],
        ["ls", "--endpoint", "relative"],
        ["show", "r", "--index", "-1"],
        ["abort"],
        ["sweep", "--shm-dir", "/nowhere/at/all"],
        ["serve", "--set", "pool"],
        ["serve", "--pool", "1GiB", "--set", "pool=2GiB"],
    ],
)
def test_a_wrong_command_line_is_2(run: Run, arguments: list[str]) -> None:
    """One line on stderr, nothing on stdout."""
    done = run(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("error: ")


def test_without_a_verb_the_help_is_shown(run: Run) -> None:
    """Exit code 2; asked for, it is 0, and tells the exit codes."""
    assert run().code == 2
    done = run("--help")
    assert done.code == 0
    assert "whoever read the output closed it" in done.out
    assert run("--version").out.startswith("connector ")


def test_a_bug_asks_for_a_report(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 and one line; the traceback only with --debug."""

    def breaks(folder: str) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(sweeping.arena_sweep, "find", breaks)
    done = run("sweep", "--shm-dir", str(tmp_path))
    assert (done.code, done.err.count("\n")) == (70, 1)
    assert done.err.startswith("error: unexpected ZeroDivisionError: oops; this is a bug, please report it")
    debugged = run("--debug", "sweep", "--shm-dir", str(tmp_path))
    assert debugged.code == 70
    assert "Traceback" in debugged.err


@pytest.mark.parametrize(("colour", "escapes"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_tables_are_drawn_on_a_terminal(
    clean: connector.Node, start: Start, colour: dict[str, str], escapes: bool
) -> None:
    """With escapes unless NO_COLOR is set."""
    clean.edge("thinker", "talker").put("[red]r", {"h": torch.zeros(1)})
    clean.flush()
    ours, theirs = pty.openpty()
    env = {"CONNECTOR_ENDPOINT": clean.endpoint, "TERM": "xterm-256color", "COLUMNS": "200"} | colour
    child = start("ls", env=env, stdout=theirs)
    os.close(theirs)
    try:
        text = read_all(ours)
    finally:
        os.close(ours)
    assert child.wait(PATIENCE) == 0
    assert ("\x1b[" in text) is escapes
    assert "[red]r" in text
    assert "──" in text


def read_all(fd: int) -> str:
    """What a terminal showed until its other end was closed."""
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(fd, 65536)
        except OSError:
            part = b""
        if not part:
            return b"".join(parts).decode()
        parts.append(part)


EVERY_VERB = """
import os, signal, sys, threading
from connector.cli.main import main
from connector.client.connecting import connect

own, shm = sys.argv[1:]
VERBS = [
    ["status"], ["ls"], ["ls", "--payloads", "--json"], ["show", "r"], ["show", "r", "--story"], ["rm", "r[0]"],
    ["abort", "s"], ["sweep", "--dry-run", "--shm-dir", shm], ["config", "check"], ["config", "show"], ["--help"],
]
codes = [main(verb) for verb in VERBS]

def stop():
    connect(stage="a", endpoint=own, timeout=60.0).close()
    os.kill(os.getpid(), signal.SIGTERM)

watcher = threading.Thread(target=stop)
watcher.start()
codes.append(main(["serve", "--run-dir", own, "--pool", "1MiB"]))
watcher.join()
loaded = "torch" in sys.modules
os.environ["CONNECTOR_ENDPOINT"] = os.environ["LATER"]
codes.append(main(["show", "s2", "--stats"]))
print("codes", codes, "torch", loaded, "torch" in sys.modules)
"""


def test_only_a_look_at_the_bytes_loads_torch(
    clean: connector.Node, tmp_path: Path, environment_of: Callable[..., dict[str, str]]
) -> None:
    """Every verb in one process, `serve` among them; then `show --stats`, which does."""
    for rid in ("r", "s", "s2"):
        clean.edge("thinker", "talker").put(rid, {"h": torch.zeros(1)})
    clean.flush()
    env = environment_of(CONNECTOR_ENDPOINT=clean.endpoint, LATER=clean.endpoint)
    done = subprocess.run(
        [sys.executable, "-c", EVERY_VERB, str(tmp_path / "own"), str(tmp_path)],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE * 2, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == f"codes {[0] * 13} torch False True", done.stderr


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 51, "2048.0 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    """Powers of 1024, one digit."""
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.00s"), (12.34, "12.3s"), (245, "4m05s"), (11220, "3h07m"), (183600, "2d03h")]
)
def test_ages(seconds: float, text: str) -> None:
    """Two units at most."""
    assert age(seconds) == text


def test_json_has_only_what_json_has() -> None:
    """No NaN, no infinity, ASCII."""
    told = as_json({"a": [float("nan"), float("-inf"), 1.5], "é": ("x",)})
    assert told == '{"a": ["nan", "-inf", 1.5], "\\u00e9": ["x"]}'
