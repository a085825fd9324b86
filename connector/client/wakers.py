"""How a node's own thread is woken, now or in a moment, and how its callers are. All live as long as anyone may call
them: a view can outlive everything else, and its finaliser does."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

#: Seconds that what nobody waits for may wait for company, and ticks without anything after which the thread sleeps.
TICK, QUIET_TICKS = 0.005, 3


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
            written = False
            try:
                self._raised = True
                os.eventfd_write(self.fd, 1)
                written = True
            finally:
                if not written:
                    # A signal's handler raised in between: the next call writes.
                    self._raised = False

    def look(self) -> None:
        """The thread is awake, and looks at everything behind this."""
        os.eventfd_read(self.fd)
        # After the read: a call in between would write, be read here, and the next ones would not write.
        self._raised = False


class Ticker:
    """Has the link's thread look in a moment. While things happen it looks every TICK by itself, so that most calls are
    no more than a flag; when nothing has happened for a while it sleeps, and the next call wakes it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        #: There is something to look at.
        self.pending = False
        #: The thread sleeps for a tick at most.
        self.ticks = False
        self._quiet = 0

    def __call__(self) -> None:
        """Any thread, any finaliser: no lock. What is to be found must be there before."""
        self.pending = True
        if not self.ticks:
            self._wake()

    def look(self) -> None:
        """The thread is awake, and looks at everything behind this."""
        if self.pending:
            self.pending = False
            self.ticks = True
            self._quiet = 0
        elif self.ticks:
            self._quiet += 1
            if self._quiet >= QUIET_TICKS:
                self.ticks = False
                # A call in between did not wake it.
                self.ticks = self.pending

    def patience(self) -> float | None:
        """Seconds that the thread may sleep; None: as long as it likes."""
        return TICK if self.ticks or self.pending else None


class Gate:
    """Closed until it is opened, once and for all. What a signal's handler raises in a wait is what its caller gets:
    in threading.Event's it can come out as a RuntimeError of a lock that was never taken."""

    def __init__(self) -> None:
        self._opened = False
        self._bar = threading.Lock()
        self._bar.acquire()

    def open(self) -> None:
        """Any thread; may be called again."""
        self._opened = True
        self._let_pass()

    def is_open(self) -> bool:
        return self._opened

    def wait(self, seconds: float) -> bool:
        """Whether it is open, or was opened meanwhile. One thread's at a time; others may look late."""
        if not self._opened and self._bar.acquire(timeout=max(seconds, 0.0)):
            self._let_pass()
        return self._opened

    def _let_pass(self) -> None:
        # RuntimeError: another one has just done it.
        with contextlib.suppress(RuntimeError):
            self._bar.release()
