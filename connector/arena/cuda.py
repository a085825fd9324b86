"""Copies from CUDA devices into the mapping, on streams of their own, and the mapping's pages locked for them.

`CALLS` is all of CUDA that is used here; a test can put something else in its place.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from connector.arena.arena import Arena
from connector.arena.mapping import Mapping as Pages
from connector.core.errors import NoSpace, UsageError

_PORTABLE, _READ_ONLY = 1, 8


class Calls:
    """CUDA, as torch gives it. Threads may share it."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, Any] = {}

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def in_use(self) -> bool:
        """There may be tensors on a device."""
        return torch.cuda.is_initialized()

    def is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def current(self, device: torch.device) -> Any:
        """The stream that this thread launches on."""
        return torch.cuda.current_stream(device)

    def side(self, device: torch.device) -> Any:
        """This process's stream for copies from the device."""
        stream = self._sides.get(device)
        if stream is None:
            stream = self._sides.setdefault(device, torch.cuda.Stream(device))
        return stream

    def event(self) -> Any:
        """Who waits for it sleeps."""
        return torch.cuda.Event(blocking=True)

    def copy(self, stream: Any, target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Launch the copy of the tensors' bytes, which stand one behind the other, to `target`, uint8 [bytes]."""
        with torch.cuda.stream(stream):
            target.copy_(joined_bytes(sources, len(target)), non_blocking=True)

    def lock_pages(self, address: int, size: int, flags: int) -> str:
        """Empty, or why not."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, flags))
        if code == 0:
            return ""
        # CUDA keeps the error for whoever asks next: torch does, behind its next launch, and takes it for its own.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device="cuda").zero_()
        return str(torch.cuda.CudaError(code))

    def unlock_pages(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


CALLS = Calls()


class Job(NamedTuple):
    """A tensor's bytes are to be copied to `position`, from the segment's start. `plain`: they lie as they are written,
    one behind the other."""

    position: int
    tensor: torch.Tensor
    nbytes: int
    plain: bool


def begin(arena: Arena, jobs: Sequence[Job], begun: list[Any]) -> None:
    """Launch all copies, behind what the caller's streams have to do, and before what they are given from now on.
    `begun` gets the events behind the copies, also of those that were launched before an error.

    The tensors must stay until then. UsageError inside a capture; RuntimeError is torch's.
    """
    calls = CALLS
    if calls.is_capturing():
        raise UsageError("a put cannot be captured in a CUDA graph: put behind the replay")
    for device, own in _by_device(jobs).items():
        side, caller = calls.side(device), calls.current(device)
        before, behind = calls.event(), calls.event()
        before.record(caller)
        side.wait_event(before)
        try:
            for run in runs(own):
                calls.copy(side, _target(arena, run), [job.tensor for job in run])
        finally:
            behind.record(side)
            begun.append(behind)
            caller.wait_event(behind)


def any_on_device(payloads: Iterable[Mapping[str, torch.Tensor]]) -> bool:
    """Whether something of a payload is on a device; what is no Tensor is not."""
    is_there = CALLS.is_there
    return any(
        isinstance(value, torch.Tensor) and is_there(value)
        for payload in payloads
        if isinstance(payload, Mapping)
        for value in payload.values()
    )


def runs(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Jobs that one copy can do: rows of one tensor, one behind the other there and in the block."""
    run: list[Job] = []
    for job in jobs:
        if run and not _follows(run[-1], job):
            yield run
            run = []
        run.append(job)
    if run:
        yield run


def lock_pages(pages: Pages) -> None:
    """Page-lock a mapping until it ends. NoSpace, with its size and why, if that is refused; it is as it was then."""
    why = CALLS.lock_pages(pages.address, pages.size, _PORTABLE | (_READ_ONLY if pages.readonly else 0))
    if why:
        raise NoSpace(f"the pool's pages cannot be locked (see `ulimit -l`): {why}", size=pages.size)
    pages.before_unmap = partial(_unlock, CALLS.unlock_pages, pages.address)


def _unlock(unlock: Callable[[int], None], address: int) -> None:
    # At the interpreter's end the driver lets go of them by itself.
    if not sys.is_finalizing():
        unlock(address)


def _by_device(jobs: Sequence[Job]) -> dict[torch.device, list[Job]]:
    found: dict[torch.device, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.tensor.device, []).append(job)
    return found


def _follows(job: Job, after: Job) -> bool:
    first, second = job.tensor, after.tensor
    return (
        job.plain
        and after.plain
        and job.position + job.nbytes == after.position
        and first.data_ptr() + job.nbytes == second.data_ptr()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )


def _target(arena: Arena, run: Sequence[Job]) -> torch.Tensor:
    window = arena.segment.mapping.window()
    size = sum(job.nbytes for job in run)
    return torch.frombuffer(window, dtype=torch.uint8, count=size, offset=run[0].position)


def joined_bytes(sources: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """The bytes of tensors that stand one behind the other, uint8 [size]; of one that is strided or bent, a copy."""
    first = sources[0].detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return first if len(sources) == 1 else first.as_strided((size,), (1,))
