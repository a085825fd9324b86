"""Two limits: a warm ring of slots in shared memory with a semaphore to wake the reader, and the copies in it alone.

Nothing is checked, nobody may die, one writer and one reader, slots of one size: what plain Python can do at
best. Written as fast as we can: a copy by libc, one torch call a tensor and dimension change.

The copy is timed here, from idle and into pages that another process has just read: copied again and again, 8 MiB
stay in a large cache, at several times the speed that any hand-over could have.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import time
from collections.abc import Sequence
from functools import partial

import msgpack
import posix_ipc
import torch

from connector.bench.payloads import Tensors
from connector.bench.systems import Place, TwoSides
from connector.bench.workloads import Workload

#: Bytes of a slot before its data.
HEAD = 512
_DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.int64": torch.int64}

_copy = ctypes.PyDLL(None).memmove
_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy.restype = ctypes.c_void_p


class _Ring:
    def __init__(self, place: Place, workload: Workload) -> None:
        nbytes = sum(_nbytes(shape, dtype) for shape, dtype in workload.shapes.values())
        self._slots = workload.window + 1
        self._slot = HEAD + -(-nbytes // 4096) * 4096 + 4096
        self._path = f"/dev/shm/{place.name}"
        size = self._slots * self._slot
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._semaphore = posix_ipc.Semaphore(f"/{place.name}", posix_ipc.O_CREAT, initial_value=0)
        # Warm: every page is there before it is used.
        if self._map[:: mmap.PAGESIZE].count(1):
            raise RuntimeError("the ring is not new")
        self._next = 0

    def _turn(self) -> int:
        at = self._next % self._slots * self._slot
        self._next += 1
        return at


class _Writer(_Ring):
    needs_fresh = False

    def __init__(self, place: Place, workload: Workload, copies_alone: bool = False) -> None:
        super().__init__(place, workload)
        self.spans: list[int] | None = [] if copies_alone else None
        # The reader, opened first, has both.
        os.unlink(self._path)
        self._semaphore.unlink()
        for at in range(0, len(self._map), mmap.PAGESIZE):
            self._map[at] = 0

    def put(self, stream: int, payload: Tensors) -> None:
        at = self._turn()
        meta, offset, span = [], 0, 0
        for key, tensor in payload.items():
            nbytes = tensor.nbytes
            meta.append((key, str(tensor.dtype), tuple(tensor.shape), offset))
            source, target = tensor.data_ptr(), self._address + at + HEAD + offset
            begun = time.monotonic_ns()
            _copy(target, source, nbytes)
            span += time.monotonic_ns() - begun
            offset += (nbytes + 63) & ~63
        if self.spans is not None:
            self.spans.append(span)
        packed = msgpack.packb(meta)
        self._map[at : at + 4 + len(packed)] = struct.pack("<I", len(packed)) + packed
        self._semaphore.release()

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        for stream, payload in enumerate(payloads):
            self.put(stream, payload)

    def acked(self, count: int) -> None:
        return

    def close(self, given_up: bool = False) -> None:
        return


class _Reader(_Ring):
    def get(self) -> list[Tensors]:
        self._semaphore.acquire()
        at = self._turn()
        (size,) = struct.unpack_from("<I", self._map, at)
        found: dict[str, torch.Tensor] = {}
        for key, dtype, shape, offset in msgpack.unpackb(self._map[at + 4 : at + 4 + size]):
            kind = _DTYPES[dtype]
            count = 1
            for dim in shape:
                count *= dim
            flat = torch.frombuffer(self._map, dtype=kind, count=count, offset=at + HEAD + offset)
            found[key] = flat if len(shape) == 1 else flat.view(shape)
        return [found]

    def close(self, given_up: bool = False) -> None:
        """The writer may never have come to do it."""
        if given_up:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            with contextlib.suppress(posix_ipc.ExistentialError):
                self._semaphore.unlink()


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return -(-torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes // 64) * 64


SEMAPHORE = TwoSides(_Writer, _Reader)
COPY = TwoSides(partial(_Writer, copies_alone=True), _Reader)
