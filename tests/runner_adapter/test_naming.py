"""Names of a model's tensors: nested mappings and names, names and keys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from runner_adapter.config import TransferConfig
from runner_adapter.naming import MAX_DEPTH, Naming, flatten, key_part, name_of, nest

RFC = {"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"}


def config(**templates: str) -> TransferConfig:
    return TransferConfig.from_mapping({"enabled": True, "items": [], "key_templates": templates or RFC})


NAMING = Naming(config())

#: Given one by one: searching all of Unicode for what is left takes longer than the tests.
parts = st.text("aZ0_- {}:/\\\n\0üΩ😀", min_size=1, max_size=6)
ints = st.integers(1 - 10**19, 10**19 - 1)
#: Anything but a mapping, list or tuple is a value.
leaves = st.integers() | st.sampled_from([None, True, "text", b"", frozenset(), 0.5])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4) | st.dictionaries(parts | ints, inner, min_size=1, max_size=4)
    ),
    max_leaves=12,
)
nested_trees = st.dictionaries(parts | ints, trees, max_size=4)

#: Rids that look like keys and names, and any text.
rids = st.one_of(
    st.sampled_from(["r-24", "-", "a-b-0", "r-ids.x", "a.b", "ids", "[24]", "hidden_states.layers[2]", "a\n-1", "Ω-7"]),
    st.text("aZ09_-.[]<> {}:/\\\n\0üΩ😀", min_size=1, max_size=40),
)
letters = "abcXYZ_"
words = st.text(letters + "0123456789", min_size=1, max_size=6)
plain_ids = st.builds(lambda first, rest: first + rest, st.sampled_from(letters), words)
dotted_ids = st.lists(words, min_size=1, max_size=3).flatmap(lambda rest: plain_ids.map(lambda a: ".".join([a, *rest])))
layers = st.integers(0, 10**19 - 1)
#: Names that have a key.
names = st.one_of(
    layers.map("hidden_states.layers[{}]".format),
    plain_ids.map("ids.{}".format),
    dotted_ids.filter(lambda name: not (name.startswith("ids.") and name.count(".") == 1)),
)


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ({}, {}),
        ({"codes": {"audio": 1}}, {"codes.audio": 1}),
        ({"hidden_states": {"layers": {24: 1, 0: 2}}}, {"hidden_states.layers[24]": 1, "hidden_states.layers[0]": 2}),
        ({"parts": [1, 2]}, {"parts<0>": 1, "parts<1>": 2}),
        ({"a": {"24": 1, 24: 2, -1: 3}}, {"a.24": 1, "a[24]": 2, "a[-1]": 3}),
        ({"a": [[1], {"b": [2]}]}, {"a<0><0>": 1, "a<1>.b<0>": 2}),
        ({7: {"a": 1}}, {"[7].a": 1}),
        ({"a b": {"-": None}}, {"a b.-": None}),
    ],
)
def test_nested_values_and_their_names(nested: dict[Any, Any], flat: dict[str, Any]) -> None:
    """Both ways, in order."""
    assert list(flatten(nested).items()) == list(flat.items())
    assert nest(flat) == nested


@pytest.mark.parametrize(
    ("given", "flat"),
    [
        ({("codes", "audio"): 1}, {"codes.audio": 1}),
        ({("hidden_states", 24): {"x": 1}}, {"hidden_states[24].x": 1}),
        ({"codes.audio": 1, "codes": {"text": 2}}, {"codes.audio": 1, "codes.text": 2}),
        ({"hidden_states.layers[24]": 1, "parts<0>": 2}, {"hidden_states.layers[24]": 1, "parts<0>": 2}),
        ({"a": (1, 2)}, {"a<0>": 1, "a<1>": 2}),
    ],
)
def test_pairs_flat_names_and_tuples_are_taken(given: dict[Any, Any], flat: dict[str, Any]) -> None:
    """A pair is two steps, what is flat stays flat, and a tuple is as a list."""
    assert flatten(given) == flat


@given(nested_trees)
def test_what_is_flattened_nests_to_itself(tree: dict[Any, Any]) -> None:
    """Without loss, whatever the keys; flat names flatten to themselves."""
    flat = flatten(tree)
    assert nest(flat) == tree
    assert flatten(flat) == flat


@pytest.mark.parametrize("key", ["", "a.", ".a", "a..b", "a[", "a]", "<a>", "a<0", "a[1.0]", "a[01]", "a[+1]", "a[-0]"])
@pytest.mark.parametrize("within", [True, False])
def test_a_part_that_no_name_can_hold_is_refused(key: str, within: bool) -> None:
    """Of the outermost mapping and of one within; the facts say whose it is."""
    with pytest.raises(errors.InvalidPayload) as refusal:
        flatten({"x": {key: 1}} if within else {key: 1}, rid="r")
    assert refusal.value.facts["rid"] == "r"


@pytest.mark.parametrize("key", ["a.b", "a[1]", "a<0>", ("a", "b")])
def test_names_and_pairs_stand_outermost_only(key: object) -> None:
    with pytest.raises(errors.InvalidPayload, match="a key is text without any of"):
        flatten({"x": {key: 1}})


@pytest.mark.parametrize(
    "key", [None, 1.5, True, b"a", 10**19, pytest.param(10**5000, id="long"), (), ("a",), ("a", "b", "c"), ("a", None)]
)
def test_a_key_of_another_kind_is_refused(key: object) -> None:
    """True is no 1."""
    with pytest.raises(errors.InvalidPayload, match="a key is text without any of"):
        flatten({key: 1})


@pytest.mark.parametrize("empty", [{}, [], ()])
def test_an_empty_mapping_or_list_is_refused(empty: Any) -> None:
    """It holds no tensor, and would be gone when it is nested again."""
    with pytest.raises(errors.InvalidPayload, match="holds no tensor") as refusal:
        flatten({"a": {"b": empty}})
    assert refusal.value.facts == {"name": "a.b"}


@pytest.mark.parametrize("given", [None, 1, [("a", 1)], "a"])
def test_names_are_made_of_a_mapping(given: Any) -> None:
    with pytest.raises(errors.InvalidPayload, match="names are made of a mapping"):
        flatten(given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "a.b"),
        ({("a", "b"): 1, "a.b": 2}, "a.b"),
        ({"a": 1, "a.b": 2}, "a.b"),
        ({"a.b": 2, "a": 1}, "a"),
        ({"a": {"b": 1}, ("a", "b"): {"c": 2}}, "a.b.c"),
        ({"a": [1], "a.b": 2}, "a"),
        ({"a": [1, 2], "a<3>": 2}, "a"),
    ],
)
def test_names_that_run_into_each_other_are_refused(given: dict[Any, Any], name: str) -> None:
    """Twice, a value and a mapping, or a mapping and a list: nothing is dropped or overwritten."""
    with pytest.raises(errors.InvalidPayload) as refusal:
        flatten(given)
    assert refusal.value.facts["name"] == name


@pytest.mark.parametrize(
    "flat",
    [
        {"a": 1, "a.b": 2},
        {"a.b": 2, "a": 1},
        {"a<1>": 1},
        {"a<0>": 1, "a.b": 2},
        {"<0>": 1},
        {"": 1},
        {"a.": 1},
        {3: 1},
    ],
)
def test_names_that_do_not_nest_are_refused(flat: Any) -> None:
    """With the facts that the caller gave."""
    with pytest.raises(errors.InvalidPayload) as refusal:
        nest(flat, rid="r")
    assert refusal.value.facts["rid"] == "r"


def test_the_depth_is_limited() -> None:
    """So that a mapping within itself is an error of the caller, and no endless walk."""
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = {"a": deep}
    assert nest(flatten(deep)) == deep
    within: dict[str, Any] = {}
    within["a"] = within
    endless: list[Any] = []
    endless.append(endless)
    for tree in ({"a": deep}, within, {"a": endless}, {".".join(["a"] * (MAX_DEPTH + 1)): 1}):
        with pytest.raises(errors.InvalidPayload) as refusal:
            flatten(tree)
        assert refusal.value.facts["limit"] == MAX_DEPTH


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("hidden_states.layers[24]", "req_abc-24"),
        ("hidden_states.layers[0]", "req_abc-0"),
        ("ids.thinker_input_ids", "req_abc-thinker_input_ids"),
        ("codes.audio", "req_abc-codes.audio"),
        ("ids.a.b", "req_abc-ids.a.b"),
        ("hidden_states.last", "req_abc-hidden_states.last"),
    ],
)
def test_a_name_and_its_key(name: str, key: str) -> None:
    """The RFC's keys, and dotted id types; each way."""
    assert NAMING.key("req_abc", name) == key
    assert NAMING.name("req_abc", key) == name


