"""A step as data: which request has which row and which tokens, and how far captured sizes pad it."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from connector import errors
from runner_adapter.requests import check_rid, unknown


@dataclass(frozen=True, slots=True)
class Row:
    """A request's place in one step: row `index`, tokens [start, stop) of the flattened step.

    `generated` output tokens were accepted for the request before this step.
    """

    rid: str
    index: int
    start: int
    stop: int
    generated: int = 0
    prefill: bool = False

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.stop

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, in the order of its batch. UsageError if the padded sizes do not hold them.

    `padded_rows` and `padded_tokens` are the sizes that the step runs with: a captured graph's, or else its own.
    """

    rows: tuple[Row, ...]
    tokens: int
    padded_rows: int
    padded_tokens: int

    def __post_init__(self) -> None:
        count = len(self.rows)
        if self.padded_rows < count:
            over = self.rows[max(self.padded_rows, 0)].rid if count else None
            raise errors.UsageError(
                "the padded size is smaller than the step", rid=over, rows=count, padded_rows=self.padded_rows
            )
        if self.padded_tokens < self.tokens or self.padded_tokens < 0:
            over = next((row.rid for row in self.rows if row.stop > self.padded_tokens), None)
            raise errors.UsageError(
                "the padded size is smaller than the step",
                rid=over,
                tokens=self.tokens,
                padded_tokens=self.padded_tokens,
            )

    @classmethod
    def make(
        cls,
        rids: Iterable[str],
        counts: Mapping[str, int],
        *,
        generated: Mapping[str, int] | None = None,
        prefill: Container[str] | None = None,
        padded_rows: int | None = None,
        padded_tokens: int | None = None,
    ) -> StepPlan:
        """The plan of a step whose batch has these `rids`, in this order; `counts` gives each one's scheduled tokens.

        The order of `rids` alone is the batch's order, never a mapping's. A count of 0 is a row with an empty
        span: a runner keeps the row of every request that its scheduler named. `generated` gives the accepted
        output tokens by rid; under speculative decoding drafted tokens that were not accepted do not count. A rid
        that is not in it has none yet. `prefill` holds the rids that are still reading their prompt; without it
        these are the rows of more than one token, and a caller that drafts tokens, or whose prompts may end in a
        chunk of one token, must give it. `generated` and `prefill` may name requests that wait.

        UsageError, with rid and numbers: a rid that is empty, no str or there twice, a number that is negative or no
        int, a rid without a count, a count without a row, padding smaller than the step.
        """
        if isinstance(rids, str) or isinstance(prefill, str):
            one = rids if isinstance(rids, str) else prefill
            raise errors.UsageError("a step takes several rids, not one str", rid=one)
        if not isinstance(rids, Iterable) or not isinstance(counts, Mapping):
            raise errors.UsageError(
                "a step is made of rids, and of counts by rid", rids=type(rids).__name__, counts=type(counts).__name__
            )
        if not isinstance(prefill, Container | None):
            raise errors.UsageError("`prefill` holds rids, such as a set", given=type(prefill).__name__)
        found: dict[str, Row] = {}
        start = 0
        for index, rid in enumerate(rids):
            if check_rid(rid) in found:
                raise errors.UsageError("a request has one row in a step", rid=rid, rows=[found[rid].index, index])
            if rid not in counts:
                raise errors.UsageError("the request has a row, but no count of tokens", rid=rid, row=index)
            tokens = _number(counts[rid], "a row's count of tokens", rid)
            done = _number((generated or {}).get(rid, 0), "the number of generated tokens", rid)
            reading = tokens > 1 if prefill is None else rid in prefill
            found[rid] = Row(rid, index, start, start + tokens, done, reading)
            start += tokens
        if len(counts) > len(found):
            lost = next(rid for rid in counts if rid not in found)
            raise errors.UsageError("the request has scheduled tokens, but no row", rid=lost, count=counts[lost])
        return cls(
            tuple(found.values()),
            start,
            len(found) if padded_rows is None else _number(padded_rows, "padded_rows"),
            start if padded_tokens is None else _number(padded_tokens, "padded_tokens"),
        )

    @classmethod
    def empty(cls, padded_rows: int = 0, padded_tokens: int = 0) -> StepPlan:
        """A step without any request, as profiling and capture run one: all of it is padding."""
        return cls.make((), {}, padded_rows=padded_rows, padded_tokens=padded_tokens)

    @cached_property
    def rids(self) -> tuple[str, ...]:
        """In batch order, without padding."""
        return tuple(row.rid for row in self.rows)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Each row's (start, stop), in batch order, without padding."""
        return tuple(row.span for row in self.rows)

    @cached_property
    def decode(self) -> tuple[Row, ...]:
        """Rows of one token that are past their prompt."""
        return tuple(row for row in self.rows if row.tokens == 1 and not row.prefill)

    @cached_property
    def _by_rid(self) -> dict[str, Row]:
        return {row.rid: row for row in self.rows}

    def __contains__(self, rid: object) -> bool:
        return rid in self._by_rid

    def row(self, rid: str) -> Row:
        """The request's row; UnknownRequest if it has none in this step."""
        row = self._by_rid.get(rid)
        if row is None:
            raise unknown(rid, self.rids, "the request has no row in this step")
        return row


def _number(value: object, what: str, rid: str | None = None) -> int:
    """An int of any library's; UsageError if it is a bool, no int, or negative."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise errors.UsageError(f"{what} must be an int of 0 or more", rid=rid, value=repr(value)[:80])
    return number
