"""What forward is given and what a model reads of it, in each phase."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter import phases
from runner_adapter.kwargs import forward_kwargs, read_kwargs
from runner_adapter.maps import BatchMaps, gather
from runner_adapter.phases import Phase
from runner_adapter.plan import StepPlan

NEW, OLD = "model_intermediate_buffer", "runtime_additional_information"
X = torch.ones(1)


class Buffer(dict[str, dict[str, Any]]):
    def names(self, rid: str) -> Mapping[str, Any]:
        return self[rid]

    def nested(self, rid: str) -> dict[str, Any]:
        return dict(self[rid])


@pytest.fixture(autouse=True)
def _warnings_come_anew() -> Iterator[None]:
    phases.forget_warnings()
    yield
    phases.forget_warnings()


def step(*rids: str, **more: Any) -> tuple[BatchMaps, StepPlan]:
    """Two tokens a row; `b` has no state."""
    plan = StepPlan.make(rids, dict.fromkeys(rids, 2), **more)
    return gather(Buffer({"a": {"x": X}, "c": {"x": X}}), plan), plan


def test_values_of_the_step_travel_beside_the_maps_in_batch_order() -> None:
    maps, plan = step("c", "b", "a", generated={"a": 1, "b": 2, "c": 3})
    given = forward_kwargs(maps, plan, Phase.CLEAN)
    assert given[NEW] is maps
    assert given["request_ids"] == ["c", "b", "a"]
    assert given["request_token_spans"] == [(0, 2), (2, 4), (4, 6)]
    assert given["generated_len"] == [3, 2, 1]
    assert [list(entry) for entry in maps] == [["x"], [], ["x"]]


def test_generated_len_is_anew_in_each_step() -> None:
    told = [forward_kwargs(*step("a", generated={"a": n}), Phase.SWITCH)["generated_len"] for n in (0, 1, 2)]
    assert told == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("phase", "names"),
    [(Phase.COMPAT, {NEW, OLD}), (Phase.SWITCH, {NEW}), (Phase.CLEAN, {NEW})],
)
def test_a_phase_writes_its_names(phase: Phase, names: set[str]) -> None:
    """RFC, phases 1 to 3: both, and as one object; then only the new one."""
    maps, plan = step("a")
    given = forward_kwargs(maps, plan, phase)
    assert {name for name, value in given.items() if value is maps} == names
    assert given.keys() == names | {"request_ids", "request_token_spans", "generated_len"}


def test_extra_args_are_aligned_with_the_rows() -> None:
    """A request without any, with none, or with None has an empty dict, never None."""
    args = {"a": {"top": 1}, "b": None, "c": {}, "waits": {"top": 9}}
    given = forward_kwargs(
        *step("c", "b", "a", "d"), Phase.CLEAN, sampling_extra_args=args, has_sampling_extra_args=True
    )
    assert given["sampling_extra_args"] == [{}, {}, {"top": 1}, {}]


def test_extra_args_are_there_only_if_the_model_declares_them() -> None:
    without = forward_kwargs(*step("a"), Phase.CLEAN, sampling_extra_args={"a": {"top": 1}})
    assert "sampling_extra_args" not in without
    declared = forward_kwargs(*step("a", "b"), Phase.CLEAN, has_sampling_extra_args=True)
    assert declared["sampling_extra_args"] == [{}, {}]


def test_a_model_writes_into_its_own_extra_args() -> None:
    args = {"a": {"top": 1}}
    given = forward_kwargs(*step("a"), Phase.CLEAN, sampling_extra_args=args, has_sampling_extra_args=True)
    given["sampling_extra_args"][0]["top"] = 2
    assert args == {"a": {"top": 1}}


def test_extra_args_that_are_no_mapping_are_refused() -> None:
    args: Any = {"a": {}, "b": [1]}
    with pytest.raises(errors.UsageError, match="must be a mapping") as caught:
        forward_kwargs(*step("a", "b"), Phase.CLEAN, sampling_extra_args=args, has_sampling_extra_args=True)
    assert caught.value.facts == {"rid": "b", "type": "list"}


def test_every_list_has_a_place_for_padded_rows() -> None:
    """A rid that no request has, an empty span at the end, nothing generated."""
    given = forward_kwargs(*step("a", "b", padded_rows=4, padded_tokens=9), Phase.CLEAN, has_sampling_extra_args=True)
    assert [len(entry) for entry in given[NEW]] == [1, 0, 0, 0]
    assert given["request_ids"] == ["a", "b", "", ""]
    assert given["request_token_spans"] == [(0, 2), (2, 4), (4, 4), (4, 4)]
    assert given["generated_len"] == [0, 0, 0, 0]
    assert given["sampling_extra_args"] == [{}, {}, {}, {}]


@pytest.mark.parametrize("padded", [0, 2])
def test_a_forward_without_any_request_has_kwargs(padded: int) -> None:
    """Profiling, and capture at a padded size."""
    plan = StepPlan.empty(padded_rows=padded, padded_tokens=8)
    given = forward_kwargs(gather(Buffer(), plan), plan, Phase.COMPAT)
    assert given[NEW] == [{}] * padded
    assert given["request_token_spans"] == [(0, 0)] * padded
    assert read_kwargs(given, Phase.COMPAT) is given[NEW]


def test_maps_of_another_step_are_refused() -> None:
    maps, _ = step("a", "b")
    _, plan = step("b", "a")
    with pytest.raises(errors.UsageError, match="not this step's"):
        forward_kwargs(maps, plan, Phase.CLEAN)


@pytest.mark.parametrize("phase", list(Phase))
def test_what_was_written_is_read_without_a_warning(phase: Phase, caplog: pytest.LogCaptureFixture) -> None:
    maps, plan = step("a", "b")
    assert read_kwargs(forward_kwargs(maps, plan, phase), phase) is maps
    assert caplog.records == []


@pytest.mark.parametrize("phase", [Phase.COMPAT, Phase.SWITCH])
def test_the_old_name_alone_is_read_with_one_warning(phase: Phase, caplog: pytest.LogCaptureFixture) -> None:
    maps, _ = step("a")
    with caplog.at_level(logging.WARNING):
        assert [read_kwargs({OLD: maps, NEW: None}, phase) is maps for _ in range(3)] == [True] * 3
    assert [record.getMessage() for record in caplog.records] == [f"{OLD} is deprecated: use {NEW}"]


@pytest.mark.parametrize("both", [True, False])
def test_phase_3_refuses_the_old_name(both: bool) -> None:
    maps, _ = step("a")
    with pytest.raises(errors.UsageError) as caught:
        read_kwargs({OLD: maps, NEW: maps if both else None}, Phase.CLEAN)
    assert caught.value.facts["name"] == OLD


@pytest.mark.parametrize("phase", [Phase.COMPAT, Phase.SWITCH])
def test_two_names_hold_one_object(phase: Phase) -> None:
    """Two of them, though equal, could come apart."""
    with pytest.raises(errors.UsageError, match="the same object") as caught:
        read_kwargs({OLD: [{}], NEW: [{}]}, phase)
    assert caught.value.facts == {"old": OLD, "new": NEW}


@pytest.mark.parametrize("kwargs", [{}, {NEW: None, OLD: None}, {"positions": X}])
def test_a_profiling_run_gives_no_maps(kwargs: dict[str, Any]) -> None:
    read = read_kwargs(kwargs, Phase.CLEAN)
    assert isinstance(read, BatchMaps)
    assert read == []


def test_a_list_of_another_runner_becomes_maps() -> None:
    """Without request_ids only by row. A model's writes stay in them."""
    theirs: list[Any] = [{"codes": {"audio": X}}, {}, {}]
    read = read_kwargs({NEW: theirs, "request_ids": ["a", "b", ""]}, Phase.CLEAN)
    assert (list(read.keys()), len(read), read["a"]["codes"]["audio"] is X) == (["a", "b"], 3, True)
    read["a"]["codes"]["new"] = read["b"]["new"] = X
    assert [list(theirs[0]["codes"]), theirs[1]] == [["audio"], {}]
    assert list(read_kwargs({NEW: tuple(theirs)}, Phase.CLEAN).keys()) == []


