"""Rows at fixed device addresses: what a captured graph reads of its requests' maps, step for step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from connector import ConnectorError, errors
from runner_adapter.maps import BatchMaps
from runner_adapter.plan import Row, StepPlan

_HOST = torch.device("cpu")


class RowSpec(NamedTuple):
    """One staged name: `shape` and `dtype` of one row; a request has one, or with `per_token` one for each token."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_token: bool = False


class Staged(NamedTuple):
    """A step's views by name, [padded rows or tokens, *shape], and what was refused, by rid."""

    views: dict[str, torch.Tensor]
    failures: dict[str, ConnectorError]


class DeviceRows:
    """One preallocated tensor on `device` for each declared name; its address never changes.

    [max_rows, *shape], and [max_tokens, *shape] for a name with a row per token. A graph that was captured on the
    views of one step reads the rows of every later step of its size.
    """

    def __init__(
        self,
        specs: Mapping[str, RowSpec],
        *,
        max_rows: int,
        max_tokens: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        place = torch.device(device)
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._blocks = {
                name: _Block(name, spec, max_tokens if spec.per_token else max_rows, place)
                for name, spec in specs.items()
            }
            room = sum(_aligned(block.rows.nbytes) for block in self._blocks.values())
            self._transfer = Transfer(room, place) if place != _HOST else None

    def stage(self, maps: BatchMaps, plan: StepPlan) -> Staged:
        """Lay the maps' tensors at their rows, or at their requests' spans; everything else of the views is zero.

        `maps`: gathered for this plan by name. A row is [*shape] or [1, *shape], or with `per_token`
        [tokens of the span, *shape]. Call it outside of capture, on the stream that the forward runs on.

        A tensor of another shape (InvalidPayload), or of another dtype or device (UnsupportedTensor), is its
        request's failure, and its row is zero. UsageError: maps of another step or in another form, a step with
        more rows or tokens than there is room for.
        """
        maps.check(plan)
        if plan.rows and maps.form != "names":
            raise errors.UsageError("maps to stage must be gathered by name", form=maps.form, names=list(self._blocks))
        for block in self._blocks.values():
            block.check_room(plan)
        staged = Staged({}, {})
        with torch.no_grad():
            laid = [
                block.laid([block.piece(row, maps[row.rid].get(name), staged.failures) for row in plan.rows], plan)
                for name, block in self._blocks.items()
            ]
            if self._transfer is not None:
                self._transfer.send([one for one in laid if one.from_host])
            for name, one in zip(self._blocks, laid, strict=True):
                one.lay_there()
                staged.views[name] = one.rows
        return staged


class _Piece(NamedTuple):
    """Rows [start, stop) of a block: a tensor of just that many rows, on the block's device or not; None for zeros."""

    start: int
    stop: int
    tensor: torch.Tensor | None
    on_device: bool


class _Laid:
    """A name's part of a step. `rows`: its view on the device; `from_host`: some of it comes by the transfer, with all
    zeros, and what is on the device is laid behind that."""

    def __init__(self, rows: torch.Tensor, pieces: list[_Piece]) -> None:
        self.rows = rows
        self._stop = pieces[-1].stop if pieces else 0
        #: Pieces that follow each other and lie in one place.
        self._runs = [list(run) for _, run in groupby(pieces, key=lambda one: (one.tensor is None, one.on_device))]
        self.from_host = any(run[0].tensor is not None and not run[0].on_device for run in self._runs)

    def lay_host(self, into: torch.Tensor) -> None:
        """`into`: the same rows, on the host."""
        for run in self._runs:
            if not run[0].on_device:
                _lay(into, run)
        into[self._stop :].zero_()

    def lay_there(self) -> None:
        for run in self._runs:
            if run[0].on_device or not self.from_host:
                _lay(self.rows, run)
        if not self.from_host:
            self.rows[self._stop :].zero_()


class Transfer:
    """What a step has on the host, to the device by one copy that nobody waits for. Two host blocks take turns: a step
    waits for the copy of the step before the last."""

    def __init__(self, room: int, device: torch.device) -> None:
        """`room`: bytes."""
        cuda = _is_cuda(device)
        make = _page_locked if cuda else partial(torch.zeros, dtype=torch.uint8)
        #: Host blocks, and the events behind their last copies; None where a copy is over when it returns.
        self._turns = deque((make(room), torch.cuda.Event() if cuda else None) for _ in range(2))
        #: Where they arrive. From there each name's rows go to their fixed address.
        self._landing = torch.zeros(room, dtype=torch.uint8, device=device)

    def send(self, names: list[_Laid]) -> None:
        """Bring what they have on the host to their rows."""
        if not names:
            return
        host, sent = self._turns[0]
        self._turns.rotate()
        if sent is not None:
            sent.synchronize()
        ends = list(accumulate(_aligned(one.rows.nbytes) for one in names))
        for one, end in zip(names, ends, strict=True):
            one.lay_host(_as(host, end, one.rows))
        self._landing[: ends[-1]].copy_(host[: ends[-1]], non_blocking=True)
        if sent is not None:
            sent.record(torch.cuda.current_stream(self._landing.device))
        for one, end in zip(names, ends, strict=True):
            one.rows.copy_(_as(self._landing, end, one.rows))


class _Block:
    """One name's tensor on the device."""

    def __init__(self, name: str, spec: RowSpec, most: int, device: torch.device) -> None:
        self.name, self.spec = name, spec
        self.rows = torch.zeros((most, *spec.shape), dtype=spec.dtype, device=device)
        # With its number, as its tensors have it.
        self.device = self.rows.device

    def laid(self, pieces: list[_Piece], plan: StepPlan) -> _Laid:
        return _Laid(self.rows[: self.size(plan)], pieces)

    def size(self, plan: StepPlan) -> int:
        return plan.padded_tokens if self.spec.per_token else plan.padded_rows

    def check_room(self, plan: StepPlan) -> None:
        most = len(self.rows)
        if self.size(plan) > most:
            ends = ((row.rid, self._place(row)[1]) for row in plan.rows)
            raise errors.UsageError(
                f"the step has more {'tokens' if self.spec.per_token else 'rows'} than were declared",
                rid=next((rid for rid, end in ends if end > most), None),
                name=self.name,
                size=self.size(plan),
                limit=most,
            )

    def piece(self, row: Row, value: object, failures: dict[str, ConnectorError]) -> _Piece:
        """What is laid at the request's place. A refusal goes to `failures`, unless an earlier one is there."""
        start, stop = self._place(row)
        try:
            tensor = None if value is None else self._fit(row.rid, value, stop - start)
        except ConnectorError as error:
            # Anew: a kept traceback would hold the maps.
            failures.setdefault(row.rid, error.anew())
            tensor = None
        return _Piece(start, stop, tensor, tensor is not None and _is_on(tensor, self.device))

    def _place(self, row: Row) -> tuple[int, int]:
        return row.span if self.spec.per_token else (row.index, row.index + 1)

    def _fit(self, rid: str, value: object, count: int) -> torch.Tensor:
        """The value as [count, *shape]; InvalidPayload or UnsupportedTensor if it is not what was declared."""
        spec, device = self.spec, self.device
        if not isinstance(value, torch.Tensor):
            raise errors.InvalidPayload(
                "a staged value must be a tensor", rid=rid, name=self.name, type=type(value).__name__
            )
        if value.dtype != spec.dtype or value.layout != torch.strided or value.device not in (_HOST, device):
            raise errors.UnsupportedTensor(
                "the tensor is of another dtype, layout or device than declared for this name",
                rid=rid,
                name=self.name,
                dtype=str(value.dtype),
                layout=str(value.layout),
                device=str(value.device),
                declared=f"{spec.dtype} on {device}",
            )
        wanted = (count, *spec.shape)
        if value.shape != wanted and (spec.per_token or value.shape != wanted[1:]):
            raise errors.InvalidPayload(
                f"the tensor is not {'a row for each token of the span' if spec.per_token else 'one row'}",
                rid=rid,
                name=self.name,
                shape=str(tuple(value.shape)),
                wanted=str(wanted),
            )
        return value if value.shape == wanted else value.reshape(wanted)


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _page_locked(room: int) -> torch.Tensor:
    return torch.zeros(room, dtype=torch.uint8, pin_memory=True)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device


def _lay(block: torch.Tensor, run: list[_Piece]) -> None:
    """Pieces that follow each other, all tensors or all zeros, in one go."""
    rows = block[run[0].start : run[-1].stop]
    tensors = [piece.tensor for piece in run if piece.tensor is not None]
    if tensors:
        torch.cat(tensors, out=rows)
    else:
        rows.zero_()


def _aligned(nbytes: int) -> int:
    """Bytes that a name's rows take among the others': their dtype's views begin where they may."""
    return -(-nbytes // 256) * 256


def _as(block: torch.Tensor, end: int, rows: torch.Tensor) -> torch.Tensor:
    """The bytes of a block before `end` that are for these rows, as such."""
    start = end - _aligned(rows.nbytes)
    return block[start : start + rows.nbytes].view(rows.dtype).view(rows.shape)
