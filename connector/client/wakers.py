"""How a node's own thread is woken: now, or in a moment. Both live as long as anyone may call them: a view can outlive
everything else, and its finaliser does."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

#: Nanoseconds that what nobody waits for may wait for company.
LATER = 1_000_000


class Waker:
    """An eventfd."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: It was written, and the thread has not looked since.
        self._raised = False

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound early: at the interpreter's end the module may be empty by now.
        close(self.fd)

    def __call__(self) -> None:
        """Any thread, any finaliser: one system call at most, no lock. What it is to find must be there before."""
        if not self._raised:
            self._raised = True
            os.eventfd_write(self.fd, 1)

    def look(self) -> None:
        """The thread is awake, and looks at everything behind this."""
        os.eventfd_read(self.fd)
        # After the read: a call in between would write, be read here, and the next ones would not write.
        self._raised = False


class _Spec(ctypes.Structure):
    """struct itimerspec on 64-bit Linux: interval, then time to the first, each in seconds and nanoseconds."""

    _fields_ = (("every_s", ctypes.c_long), ("every_ns", ctypes.c_long), ("s", ctypes.c_long), ("ns", ctypes.c_long))


#: With the GIL held: the call is shorter than giving it away.
_libc = ctypes.PyDLL(None, use_errno=True)
_timerfd_create = _libc.timerfd_create
_timerfd_create.argtypes = (ctypes.c_int, ctypes.c_int)
_timerfd_settime = _libc.timerfd_settime
_timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Spec), ctypes.c_void_p)
_MONOTONIC = 1


class Alarm:
    """A timerfd, which `os` has from Python 3.13 on only. Set again while it is set it does nothing."""

    def __init__(self) -> None:
        self.fd = _timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._spec = ctypes.pointer(_Spec(0, 0, 0, LATER))
        self._is_set = False

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)

    def __call__(self) -> None:
        """Any thread, any finaliser: one system call at most, no lock. What it is to find must be there before."""
        if not self._is_set:
            self._is_set = True
            _timerfd_settime(self.fd, 0, self._spec, None)

    def look(self) -> None:
        """It went off: the thread looks at everything behind this."""
        os.read(self.fd, 8)
        # After the read, as above.
        self._is_set = False