def test_maps_by_rid_are_read_in_the_order_of_request_ids() -> None:
    """The RFC's form of the kwarg. Its own order is not the batch's."""
    theirs = {"a": {"x": X}, "waits": {"x": X}, "c": {"y": X}}
    read = read_kwargs({NEW: theirs, "request_ids": ["c", "b", "a"]}, Phase.CLEAN)
    assert [list(entry) for entry in read] == [["y"], [], ["x"]]
    assert list(read.keys()) == ["c", "b", "a"]
    with pytest.raises(errors.UsageError, match="no order without request_ids"):
        read_kwargs({NEW: theirs}, Phase.CLEAN)


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({NEW: 7}, "one mapping a row"),
        ({NEW: "ab"}, "one mapping a row"),
        ({NEW: [{}], "request_ids": ["a", "b"]}, "name every row"),
        ({NEW: [{}, X]}, "must be a mapping"),
        ({NEW: [{}, {}], "request_ids": ["", "b"]}, "a str, and not empty"),
        ({NEW: [{}], "request_ids": [None]}, "a str, and not empty"),
        ({NEW: [{}, {}], "request_ids": ["a", "a"]}, "a place of its own"),
    ],
)
def test_what_is_no_batch_of_maps_is_refused(kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(errors.UsageError, match=told):
        read_kwargs(kwargs, Phase.CLEAN)
