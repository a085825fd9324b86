"""CUDA's calls as the connector makes them (connector/arena/cuda.py), with streams that run when a test says so."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from connector.arena import cuda


class Event:
    """Not recorded, it is over, as CUDA's."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        self._over = threading.Event()
        self._over.set()

    def record(self, stream: Stream) -> None:
        self._over.clear()
        stream.launch(self._over.set)

    def is_over(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        if not self._over.wait(60.0):
            raise AssertionError("the test never ran the streams")
        if self._fake.broken:
            raise RuntimeError(self._fake.broken)


class Stream:
    def __init__(self) -> None:
        self._todo: deque[Callable[[], object] | Event] = deque()

    def launch(self, work: Callable[[], object]) -> None:
        self._todo.append(work)

    def wait_event(self, event: Event) -> None:
        self._todo.append(event)

    def run(self) -> bool:
        """Whether it got on."""
        got_on = False
        while self._todo:
            first = self._todo[0]
            if isinstance(first, Event):
                if not first.is_over():
                    break
            else:
                first()
            self._todo.popleft()
            got_on = True
        return got_on


class FakeCuda(cuda.Calls):
    """One device, whose tensors are those that `tensor` made, and their views; nothing of CUDA's is called."""

    def __init__(self) -> None:
        super().__init__()
        self.caller, self.aside = Stream(), Stream()
        self._there: set[int] = set()
        self._kept: list[torch.Tensor] = []
        #: Bytes of each copy that was launched.
        self.copies: list[int] = []
        #: What `copy` and `lock_pages` refuse with, and what a copy comes to.
        self.refuses_copy = self.refuses_lock = self.broken = ""
        self.capturing, self.available = False, True
        #: Address -> (bytes, flags).
        self.locked: dict[int, tuple[int, int]] = {}

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor on the device."""
        made = values.clone()
        self._there.add(made.untyped_storage().data_ptr())
        self._kept.append(made)
        return made

    def run(self) -> None:
        """Everything that was launched, in an order that CUDA could have."""
        # Both: the one may wait for the other.
        while self.aside.run() | self.caller.run():
            continue

    # -- cuda.Calls -------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return self.available

    def in_use(self) -> bool:
        return True

    def is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._there

    def is_capturing(self) -> bool:
        return self.capturing

    def current(self, device: torch.device) -> Any:
        return self.caller

    def side(self, device: torch.device) -> Any:
        return self.aside

    def event(self) -> Any:
        return Event(self)

    def copy(self, stream: Any, target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        if self.refuses_copy:
            raise RuntimeError(self.refuses_copy)
        self.copies.append(len(target))
        stream.launch(lambda: target.copy_(cuda.joined_bytes(sources, len(target))))

    def lock_pages(self, address: int, size: int, flags: int) -> str:
        if not self.refuses_lock:
            self.locked[address] = (size, flags)
        return self.refuses_lock

    def unlock_pages(self, address: int) -> None:
        del self.locked[address]
