"""vLLM-Omni's genuine SharedMemoryConnector as a system of the benchmark, from the published wheel.

Two ways: under its own transfer adapter's loops, as its stages use it, and asked for the next chunk without a pause.
Keys are of this run alone; what it leaves in /dev/shm is removed when a side closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from connector.bench.payloads import Tensors
from connector.bench.systems import Place, TwoSides
from connector.bench.workloads import Workload

try:
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
    from vllm_omni.distributed.omni_connectors.transfer_adapter.base import OmniTransferAdapterBase
except ImportError as error:
    raise ImportError("scripts/setup-engines installs it") from error

logging.getLogger("vllm_omni").setLevel(logging.CRITICAL)
#: Seconds without a payload after which a run is given up.
PATIENCE = 60.0


class Request(NamedTuple):
    """What the adapter's loops ask of a request, and the chunk that it waits for."""

    request_id: str
    stream: int
    chunk: int


class _Side:
    def __init__(self, place: Place, workload: Workload, stage: int) -> None:
        self._name = place.name
        self._connector = SharedMemoryConnector({"stage_id": stage})
        #: Next chunk of each stream.
        self._next = [0] * workload.streams

    def _key(self, stream: int, chunk: int) -> str:
        return f"{self._name}-{stream}_0_{chunk}"

    def acked(self, count: int) -> None:
        return

    def close(self, given_up: bool = False) -> None:
        self._connector.close()
        for left in Path("/dev/shm").glob(f"*{self._name}-*"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left)


class _Writer(_Side):
    needs_fresh = False
    spans: list[int] | None = None

    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(place, workload, 0)

    def put(self, stream: int, payload: Tensors) -> None:
        key = self._key(stream, self._next[stream])
        self._next[stream] += 1
        self._send(key, payload)

    def _send(self, key: str, payload: Tensors) -> None:
        stored, _, _ = self._connector.put("0", "1", key, dict(payload))
        if not stored:
            raise RuntimeError(f"the peer did not take {key}")

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        for stream, payload in enumerate(payloads):
            self.put(stream, payload)


class _Reader(_Side):
    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(place, workload, 1)
        self._turn = 0

    def get(self) -> list[Tensors]:
        while True:
            stream = self._turn
            self._turn = (stream + 1) % len(self._next)
            found = self._connector.get("0", "1", self._key(stream, self._next[stream]))
            if found is not None:
                self._next[stream] += 1
                return [found[0]]


class _Loops(OmniTransferAdapterBase):
    """The adapter's own threads around a side."""

    def __init__(self, side: _LoopWriter | _LoopReader) -> None:
        self.connector = side._connector
        self.side = side
        super().__init__(None)

    def _send_single_request(self, task: dict[str, Any]) -> None:
        _Writer._send(self.side, task["key"], task["payload"])

    def _poll_single_request(self, request: Request) -> bool:
        return bool(self.side.poll(request))

    def end(self) -> None:
        self.stop_event.set()
        for condition in (self._recv_cond, self._save_cond):
            with condition:
                condition.notify_all()
        self.recv_thread.join()
        self.save_thread.join()


class _LoopWriter(_Writer):
    # Its loop sends later.
    needs_fresh = True

    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(place, workload)
        self._loops = _Loops(self)

    def _send(self, key: str, payload: Tensors) -> None:
        self._loops._pending_save_reqs.append({"key": key, "payload": payload})
        with self._loops._save_cond:
            self._loops._save_cond.notify()

    def close(self, given_up: bool = False) -> None:
        self._loops.end()
        super().close()


class _LoopReader(_Side):
    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(place, workload, 1)
        self._arrived: queue.SimpleQueue[Tensors] = queue.SimpleQueue()
        self._loops = _Loops(self)
        for stream in range(workload.streams):
            self._load(Request(str(stream), stream, 0))
        with self._loops._recv_cond:
            self._loops._recv_cond.notify()

    def _load(self, request: Request) -> None:
        self._loops._pending_load_reqs.append(request)

    def poll(self, request: Request) -> bool:
        """The adapter asks once a pass."""
        found = self._connector.get("0", "1", self._key(request.stream, request.chunk))
        if found is None:
            return False
        self._arrived.put(found[0])
        self._load(request._replace(chunk=request.chunk + 1))
        return True

    def get(self) -> list[Tensors]:
        return [self._arrived.get(timeout=PATIENCE)]

    def close(self, given_up: bool = False) -> None:
        self._loops.end()
        super().close()


TIGHT = TwoSides(_Writer, _Reader)
ADAPTER = TwoSides(_LoopWriter, _LoopReader)
