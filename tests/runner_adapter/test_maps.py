"""The batch's maps: this step's order, a place for every row, and nothing shared with the buffer but tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from runner_adapter.maps import BatchMaps, Form, gather
from runner_adapter.plan import StepPlan


class Buffer(dict[str, dict[str, Any]]):
    """Hands out what it holds itself, so that only gather keeps it from being written."""

    def names(self, rid: str) -> Mapping[str, Any]:
        return self[rid]["names"]

    def nested(self, rid: str) -> dict[str, Any]:
        return self[rid]["nested"]


def tensor(value: float) -> torch.Tensor:
    return torch.full((2,), value)


def flat(**values: float) -> Buffer:
    """One tensor `x` a request."""
    return Buffer({rid: {"x": tensor(value)} for rid, value in values.items()})


def plan(*rids: str, **padding: int) -> StepPlan:
    return StepPlan.make(rids, dict.fromkeys(rids, 1), **padding)  # type: ignore[arg-type]


def values(maps: BatchMaps) -> list[float | None]:
    return [float(entry["x"][0]) if entry else None for entry in maps]


def test_maps_follow_the_batch_order_of_each_step() -> None:
    """The buffer's own order is another, and rows are put in others' places."""
    buffer = flat(a=1, b=2, c=3)
    assert values(gather(buffer, plan("c", "a"))) == [3, 1]
    assert values(gather(buffer, plan("b", "c", "a"))) == [2, 3, 1]
    del buffer["a"]
    buffer["d"] = {"x": tensor(4)}
    assert values(gather(buffer, plan("b", "c", "d"))) == [2, 3, 4]


@given(st.lists(st.permutations("abcdef").flatmap(lambda all_: st.integers(0, 6).map(lambda n: all_[:n])), max_size=6))
def test_any_sequence_of_batches_gives_each_row_its_own_map(steps: list[list[str]]) -> None:
    """Swaps, condensed rows and removals: against a dict; `f` never has state."""
    state = {rid: float(number) for number, rid in enumerate("abcde")}
    buffer = flat(**state)
    for rids in steps:
        maps = gather(buffer, plan(*rids))
        assert values(maps) == [state.get(rid) for rid in rids]
        assert list(maps.keys()) == rids
        assert all(maps[rid] is maps[row] for row, rid in enumerate(rids))


def test_a_row_without_state_keeps_its_place() -> None:
    """Never known, or known and empty: an empty map, and the rows behind it do not move up."""
    buffer = flat(a=1, b=2)
    buffer["empty"] = {}
    assert values(gather(buffer, plan("new", "a", "empty", "b"))) == [None, 1, None, 2]


def test_padded_rows_are_empty_maps_of_their_own_at_the_end() -> None:
    maps = gather(flat(a=1), plan("a", padded_rows=3))
    assert values(maps) == [1, None, None]
    assert list(maps.keys()) == ["a"]
    maps[1]["x"] = tensor(9)
    assert maps[2] == {}


def test_a_step_without_requests_has_maps() -> None:
    assert gather(flat(a=1), StepPlan.empty()) == []
    assert gather(flat(a=1), StepPlan.empty(padded_rows=2)) == [{}, {}]


def test_maps_are_a_list_of_dicts() -> None:
    """As models know them."""
    maps = gather(flat(a=1, b=2), plan("b", "a"))
    assert isinstance(maps, list)
    assert [type(entry) for entry in maps] == [dict, dict]
    assert (len(maps), maps[-1] is maps["a"], maps[:1] == [maps["b"]]) == (2, True, True)


def test_maps_are_found_by_rid() -> None:
    maps = gather(flat(a=1, b=2), plan("b", "a"))
    assert dict(maps) == {"b": maps[0], "a": maps[1]}
    assert [(rid, entry is maps[rid]) for rid, entry in maps.items()] == [("b", True), ("a", True)]
    assert ("a" in maps, "z" in maps, maps[0] in maps) == (True, False, True)
    assert maps.get("a") is maps[1]
    assert (maps.get("z"), maps.get("z", {})) == (None, {})


def test_a_rid_without_a_row_is_unknown() -> None:
    with pytest.raises(errors.UnknownRequest) as caught:
        gather(flat(a=1, bb=2), plan("bb"))["b"]
    assert caught.value.facts == {"rid": "b", "near": ["bb"]}


def test_a_rid_keeps_its_map_when_a_model_bends_the_list() -> None:
    maps = gather(flat(a=1, b=2), plan("b", "a"))
    maps.reverse()
    maps.pop(0)
    assert (float(maps["a"]["x"][0]), float(maps["b"]["x"][0])) == (1, 2)


def test_a_copy_of_the_maps_still_knows_its_rids() -> None:
    maps = copy.deepcopy(gather(flat(a=1, b=2), plan("b", "a")))
    assert maps["a"] is maps[1]
    maps["a"]["new"] = tensor(5)
    assert list(maps[1]) == ["x", "new"]


def test_nothing_written_into_a_map_reaches_the_buffer() -> None:
    """Values, and keys that a runner or a model adds: at every level, and in lists."""
    inner: dict[str, Any] = {"codes": {"audio": tensor(1), "all": [tensor(2), {"deep": tensor(3)}]}}
    buffer = Buffer({"a": {"x": tensor(1), "names": {"codes.audio": tensor(1)}, "nested": inner}})
    keys, names, nested = (gather(buffer, plan("a"), form)[0] for form in ("keys", "names", "nested"))
    keys["generated_len"] = names["generated_len"] = nested["generated_len"] = 3
    del names["codes.audio"]
    nested["codes"]["audio"] = None
    nested["codes"]["all"][1]["deep"] = None
    nested["codes"]["all"].clear()
    assert list(buffer["a"]) == ["x", "names", "nested"]
    assert list(buffer.names("a")) == ["codes.audio"]
    assert list(buffer.nested("a")) == ["codes"]
    assert buffer["a"]["nested"]["codes"]["audio"] is not None
    assert len(inner["codes"]["all"]) == 2
    assert isinstance(inner["codes"]["all"][1]["deep"], torch.Tensor)


def test_two_steps_share_no_map() -> None:
    buffer = flat(a=1)
    first, second = gather(buffer, plan("a")), gather(buffer, plan("a"))
    first["a"]["x"] = tensor(7)
    assert values(second) == [1]


@pytest.mark.parametrize("form", ["keys", "names", "nested"])
def test_a_map_has_the_form_that_was_asked_for(form: Form) -> None:
    """The tensors are the buffer's own: gathering copies none."""
    held = tensor(1)
    buffer = Buffer({"a": {"a-24": held, "names": {"n": held}, "nested": {"n": {24: held}}}})
    maps = gather(buffer, plan("a"), form)
    found = {"keys": lambda m: m["a-24"], "names": lambda m: m["n"], "nested": lambda m: m["n"][24]}[form](maps[0])
    assert found is held
    assert maps.form == form


def test_another_form_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="a form is keys, names or nested") as caught:
        gather(flat(a=1), plan("a"), "lists")  # type: ignore[arg-type]
    assert caught.value.facts == {"form": "lists"}


@pytest.mark.parametrize("rids", [["a", "a"], ["a", "b", "c"]])
def test_each_rid_has_a_map_of_its_own(rids: list[str]) -> None:
    with pytest.raises(errors.UsageError, match="a place of its own"):
        BatchMaps([{}, {}], rids)


@pytest.mark.parametrize(
    ("other", "rid"),
    [
        (plan("b", "a"), "b"),
        (plan("a"), "b"),
        (plan("a", "b", "c"), "c"),
        (plan("a", "b", padded_rows=4), None),
    ],
)
def test_maps_of_another_step_are_told_apart(other: StepPlan, rid: str | None) -> None:
    maps = gather(flat(a=1, b=2), plan("a", "b"))
    maps.check(plan("a", "b"))
    with pytest.raises(errors.UsageError, match="not this step's") as caught:
        maps.check(other)
    assert caught.value.facts.get("rid") == rid
