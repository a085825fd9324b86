"""A step's output cut by declared axes and the plan's spans; what fits by chance is refused, nothing goes to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from runner_adapter.outputs import TEXT, Cut, Failed, StageOutput, cut
from runner_adapter.plan import StepPlan

LAYER_0, LAYER_24 = "hidden_states.layers[0]", "hidden_states.layers[24]"
#: Three requests of 2, 1 and 3 tokens.
PLAN = StepPlan.make(["b", "a", "c"], {"a": 1, "b": 2, "c": 3})


class Output(NamedTuple):
    """The object that models return: a named tuple, too."""

    text_hidden_states: Any
    multimodal_outputs: Any


def rows(count: int = 6, base: int = 0) -> torch.Tensor:
    """[count, 2]; each row says its number."""
    return torch.arange(base, base + count).unsqueeze(1).repeat(1, 2)


def cut_all(output: object, plan: StepPlan = PLAN, **row_axes: int) -> tuple[Cut, Failed]:
    return cut(output, plan, {name.replace("__", "."): axis for name, axis in row_axes.items()})


def numbers(found: Cut, name: str) -> dict[str, list[int]]:
    """By rid the row numbers of a name."""
    return {rid: named[name][:, 0].tolist() for rid, named in found.items() if name in named}


def refusal(output: object, plan: StepPlan = PLAN, **row_axes: int) -> errors.ConnectorError:
    """Every request of the step got the error, nobody a tensor."""
    found, failed = cut_all(output, plan, **row_axes)
    assert found == {}
    assert list(failed) == list(plan.rids)
    assert [error.facts["rid"] for error in failed.values()] == list(plan.rids)
    assert {type(error) for error in failed.values()} == {errors.InvalidPayload}
    return next(iter(failed.values()))


def test_a_tensor_is_the_text_and_requests_get_their_spans() -> None:
    found, failed = cut_all(rows())
    assert numbers(found, TEXT) == {"b": [0, 1], "a": [2], "c": [3, 4, 5]}
    assert failed == {}


def test_rows_are_views_and_not_copies() -> None:
    text = rows()
    assert cut_all(text)[0]["c"][TEXT].data_ptr() == text[3].data_ptr()


@pytest.mark.parametrize("form", [tuple, list])
def test_a_pair_is_text_and_what_stands_beside_it(form: type) -> None:
    found, _ = cut_all(form([rows(), {0: rows(base=100), 24: rows(base=200)}]))
    assert numbers(found, TEXT)["a"] == [2]
    assert numbers(found, LAYER_0)["a"] == [102]
    assert numbers(found, LAYER_24)["c"] == [203, 204, 205]


def test_a_tuple_of_one_is_text_alone() -> None:
    assert [list(named) for named in cut_all((rows(),))[0].values()] == [[TEXT]] * 3


def test_a_sequence_stands_for_the_layers_that_were_asked_for() -> None:
    found, _ = cut((rows(), [rows(base=100), rows(base=200)]), PLAN, {}, aux_layers=(24, 0))
    assert numbers(found, LAYER_24)["a"] == [102]
    assert numbers(found, LAYER_0)["a"] == [202]


def test_more_or_fewer_layers_than_were_asked_for_are_refused() -> None:
    found, failed = cut((rows(), [rows()]), PLAN, {}, aux_layers=(0, 24))
    assert (found, list(failed)) == ({}, ["b", "a", "c"])
    assert failed["a"].facts == {"found": 1, "asked": 2, "rid": "a"}


def test_an_object_gives_its_names_nested_or_flat() -> None:
    nested = {"codes": {"audio": rows(base=100)}, "hidden_states": {"layers": {24: rows(base=200)}}, "x.y": rows()}
    found, failed = cut_all(Output(rows(), nested), codes__audio=0, x__y=0)
    assert failed == {}
    assert numbers(found, "codes.audio")["b"] == [100, 101]
    assert numbers(found, LAYER_24)["c"] == [203, 204, 205]
    assert numbers(found, "x.y")["a"] == [2]


@pytest.mark.parametrize("aux", [None, {}, {"codes": {}}, {"codes": {"audio": None}}])
def test_what_is_not_there_is_nothing(aux: object) -> None:
    assert [list(named) for named in cut_all(Output(rows(), aux), codes__audio=0)[0].values()] == [[TEXT]] * 3


@pytest.mark.parametrize("output", [None, 3, {"text": 1}, (), (1, 2, 3)], ids=str)
def test_another_form_is_refused(output: object) -> None:
    with pytest.raises(errors.InvalidPayload) as caught:
        StageOutput.of(output)
    assert caught.value.facts["found"] == type(output).__name__


NESTED = [torch.ones(2), torch.ones(3)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: rows().to_sparse(),
        lambda: rows().to_sparse_csr(),
        lambda: torch.nested.nested_tensor(NESTED),
        lambda: torch.nested.nested_tensor(NESTED, layout=torch.jagged),
    ],
    ids=["sparse", "csr", "nested", "jagged"],
)
def test_rows_of_a_tensor_that_is_not_dense_are_refused(make: Callable[[], torch.Tensor]) -> None:
    """Each request is told: nobody can say whose rows these are."""
    found, failed = cut_all(Output(rows(), {"codes": {"audio": make()}}), codes__audio=0)
    assert found == {} and {type(error) for error in failed.values()} == {errors.InvalidPayload}
    assert failed["a"].facts["name"] == "codes.audio" and "layout" in failed["a"].facts


def test_the_declared_axis_is_cut() -> None:
    found, _ = cut_all(Output(None, {"codes": {"audio": rows().T.contiguous()}}), codes__audio=1)
    assert found["c"]["codes.audio"].tolist() == [[3, 4, 5], [3, 4, 5]]


def test_padding_belongs_to_nobody() -> None:
    plan = StepPlan.make(["b", "a"], {"b": 2, "a": 1}, padded_rows=4, padded_tokens=8)
    found, failed = cut_all((rows(8), {24: rows(8, base=100)}), plan)
    assert failed == {}
    assert numbers(found, TEXT) == {"b": [0, 1], "a": [2]}
    assert numbers(found, LAYER_24) == {"b": [100, 101], "a": [102]}


def test_a_name_without_a_declared_axis_is_refused_for_every_request() -> None:
    """Also when its size is that of the step: nobody said that these are the step's tokens."""
    error = refusal(Output(rows(), {"codes": {"audio": rows()}}))
    assert error.facts["name"] == "codes.audio"
    assert "MergeRules(row_axes=…)" in error.message


