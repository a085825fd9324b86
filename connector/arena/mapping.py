"""One mapping of a file, with a lifetime: it ends with the last object that refers to it.

The standard library's `mmap` keeps a duplicate of the descriptor (closing that would drop an
fcntl lock) and can be unmapped under a tensor. Here the descriptor may be closed at once, and
nothing unmaps but the collector, when the last memoryview, window and tensor has died.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_munmap.restype = ctypes.c_int
_FAILED = ctypes.c_void_p(-1).value


class Window(ctypes.Array):
    """A buffer over a whole mapping: it keeps the mapping, and calls `on_release` once when it dies.

    Many tensors may share a window. The collector runs `__del__` at any point of any thread:
    `on_release` must take no lock, log nothing and send nothing (append to a deque).
    """

    _type_ = ctypes.c_uint8
    _length_ = 0

    mapping: Mapping
    on_release: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.on_release is not None:
            self.on_release()


class Mapping:
    """Shared pages of `size` bytes at `address`. OSError if the kernel refuses."""

    __slots__ = ("__weakref__", "_type", "address", "before_unmap", "readonly", "size")

    def __init__(self, fd: int, size: int, readonly: bool) -> None:
        self.address = 0
        #: Called once, just before the pages go; as `on_release`, by whichever thread lets go last.
        self.before_unmap: Callable[[], object] | None = None
        self.size = size
        self.readonly = readonly
        protection = mmap.PROT_READ if readonly else mmap.PROT_READ | mmap.PROT_WRITE
        address = _mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address = address
        # One type per mapping: ctypes makes a type for each length, and that costs more than a chunk.
        self._type: type[Window] = type("Window", (Window,), {"_length_": size})

    def window(self) -> Window:
        """A fresh buffer object over all of the mapping, from its address: always writable to its user."""
        window = self._type.from_address(self.address)
        window.mapping = self
        return window

    def view(self) -> memoryview:
        """Bytes of the mapping, read-only if the pages are. The memoryview keeps the mapping."""
        view = memoryview(self.window()).cast("B")
        return view.toreadonly() if self.readonly else view

    def __del__(self, unmap: Any = _munmap) -> None:
        if self.address:
            if self.before_unmap is not None:
                self.before_unmap()
            unmap(self.address, self.size)
