"""Touch pages ahead of use: cold shared pages take writes at a fifth of the speed of warm ones.

`madvise` is called through ctypes, which gives the GIL back; the standard library's
`mmap.madvise` holds it for as long as the kernel works.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable

from connector.arena.segment import Segment
from connector.core.errors import NoSpace, UsageError

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
STEP = 16 << 20

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


def populate(address: int, size: int, write: bool = True, step: int = STEP) -> bool:
    """Maps the pages of [address, address + size); True if done, False on a kernel that cannot (< 5.14).

    Contents do not change, so it may run while others write. write=False for a read-only mapping.
    NoSpace if the kernel cannot give the pages.
    """
    at = address - address % mmap.PAGESIZE
    end = address + size
    while at < end:
        count = min(step, end - at)
        if not _populate_step(at, count, write):
            return False
        at += count
    return True


def _populate_step(address: int, count: int, write: bool) -> bool:
    advice = MADV_POPULATE_WRITE if write else MADV_POPULATE_READ
    while _madvise(address, count, advice) != 0:
        code = ctypes.get_errno()
        if code in (errno.EINTR, errno.EAGAIN):
            continue
        if code == errno.EINVAL:
            # An old kernel, or write=True on read-only pages. The pages come with their first use
            # then; touching them here could lose what another process writes there meanwhile.
            return False
        raise NoSpace(f"pages of the segment cannot be had: {os.strerror(code)}", size=count)
    return True


class Prefault:
    """A thread that populates [begin, end) of a segment, a step at a time, until done or stopped; `then` is called by
    it, unless it was stopped or failed.

    done: set when the thread has ended for whatever reason; progress: bytes populated so far;
    complete: all of them; error: NoSpace that ended it, or None. The thread keeps the mapping.
    """

    def __init__(
        self,
        segment: Segment,
        begin: int = 0,
        end: int | None = None,
        write: bool = True,
        step: int = STEP,
        then: Callable[[], object] | None = None,
    ) -> None:
        self.begin = begin
        self.end = segment.size if end is None else end
        if not 0 <= begin <= self.end <= segment.size or step <= 0 or step % mmap.PAGESIZE:
            raise UsageError("a range to prefault lies outside of its segment", begin=begin, end=end, step=step)
        self.done = threading.Event()
        self.progress = 0
        self.error: NoSpace | None = None
        self._mapping = segment.mapping
        self._write = write and not segment.readonly
        self._step = step
        self._then = then
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connector-prefault", daemon=True)

    def start(self) -> Prefault:
        """Begins; returns itself."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread after its present step and joins it. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def complete(self) -> bool:
        """True if every page of the range was populated."""
        return self.progress == self.end - self.begin

    def _run(self) -> None:
        try:
            while not self.complete and not self._stopping.is_set():
                count = min(self._step, self.end - self.begin - self.progress)
                if not populate(self._mapping.address + self.begin + self.progress, count, self._write, self._step):
                    break
                self.progress += count
            if self._then is not None and not self._stopping.is_set():
                self._then()
        except NoSpace as error:
            self.error = error
        finally:
            self.done.set()
