"""The look after each test (tests/conftest.py) finds what a test leaves, and lets pass what ends in time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

#: One test a kind of leftover. What they leave outlives only the inner run's own checks, not this test.
LEAVING = """
import socket, subprocess, sys, threading
from pathlib import Path

kept = []
never = threading.Event()

def test_leaves_a_segment():
    Path("/dev/shm/NAME").touch()

def test_leaves_a_thread():
    kept.append(threading.Thread(target=never.wait, args=(20,), name="stray"))
    kept[-1].start()

def test_leaves_a_daemon_of_ours():
    kept.append(threading.Thread(target=never.wait, args=(20,), name="connector-stray", daemon=True))
    kept[-1].start()

def test_leaves_a_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_leaves_a_child_that_nobody_waits_for():
    kept.append(subprocess.Popen([sys.executable, "-c", ""]))

def test_leaves_a_socket(tmp_path):
    kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    kept[-1].bind(str(tmp_path / "broker.sock"))

def test_the_end():
    never.set()
    for child in [k for k in kept if isinstance(k, subprocess.Popen)]:
        child.communicate()
"""

CLEAN = """
import multiprocessing, threading
from pathlib import Path

class Knot:
    def __init__(self, path):
        self.path, self.me = path, self
        path.touch()

    def __del__(self):
        self.path.unlink()

def test_thread_that_is_ending():
    threading.Thread(target=threading.Event().wait, args=(0.2,)).start()

def test_daemon_of_others():
    threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()

def test_child_that_is_ending():
    multiprocessing.get_context("spawn").Process(target=print).start()

def test_segment_that_the_collector_frees():
    Knot(Path("/dev/shm/NAME"))

def test_segment_that_was_removed():
    Path("/dev/shm/NAME").touch()
    Path("/dev/shm/NAME").unlink()
"""

FAILING = """
import threading

def test_fails():
    stray = threading.Thread(target=threading.Event().wait, args=(1,))
    stray.start()
    assert False
"""


@pytest.fixture
def segment() -> Iterator[str]:
    """A name in /dev/shm of the form of ours, removed afterwards."""
    name = f"tc-guard-{uuid4().hex}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)


def inner_run(folder: Path, source: str, segment: str = "") -> str:
    """Output of pytest on `source` under a copy of the guard, with a short patience."""
    guard = (Path(__file__).parent / "conftest.py").read_text()
    assert "PATIENCE = 5.0" in guard
    patience = "0.2" if "stray" in source else "5.0"
    (folder / "conftest.py").write_text(guard.replace("PATIENCE = 5.0", f"PATIENCE = {patience}"))
    (folder / "test_inner.py").write_text(source.replace("NAME", segment))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(folder)]
    # The plug-ins of this run would cost more time than the inner tests, and serve none of them.
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return done.stdout + done.stderr


def test_each_leftover_is_an_error_of_its_test(tmp_path: Path, segment: str) -> None:
    """Segment, thread, our daemon, child, zombie, socket: each is named at the test that left it, and only there."""
    output = inner_run(tmp_path, LEAVING, segment)
    errors = set(re.findall(r"^ERROR \S+::test_leaves_(\w+)", output, re.MULTILINE))
    assert errors == {
        "a_segment",
        "a_thread",
        "a_daemon_of_ours",
        "a_child",
        "a_child_that_nobody_waits_for",
        "a_socket",
    }, output
    assert "7 passed, 6 errors" in output
    for told in (f"/dev/shm/{segment}", "thread: stray", "thread: connector-stray", "nobody waited", "broker.sock"):
        assert told in output


def test_what_ends_in_time_is_no_leftover(tmp_path: Path, segment: str) -> None:
    """Ending threads and children are waited for, garbage is collected, and others' daemons are theirs."""
    output = inner_run(tmp_path, CLEAN, segment)
    assert "5 passed" in output and "error" not in output, output


def test_a_failed_test_fails_once(tmp_path: Path) -> None:
    """Its traceback keeps things alive; an error about those would hide the failure."""
    output = inner_run(tmp_path, FAILING)
    assert "1 failed" in output and "error" not in output.rsplit("\n=", 1)[-1], output


HOLDER = """
import sys
ask, answer, segment = sys.argv[1:]
open(ask).read()
kept = open(segment, "w")
open(answer, "w").write("made")
input()
"""

MET = """
def test_inner():
    open("ASK", "w").write("make it")
    assert open("ANSWER").read() == "made"
"""


def test_a_segment_that_another_process_holds_is_not_this_tests(tmp_path: Path, segment: str) -> None:
    """Two runs of tests on one node do not fail each other: a stranger makes a segment while the inner test runs."""
    ask, answer = tmp_path / "ask", tmp_path / "answer"
    os.mkfifo(ask)
    os.mkfifo(answer)
    command = [sys.executable, "-c", HOLDER, str(ask), str(answer), f"/dev/shm/{segment}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as holder:
        try:
            output = inner_run(tmp_path, MET.replace("ASK", str(ask)).replace("ANSWER", str(answer)))
            assert Path("/dev/shm", segment).exists()
            assert "1 passed" in output and "error" not in output, output
        finally:
            holder.kill()
