"""A step as data: rows in the batch's order, spans without gaps, decode rows, padding."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from runner_adapter.plan import Row, StepPlan


class Number:
    """An int of another library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_rows_stand_in_the_order_of_the_rids_not_of_the_counts() -> None:
    plan = StepPlan.make(["c", "a"], {"a": 3, "c": 2}, generated={"a": 7}, prefill={"c"})
    assert plan.rows == (Row("c", 0, 0, 2, 0, True), Row("a", 1, 2, 5, 7, False))
    assert (plan.rids, plan.spans, plan.tokens) == (("c", "a"), ((0, 2), (2, 5)), 5)


@given(st.permutations(range(8)), st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 8))
def test_spans_follow_each_other_without_gaps(order: list[int], counts: list[int], size: int) -> None:
    """Whatever order the counts were told in."""
    rids = [f"r{number}" for number in order[:size]]
    plan = StepPlan.make(rids, {f"r{number}": counts[number] for number in sorted(order[:size])})
    assert list(plan.rids) == rids
    assert [row.index for row in plan.rows] == list(range(size))
    edges = [0, *(row.stop for row in plan.rows)]
    assert [row.start for row in plan.rows] == edges[:-1]
    assert [row.tokens for row in plan.rows] == [counts[number] for number in order[:size]]
    assert plan.tokens == plan.padded_tokens == edges[-1]
    assert plan.padded_rows == size


def test_generated_tokens_are_those_of_this_step() -> None:
    """A request that is not named has none yet; one that waits may be named."""
    first = StepPlan.make(["a", "b"], {"a": 4, "b": 1}, generated={"b": 2, "waits": 9})
    second = StepPlan.make(["b", "a"], {"a": 1, "b": 1}, generated={"b": 3, "a": 1, "waits": 9})
    assert [row.generated for row in first.rows] == [0, 2]
    assert [row.generated for row in second.rows] == [3, 1]


def test_decode_rows_have_one_token_and_are_past_their_prompt() -> None:
    counts = {"reads": 5, "last-of-prompt": 1, "decodes": 1, "drafts": 3}
    plan = StepPlan.make(counts, counts, prefill=["reads", "last-of-prompt"])
    assert [row.rid for row in plan.decode] == ["decodes"]
    assert [row.prefill for row in plan.rows] == [True, True, False, False]


def test_without_being_told_rows_of_several_tokens_read_their_prompt() -> None:
    plan = StepPlan.make(["a", "b", "c"], {"a": 2, "b": 1, "c": 0})
    assert [row.prefill for row in plan.rows] == [True, False, False]
    assert [row.rid for row in plan.decode] == ["b"]


def test_a_row_without_tokens_keeps_its_place() -> None:
    plan = StepPlan.make(["a", "b", "c"], {"a": 2, "b": 0, "c": 1})
    assert plan.spans == ((0, 2), (2, 2), (2, 3))
    assert plan.row("b").tokens == 0


@pytest.mark.parametrize(
    ("rids", "counts", "more", "facts"),
    [
        (["a", "b", "a"], {"a": 1, "b": 1}, {}, {"rid": "a", "rows": [0, 2]}),
        (["a", ""], {"a": 1, "": 1}, {}, {"rid": "''"}),
        ([None], {None: 1}, {}, {"rid": "None"}),
        ("ab", {"a": 1, "b": 1}, {}, {"rid": "ab"}),
        (["a"], {"a": 1}, {"prefill": "ab"}, {"rid": "ab"}),
        (["a"], {"a": 1}, {"prefill": 3}, {"given": "int"}),
        (None, {}, {}, {"rids": "NoneType", "counts": "dict"}),
        (["a"], None, {}, {"rids": "list", "counts": "NoneType"}),
        (["a", "b"], {"a": 1}, {}, {"rid": "b", "row": 1}),
        (["a"], {"a": 1, "b": 4}, {}, {"rid": "b", "count": 4}),
        (["a"], {"a": -2}, {}, {"rid": "a", "value": "-2"}),
        (["a"], {"a": 1.0}, {}, {"rid": "a", "value": "1.0"}),
        (["a"], {"a": True}, {}, {"rid": "a", "value": "True"}),
        (["a"], {"a": 1}, {"generated": {"a": -1}}, {"rid": "a", "value": "-1"}),
        (["a", "b"], {"a": 1, "b": 1}, {"padded_rows": 1}, {"rid": "b", "rows": 2, "padded_rows": 1}),
        (["a", "b"], {"a": 2, "b": 3}, {"padded_tokens": 4}, {"rid": "b", "tokens": 5, "padded_tokens": 4}),
        ([], {}, {"padded_tokens": -1}, {"value": "-1"}),
        ([], {}, {"padded_rows": "4"}, {"value": "'4'"}),
    ],
)
def test_a_step_that_cannot_be_is_refused(
    rids: Any, counts: dict[Any, Any], more: dict[str, Any], facts: dict[str, Any]
) -> None:
    with pytest.raises(errors.UsageError) as caught:
        StepPlan.make(rids, counts, **more)
    assert caught.value.facts == facts


@pytest.mark.parametrize("sizes", [(-1, 0), (0, -1)])
def test_padding_is_checked_however_a_plan_is_made(sizes: tuple[int, int]) -> None:
    with pytest.raises(errors.UsageError, match="smaller than the step"):
        StepPlan((), 0, *sizes)


def test_numbers_of_other_libraries_become_ints() -> None:
    plan = StepPlan.make(["a"], {"a": Number(2)}, generated={"a": Number(3)}, padded_tokens=Number(4))  # type: ignore[dict-item, arg-type]
    assert [type(n) for n in (plan.tokens, plan.rows[0].generated, plan.padded_tokens)] == [int, int, int]
    assert (plan.tokens, plan.rows[0].generated, plan.padded_tokens) == (2, 3, 4)


def test_padding_adds_no_rows() -> None:
    plan = StepPlan.make(["a"], {"a": 3}, padded_rows=4, padded_tokens=8)
    assert (len(plan.rows), plan.tokens, plan.padded_rows, plan.padded_tokens) == (1, 3, 4, 8)
    assert plan.spans == ((0, 3),)


def test_a_step_without_requests_is_padding_alone() -> None:
    plan = StepPlan.empty(padded_rows=2, padded_tokens=16)
    assert plan == StepPlan((), 0, 2, 16)
    assert (plan.rids, plan.spans, plan.decode) == ((), (), ())
    assert StepPlan.empty() == StepPlan((), 0, 0, 0)


def test_a_row_is_found_by_its_rid() -> None:
    plan = StepPlan.make(["a", "b"], {"a": 2, "b": 1})
    assert plan.row("b") == Row("b", 1, 2, 3)
    assert ("b" in plan, "c" in plan) == (True, False)
    with pytest.raises(errors.UnknownRequest) as caught:
        plan.row("aa")
    assert caught.value.facts == {"rid": "aa", "near": ["a"]}


def test_a_plan_is_made_without_torch() -> None:
    """A scheduler's process plans, too."""
    program = "import sys, runner_adapter.plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
