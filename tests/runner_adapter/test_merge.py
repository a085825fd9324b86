"""How an update meets what is there: replaced, appended, or continued as an absolute span."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from runner_adapter import values
from runner_adapter.merge import KEPT, MergeRules, merged
from runner_adapter.naming import flatten, nest

PLAIN = MergeRules()
APPEND = MergeRules(accumulated=["x"])
SPAN = MergeRules(spans={"embed.decode": ("embed.start", "embed.end")})


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64).view(-1, 1)


def span(start: int, end: int, **more: Any) -> dict[str, Any]:
    """Rows whose values are their places in the sequence."""
    ends = {"embed.start": torch.tensor(start), "embed.end": torch.tensor(end)}
    return {"embed.decode": rows(*range(start, end)), **ends, **more}


def merge(current: Mapping[str, Any], *updates: Mapping[str, Any], rules: MergeRules = PLAIN) -> dict[str, Any]:
    return merged(current, updates, rules, "cpu", {})


def told(found: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: tensor.flatten().tolist() for name, tensor in found.items()}


def spanned(found: Mapping[str, torch.Tensor]) -> tuple[list[int], int, int]:
    return (
        found["embed.decode"].flatten().tolist(),
        values.as_value(found["embed.start"]),
        values.as_value(found["embed.end"]),
    )


# -- replaced ---------------------------------------------------------------------------------------


def test_an_update_replaces_its_names_and_leaves_the_others() -> None:
    current = merge({}, {"a": rows(1), "b.c": rows(2)})
    assert told(merge(current, {"b.c": rows(3, 4), "d": rows(5)})) == {"a": [1], "b.c": [3, 4], "d": [5]}


def test_the_current_map_is_not_changed() -> None:
    current = merge({}, {"x": rows(1), "y": rows(2)}, rules=APPEND)
    before = dict(current)
    made = merge(current, {"x": rows(3), "y": rows(4)}, rules=APPEND)
    assert current == before and told(current) == {"x": [1], "y": [2]}
    assert told(made) == {"x": [1, 3], "y": [4]}


def test_what_is_stored_shares_no_memory_with_the_update() -> None:
    given_ = {"x": rows(1), "y": rows(2)}
    made = merge({}, given_, rules=APPEND)
    for tensor in given_.values():
        tensor.fill_(9)
    assert told(made) == {"x": [1], "y": [2]}


def test_names_that_an_update_does_not_give_are_not_copied() -> None:
    current = merge({}, {"a": rows(1), "b": rows(2)})
    made = merge(current, {"b": rows(3)})
    assert made["a"] is current["a"]


def test_the_last_of_several_updates_stands() -> None:
    assert told(merge({"x": rows(0)}, {"x": rows(1), "y": rows(5)}, {"x": rows(2)})) == {"x": [2], "y": [5]}


def test_what_a_later_update_replaces_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[list[int]] = []
    genuine = values.joined

    def joined(pieces: list[torch.Tensor], *args: Any, **facts: Any) -> torch.Tensor:
        copied.extend(piece.flatten().tolist() for piece in pieces)
        return genuine(pieces, *args, **facts)

    monkeypatch.setattr(values, "joined", joined)
    merge({}, {"x": rows(1)}, {"x": rows(2)})
    assert copied == [[2]]


def test_the_maps_own_tensor_in_an_update_is_no_news() -> None:
    """A hook that hands back what it was given appends nothing, and costs no copy."""
    current = merge({}, {"x": rows(1, 2), "y": rows(3)}, rules=APPEND)
    made = merge(current, {"x": current["x"], "y": current["y"]}, rules=APPEND)
    assert made["x"] is current["x"] and made["y"] is current["y"]


@pytest.mark.parametrize(
    ("current", "update", "names"),
    [
        (["codes", "a"], ["codes.audio"], {"a", "codes.audio"}),
        (["codes.audio", "codes.text", "code"], ["codes"], {"code", "codes"}),
        (["h.layers[0]", "h.x"], ["h.layers"], {"h.x", "h.layers"}),
        (["h.layers[0]"], ["h.layers[1]"], {"h.layers[0]", "h.layers[1]"}),
        (["p<0>", "p<1>", "p<2>", "q<0>"], ["p<0>"], {"p<0>", "q<0>"}),
        (["p.a", "pa"], ["p<0>", "p<1>"], {"pa", "p<0>", "p<1>"}),
        (["p<0>.a", "p<1>.a"], ["p.b"], {"p.b"}),
    ],
    ids=str,
)
def test_a_tensor_a_mapping_and_a_list_take_each_others_place(
    current: list[str], update: list[str], names: set[str]
) -> None:
    """A list is given whole: the items of a longer one before do not stay behind it."""
    made = merge(dict.fromkeys(current, rows(1)), dict.fromkeys(update, rows(2)))
    assert made.keys() == names
    assert all(made[name].item() == 2 for name in update)


LEAVES = st.integers(0, 99)
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", 0]), inner, min_size=1), st.lists(inner, min_size=1, max_size=2)
    ),
    max_leaves=6,
)
UPDATES = st.dictionaries(st.sampled_from(["a", "b"]), TREES)


def deep(old: Any, new: Any) -> Any:
    """What merging means, said of plain values: mappings into each other, all else replaced."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: deep(old.get(key), value) for key, value in new.items()}}
    return new


