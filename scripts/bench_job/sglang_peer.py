"""sglang-omni's genuine shared-memory relay as a system of the benchmark, from the published wheel.

A payload goes as between its stages: packed and described by its `stage_io`, handed to the relay, and announced with
a `DataReadyMessage` over its control plane. Two things are this benchmark's: that the reader is done is told by the
benchmark's own pipe, not by another message, and the relay has credits for a whole window (2 is its default).
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import types
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from connector.bench.payloads import Tensors
from connector.bench.systems import Place, TwoSides
from connector.bench.workloads import Workload


def _load() -> Any:
    """`sglang_omni.comm.stage_io`, without the package's own __init__: that one imports its engine, and sglang."""
    # It warns of each other relay that is not there.
    logging.getLogger("sglang_omni").setLevel(logging.CRITICAL)
    top = importlib.import_module("sglang_omni")
    comm = types.ModuleType("sglang_omni.comm")
    comm.__path__ = [str(Path(str(top.__file__)).with_name("comm"))]
    sys.modules.setdefault("sglang_omni.comm", comm)
    return importlib.import_module("sglang_omni.comm.stage_io")


try:
    stage_io = _load()
    from sglang_omni.comm.data_ref import DataRef, TransportKind
    from sglang_omni.pipeline.control_plane import PullSocket, PushSocket
    from sglang_omni.proto import DataReadyMessage, OmniRequest, StagePayload
    from sglang_omni.relay.shm import ShmRelay
except ImportError as error:
    raise ImportError(f"scripts/setup-peers installs it ({error})") from error


class _Side:
    def __init__(self, place: Place, workload: Workload) -> None:
        self._place = place
        self._endpoint = f"ipc://{place.folder}/{place.name}"
        self._loop = asyncio.new_event_loop()
        self._relay = ShmRelay(place.source, credits=workload.window + 1, device="cpu")

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def _end(self, socket: PullSocket | PushSocket) -> None:
        # The sockets' context is the process's and outlives this run; what was not sent must not hold it up.
        if socket.socket is not None:
            socket.socket.linger = 0
        socket.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.close()


class _Writer(_Side):
    needs_fresh = False
    spans: list[int] | None = None

    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(place, workload)
        self._push = PushSocket(self._endpoint)
        self._do(self._push.connect())
        #: Operations whose reader is not done.
        self._operations: deque[Any] = deque()

    def put(self, stream: int, payload: Tensors) -> None:
        self._do(self._put(str(stream), dict(payload)))

    async def _put(self, rid: str, payload: dict[str, Any]) -> None:
        source, target = self._place.source, self._place.target
        whole = StagePayload(rid, OmniRequest(None), payload)
        ref, operation = await stage_io.write_payload(
            self._relay, rid, whole, transport=TransportKind.SHM, from_stage=source, to_stage=target
        )
        self._operations.append(operation)
        await self._push.send(DataReadyMessage(rid, source, target, ref.to_dict()))

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        for stream, payload in enumerate(payloads):
            self.put(stream, payload)

    def acked(self, count: int) -> None:
        self._do(self._done(count))

    async def _done(self, count: int) -> None:
        for _ in range(count):
            operation = self._operations.popleft()
            operation.mark_receiver_done()
            await operation.wait_for_completion()

    def close(self, given_up: bool = False) -> None:
        for operation in self._operations:
            operation.unlink_if_present()
        self._end(self._push)


class _Reader(_Side):
    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(place, workload)
        self._pull = PullSocket(self._endpoint)
        self._do(self._pull.start())

    def get(self) -> list[Tensors]:
        payload: Tensors = self._do(self._get())
        return [payload]

    async def _get(self) -> Any:
        message = await self._pull.recv()
        payload = await stage_io.read_payload(self._relay, message.request_id, DataRef.from_dict(message.data_ref))
        return payload.data

    def close(self, given_up: bool = False) -> None:
        self._end(self._pull)


RELAY = TwoSides(_Writer, _Reader)
