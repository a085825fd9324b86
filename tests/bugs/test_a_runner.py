"""Kind A of the bug log, where it is the runner's batch: rows, order, ids, names. Tests are named after entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from runner_adapter import (
    MergeRules,
    ModelIntermediateBuffer,
    RunnerAdapter,
    StepPlan,
    cut,
    flatten,
    gather,
)
from tests.runner_adapter.models import HookModel, raises

CODES = "codes.audio"


def numbered(**of: int) -> ModelIntermediateBuffer:
    """By rid, `x` is that number."""
    buffer = ModelIntermediateBuffer()
    for rid, number in of.items():
        buffer.add(rid, {"x": torch.tensor([number])})
    return buffer


def test_b07_a_tensor_of_fewer_rows_than_the_step_goes_to_nobody() -> None:
    """Three requests, codes of the two that decode: by its rows alone nobody can say whose they are."""
    plan = StepPlan.make(["a", "b", "c"], {"a": 1, "b": 5, "c": 1}, prefill={"b"})
    text, codes = torch.zeros(7, 4), torch.tensor([[1], [2]])
    found, refused = cut((text, {CODES: codes}), plan, {CODES: 0})
    assert not any(CODES in named for named in found.values())
    assert {rid: type(error) for rid, error in refused.items()} == dict.fromkeys("abc", errors.InvalidPayload)
    facts = refused["a"].facts
    assert (facts["name"], facts["shape"], facts["expected"]) == (CODES, [2, 1], [7])
    by_rid = {"a": codes[:1], "c": codes[1:]}
    found, refused = cut((text, {CODES: by_rid}), plan, {CODES: 0})
    assert {rid: named[CODES].tolist() for rid, named in found.items() if CODES in named} == {"a": [[1]], "c": [[2]]}
    assert refused == {}


def test_b08_maps_follow_the_rows_of_this_step() -> None:
    adapter = RunnerAdapter(object())
    first = {rid: {"x": torch.tensor([number])} for rid, number in {"a": 1, "b": 2, "c": 3}.items()}
    adapter.begin_step(new=first, scheduled=["c", "a"])
    seen = []
    for order in (["c", "a"], ["b", "c", "a"]):
        adapter.begin_step(scheduled=order)
        # The scheduler's own order is another one.
        plan = StepPlan.make(order, dict.fromkeys(sorted(order), 1))
        seen.append([int(held["x"]) for held in adapter.gather(plan)])
    adapter.begin_step(finished=["a"], new={"d": {"x": torch.tensor([4])}}, scheduled=["b", "c", "d"])
    plan = StepPlan.make(["d", "b", "c"], dict.fromkeys("bcd", 1))
    seen.append([int(held["x"]) for held in adapter.gather(plan)])
    assert seen == [[3, 1], [2, 3, 1], [4, 2, 3]]


def test_b08_a_row_without_a_request_keeps_its_place() -> None:
    buffer = numbered(a=1)
    adapter_rows = StepPlan.make(["nobody", "a"], {"nobody": 1, "a": 1})
    maps = gather(buffer, adapter_rows)
    assert [len(held) for held in maps] == [0, 1] and int(maps["a"]["x"]) == 1


@pytest.mark.parametrize("rid", [None, "", 7])
def test_b10_without_an_id_there_is_no_request(rid: object) -> None:
    """Nothing is shared by those that have none."""
    adapter = RunnerAdapter(HookModel())
    with pytest.raises(errors.UsageError):
        adapter.begin_step(new=[rid], scheduled=[])  # type: ignore[list-item]
    with pytest.raises(errors.UsageError):
        StepPlan.make([rid], {rid: 1})  # type: ignore[list-item,dict-item]
    assert len(adapter.buffer) == 0 and list(adapter.requests) == []


def test_b10_a_hook_is_given_the_id_of_its_row() -> None:
    model = HookModel()
    adapter = RunnerAdapter(model)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    adapter.preprocess(StepPlan.make(["b", "a"], {"a": 1, "b": 1}), torch.zeros(2, dtype=torch.int64))
    assert model.called == ["b", "a"]


def test_b11_a_new_row_puts_no_live_request_out() -> None:
    """A prefill comes first, and those that decode are called behind it: each finds its own map."""
    live = ["d1", "d2", "d3", "d4"]
    model = HookModel()
    adapter = RunnerAdapter(model)
    adapter.begin_step(new={rid: {"x": torch.tensor([n])} for n, rid in enumerate(live)}, scheduled=live)
    adapter.begin_step(new=["p"], scheduled=["p", *live])
    plan = StepPlan.make(["p", *live], {"p": 3, **dict.fromkeys(live, 1)})
    adapter.preprocess(plan, torch.zeros(7, dtype=torch.int64))
    assert [int(call["x"]) for call in model.calls[1:]] == [0, 1, 2, 3]
    # Not even while nothing of them is scheduled.
    adapter.begin_step(scheduled=["p"])
    assert set(adapter.buffer) == {"p", *live}


@given(st.permutations(["a", "b", "c", "d"]), st.sets(st.sampled_from(["a", "b", "c", "d"])))
def test_b12_a_swap_of_rows_moves_each_state_with_its_request(order: list[str], without: set[str]) -> None:
    """Requests without state leave an empty row, wherever they stand."""
    buffer = numbered(**{rid: n for n, rid in enumerate("abcd") if rid not in without})
    for rid in without:
        buffer.add(rid)
    adapter = RunnerAdapter(object())
    adapter.buffer = buffer
    maps = adapter.gather(StepPlan.make(order, dict.fromkeys(order, 1)))
    found = [int(held["x"]) if held else None for held in maps]
    assert found == [None if rid in without else "abcd".index(rid) for rid in order]


def test_b14_a_nested_name_and_its_flat_spelling_are_one() -> None:
    buffer = ModelIntermediateBuffer()
    buffer.add("a", {"meta": {"left_context": torch.tensor(25)}})
    assert int(buffer["a"]["meta.left_context"]) == 25 and int(buffer.nested("a")["meta"]["left_context"]) == 25
    assert "left_context" not in buffer["a"]
    buffer.merge("a", {"meta.left_context": torch.tensor(26)})
    assert int(buffer.nested("a")["meta"]["left_context"]) == 26
    with pytest.raises(errors.InvalidPayload, match=r"meta\.left_context"):
        flatten({"meta.left_context": torch.tensor(1), "meta": {"left_context": torch.tensor(2)}})


def test_b67_a_hook_that_always_raises_fails_its_request_once() -> None:
    """No loop: it is not called again, and the others go on."""
    model = HookModel(a=raises(TypeError("an argument too many")))
    adapter = RunnerAdapter(model, rules=MergeRules())
    for new in (["a", "b"], [], []):
        adapter.begin_step(new=new, scheduled=["a", "b"])
        adapter.preprocess(StepPlan.make(["a", "b"], {"a": 1, "b": 1}), torch.zeros(2, dtype=torch.int64))
    assert {rid: str(error) for rid, error in adapter.failures().items()} == {"a": "an argument too many"}
    assert (model.called.count("a"), model.called.count("b")) == (1, 3)