@given(st.lists(st.lists(UPDATES, max_size=2), max_size=3))
def test_merging_names_is_merging_nested_dicts(steps: list[list[dict[str, Any]]]) -> None:
    current: dict[str, torch.Tensor] = {}
    wanted: dict[str, Any] = {}
    for updates in steps:
        named = [{name: torch.tensor(leaf) for name, leaf in flatten(update).items()} for update in updates]
        current = merge(current, *named)
        for update in updates:
            wanted = deep(wanted, update)
        assert nest({name: tensor.item() for name, tensor in current.items()}) == wanted


def test_an_update_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(errors.InvalidPayload) as caught:
        merge({}, {"codes": rows(1), "codes.audio": rows(2)})
    assert caught.value.facts == {"name": "codes"}


@pytest.mark.parametrize("value", [None, 0, [rows(1)], {"a": rows(1)}], ids=["None", "0", "list", "dict"])
def test_what_is_no_tensor_is_refused_by_name(value: Any) -> None:
    with pytest.raises(errors.InvalidPayload) as caught:
        merge({}, {"codes.audio": value})
    assert caught.value.facts == {"name": "codes.audio"}


# -- devices ----------------------------------------------------------------------------------------

RESIDENT = MergeRules(gpu_resident=[("hidden_states", "last"), "kv"], accumulated=["kv.rows"])


def test_declared_names_go_to_the_device_and_all_others_to_the_host() -> None:
    """`meta` stands for the device. What stands below a declared name goes with it."""
    update = {
        name: rows(1) for name in ("hidden_states.last", "hidden_states.first", "kv.rows", "kv[3]", "kva", "k<0>")
    }
    made = merged({}, [update], RESIDENT, "meta", {})
    assert {name for name, tensor in made.items() if tensor.is_meta} == {"hidden_states.last", "kv.rows", "kv[3]"}
    assert all(tensor.device.type in ("meta", "cpu") for tensor in made.values())


def test_rows_of_a_resident_name_are_appended_there() -> None:
    made = merged({}, [{"kv.rows": rows(1, 2)}], RESIDENT, "meta", {})
    made = merged(made, [{"kv.rows": rows(3)}], RESIDENT, "meta", {})
    assert made["kv.rows"].is_meta and made["kv.rows"].shape == (3, 1)


def test_a_resident_tensor_is_a_clone() -> None:
    """A captured graph writes its output buffers again at the next step."""
    output = rows(1)
    made = merge({}, {"hidden_states.last": output}, rules=RESIDENT)
    output.fill_(9)
    assert told(made) == {"hidden_states.last": [1]}


@pytest.mark.cuda
def test_tensors_cross_to_where_they_live() -> None:
    """Whatever they come from: a connector's payload is on the host, a hook's update on the device."""
    update = {"hidden_states.last": rows(1), "x": rows(2).cuda(), "kv.rows": rows(3)}
    made = merged({}, [update], RESIDENT, "cuda", {})
    made = merged(
        made, [{"kv.rows": rows(4).cuda(), "hidden_states.last": made["hidden_states.last"]}], RESIDENT, "cuda", {}
    )
    assert {name: tensor.device.type for name, tensor in made.items()} == {
        "hidden_states.last": "cuda",
        "x": "cpu",
        "kv.rows": "cuda",
    }
    assert told(made) == {"hidden_states.last": [1], "x": [2], "kv.rows": [3, 4]}


