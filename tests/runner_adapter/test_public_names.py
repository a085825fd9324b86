"""The public names of the room: each is there, and the pure ones load no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import runner_adapter

ROOT = Path(__file__).parents[2]
PURE = [
    "AdapterConfig",
    "Naming",
    "Phase",
    "Requests",
    "Row",
    "StepChange",
    "StepPlan",
    "TransferConfig",
    "flatten",
    "nest",
]


@pytest.mark.parametrize("name", runner_adapter.__all__)
def test_each_public_name_is_there(name: str) -> None:
    assert getattr(runner_adapter, name).__name__ == name


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(AttributeError, match="Buffer"):
        runner_adapter.Buffer  # noqa: B018


def test_pure_names_load_no_torch_and_no_zmq() -> None:
    """A launcher checks a stage's config without them."""
    told = f"""
import sys, runner_adapter
for name in {PURE}:
    getattr(runner_adapter, name)
print({{"torch", "zmq"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")
