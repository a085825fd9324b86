"""talker_mtp: the decode rows of a step packed into fixed buffers, and each request's draws from its own generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from connector import errors
from runner_adapter.hooks import Failures, Maps, MtpInput, isolated

#: Seeds that a torch.Generator takes.
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
#: The rows of one call, and whose generators they draw from.
_Call = list[tuple[MtpInput, torch.Generator | None]]


def is_seed(value: object) -> bool:
    """Whether a torch.Generator takes it."""
    return isinstance(value, int) and not isinstance(value, bool) and MIN_SEED <= value <= MAX_SEED


class Talker:
    """Calls `model.talker_mtp(ids, embeds, hidden, text_step, **sampling) -> (embeds, codes)` for decode rows.

    The buffers `input_ids` int32 [max_rows], `inputs_embeds`, `last_hidden` and `text_step` [max_rows, width] keep
    their addresses, so that a captured graph may read them. Their width is the model's `mtp_hidden_size`, or else
    `hidden_size` (runner). `padded` tells the captured size for a number of rows; without it there is no padding.
    `sampling` is given to each call as it is. `generator_of(rid)` is the generator that the engine has for a request,
    or None: then, and without it, the request draws by its seed. Codes are merged under
    `model.talker_mtp_output_key`, by default ("codes", "audio"). The model is looked up once: build this after the
    engine has wrapped it.

    TypeError if that key is not two str; UsageError if the model has no talker_mtp or a size is missing.
    """

    def __init__(
        self,
        model: object,
        *,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        hidden_size: int | None = None,
        padded: Callable[[int], int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        generator_of: Callable[[str], torch.Generator | None] | None = None,
    ) -> None:
        call = getattr(model, "talker_mtp", None)
        width = int(getattr(model, "mtp_hidden_size", 0) or hidden_size or 0)
        if not callable(call) or width < 1 or max_rows < 1:
            raise errors.UsageError(
                "the talker needs a callable talker_mtp, a width and rows",
                model=type(model).__name__,
                width=width,
                max_rows=max_rows,
            )
        self._call: Callable[..., Any] = call
        self._output_key = _output_key(getattr(model, "talker_mtp_output_key", ("codes", "audio")))
        self._takes_a_list = bool(getattr(model, "talker_mtp_accepts_per_row_generators", False))
        self._sampling = dict(sampling or {})
        self._padded, self._generator_of = padded, generator_of
        self._generators: dict[str, torch.Generator] = {}
        self.max_rows, self.width = max_rows, width
        self.input_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.inputs_embeds, self.last_hidden, self.text_step = (
            torch.zeros(max_rows, width, dtype=dtype, device=device) for _ in range(3)
        )

    def run(
        self,
        mtp_inputs: Iterable[MtpInput],
        buffer: Maps,
        input_ids: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
        *,
        seeds: Mapping[str, int] | None = None,
        failures: Failures,
    ) -> None:
        """One call for a step's decode rows, in row order; embeds go to each row's token, codes are merged.

        Ids and embeds are read from the step's [tokens] and [tokens, width] as preprocess left them. A request of
        `seeds` draws from a generator of its own, made once, unless `generator_of` has one for it; never from
        another's: so it is called alone, unless the model takes a list (`talker_mtp_accepts_per_row_generators`).
        Requests without a generator share a call. Calls with one are not padded: padding would draw from the
        request's stream.

        A call that raises or gives what does not fit (InvalidPayload) fails its rows; a codes' merge that is refused,
        a seed or a width that cannot be, a `generator_of` that raises, that request. The embeds of a failed row are
        as they were. UsageError if the step does not fit the buffers.
        """
        rows = [one for one in mtp_inputs if one.row.rid not in failures]
        if not rows or inputs_embeds is None:
            return
        if len(rows) > self.max_rows or inputs_embeds.shape[1] != self.width:
            raise errors.UsageError(
                "the step does not fit the talker's buffers",
                rows=len(rows),
                max_rows=self.max_rows,
                width=inputs_embeds.shape[1],
                buffer_width=self.width,
            )
        for call in self._calls(rows, seeds or {}, failures):
            drawing = _drawing([generator for _, generator in call])
            size = len(call) if drawing else self._size(len(call))
            with isolated(failures, [one.row.rid for one, _ in call], "talker_mtp"):
                group = [one for one, _ in call]
                self._pack(group, size, input_ids, inputs_embeds)
                self._hand_out(group, *self._predict(len(group), size, drawing), buffer, inputs_embeds, failures)

    def warm_up(self, rows: int) -> None:
        """A call on the first `rows` of the buffers, zeros, without any request: for profiling and capture."""
        size = self._size(rows)
        self._clear(0, size)
        self._predict(rows, size, {})

    def finish(self, rids: Iterable[str]) -> None:
        """The generators of finished requests go: the same id again draws its seed's stream from the start."""
        for rid in rids:
            self._generators.pop(rid, None)

    def _calls(self, rows: Iterable[MtpInput], seeds: Mapping[str, int], failures: Failures) -> list[_Call]:
        """The rows of each call, in the order of the calls' first rows."""
        shared: _Call = []
        calls: list[_Call] = []
        for one in rows:
            rid = one.row.rid
            with isolated(failures, [rid], "talker_mtp"):
                for part in (one.hidden, one.text_step):
                    if part.numel() != self.width:
                        raise errors.InvalidPayload(
                            "mtp_inputs have another width than the talker",
                            rid=rid,
                            size=part.numel(),
                            limit=self.width,
                        )
                generator = self._generator(rid, seeds.get(rid))
                if generator is not None and not self._takes_a_list:
                    calls.append([(one, generator)])
                    continue
                if not shared:
                    calls.append(shared)
                shared.append((one, generator))
        return calls

    def _generator(self, rid: str, seed: int | None) -> torch.Generator | None:
        own = None if self._generator_of is None else self._generator_of(rid)
        if own is not None or seed is None:
            return own
        if rid not in self._generators:
            if not is_seed(seed):
                raise errors.InvalidPayload("a seed is an int of 64 bits", rid=rid, seed=repr(seed)[:40])
            self._generators[rid] = torch.Generator(self.input_ids.device)
            self._generators[rid].manual_seed(seed)
        return self._generators[rid]

    def _size(self, rows: int) -> int:
        size = rows if self._padded is None else self._padded(rows)
        if not 1 <= rows <= size <= self.max_rows:
            raise errors.UsageError(
                "a call's padded size holds its rows and fits the buffers", rows=rows, size=size, limit=self.max_rows
            )
        return size

    def _pack(self, group: Sequence[MtpInput], size: int, input_ids: torch.Tensor, inputs_embeds: torch.Tensor) -> None:
        rows = len(group)
        starts = torch.tensor([one.row.start for one in group])
        self.input_ids[:rows].copy_(input_ids.index_select(0, starts.to(input_ids.device)))
        self.inputs_embeds[:rows].copy_(inputs_embeds.index_select(0, starts.to(inputs_embeds.device)))
        torch.cat([one.hidden.to(self.last_hidden) for one in group], out=self.last_hidden[:rows])
        torch.cat([one.text_step.to(self.text_step) for one in group], out=self.text_step[:rows])
        self._clear(rows, size)

    def _clear(self, start: int, stop: int) -> None:
        """Padding is never what an earlier step left."""
        for part in (self.input_ids, self.inputs_embeds, self.last_hidden, self.text_step):
            part[start:stop].zero_()

    def _predict(self, rows: int, size: int, drawing: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """What talker_mtp gave, checked: embeds [rows, width] and codes [rows, ...]."""
        given = self._call(
            self.input_ids[:size],
            self.inputs_embeds[:size],
            self.last_hidden[:size],
            self.text_step[:size],
            **self._sampling,
            **drawing,
        )
        if not isinstance(given, tuple | list) or [isinstance(part, torch.Tensor) for part in given] != [True, True]:
            raise errors.InvalidPayload("talker_mtp gives (embeds, codes), two tensors", given=type(given).__name__)
        embeds, codes = (part.detach()[:rows] for part in given)
        if embeds.shape != (rows, self.width) or codes.shape[:1] != (rows,):
            raise errors.InvalidPayload(
                "talker_mtp gives a row of the buffers' width and a row of codes for each of its rows",
                rows=rows,
                width=self.width,
                embeds=f"{list(embeds.shape)}",
                codes=f"{list(codes.shape)}",
            )
        return embeds, codes

    def _hand_out(
        self,
        group: Sequence[MtpInput],
        embeds: torch.Tensor,
        codes: torch.Tensor,
        buffer: Maps,
        inputs_embeds: torch.Tensor,
        failures: Failures,
    ) -> None:
        kind, qualifier = self._output_key
        done: list[int] = []
        for place, one in enumerate(group):
            with isolated(failures, [one.row.rid], "talker_mtp"):
                buffer.merge(one.row.rid, {kind: {qualifier: codes[place : place + 1]}})
                done.append(place)
        starts = torch.tensor([group[place].row.start for place in done], dtype=torch.long)
        inputs_embeds.index_copy_(0, starts.to(inputs_embeds.device), embeds[done].to(inputs_embeds))


def _drawing(generators: Sequence[torch.Generator | None]) -> dict[str, Any]:
    """The keyword of a call whose rows draw from these; none if all draw from the device's own."""
    if all(generator is None for generator in generators):
        return {}
    return {"generator": generators[0]} if len(generators) == 1 else {"generators": list(generators)}


def _output_key(given: object) -> tuple[str, str]:
    if not isinstance(given, tuple) or len(given) != 2 or not all(isinstance(part, str) for part in given):
        raise TypeError(f"talker_mtp_output_key must be a tuple of two str (type key, qualifier), not {given!r:.80}")
    return given
