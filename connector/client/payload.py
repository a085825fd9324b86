"""What a reader gets: a mapping of tensors that pins its block for as long as any view of it is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from connector.arena import tensors
from connector.arena.arena import Arena
from connector.client import layouts
from connector.client.rid_queue import Arrived
from connector.core.directory.events import Flags
from connector.core.errors import Broken, ProtocolViolation
from connector.core.names import Edge

if TYPE_CHECKING:
    import torch


class Payload(Mapping[str, "torch.Tensor"]):
    """`dict[str, Tensor]` as it was put: keys in the order of the put, exact dtypes, shapes and bits.

    Views on shared memory unless it was copied: do not write to them, another reader may share them. The
    block is released when the last view has died; leaving a `with` block drops this object's own.
    """

    __slots__ = ("_tensors", "attempt", "edge", "index", "last", "life", "redelivered", "rid")

    def __init__(self, arrived: Arrived, found: dict[str, torch.Tensor], last: bool) -> None:
        told = arrived.descriptor
        self._tensors = found
        self.edge: Edge = told.edge
        self.rid: str = told.rid
        #: Chunk number in its stream.
        self.index: int = told.index
        self.attempt: int = told.attempt
        #: Which use of the rid, numbered by the broker.
        self.life: int = told.life
        #: The stream ends with this payload.
        self.last: bool = last
        #: It was delivered before, to a reader that died.
        self.redelivered: bool = bool(told.flags & Flags.REDELIVERED)

    def __getitem__(self, key: str) -> torch.Tensor:
        found = self._tensors.get(key)
        if found is None:
            there = ", ".join(sorted(self._tensors)) or "none (released, or an empty payload)"
            raise KeyError(f"no tensor {key!r} in {self.rid}[{self.index}] on {self.edge}; there are: {there}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

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
        self._tensors = {}


def open_payload(arrived: Arrived, arena: Arena, copy: bool, last: bool, free: Callable[..., None]) -> Payload:
    """Views (or owned copies) of an arrived payload; `free(uuid, hold)` is called once they are dead.

    Raises Broken, with the hold freed, if manifest and block do not fit each other.
    """
    told = arrived.descriptor
    offset, generation = told.handle
    release = partial(free, arrived.arena.uuid, arrived.hold)
    try:
        if (
            offset < arena.data_begin
            or offset + told.length > arena.end
            or (offset | told.data_offset) & 63
            or not 64 <= told.data_offset <= told.length
            or arena.segment.words[offset >> 3] != generation
        ):
            _check_place(arrived, arena)
        manifest = layouts.read(told.manifest, told.length - told.data_offset)
        found = tensors.views(arena, offset + told.data_offset, manifest, release)
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
    return Payload(arrived, tensors.owned(found) if copy else found, last)


def _check_place(arrived: Arrived, arena: Arena) -> None:
    """The descriptor must lie in the arena and name the generation that stands in the block."""
    told = arrived.descriptor
    offset = told.handle.offset
    inside = arena.data_begin <= offset and offset + told.length <= arena.end
    if not inside or offset % 64 or not 64 <= told.data_offset <= told.length or told.data_offset % 64:
        raise Broken("its block lies outside of the arena", offset=offset, length=told.length, limit=arena.end)
    found = arena.segment.words[offset >> 3]
    if found != told.handle.generation:
        raise Broken("its block was sealed as another generation", found=found, expected=told.handle.generation)
