"""The benchmark as its users run it, with little of everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connector.bench import clocks, growth, job, report, standing
from connector.bench.payloads import Maker, WrongBytes
from connector.bench.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
LITTLE = job.Length(1, {"chunk": 10, "sustained16": 160, "step": 128, "prefill": 3, "large": 0}, (1, 20), 0.1)
SMALL = ("chunk", "sustained16", "step", "prefill")


def heard(text: str) -> None:
    return


@pytest.fixture(scope="module")
def result() -> Iterator[job.Result]:
    others = {"absent": "tests.bench.test_run:ABSENT"}
    yield job.run(LITTLE, others, SMALL, {"ring_sem_chunk_us": 1e9}, heard)


class _Absent:
    stays = True

    def writer(self, place: object, workload: object) -> Any:
        raise ImportError("pip install something")

    reader = writer

    def leave(self) -> None:
        return


ABSENT = _Absent()


def test_each_system_has_a_row_a_workload(result: job.Result) -> None:
    assert {(row.workload, row.system) for row in result.rows} == {
        *((workload, system) for workload in SMALL for system in ("connector", "ring_sem", "zmq_hop")),
        ("prefill", "memcpy"),
    }
    assert all(row.payloads == LITTLE.counts[row.workload] for row in result.rows)
    assert all(0 < row.p50_us <= row.p99_us and row.per_s > 0 and row.cpu_us > 0 for row in result.rows)


def test_the_broker_s_time_is_this_connector_s_alone(result: job.Result) -> None:
    assert all(row.broker_cpu_us > 0 for row in result.rows if row.system == "connector")


def test_ratios_are_told_of_what_was_measured(result: job.Result) -> None:
    assert set(result.ratios) == {
        "chunk_p50_vs_ring_sem",
        "chunk_p50_vs_zmq_hop",
        "chunk_p99_vs_ring_sem",
        "chunks_per_s_16_vs_zmq",
        "prefill_vs_memcpy",
        "broker_cpu_us_per_chunk",
    }
    told = report.as_mapping(result)
    assert json.loads(json.dumps(told)) == told and told["ratios"].keys() == result.ratios.keys()


def test_what_is_not_installed_is_a_line(result: job.Result) -> None:
    assert result.missing == {"absent": "pip install something"}


def test_limits_far_from_the_stored_ones_are_said(result: job.Result) -> None:
    assert set(result.void) == {"ring_sem_chunk_us"}


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    limits = tmp_path / "limits.json"
    limits.write_text("{}")
    command = [sys.executable, "-m", "connector.cli", "bench", "--quick", "--workload", "step"]
    done = subprocess.run(
        [*command, "--json", str(file), "--limits", str(limits)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {row["workload"] for row in json.loads(file.read_text())["rows"]} == {"step"}
    assert "broker_cpu_us_per_chunk" in done.stdout


def test_an_unknown_workload_is_refused_with_those_there_are() -> None:
    command = [sys.executable, "-m", "connector.cli", "bench", "--workload", "chunks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "sustained16" in done.stderr


@pytest.mark.parametrize("key", ["hidden", "ids"])
def test_a_flipped_bit_is_seen(key: str) -> None:
    maker = Maker(WORKLOADS["chunk"])
    payload = maker.numbered(7, fresh=True)
    assert maker.check(payload) == 7
    payload[key].view(torch.uint8).reshape(-1)[-1] ^= 1
    with pytest.raises(WrongBytes):
        maker.check(payload)


@pytest.mark.long
def test_growth_is_measured_along_each_axis() -> None:
    small, large = growth.over_live((1, 20), 5, "64MiB", heard)
    assert (small.value, large.value) == (1, 20) and small.broker_cpu_us > 0 < small.p50_us
    one, five = growth.over_sessions((1, 5), 10, "64MiB", heard)
    assert (one.value, five.value) == (1, 5) and one.broker_cpu_us > 0 < five.p50_us
    pools, notes = growth.over_pools((4, 8), 10, heard)
    assert [(row.axis, row.value) for row in pools] == [("pool", 4), ("pool", 8)] and not notes


def test_pools_end_where_the_machine_does() -> None:
    pools, notes = growth.over_pools((4, 1 << 30), 10, heard)
    assert [row.value for row in pools] == [4]
    assert len(notes) == 1 and "before 1073741824 MiB" in notes[0] and "free" in notes[0]


def test_idleness_is_measured() -> None:
    assert all(share >= 0 for share in standing.idle(0.05))


def test_the_clock_of_a_process_goes_on_with_its_work() -> None:
    before = clocks.cpu_of(os.getpid())
    sum(range(100_000))
    assert clocks.cpu_of(os.getpid()) > before
