"""`connector serve` and `connector config`: which value wins, where it came from, what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import connector
from connector.core.errors import BrokerLost

Run = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[str]"]
PATIENCE = 60.0
SOURCES = ("command line", "environment", "file", "default")


def test_the_strongest_source_wins_and_is_logged(start: Start, tmp_path: Path) -> None:
    """Pool by all three, window by two, heartbeat by the file; a stop is clean, exit code 0."""
    file = tmp_path / "c.yaml"
    file.write_text("pool: 2MiB\nwindow: 7\nheartbeat: 4.5\n")
    own = tmp_path / "own"
    env = {"CONNECTOR_POOL": "3MiB", "CONNECTOR_WINDOW": "8", "CONNECTOR_WINDWO": "9"}
    child = start("serve", "--json", "--config", str(file), "--run-dir", str(own), "--pool", "4MiB", env=env)
    with connector.connect(stage="a", endpoint=str(own), timeout=PATIENCE) as node:
        assert node.status()["pool_bytes"] == 4 << 20
    second = start("serve", "--run-dir", str(own), "--pool", "1MiB")
    _, err = second.communicate(timeout=PATIENCE)
    assert second.returncode == 3
    assert err.splitlines()[-1].startswith("error: another broker serves this run directory")
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=PATIENCE)
    assert (child.returncode, out, own.exists()) == (0, "", False)
    lines = [json.loads(line) for line in err.splitlines()]
    told = {name: line["source"] for line in lines if line["text"] == "configured" for name in line}
    assert told["pool"] == "command line"
    assert told["window"] == "environment CONNECTOR_WINDOW"
    assert told["heartbeat"] == f"file {file}:3"
    assert "put_timeout" not in told
    assert any(line["level"] == "warning" and "CONNECTOR_WINDOW?" in line["text"] for line in lines)


def test_ctrl_c_ends_a_broker_cleanly(start: Start, tmp_path: Path) -> None:
    """As SIGTERM does."""
    own = tmp_path / "own"
    child = start("serve", "--run-dir", str(own), "--pool", "1MiB")
    connector.connect(stage="a", endpoint=str(own), timeout=PATIENCE).close()
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=PATIENCE)
    assert (child.returncode, own.exists()) == (0, False)


def test_a_broker_that_stops_answering_is_away_after_the_time_out(start: Start, tmp_path: Path) -> None:
    """Of the node that asks; once it goes on, so do the questions."""
    own = tmp_path / "own"
    child = start("serve", "--run-dir", str(own), "--pool", "1MiB")
    with connector.connect(stage="a", endpoint=str(own), timeout=PATIENCE) as node:
        node.answer_timeout = 0.1
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(BrokerLost, match=str(own)):
            node.status()
        child.send_signal(signal.SIGCONT)
        node.answer_timeout = PATIENCE
        assert node.status("all")["summary"]["pool_bytes"] == 1 << 20
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=PATIENCE)


def test_a_pool_beyond_the_node_is_3(run: Run, tmp_path: Path) -> None:
    """Nothing is left."""
    done = run("serve", "--run-dir", str(tmp_path / "own"), "--pool", "100TiB")
    assert done.code == 3
    assert done.err.splitlines()[-1].startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_serve_refuses_an_invalid_configuration(run: Run, tmp_path: Path) -> None:
    """With every problem's line; nothing is started."""
    file = tmp_path / "c.yaml"
    file.write_text("pool: 1MiB\nwindwo: 3\nheartbeat: soon\n")
    done = run("serve", "--config", str(file), "--run-dir", str(tmp_path / "own"))
    assert (done.code, done.out) == (1, "")
    assert f"error: {file}:2: windwo: there is no such field; did you mean 'window'?" in done.err
    assert f"error: {file}:3: heartbeat:" in done.err
    assert not (tmp_path / "own").exists()


def test_check_tells_every_problem(run: Run, tmp_path: Path) -> None:
    """Exit code 1, file and line each; as JSON, too."""
    file = tmp_path / "c.yaml"
    file.write_text("windwo: 3\nmax_sessions: 0\npool: 1.5\n")
    done = run("config", "check", str(file))
    assert (done.code, done.out) == (1, "")
    assert sorted(line.split(": ")[1] for line in done.err.splitlines()) == [f"{file}:{n}" for n in (1, 2, 3)]
    told = run("config", "check", str(file), "--json")
    assert (told.code, told.json()["ok"], len(told.json()["problems"])) == (1, False, 3)


def test_check_of_a_good_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0; a variable that looks like ours is a warning, one with a wrong value a problem."""
    file = tmp_path / "c.yaml"
    file.write_text("pool: 1MiB\n")
    monkeypatch.setenv("CONNECTOR_POOOL", "1")
    done = run("config", "check", str(file))
    assert (done.code, done.out) == (0, f"{file}: ok\n")
    assert "did you mean CONNECTOR_POOL?" in done.err
    assert run("config", "check", str(file), "--json").json()["ok"] is True
    monkeypatch.setenv("CONNECTOR_WINDOW", "none")
    assert "CONNECTOR_WINDOW: window" in run("config", "check", str(file)).err
    assert run("config", "check", str(tmp_path / "absent.yaml")).code == 1


@pytest.mark.parametrize("strongest", range(4))
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("pool", ["2MiB", "3MiB", "4MiB"]),
        ("window", ["11", "12", "13"]),
        ("group", ["null", "a", "b"]),
        ("log_level", ["debug", "warning", "error"]),
        ("unclaimed_after", ["1.5", "2.5", "3.5"]),
    ],
)
def test_show_tells_the_effective_value_and_its_source(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, values: list[str], strongest: int
) -> None:
    """Whatever the weaker sources say; `null` on the command line beats a value in the file."""
    file = tmp_path / "c.yaml"
    file.write_text(f"{field}: {values[2]}\n" if strongest <= 2 else "")
    if strongest <= 1:
        monkeypatch.setenv(f"CONNECTOR_{field.upper()}", values[1])
    line = ["--set", f"{field}={values[0]}"] if strongest == 0 else []
    told = run("config", "show", "--json", "--config", str(file), *line).json()["fields"][field]
    assert told["source"].split(f" {file}")[0].removesuffix(f" CONNECTOR_{field.upper()}") == SOURCES[strongest]
    if strongest < 3:
        given = values[strongest]
        kinds: dict[str, Any] = {"pool": int(given[0]) << 20 if field == "pool" else 0, "group": given}
        expected = None if given == "null" else kinds.get(field, given)
        assert told["value"] == (type(told["value"])(expected) if expected is not None else None)


def test_show_tells_what_null_stands_for(run: Run, tmp_path: Path) -> None:
    """In the table and as JSON."""
    file = tmp_path / "c.yaml"
    file.write_text("pool: 64MiB\n")
    fields = run("config", "show", "--config", str(file), "--json").json()["fields"]
    assert fields["max_blocks"] == {"value": None, "effective": 16384, "source": "default"}
    rows = [row.split() for row in run("config", "show", "--config", str(file)).rows]
    assert ["max_blocks", "null", "(16384)", "default"] in rows
    assert ["pool", str(64 << 20), "file", f"{file}:1"] in rows
