"""Runs the demo as a user does: a command, its exit code, what it prints and what it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MAIN = [sys.executable, str(ROOT / "scripts" / "demo_job" / "main.py")]


class Ended(NamedTuple):
    """A run that ended; `data` is what --json holds, empty if it was not written."""

    code: int
    lines: list[str]
    errors: str
    out: Path
    data: dict[str, Any]


def _environment() -> dict[str, str]:
    """This environment, with the project importable whether or not it is installed."""
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(ROOT)) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"}


Demo = Callable[..., Ended]
Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    """demo(*arguments, command=MAIN): run to the end in an empty folder."""

    def run(*arguments: str, command: list[str] = MAIN) -> Ended:
        out, numbers = tmp_path / "out", tmp_path / "numbers.json"
        line = [*command, "--out", str(out), "--json", str(numbers), *arguments]
        done = subprocess.run(line, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=110)
        data = json.loads(numbers.read_text()) if numbers.exists() else {}
        return Ended(done.returncode, done.stdout.splitlines(), done.stderr, out, data)

    return run


@pytest.fixture
def started_demo(tmp_path: Path) -> Iterator[Started]:
    """started_demo(*arguments): a running demo in a process group of its own, ended with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*MAIN, "--out", str(tmp_path / "out"), *arguments],
            cwd=tmp_path,
            env=_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
