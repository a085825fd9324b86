"""`connector bench --device`: it says so where there is none, and goes right where the device is the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from connector.bench import device

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "connector.cli", "bench", "--device", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("name", "told"), [("cuda", "torch finds no CUDA device"), ("tpu", "a device is cuda or cuda:N")]
)
def test_a_device_that_is_not_there_is_told(name: str, told: str) -> None:
    done = bench(name)
    assert done.returncode == 2
    assert told in done.stderr and f"device='{name}'" in done.stderr


def test_the_way_is_right_where_the_device_is_the_host() -> None:
    rows = device.run("cpu", print, rounds=2, shape=(128, 64))
    assert [row.way for row in rows] == ["d2h", "h2d"]
    assert all(row.gib_per_s > 0 and row.pinned_gib_per_s > 0 for row in rows)


@pytest.mark.cuda
def test_a_step_s_rows_are_one_copy(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = bench("cuda", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert [row["copies"] for row in json.loads(file.read_text())["rows"]] == [1, 1]
