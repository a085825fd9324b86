"""`ls` over many live keys: how long it takes, and what it does to those who hand over meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import torch

import connector

#: Keys of one payload.
WIDTH = 500


def run(keys: int) -> list[dict[str, Any]]:
    """Rows: seconds of one whole `connector ls`, and a chunk's p99 with and without `ls` in a loop."""
    with connector.connect(stage="filler", embedded=True, pool="512MiB") as node:
        edge = node.edge("filler", "nobody")
        payload = {f"key-{number}": torch.zeros(1, dtype=torch.uint8) for number in range(WIDTH)}
        for number in range(keys // WIDTH):
            edge.put(f"live-{number}", payload)
        node.flush()
        start = time.monotonic()
        lines = _ls(node.endpoint)
        seconds = round(time.monotonic() - start, 2)
        quiet = _chunk_p99(node)
        stop = threading.Event()
        rounds = [0]

        def loop() -> None:
            while not stop.is_set():
                _ls(node.endpoint)
                rounds[0] += 1

        thread = threading.Thread(target=loop)
        thread.start()
        busy = _chunk_p99(node)
        stop.set()
        thread.join()
        for number in range(keys // WIDTH):
            node.abort(f"live-{number}", "done")
    return [
        {"workload": "ls", "keys": keys, "lines": lines, "seconds": seconds},
        {"workload": "chunk beside ls", "p99_us_quiet": quiet, "p99_us_while_ls_loops": busy, "ls_rounds": rounds[0]},
    ]


def _ls(endpoint: str) -> int:
    command = [sys.executable, "-m", "connector.cli", "ls", "--endpoint", endpoint]
    return subprocess.run(command, check=True, capture_output=True).stdout.count(b"\n")


def _chunk_p99(node: connector.Node, count: int = 400) -> float:
    """µs from put to having it, both ends in this process on two sessions, paced."""
    spans = []
    with connector.connect(stage="other", endpoint=node.endpoint) as other:
        out, inn = node.edge("filler", "other"), other.edge("filler", "other")
        payload = {"hidden": torch.ones(1, 2048, dtype=torch.bfloat16), "ids": torch.ones(1, dtype=torch.int64)}
        for number in range(count):
            time.sleep(0.002)
            start = time.perf_counter_ns()
            out.put(f"c-{number}", payload)
            inn.take(f"c-{number}", timeout=60.0)
            spans.append((time.perf_counter_ns() - start) / 1000)
            node.finish(f"c-{number}")
            other.finish(f"c-{number}")
    spans.sort()
    return round(spans[int(count * 0.99)], 1)


if __name__ == "__main__":
    for row in run(int(sys.argv[1])):
        print("  ".join(f"{key}={value}" for key, value in row.items()))
