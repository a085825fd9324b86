"""core and wire need nothing of the machine: no torch, no sockets, no shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Imports every module of two rooms while the packages named on the command line cannot be found.
SCRIPT = """
import importlib, importlib.abc, pkgutil, sys

class Forbidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ImportError(f"{name} is forbidden here")
        return None

for name in sys.argv[1:]:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Forbidden())
for room in ("connector.core", "connector.wire"):
    package = importlib.import_module(room)
    for found in pkgutil.walk_packages(package.__path__, room + "."):
        importlib.import_module(found.name)
        print(found.name)
"""


def imports_without(*forbidden: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *forbidden], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_every_module_of_core_and_wire_imports_without_torch_zmq_and_shared_memory() -> None:
    """Their tests run on any machine, and a command that only reads messages starts at once."""
    done = imports_without("torch", "numpy", "zmq", "posix_ipc", "mmap", "multiprocessing", "yaml", "pydantic")
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert {"connector.core.errors", "connector.core.directory.state", "connector.wire.codec"} <= set(names)
    files = [path for room in ("core", "wire") for path in (ROOT / "connector" / room).rglob("*.py")]
    assert len(names) == len(files) - 2


@pytest.mark.parametrize("needed", ["msgpack", "dataclasses"])
def test_the_hook_forbids(needed: str) -> None:
    """Else the test above would hold for nothing."""
    done = imports_without(needed)
    assert done.returncode != 0
    assert f"{needed} is forbidden here" in done.stderr