@pytest.mark.parametrize(
    "name",
    ["a", "thinker_input_ids", "ids", "ids.", "ids.0a", "ids.x-y", "codes.a-b", "codes.a b", "0codes.audio", "codes..a",
     "codes.", ".codes", "hidden_states.layers[-1]", "hidden_states.layers[024]", "hidden_states.layers", "parts<0>",
     "hidden_states.layers[24].x", "hidden_states.layers[24]\n", "hidden_states.layers[10000000000000000000]", ""],
)  # fmt: skip
def test_other_names_have_no_key(name: str) -> None:
    """A model's own state, and what is no name at all. `hidden_states.layers` is an id type, dot and all."""
    expected = "r-hidden_states.layers" if name == "hidden_states.layers" else None
    assert NAMING.key("r", name) == expected


@given(rids, names)
def test_a_name_comes_back_from_its_key(rid: str, name: str) -> None:
    """name(key(name)) == name, and the key is that of this rid only."""
    key = NAMING.key(rid, name)
    assert key is not None
    assert NAMING.name(rid, key) == name
    with pytest.raises(errors.InvalidPayload):
        NAMING.name(rid + "-", key)


@given(rids, layers.map(str) | plain_ids | dotted_ids | plain_ids.map("ids.{}".format))
def test_a_key_comes_back_from_its_name(rid: str, part: str) -> None:
    """key(name(key)) == key, or the key has no name: no two keys share one."""
    key = f"{rid}-{part}"
    try:
        name = NAMING.name(rid, key)
    except errors.InvalidPayload:
        assert part.startswith("ids.") and part.count(".") == 1
        return
    assert NAMING.key(rid, name) == key


