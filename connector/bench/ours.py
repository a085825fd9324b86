"""This connector as a system: put and put_many on one edge, wait and poll on the other side.

As in a stage worker, a process joins once and goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import connector
from connector.bench.payloads import Tensors
from connector.bench.systems import Place
from connector.bench.workloads import Workload

#: Seconds without a payload after which a run is given up.
PATIENCE = 30.0
WRITER, READER = "bench-writer", "bench-reader"


class _Writer:
    needs_fresh = False
    spans = None

    def __init__(self, node: connector.Node, rids: list[str]) -> None:
        self._node, self._rids = node, rids
        self._edge = node.edge(WRITER, READER)

    def put(self, stream: int, payload: Tensors) -> None:
        self._edge.put(self._rids[stream], payload, last=False)

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        self._edge.put_many(dict(zip(self._rids, payloads, strict=True)))

    def acked(self, count: int) -> None:
        return

    def close(self) -> None:
        for rid in self._rids:
            self._edge.end(rid)
            self._node.finish(rid)
        self._node.flush()


class _Reader:
    def __init__(self, node: connector.Node, rids: list[str]) -> None:
        self._node, self._rids = node, rids
        self._edge = node.edge(WRITER, READER)
        self._edge.poll()
        self._ended: set[str] = set()

    def get(self) -> list[Tensors]:
        while True:
            arrived = self._poll()
            if arrived:
                return arrived
            self._wait()

    def _wait(self) -> None:
        if not self._edge.wait(PATIENCE):
            raise TimeoutError(f"nothing has come for {PATIENCE} s")

    def _poll(self) -> list[Tensors]:
        found = self._edge.poll()
        if found.failed:
            raise next(iter(found.failed.values()))
        self._ended |= found.ended
        return [dict(payload) for payloads in found.values() for payload in payloads]

    def close(self) -> None:
        """The writer ends its streams before it closes: hear that, so that nothing is left at the broker."""
        while not self._ended.issuperset(self._rids):
            self._wait()
            self._poll()
        for rid in self._rids:
            self._node.finish(rid)
        self._node.flush()


class _Connector:
    def __init__(self) -> None:
        self._node: connector.Node | None = None

    def _join(self, stage: str, place: Place, workload: Workload) -> tuple[connector.Node, list[str]]:
        if self._node is None:
            self._node = connector.connect(stage=stage, endpoint=place.endpoint)
            _settle()
        return self._node, [f"{place.name}-{stream}" for stream in range(workload.streams)]

    def writer(self, place: Place, workload: Workload) -> _Writer:
        return _Writer(*self._join(WRITER, place, workload))

    def reader(self, place: Place, workload: Workload) -> _Reader:
        return _Reader(*self._join(READER, place, workload))

    def leave(self) -> None:
        if self._node is not None:
            self._node.close()


def _settle() -> None:
    """Wait until the process is idle: its pages are being touched in the background."""
    while True:
        used = time.process_time()
        time.sleep(0.05)
        if time.process_time() - used < 0.005:
            return


BROKER_PATH = _Connector()
