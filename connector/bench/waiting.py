"""Until a process does nothing: after it has joined, the pool's pages are touched in the background."""

from __future__ import annotations

import time


def until_idle() -> None:
    while True:
        used = time.process_time()
        time.sleep(0.05)
        if time.process_time() - used < 0.005:
            return
