"""What a broker that serves does not do: import torch, listen on TCP, wake for nothing; and how it logs."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import connector
from connector.broker.logs import HumanFormatter, JsonFormatter

ROOT = Path(__file__).resolve().parents[2]


def test_a_serving_broker_has_not_loaded_torch(served: Any, witness: connector.Node) -> None:
    """It costs 1.3 s and 146 MB, and the broker never looks at a tensor."""
    assert witness.status()["pid"] == served.pid
    maps = Path(f"/proc/{served.pid}/maps").read_text()
    assert "zmq" in maps
    assert "torch" not in maps
    assert "numpy" not in maps


def test_no_module_of_the_broker_imports_torch() -> None:
    """Not even on a path that this test's broker did not take."""
    script = (
        "import importlib, pkgutil, sys, connector.broker as b\n"
        "[importlib.import_module('connector.broker.' + m.name) for m in pkgutil.iter_modules(b.__path__)"
        " if m.name != '__main__']\n"
        "print([m for m in ('torch', 'numpy', 'pickle') if m in sys.modules and m != 'pickle'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_nothing_listens_on_tcp(served: Any, witness: connector.Node) -> None:
    """All of its sockets are UNIX sockets."""
    assert witness.status()["pid"] == served.pid
    inodes = set()
    for fd in Path(f"/proc/{served.pid}/fd").iterdir():
        target = str(fd.readlink()) if fd.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    known = {row.split()[6] for row in Path("/proc/net/unix").read_text().splitlines()[1:]}
    assert inodes
    assert inodes <= known
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        assert not inodes & {row.split()[9] for row in rows}


def test_an_idle_broker_wakes_rarely(served: Any, witness: connector.Node) -> None:
    """Turns of the loop, counted over a span without work; a loop that spins makes thousands."""
    edge = witness.edge("idle", "nobody")
    assert edge.wait(0.01) is False
    before = witness.status()["turns"]
    assert edge.wait(2.0) is False
    assert 0 < witness.status()["turns"] - before < 20


def test_a_broker_with_a_waiter_sleeps_until_its_deadline(served: Any, witness: connector.Node) -> None:
    """A take that waits is no reason to wake."""
    edge = witness.edge("idle", "nobody")
    before = witness.status()["turns"]
    with pytest.raises(TimeoutError):
        edge.take("never", timeout=2.0)
    assert 0 < witness.status()["turns"] - before < 30


def test_json_logs_are_one_object_a_line(start: Callable[..., Any]) -> None:
    """Time, level, text, and the facts beside them."""
    running = start(log_format="json")
    assert running.end() == 0
    lines = [json.loads(line) for line in running.log().splitlines()]
    assert [line["text"] for line in lines] == ["serving", "stopping", "stopped"]
    assert lines[0]["level"] == "info"
    assert lines[0]["run_dir"] == running.run_dir
    assert lines[0]["pid"] == running.pid
    assert all(line["time"] > 1.6e9 for line in lines)


def test_human_logs_are_one_line_each(start: Callable[..., Any]) -> None:
    """Clock, level, text, facts; nothing below the level."""
    running = start()
    assert running.end() == 0
    first = running.log().splitlines()[0].split()
    assert first[1:3] == ["info", "serving"]
    assert f"run_dir={running.run_dir}" in first
    quiet = start(log_level="error")
    assert quiet.end() == 0
    assert quiet.log() == ""


def record(message: str, **facts: Any) -> logging.LogRecord:
    made = logging.LogRecord("connector.x", logging.WARNING, "f.py", 1, message, (), None)
    made.facts = facts
    return made


HOSTILE = "r\n12:00:00 error forged\r\x1b[31m\x85\u2028\x00"


def test_a_rid_cannot_forge_a_line_or_a_colour() -> None:
    """It is any text that a client likes; it stays readable."""
    line = HumanFormatter().format(record("a put was refused", rid=HOSTILE, edge="a:b:0", other="日本"))
    assert line.isprintable()
    assert "r\\n12:00:00 error forged\\r\\x1b[31m" in line
    assert "other=日本" in line
    told = JsonFormatter().format(record("a put was refused", rid=HOSTILE))
    assert "\n" not in told
    assert json.loads(told)["rid"] == HOSTILE


def test_a_fact_cannot_stand_for_the_level_or_the_time() -> None:
    told = json.loads(JsonFormatter().format(record("x", level="debug", time=0, text="y", rid="r")))
    assert (told["level"], told["text"], told["rid"]) == ("warning", "x", "r")


def test_a_bug_is_logged_with_its_trace() -> None:
    """In both forms; one object in the second."""
    try:
        raise ValueError("it broke")
    except ValueError:
        made = record("the loop met a bug")
        made.exc_info = sys.exc_info()
    assert "ValueError: it broke" in HumanFormatter().format(made)
    assert "ValueError: it broke" in json.loads(JsonFormatter().format(made))["trace"]
