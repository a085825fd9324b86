"""The other peers of the full run, with little of everything, in the environment of scripts/setup-peers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from connector.bench import job

ROOT = Path(__file__).parents[2]
JOB = ROOT / "scripts" / "bench_job"
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PEERS = {
    "sglang_omni": "sglang_peer:RELAY",
    "torch_queue": "torch_peer:DESCRIPTORS",
    "torch_queue_files": "torch_peer:FILES",
    "iceoryx2": "iox_peer:WAITING",
    "mooncake_store": "mooncake_peer:STORE",
}
#: Those without a package of their own are everywhere.
INSTALLED = {name: where for name, where in PEERS.items() if not name.startswith("torch")} | {"ray": "ray_peer:CLUSTER"}
LITTLE = """
import json, sys
from connector.bench import job, report
if __name__ == "__main__":
    counts, peers = json.loads(sys.argv[1])
    result = job.run(job.Length(1, counts, (), 0.0), peers, list(counts), {}, lambda text: None)
    print(json.dumps(report.as_mapping(result)))
"""

needs_peers = pytest.mark.skipif(not PYTHON.exists(), reason="scripts/setup-peers makes .venv-peers")


def left() -> set[str]:
    """In shared memory and for a while: of anybody's benchmark. torch's manager removes its own a moment later."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("tc-", "torch_", "sem.mp-"))}


def run(counts: dict[str, int], peers: dict[str, str], folder: Path) -> dict[str, Any]:
    program = folder / "little.py"
    program.write_text(LITTLE)
    environment = {**os.environ, "PYTHONPATH": f"{JOB}:{ROOT}"}
    command = [str(PYTHON), str(program), json.dumps([counts, peers])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def rows(told: dict[str, Any]) -> set[tuple[str, str]]:
    return {(row["system"], row["workload"]) for row in told["rows"]}


@needs_peers
@pytest.mark.parametrize("peers", [PEERS, {"ray": "ray_peer:CLUSTER"}], ids=["others", "ray"])
def test_each_hands_over_every_payload_and_leaves_nothing(peers: dict[str, str], tmp_path: Path) -> None:
    counts = {"chunk": 5, "pipeline": 64} | ({} if "ray" in peers else {"step": 128})
    before = left()
    told = run(counts, peers, tmp_path)
    # What a machine cannot have is told, and is no failure.
    there = peers.keys() - told["missing"].keys()
    assert told["missing"].keys() <= INSTALLED.keys()
    assert rows(told) >= {(peer, workload) for peer in there for workload in counts}
    assert left() <= before


def test_what_is_not_installed_is_a_line_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOB))
    result = job.run(job.Length(1, {"chunk": 5}, (), 0.0), INSTALLED, ["chunk"], {}, lambda text: None)
    assert result.missing.keys() == INSTALLED.keys()
    assert all("scripts/setup-peers" in how for how in result.missing.values())
    assert {row.system for row in result.rows} == {"connector", "ring_sem", "zmq_hop"}