def test_a_category_without_a_template_has_no_keys() -> None:
    naming = Naming(config(ids="{rid}-{id_type}"))
    assert naming.key("r", "hidden_states.layers[24]") is None
    assert naming.key("r", "ids.a") == "r-a"


def test_without_an_enabled_config_no_name_has_a_key() -> None:
    """And no key a name, even one that the templates of the config would make."""
    off = TransferConfig.from_mapping({"enabled": False, "items": [], "key_templates": RFC})
    for naming in (Naming(TransferConfig.disabled()), Naming(off)):
        assert naming.key("r", "hidden_states.layers[24]") is None
        with pytest.raises(errors.InvalidPayload):
            naming.name("r", "r-24")


def test_filters_say_what_is_sent_and_not_what_it_is_called() -> None:
    """Else a layer would have another place in the buffer of each stage."""
    narrow = TransferConfig.from_mapping(
        {"enabled": True, "items": ["ids"], "key_templates": RFC, "hidden_state_layers": [], "id_types": ["a"]}
    )
    assert Naming(narrow).key("r", "hidden_states.layers[24]") == "r-24"
    assert Naming(narrow).key("r", "ids.b") == "r-b"


def test_a_key_too_long_for_the_connector_is_refused() -> None:
    """By rid and limit, where the name is asked for its key."""
    with pytest.raises(errors.InvalidPayload) as refusal:
        NAMING.key("r" * 1020, "ids.abcdef")
    assert (refusal.value.facts["size"], refusal.value.facts["limit"]) == (1027, 1024)


@given(names)
def test_a_key_part_and_its_name(name: str) -> None:
    """key_part and name_of are inverses."""
    found = key_part(name)
    assert found is not None
    assert name_of(*found) == name


@pytest.mark.parametrize(
    ("category", "part"),
    [("ids", "ids.x"), ("ids", "a..b"), ("ids", "a."), ("ids", "a-b"), ("ids", ""), ("hidden_states", "01"),
     ("hidden_states", "-1"), ("hidden_states", "x"), ("hidden_states", "1" * 20)],
)  # fmt: skip
def test_a_key_part_without_a_name_is_refused(category: str, part: str) -> None:
    with pytest.raises(errors.InvalidPayload) as refusal:
        name_of(category, part, rid="r")
    assert refusal.value.facts == {"part": part, "rid": "r"}