@pytest.mark.parametrize("count", [2, 1, 3, 5, 7, 0])
def test_a_size_that_is_not_the_steps_is_refused_for_every_request(count: int) -> None:
    """Two rows of the decoding requests, one for all, one a request: no guess, and nobody gets the whole."""
    error = refusal(Output(rows(), {"codes": {"audio": rows(count)}}), codes__audio=0)
    assert error.facts["shape"] == [count, 2]
    assert error.facts["expected"] == [6]


def test_a_tensor_without_the_declared_axis_is_refused() -> None:
    assert refusal(Output(rows(), {"loss": torch.tensor(1.0)}), loss=0).facts["shape"] == []


def test_text_of_another_size_is_refused() -> None:
    assert refusal(rows(5)).facts["name"] == TEXT


def test_a_list_holds_one_tensor_a_row() -> None:
    """Of any shape, and None for nothing; entries of the padding are nobody's."""
    plan = StepPlan.make(["b", "a"], {"b": 2, "a": 1}, padded_rows=3)
    parts = [torch.tensor(7), None, torch.tensor([9])]
    found, failed = cut_all(Output(None, {"codes": {"audio": parts}}), plan, codes__audio=0)
    assert failed == {}
    assert found == {"b": {"codes.audio": parts[0]}, "a": {}}


def test_a_list_of_another_length_is_refused_for_every_request() -> None:
    error = refusal(Output(None, {"codes": {"audio": [rows(), rows()]}}), codes__audio=0)
    assert (error.facts["found"], error.facts["expected"]) == (2, [3])


