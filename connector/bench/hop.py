"""A limit: one ZeroMQ hop over ipc with the bytes inside, and tensors made from the frames."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

import msgpack
import torch
import zmq

from connector.bench.payloads import Tensors
from connector.bench.systems import Place, TwoSides
from connector.bench.workloads import Workload

_DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.int64": torch.int64}


class _Side:
    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)

    def close(self, given_up: bool = False) -> None:
        self._socket.close(linger=0)
        self._context.term()


class _Writer(_Side):
    needs_fresh = True
    spans: list[int] | None = None

    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(zmq.PUSH)
        self._socket.connect(f"ipc://{place.folder}/{place.name}")
        #: What ZeroMQ may still have to send.
        self._kept: deque[Tensors] = deque()

    def put(self, stream: int, payload: Tensors) -> None:
        meta = [(key, str(tensor.dtype), tuple(tensor.shape)) for key, tensor in payload.items()]
        frames = [msgpack.packb(meta), *(memoryview(_bytes(tensor)) for tensor in payload.values())]
        self._kept.append(payload)
        self._socket.send_multipart(frames, copy=False)

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        for stream, payload in enumerate(payloads):
            self.put(stream, payload)

    def acked(self, count: int) -> None:
        for _ in range(count):
            self._kept.popleft()


class _Reader(_Side):
    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(zmq.PULL)
        self._socket.bind(f"ipc://{place.folder}/{place.name}")

    def get(self) -> list[Tensors]:
        head, *frames = self._socket.recv_multipart(copy=False)
        meta = msgpack.unpackb(head.buffer)
        found = {
            key: torch.frombuffer(frame.buffer, dtype=_DTYPES[dtype]).view(shape)
            for (key, dtype, shape), frame in zip(meta, frames, strict=True)
        }
        return [found]


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory, without NumPy, which not everybody has. It does not keep the tensor."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


HOP = TwoSides(_Writer, _Reader)
