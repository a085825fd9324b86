"""A process that puts, or takes, one large tensor and tells by how much its own memory grew. See test_one_copy.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import connector

MIB = 1 << 20
SIZE = 64 * MIB
PATIENCE = 60.0


class Seen(TorchDispatchMode):
    """Names of the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def anonymous_kib() -> int:
    """RssAnon: memory of this process alone, not the shared pool."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1])


def put(edge: connector.Edge) -> dict[str, Any]:
    large = torch.arange(SIZE // 8)
    # A first small one: what is made once, such as a thread's stack, is not the copy's.
    edge.put("warm", {"n": torch.zeros(1 << 17)})
    before, seen = anonymous_kib(), Seen()
    with seen:
        edge.put("large", {"n": large})
    return {"grown": anonymous_kib() - before, "dispatched": seen.names}


def take(edge: connector.Edge) -> dict[str, Any]:
    edge.take("warm", timeout=PATIENCE).release()
    before, seen = anonymous_kib(), Seen()
    with seen:
        taken = edge.take("large", timeout=PATIENCE)["n"]
    grown, first, last = anonymous_kib() - before, int(taken[0]), int(taken[-1])
    fine = taken.untyped_storage().nbytes() == SIZE and (first, last) == (0, SIZE // 8 - 1)
    return {"grown": grown, "dispatched": seen.names, "fine": fine}


def main(role: str, endpoint: str) -> None:
    with connector.connect(stage=role, endpoint=endpoint) as node:
        edge = node.edge("put", "take")
        told = put(edge) if role == "put" else take(edge)
        node.flush()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
