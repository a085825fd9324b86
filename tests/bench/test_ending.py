"""A benchmark that is ended in the middle leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where the run puts what it needs for a while. Short: sockets lie there."""
    folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def shared() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "bench-" in name}


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_nothing_stays(how: signal.Signals, code: int, temporary: Path) -> None:
    before = shared()
    command = [sys.executable, "-m", "connector.cli", "bench", "--workload", "sustained", "--workload", "pipeline"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if "round 2 of" in line:
                break
        assert [path.name for path in temporary.glob("bench-*")] != []
        run.send_signal(how)
        # All processes of the run have this pipe, too: its end is theirs.
        said = run.stderr.read()
    assert run.returncode == code
    assert "Traceback" not in said, said
    assert list(temporary.glob("bench-*")) == []
    assert shared() <= before
