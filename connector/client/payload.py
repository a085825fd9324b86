"""What a reader gets: a mapping of tensors that pins its block for as long as any view of it is alive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from connector.arena import tensors
from connector.arena.arena import Arena
from connector.arena.mapping import Window
from connector.client import layouts
from connector.client.rid_queue import Arrived
from connector.core.directory.effects import Descriptor
from connector.core.directory.events import Flags
from connector.core.errors import Broken, ProtocolViolation
from connector.core.names import Edge

if TYPE_CHECKING:
    import torch


class Payload(dict[str, "torch.Tensor"]):
    """`dict[str, Tensor]` as it was put: keys in the order of the put, exact dtypes, shapes and bits.

    Views on shared memory unless it was copied: do not write to them, another reader may share them. The
    block is released when the last view has died; leaving a `with` block drops this object's own.
    """

    __slots__ = ("_told", "last")

    def __init__(self, told: Descriptor, last: bool) -> None:
        self._told = told
        #: The stream ends with this payload.
        self.last: bool = last

    @property
    def edge(self) -> Edge:
        return self._told.edge

    @property
    def rid(self) -> str:
        return self._told.rid

    @property
    def index(self) -> int:
        """Chunk number in its stream."""
        return self._told.index

    @property
    def attempt(self) -> int:
        return self._told.attempt

    @property
    def life(self) -> int:
        """Which use of the rid, numbered by the broker."""
        return self._told.life

    @property
    def redelivered(self) -> bool:
        """It was delivered before, to a reader that died."""
        return bool(self._told.flags & Flags.REDELIVERED)

    def __missing__(self, key: str) -> torch.Tensor:
        there = ", ".join(sorted(self)) or "none (released, or an empty payload)"
        raise KeyError(f"no tensor {key!r} in {self.rid}[{self.index}] on {self.edge}; there are: {there}")

    def __repr__(self) -> str:
        keys = ", ".join(f"{key}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for key, t in self.items())
        return f"<Payload {self.rid}[{self.index}] on {self.edge} {{{keys}}}>"

    def __enter__(self) -> Payload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Drop this object's tensors; views that the caller keeps stay valid and pin the block."""
        self.clear()


class Opened(NamedTuple):
    """A payload's views, made before its block was sealed: nobody has them yet, and their end releases nothing."""

    arena: Arena
    payload: Payload
    window: Window


def open_ahead(told: Descriptor, arena: Arena, mapped: Arena) -> Arrived:
    """What will have come when the writer tells of it, with its views on `mapped`, which is of the same pages as
    `arena`. ProtocolViolation, InvariantBroken or Broken: it cannot be opened now."""
    _check_bounds(told, mapped)
    manifest = layouts.read(told.manifest, told.length - told.data_offset)
    payload = Payload(told, False)
    window = tensors.open_views(mapped, told.handle.offset + told.data_offset, manifest, payload)
    return Arrived.of(told, arena, Opened(mapped, payload, window) if window is not None else None)


def open_payload(arrived: Arrived, arena: Arena, copy: bool, last: bool, free: Callable[..., None]) -> Payload:
    """Views (or owned copies) of an arrived payload; `free(uuid, hold)` is called once they are dead.

    Raises Broken, with the hold freed, if manifest and block do not fit each other.
    """
    told, opened = arrived.descriptor, arrived.opened
    release = partial(free, arrived.arena.uuid, arrived.hold)
    try:
        if opened is not None and opened.arena is arena:
            _check_generation(told, arena)
            payload = opened.payload
            payload.last = last
            opened.window.on_release = release
        else:
            _check_bounds(told, arena)
            _check_generation(told, arena)
            manifest = layouts.read(told.manifest, told.length - told.data_offset)
            payload = Payload(told, last)
            tensors.views(arena, told.handle.offset + told.data_offset, manifest, release, into=payload)
    except (ProtocolViolation, Broken) as error:
        release()
        raise Broken(
            f"the payload failed its check: {error.message}",
            **{
                **error.facts,
                "rid": told.rid,
                "edge": str(told.edge),
                "index": told.index,
                "offset": told.handle.offset,
            },
        ) from error
    if copy:
        payload.update(tensors.owned(payload))
    return payload


def _check_bounds(told: Descriptor, arena: Arena) -> None:
    """The descriptor must lie in the arena."""
    (offset, _), length, data_offset = told.handle, told.length, told.data_offset
    inside = arena.data_begin <= offset and offset + length <= arena.end
    if not inside or (offset | data_offset) & 63 or not 64 <= data_offset <= length:
        raise Broken("its block lies outside of the arena", offset=offset, length=length, limit=arena.end)


def _check_generation(told: Descriptor, arena: Arena) -> None:
    """It must name the generation that stands in the block."""
    offset, generation = told.handle
    found = arena.segment.words[offset >> 3]
    if found != generation:
        raise Broken("its block was sealed as another generation", found=found, expected=generation)