# -- accumulated ------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=4))
def test_rows_are_appended_once_and_in_order_however_they_are_bundled(steps: list[list[int]]) -> None:
    current: dict[str, torch.Tensor] = {}
    number = 0
    for step in steps:
        updates = [
            {"x": rows(*range(number + sum(step[:at]), number + sum(step[: at + 1])))} for at in range(len(step))
        ]
        current = merge(current, *updates, rules=APPEND)
        number += sum(step)
    assert told(current).get("x", []) == list(range(number))


@pytest.mark.parametrize(
    "tensor", [rows(1).double(), torch.ones(1, 2), torch.tensor(1.0)], ids=["dtype", "width", "0-dim"]
)
def test_rows_that_do_not_fit_those_before_are_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(errors.InvalidPayload) as caught:
        merge({"x": rows(1)}, {"x": tensor}, rules=APPEND)
    assert caught.value.facts["name"] == "x"


def test_a_first_tensor_without_rows_is_refused() -> None:
    """Not at the second one, when it is too late."""
    with pytest.raises(errors.InvalidPayload):
        merge({}, {"x": torch.tensor(1.0)}, rules=APPEND)


def test_the_same_rows_twice_in_different_updates_are_two_chunks() -> None:
    chunk = rows(1)
    assert told(merge({}, {"x": chunk}, {"x": chunk}, rules=APPEND)) == {"x": [1, 1]}


# -- spans ------------------------------------------------------------------------------------------


def test_a_first_span_is_taken_as_it_is() -> None:
    assert spanned(merge({}, span(3, 5), rules=SPAN)) == ([3, 4], 3, 5)


@pytest.mark.parametrize(
    ("start", "end", "result"),
    [
        (5, 7, ([3, 4, 5, 6], 3, 7)),
        (4, 7, ([3, 4, 5, 6], 3, 7)),
        (0, 6, ([3, 4, 5], 3, 6)),
        (4, 5, ([3, 4], 3, 5)),
        (0, 1, ([3, 4], 3, 5)),
        (5, 5, ([3, 4], 3, 5)),
    ],
    ids="continues overlaps from-before within long-ago empty".split(),
)
def test_of_a_span_only_the_rows_that_are_not_there_yet_are_taken(start: int, end: int, result: Any) -> None:
    current = merge({}, span(3, 5), rules=SPAN)
    assert spanned(merge(current, span(start, end), rules=SPAN)) == result


def test_several_spans_in_one_merge_continue_each_other() -> None:
    assert spanned(merge({}, span(0, 2), span(1, 3), span(3, 4), rules=SPAN)) == ([0, 1, 2, 3], 0, 4)


def test_a_span_behind_a_gap_is_refused() -> None:
    current = merge({}, span(3, 5), rules=SPAN)
    with pytest.raises(errors.InvalidPayload) as caught:
        merge(current, span(6, 7), rules=SPAN)
    assert caught.value.facts == {"name": "embed.decode", "start": 6, "reached": 5}


@pytest.mark.parametrize(
    "wrong",
    [
        {"embed.end": torch.tensor(4)},
        {"embed.start": torch.tensor(-1), "embed.end": torch.tensor(1)},
        {"embed.start": torch.tensor(2.0)},
        {"embed.end": torch.tensor([5])},
        {"embed.end": torch.tensor(5, dtype=torch.int32)},
        {"embed.decode": torch.tensor(1.0)},
    ],
    ids="count negative float 1-dim int32 0-dim-rows".split(),
)
def test_ends_that_do_not_say_where_the_rows_are_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidPayload) as caught:
        merge({}, span(3, 5, **wrong), rules=SPAN)
    assert str(caught.value.facts["name"]).startswith("embed.")


@pytest.mark.parametrize("missing", ["embed.decode", "embed.start", "embed.end"])
def test_rows_and_ends_come_together(missing: str) -> None:
    update = span(3, 5)
    del update[missing]
    with pytest.raises(errors.InvalidPayload) as caught:
        merge({}, update, rules=SPAN)
    assert caught.value.facts["given"] == list(update)