def test_a_mapping_at_a_declared_name_is_by_rid() -> None:
    """A request that is not in it gets nothing. Rids are any text, also one that is no part of a name."""
    plan = StepPlan.make(["r.1", "audio"], {"r.1": 1, "audio": 1})
    parts = {"audio": torch.tensor([1])}
    assert cut_all(Output(None, {"codes": parts}), plan, codes=0)[0] == {
        "r.1": {},
        "audio": {"codes": parts["audio"]},
    }


def test_a_rid_that_is_called_like_a_part_of_a_name_gets_its_rows_only() -> None:
    """Clients choose rids: {"codes": {"audio": ...}} is a name, whoever is in the batch."""
    plan = StepPlan.make(["x", "audio"], {"x": 2, "audio": 1})
    found, _ = cut_all(Output(None, {"codes": {"audio": rows(3)}}), plan, codes__audio=0)
    assert numbers(found, "codes.audio") == {"x": [0, 1], "audio": [2]}


def test_a_part_of_a_request_that_is_not_in_the_step_is_refused() -> None:
    assert refusal(Output(None, {"codes": {"gone": rows()}}), codes=0).facts["strange"] == "gone"


@pytest.mark.parametrize("parts", [["no tensor", rows(1), rows(3)], {"b": 3, "a": rows(1), "c": rows(3)}])
def test_what_is_no_tensor_fails_its_request_alone(parts: object) -> None:
    found, failed = cut_all(Output(rows(), {"codes": {"audio": parts}}), codes__audio=0)
    assert list(failed) == ["b"]
    assert (failed["b"].facts["rid"], failed["b"].facts["name"]) == ("b", "codes.audio")
    assert list(found) == ["a", "c"]
    assert found["a"]["codes.audio"].tolist() == rows(1).tolist()


def test_a_declared_name_that_holds_no_tensors_is_refused() -> None:
    assert refusal(Output(rows(), {"codes": {"audio": 3}}), codes__audio=0).facts["found"] == "int"


@pytest.mark.parametrize("aux", [rows(), 3, "x"], ids=["a tensor", "an int", "text"])
def test_beside_the_text_stands_a_mapping_or_a_list(aux: object) -> None:
    refusal((rows(), aux))


def test_a_name_that_stands_twice_is_refused() -> None:
    aux = {"codes": {"audio": rows()}, ("codes", "audio"): rows()}
    assert refusal(Output(rows(), aux), codes__audio=0).facts["name"] == "codes.audio"


def test_names_that_nobody_wants_are_not_looked_at() -> None:
    """Whatever they hold: a model may keep more in its output than it hands over."""
    asked: list[str] = []

    def wanted(name: str) -> bool:
        asked.append(name)
        return name == LAYER_24

    aux = {"hidden_states": {"layers": {0: "none", 24: rows(base=100)}}, "debug": object(), "codes": rows(2)}
    found, failed = cut(Output("none", aux), PLAN, {}, wanted=wanted)
    assert failed == {}
    assert numbers(found, LAYER_24) == {"b": [100, 101], "a": [102], "c": [103, 104, 105]}
    assert [list(named) for named in found.values()] == [[LAYER_24]] * 3
    assert asked == [TEXT, LAYER_0, LAYER_24, "debug", "codes"]


def test_a_row_without_tokens_gets_an_empty_tensor() -> None:
    """Something, and not nothing: the next stage hears of the request."""
    found, _ = cut_all(rows(2), StepPlan.make(["a", "b"], {"a": 0, "b": 2}))
    assert found["a"][TEXT].shape == (0, 2)


def test_a_step_without_requests_is_cut_into_nothing() -> None:
    assert cut_all((rows(8), {24: rows(8)}), StepPlan.empty(padded_rows=2, padded_tokens=8)) == ({}, {})


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 4))
def test_every_row_goes_to_one_request_and_in_order(counts: list[int], padding: int) -> None:
    rids = [f"r{i}" for i in range(len(counts))]
    tokens = sum(counts)
    plan = StepPlan.make(rids, dict(zip(rids, counts, strict=True)), padded_tokens=tokens + padding)
    found, failed = cut_all((None, {24: rows(tokens + padding)}), plan)
    assert failed == {}
    assert [len(part) for part in numbers(found, LAYER_24).values()] == counts
    assert [n for part in numbers(found, LAYER_24).values() for n in part] == list(range(tokens))
