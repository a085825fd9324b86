"""iceoryx2 as a system of the benchmark: publish and subscribe of bytes in its shared memory, and an event to wait for.

It carries bytes; that they are tensors is written before them, as in the ring, which is as little as one can do. Its
files lie in the run's folder and its segments have the run's name, so that what it keeps for the next user goes, too.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import torch

from connector.bench.payloads import Tensors
from connector.bench.systems import Place, TwoSides
from connector.bench.workloads import Workload

try:
    import iceoryx2 as iox
except ImportError as error:
    raise ImportError(f"scripts/setup-peers installs it ({error})") from error

iox.set_log_level(iox.LogLevel.Fatal)
#: Bytes before the tensors, and what their places are multiples of.
HEAD, ALIGNED = 512, 64
_DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.int64": torch.int64}


class _Side:
    def __init__(self, place: Place, workload: Workload) -> None:
        config = iox.config.default()
        config.global_cfg.root_path = iox.Path.new(f"{place.folder}/iceoryx2")
        config.global_cfg.prefix = iox.FileName.new(f"{place.name}_")
        node = iox.NodeBuilder.new().config(config).signal_handling_mode(iox.SignalHandlingMode.Disabled)
        self._node = node.create(iox.ServiceType.Ipc)
        name = iox.ServiceName.new("tensors")
        self._bytes = (
            self._node.service_builder(name)
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .payload_alignment(iox.Alignment.new(ALIGNED))
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(workload.window + 1)
            .subscriber_max_borrowed_samples(2)
            .max_publishers(1)
            .max_subscribers(1)
            .open_or_create()
        )
        self._events = self._node.service_builder(name).event().open_or_create()
        self._ports: list[Any] = []

    def close(self, given_up: bool = False) -> None:
        for port in self._ports:
            port.delete()
        del self._events, self._bytes, self._node


class _Writer(_Side):
    needs_fresh = False
    spans: list[int] | None = None

    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(place, workload)
        most = HEAD + workload.nbytes + ALIGNED * len(workload.shapes)
        self._publisher = self._bytes.publisher_builder().initial_max_slice_len(most).max_loaned_samples(2).create()
        self._notifier = self._events.notifier_builder().create()
        self._ports = [self._notifier, self._publisher]

    def put(self, stream: int, payload: Tensors) -> None:
        meta, size = [], HEAD
        for key, tensor in payload.items():
            meta.append((key, str(tensor.dtype), tuple(tensor.shape), size))
            size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        head = msgpack.packb(meta)
        sample = self._publisher.loan_slice_uninit(size)
        address = sample.payload().as_ptr()
        ctypes.memmove(address, struct.pack("<I", len(head)) + head, 4 + len(head))
        for (_, _, _, offset), tensor in zip(meta, payload.values(), strict=True):
            ctypes.memmove(address + offset, tensor.data_ptr(), tensor.nbytes)
        sample.assume_init().send()
        self._notifier.notify()

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        for stream, payload in enumerate(payloads):
            self.put(stream, payload)

    def acked(self, count: int) -> None:
        return


class _Reader(_Side):
    def __init__(self, place: Place, workload: Workload) -> None:
        super().__init__(place, workload)
        self._subscriber = self._bytes.subscriber_builder().create()
        self._listener = self._events.listener_builder().create()
        self._ports = [self._listener, self._subscriber]
        self._pause = iox.Duration.from_millis(100)
        #: What the payload of the last `get` lies in.
        self._sample: Any = None

    def get(self) -> list[Tensors]:
        self._give_back()
        while (sample := self._subscriber.receive()) is None:
            self._listener.timed_wait(self._pause)
        self._sample = sample
        whole = sample.payload()
        memory = (ctypes.c_uint8 * whole.len()).from_address(whole.as_ptr())
        (size,) = struct.unpack_from("<I", memory)
        found: dict[str, torch.Tensor] = {}
        for key, dtype, shape, offset in msgpack.unpackb(bytes(memory[4 : 4 + size])):
            count = 1
            for dim in shape:
                count *= dim
            found[key] = torch.frombuffer(memory, dtype=_DTYPES[dtype], count=count, offset=offset).view(shape)
        return [found]

    def _give_back(self) -> None:
        if self._sample is not None:
            self._sample.delete()
            self._sample = None

    def close(self, given_up: bool = False) -> None:
        self._give_back()
        super().close(given_up)


WAITING = TwoSides(_Writer, _Reader)
