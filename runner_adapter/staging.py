"""Rows at fixed device addresses: what a captured graph reads of its requests' maps, step for step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
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
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._blocks = {
                name: _Block(name, spec, max_tokens if spec.per_token else max_rows, torch.device(device))
                for name, spec in specs.items()
            }
        self._device = torch.device(device)
        #: Behind the last transfers from host blocks. None where a transfer is over when it returns.
        self._sent = torch.cuda.Event() if self._device.type == "cuda" else None

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
        if self._sent is not None:
            # A transfer of the last step may still read the host blocks that are written now.
            self._sent.synchronize()
        with torch.no_grad():
            for name, block in self._blocks.items():
                pieces = [block.piece(row, maps[row.rid].get(name), staged.failures) for row in plan.rows]
                staged.views[name] = block.fill(pieces, block.size(plan))
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))
        return staged


class _Piece(NamedTuple):
    """Rows [start, stop) of a block: a tensor of just that many rows, on the block's device or not; None for zeros."""

    start: int
    stop: int
    tensor: torch.Tensor | None
    on_device: bool


class _Block:
    """One name's tensor on the device and, if that is not the host, the host block that its rows are gathered in."""

    def __init__(self, name: str, spec: RowSpec, most: int, device: torch.device) -> None:
        self.name, self.spec = name, spec
        self.rows = torch.zeros((most, *spec.shape), dtype=spec.dtype, device=device)
        # With its number, as its tensors have it.
        self.device = self.rows.device
        self._host = self.rows
        if device != _HOST:
            self._host = torch.zeros((most, *spec.shape), dtype=spec.dtype, pin_memory=device.type == "cuda")

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
        return _Piece(start, stop, tensor, tensor is not None and tensor.device == self.device)

    def fill(self, pieces: list[_Piece], size: int) -> torch.Tensor:
        """The first `size` rows, with the pieces in them: one copy for each run of pieces that lie in one place, and
        one transfer for all that come from the host."""
        runs = [list(run) for _, run in groupby(pieces, key=lambda piece: (piece.tensor is None, piece.on_device))]
        from_host = any(run[0].tensor is not None and not run[0].on_device for run in runs)
        into = self._host if from_host else self.rows
        for run in runs:
            if not (from_host and run[0].on_device):
                _lay(into, run)
        into[pieces[-1].stop if pieces else 0 : size].zero_()
        view = self.rows[:size]
        if from_host:
            view.copy_(into[:size], non_blocking=True)
            # Only now: the transfer would have covered what is on the device already.
            for run in runs:
                if run[0].on_device:
                    _lay(view, run)
        return view

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


def _lay(block: torch.Tensor, run: list[_Piece]) -> None:
    """Pieces that follow each other, all tensors or all zeros, in one go."""
    rows = block[run[0].start : run[-1].stop]
    tensors = [piece.tensor for piece in run if piece.tensor is not None]
    if tensors:
        torch.cat(tensors, out=rows)
    else:
        rows.zero_()