def test_a_span_that_lost_its_ends_begins_anew() -> None:
    """A tensor took the place of the mapping in which they stood."""
    rules = MergeRules(spans={"rows": ("at.start", "at.end")})
    current = merge({}, {"rows": rows(1), "at.start": torch.tensor(3), "at.end": torch.tensor(4)}, rules=rules)
    current = merge(current, {"at": rows(0)}, rules=rules)
    again = {"rows": rows(2), "at.start": torch.tensor(8), "at.end": torch.tensor(9)}
    assert told(merge(current, again, rules=rules)) == {"rows": [2], "at.start": [8], "at.end": [9]}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=6))
def test_a_sequence_resent_in_any_pieces_is_whole(pieces: list[tuple[int, int]]) -> None:
    """Each piece begins at or before what was reached, as after a preemption."""
    current = merge({}, span(0, 1), rules=SPAN)
    reached = 1
    for back, length in pieces:
        start = max(0, reached - back)
        current = merge(current, span(start, start + length), rules=SPAN)
        reached = max(reached, start + length)
        assert spanned(current) == (list(range(reached)), 0, reached)


# -- rules ------------------------------------------------------------------------------------------


def test_names_are_taken_dotted_or_as_pairs() -> None:
    rules = MergeRules(
        gpu_resident={("hidden_states", "last")},
        accumulated=("ids.all",),
        spans={("embed", "decode"): (("embed", "start"), "embed.end")},
        row_axes={("codes", "audio"): 1},
    )
    assert rules.gpu_resident == {"hidden_states.last"} and rules.accumulated == {"ids.all"}
    assert dict(rules.spans) == {"embed.decode": ("embed.start", "embed.end")}
    assert dict(rules.row_axes) == {"codes.audio": 1}


def test_a_name_below_a_kept_one_is_kept() -> None:
    rules = MergeRules(kept=["meta", "a.b"])
    names = ["meta", "meta.x", "meta[1]", "metal", "a", "a.b<0>", "a.c"]
    assert [name for name in names if rules.is_kept(name)] == ["meta", "meta.x", "meta[1]", "a.b<0>"]
    assert MergeRules().kept == set(KEPT) == {"meta.num_processed_tokens", "meta.resumable"}


@pytest.mark.parametrize(
    "rules",
    [
        {"accumulated": "codes"},
        {"accumulated": [("codes",)]},
        {"accumulated": [("codes", "audio", "x")]},
        {"accumulated": [3]},
        {"gpu_resident": [""]},
        {"gpu_resident": ["a..b"]},
        {"kept": [("a.b", "c")]},
        {"accumulated": ["p<0>"]},
        {"spans": {"p": ("q<0>", "e")}},
        {"spans": {"p": ("s",)}},
        {"spans": {"p": "se"}},
        {"spans": {"p": ("s", "s")}},
        {"spans": {"p": ("p", "e")}},
        {"spans": {"p": ("s", "e"), "q": ("s", "f")}},
        {"spans": {"p": ("s", "e")}, "accumulated": ["p"]},
        {"spans": {"p": ("s", "e")}, "accumulated": ["e"]},
        {"spans": {"m.p": ("m.s", "m.e")}, "gpu_resident": ["m"]},
        {"spans": {"p": ("s", "e")}, "kept": ["p", "s"]},
        {"row_axes": {"p": -1}},
        {"row_axes": {"p": True}},
        {"row_axes": {"p": "0"}},
    ],
    ids=str,
)
def test_rules_that_cannot_be_are_refused_when_they_are_made(rules: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError) as caught:
        MergeRules(**rules)
    assert {"rule", "name"} & caught.value.facts.keys()


def test_rows_of_a_span_may_be_resident_while_their_ends_are_not() -> None:
    rules = MergeRules(spans={"embed.decode": ("embed.start", "embed.end")}, gpu_resident=["embed.decode"])
    made = merged({}, [span(0, 2)], rules, "meta", {})
    made = merged(made, [span(1, 4)], rules, "meta", {})
    assert made["embed.decode"].is_meta and made["embed.decode"].shape == (4, 1)
    assert made["embed.end"].item() == 4
