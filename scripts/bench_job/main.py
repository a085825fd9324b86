"""First figures: hand-over of a 4 KiB chunk and of an 8 MiB prefill, between two processes through the broker.

Paced, so that both sides wake from idle; every payload's bytes are checked. Beside each figure stand limits
measured in the same run: one memcpy into warm shared memory, and one ZeroMQ ipc hop with the same bytes.
With --listing also: seconds of `ls` over many live keys, and the chunk's p99 while `ls` loops.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import listing
import torch
import zmq

import connector

CHUNK = {"hidden": ((1, 2048), torch.bfloat16), "ids": ((1,), torch.int64)}
PREFILL = {
    "embed": ((1024, 2048), torch.bfloat16),
    "hidden": ((1024, 2048), torch.bfloat16),
    "ids": ((1024,), torch.int64),
}
WORKLOADS = {"chunk": (CHUNK, 0.0025), "prefill": (PREFILL, 0.0045)}


def make(shapes: dict[str, Any], tag: int) -> dict[str, torch.Tensor]:
    """A payload whose bytes depend on `tag`."""
    return {key: torch.full(shape, tag % 120, dtype=dtype) for key, (shape, dtype) in shapes.items()}


def reader(endpoint: str, name: str, count: int, results: Any) -> None:
    """Takes `count` payloads, checks them, and reports (sent, received) in ns."""
    torch.set_num_threads(1)
    times: list[int] = []
    wrong = 0
    with connector.connect(stage="reader", endpoint=endpoint) as node:
        edge = node.edge("writer", "reader")
        back = node.edge("reader", "writer")
        for tag in range(count):
            payload = edge.take(f"{name}-{tag}", timeout=30.0)
            times.append(time.monotonic_ns())
            wrong += any(bool((tensor != tag % 120).any()) for tensor in payload.values())
            node.finish(f"{name}-{tag}")
            del payload
            back.put(f"ack-{name}-{tag}", {})
    results.put((times, wrong))


def hand_over(node: connector.Node, name: str, count: int) -> dict[str, Any]:
    """One workload: time from just before put to the reader's having it, in µs."""
    shapes, pause = WORKLOADS[name]
    results: Any = mp.get_context("spawn").Queue()
    process = mp.get_context("spawn").Process(target=reader, args=(node.endpoint, name, count, results))
    process.start()
    edge, back = node.edge("writer", "reader"), node.edge("reader", "writer")
    sent: list[int] = []
    for tag in range(count):
        payload = make(shapes, tag)
        time.sleep(pause)
        sent.append(time.monotonic_ns())
        edge.put(f"{name}-{tag}", payload)
        back.take(f"ack-{name}-{tag}", timeout=60.0)
        node.finish(f"{name}-{tag}")
        node.finish(f"ack-{name}-{tag}")
    received, wrong = results.get(timeout=60.0)
    process.join()
    warm = count // 10
    spans = sorted((b - a) / 1000 for a, b in zip(sent[warm:], received[warm:], strict=True))
    return {
        "p50_us": round(spans[len(spans) // 2], 1),
        "p99_us": round(spans[int(len(spans) * 0.99)], 1),
        "wrong": wrong,
    }


def memcpy_us(nbytes: int) -> float:
    """Median µs of one copy of `nbytes` into warm memory that was mapped before."""
    import ctypes
    import mmap

    target = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    source = torch.ones(nbytes, dtype=torch.uint8)
    spans = []
    for _ in range(30):
        start = time.perf_counter_ns()
        ctypes.memmove(address, source.data_ptr(), nbytes)
        spans.append((time.perf_counter_ns() - start) / 1000)
    return round(statistics.median(spans[5:]), 1)


def echo(path: str, count: int) -> None:
    """The far end of the ZeroMQ hop: sends back the time at which each message arrived."""
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(f"ipc://{path}")
    for _ in range(count):
        socket.recv()
        socket.send(time.monotonic_ns().to_bytes(8, "little"))


def zmq_hop_us(nbytes: int, pause: float, count: int) -> float:
    """Median µs of one ipc hop with the bytes inside, paced like the workload."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "hop"))
        process = mp.get_context("spawn").Process(target=echo, args=(path, count))
        socket = zmq.Context().socket(zmq.PAIR)
        socket.bind(f"ipc://{path}")
        process.start()
        spans = []
        for _ in range(count):
            data = os.urandom(16) + bytes(nbytes - 16)
            time.sleep(pause)
            start = time.monotonic_ns()
            socket.send(data)
            spans.append((int.from_bytes(socket.recv(), "little") - start) / 1000)
        process.join()
        socket.close(0)
    return round(statistics.median(spans[count // 10 :]), 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="hand-overs of a chunk (an eighth of it of a prefill)")
    parser.add_argument("--listing", type=int, metavar="KEYS", default=0, help="also time `ls` over so many live keys")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with connector.connect(stage="writer", embedded=True, pool="256MiB") as node:
        for name, (shapes, pause) in WORKLOADS.items():
            count = options.count if name == "chunk" else max(options.count // 8, 20)
            nbytes = sum(t.numel() * t.element_size() for t in make(shapes, 0).values())
            row = {"workload": name, "bytes": nbytes, "count": count, **hand_over(node, name, count)}
            row["memcpy_us"] = memcpy_us(nbytes)
            row["zmq_hop_us"] = zmq_hop_us(nbytes, pause, min(count, 200))
            row["vs_memcpy"] = round(row["p50_us"] / row["memcpy_us"], 2)
            row["vs_zmq_hop"] = round(row["p50_us"] / row["zmq_hop_us"], 2)
            rows.append(row)
    if options.listing:
        rows += listing.run(options.listing)
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))
    return 1 if any(row.get("wrong") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
