"""Signals' handlers that raise, at any place of code that is traced by its opcodes."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Container
from types import FrameType
from typing import Any

#: Behind these the interpreter looks whether there was a signal.
LOOKS = {"CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME"}


class Signal(BaseException):
    pass


def interrupted(
    act: Callable[[], object],
    at: int,
    files: Container[str],
    careful: Container[Any] = (),
    behind: Container[str] | None = None,
) -> bool:
    """Whether `act` was still on its way at the so many'th opcode of its frames in `files`, where Signal is raised.
    `careful`: code objects that are left out. `behind`: opcodes behind these count, and no others."""
    left = at
    before: dict[FrameType, str] = {}

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files or frame.f_code in careful:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last, before[frame] = before.get(frame), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if behind is None or last in behind:
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise Signal
        return step

    sys.settrace(step)
    try:
        act()
    except Signal:
        return True
    finally:
        sys.settrace(None)
        before.clear()
    return False
