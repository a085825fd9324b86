"""What may leave a stage and under which keys, and the adapter's settings: what is taken, sent, refused and told."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from connector import errors
from runner_adapter.config import AdapterConfig, TransferConfig

ROOT = Path(__file__).parents[2]
RFC: dict[str, Any] = {
    "enabled": True,
    "items": ["hidden_states", "ids"],
    "key_templates": {"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"},
    "hidden_state_layers": [0, 24],
    "id_types": ["thinker_input_ids", "code_predictor_codes"],
}


def config(**more: Any) -> TransferConfig:
    """The RFC's example; a field that is None is left out."""
    return TransferConfig.from_mapping({name: value for name, value in (RFC | more).items() if value is not None})


def refused(section: type[TransferConfig] | type[AdapterConfig], fields: Any) -> errors.ConfigError:
    with pytest.raises(errors.ConfigError) as refusal:
        section.from_mapping(fields)
    return refusal.value


class Watched(Mapping[Any, Any]):
    """Values that say which of them were looked at."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.inner = values
        self.fetched: list[Any] = []

    def __getitem__(self, key: Any) -> Any:
        self.fetched.append(key)
        return self.inner[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


# -- what leaves ----------------------------------------------------------------------------------


def test_the_rfcs_example_moves_what_it_names() -> None:
    """Layers 0 and 24 and two id types, under the RFC's keys; the tensors themselves, not copies."""
    found = config()
    tensors = [torch.zeros(2, 3), torch.ones(()), torch.empty(0, dtype=torch.int64), torch.zeros(1)]
    sent = found.select(
        "req_abc",
        hidden_states={0: tensors[0], 12: torch.zeros(9), 24: tensors[1]},
        ids={"thinker_input_ids": tensors[2], "other": torch.zeros(9), "code_predictor_codes": tensors[3]},
    )
    keys = ["req_abc-0", "req_abc-24", "req_abc-thinker_input_ids", "req_abc-code_predictor_codes"]
    assert list(sent) == keys
    assert all(there is here for there, here in zip(sent.values(), tensors, strict=True))


@pytest.mark.parametrize("off", [TransferConfig(), TransferConfig.disabled(), config(enabled=False)], ids=str)
def test_without_an_enabled_config_nothing_moves(off: TransferConfig) -> None:
    """Nothing is looked at either."""
    values = Watched({0: torch.zeros(1), "thinker_input_ids": 7})
    assert off.select("r", hidden_states=values, ids=values) == {}
    assert values.fetched == []
    assert not off.allows("hidden_states", 0)


@pytest.mark.parametrize(
    ("items", "keys"),
    [
        ([], []),
        (["hidden_states"], ["r-0"]),
        (["ids"], ["r-thinker_input_ids"]),
        (["ids", "hidden_states"], ["r-0", "r-thinker_input_ids"]),
    ],
)
def test_items_say_which_categories_leave(items: list[str], keys: list[str]) -> None:
    sent = config(items=items).select("r", {0: torch.zeros(1)}, {"thinker_input_ids": torch.zeros(1)})
    assert list(sent) == keys


@pytest.mark.parametrize(
    ("layers", "id_types", "keys"),
    [
        (None, None, ["r-0", "r-7", "r-a", "r-b.c"]),
        ([], None, ["r-a", "r-b.c"]),
        ([7], [], ["r-7"]),
        ([7, 8], ["b.c"], ["r-7", "r-b.c"]),
        ([], [], []),
    ],
)
def test_filters_left_out_are_all_and_empty_ones_none(
    layers: list[int] | None, id_types: list[str] | None, keys: list[str]
) -> None:
    found = config(hidden_state_layers=layers, id_types=id_types)
    sent = found.select("r", {0: torch.zeros(1), 7: torch.zeros(1)}, {"a": torch.zeros(1), "b.c": torch.zeros(1)})
    assert list(sent) == keys


@pytest.mark.parametrize("items", [["ids"], ["hidden_states", "ids"]])
def test_hidden_states_are_no_id_types_unless_they_are_named(items: list[str]) -> None:
    """`hidden_states.last` can be an id type by its form; what gates hidden states must not let it pass as one."""
    names = ("hidden_states.last", "hidden_states.output", "hidden_states", "hidden_statesx.y")
    given = dict.fromkeys(names, torch.zeros(1))
    every = config(items=items, id_types=None)
    assert list(every.select("r", ids=given)) == ["r-hidden_states", "r-hidden_statesx.y"]
    named = config(items=items, id_types=["hidden_states.last"])
    assert list(named.select("r", ids=given)) == ["r-hidden_states.last"]


def test_what_is_filtered_out_is_not_looked_at() -> None:
    """Not fetched from its mapping: nothing is computed or copied for it, and no value of any kind is refused."""
    hidden = Watched({0: torch.zeros(1), 1: "no tensor", -1: None, "x": 3, 24: torch.zeros(1)})
    ids = Watched({"a-b": 1, "thinker_input_ids": torch.zeros(1)})
    sent = config(items=["hidden_states"]).select("r", hidden, ids)
    assert list(sent) == ["r-0", "r-24"]
    assert (hidden.fetched, ids.fetched) == ([0, 24], [])


@pytest.mark.parametrize(
    "value", [None, 1, "text", [torch.zeros(1)], {"a": torch.zeros(1)}, torch.Size([1]), torch.Tensor]
)
def test_what_is_no_tensor_does_not_leave(value: Any) -> None:
    """Refused by rid, key and type: a payload is strictly dict[str, Tensor]."""
    with pytest.raises(errors.InvalidPayload, match="only Tensors are handed over") as refusal:
        config().select("r", ids={"thinker_input_ids": value})
    assert refusal.value.facts == {"rid": "r", "key": "r-thinker_input_ids", "type": type(value).__name__}


@pytest.mark.parametrize("given", [[1], [], torch.zeros(2), "text", 0])
def test_tensors_are_given_in_mappings(given: Any) -> None:
    for category in ("hidden_states", "ids"):
        with pytest.raises(errors.InvalidPayload, match="tensors are given in a mapping") as refusal:
            config().select("r", **{category: given})
        assert refusal.value.facts == {"rid": "r", "category": category, "type": type(given).__name__}


def test_every_kind_of_tensor_leaves() -> None:
    """A subclass is one."""
    given = {0: torch.nn.Parameter(torch.zeros(1)), 24: torch.zeros(1, device="meta")}
    assert list(config().select("r", given).values()) == list(given.values())


def test_two_spellings_of_a_layer_are_not_one() -> None:
    """Neither tensor is dropped in silence."""
    given: Any = {24: torch.zeros(1), "24": torch.zeros(1)}
    with pytest.raises(errors.InvalidPayload, match="two tensors have one key") as refusal:
        config().select("r", given)
    assert refusal.value.facts["key"] == "r-24"


@pytest.mark.parametrize(
    ("category", "name", "may"),
    [
        ("hidden_states", 24, True),
        ("hidden_states", "24", True),
        ("hidden_states", 12, False),
        ("hidden_states", True, False),
        ("ids", "thinker_input_ids", True),
        ("ids", "thinker", False),
    ],
)
def test_allows_tells_what_may_leave(category: str, name: int | str, may: bool) -> None:
    """A layer id as an int, or as `parse_key` gives it."""
    assert config().allows(category, name) is may
    assert config(items=[]).allows(category, name) is False


def test_a_category_that_there_is_not_is_the_callers_mistake() -> None:
    with pytest.raises(errors.UsageError) as refusal:
        config().allows("hidden_state", 0)
    assert refusal.value.facts["valid"] == ["hidden_states", "ids"]


# -- keys -----------------------------------------------------------------------------------------

hostile = st.one_of(
    st.sampled_from(["r-24", "-", "a--", "a-thinker_input_ids", "{rid}", "a\n-0", "a.b-c", "0"]),
    st.text("aZ09_-. {}:/\\\n\0üΩ😀", min_size=1, max_size=40),
)


@given(
    hostile,
    st.integers(0, 2**63 - 1),
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}(\.[A-Za-z0-9_]{1,5}){2}", fullmatch=True),
)
def test_keys_are_parsed_from_the_right_whatever_the_rid(rid: str, layer: int, id_type: str) -> None:
    found = config()
    assert found.parse_key(found.hidden_state_key(rid, layer)) == (rid, "hidden_states", str(layer))
    assert found.parse_key(found.id_key(rid, id_type), rid) == (rid, "ids", id_type)


@pytest.mark.parametrize(
    ("templates", "hidden", "ids"),
    [
        ({"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"}, "a-1-24", "a-1-x"),
        ({"hidden_states": "h/{layer_id}/{rid}", "ids": "i:{rid}:{id_type}!"}, "h/24/a-1", "i:a-1:x!"),
    ],
)
def test_keys_are_as_their_templates_say(templates: dict[str, str], hidden: str, ids: str) -> None:
    """Made whether or not they may leave, and parsed."""
    found = config(key_templates=templates, items=[])
    assert (found.hidden_state_key("a-1", 24), found.id_key("a-1", "x")) == (hidden, ids)
    assert found.parse_key(hidden, "a-1") == ("a-1", "hidden_states", "24")
    assert found.parse_key(ids, "a-1") == ("a-1", "ids", "x")


@pytest.mark.parametrize(
    ("key", "rid"),
    [
        ("req_abc", "req_abc"),
        ("req_abc-", "req_abc"),
        ("req_abc-024", "req_abc"),
        ("req_abc--1", "req_abc"),
        ("req_abc-24 ", "req_abc"),
        ("-24", "req_abc"),
        ("req_abc-24", "req"),
        ("req_abc-24", "req_abc-"),
        ("req_abc-ids.x", "req_abc"),
        ("req_abc-a..b", "req_abc"),
        ("req_abc-" + "9" * 20, "req_abc"),
        ("x" * 1025, "req_abc"),
    ],
)
def test_a_key_that_no_template_makes_is_refused_and_logged(
    key: str, rid: str, caplog: pytest.LogCaptureFixture
) -> None:
    """RFC: rejected with clear error logs. Error and log name key, templates and rid."""
    with caplog.at_level(logging.ERROR, "runner_adapter"), pytest.raises(errors.InvalidPayload) as refusal:
        config().parse_key(key, rid)
    facts = refusal.value.facts
    assert facts["key"].removesuffix("…") == key[:40]
    assert facts["rid"] == rid
    assert facts["templates"] == ["hidden_states: {rid}-{layer_id}", "ids: {rid}-{id_type}"]
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("runner_adapter", "ERROR", str(refusal.value))
    ]


def test_a_key_that_is_known_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Whether or not it may leave: who reads has filters of its own."""
    with caplog.at_level(logging.DEBUG):
        assert config(items=[]).parse_key("a-12") == ("a", "hidden_states", "12")
    assert caplog.records == []


def test_without_an_enabled_config_there_are_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    """Neither made nor known."""
    off = config(enabled=False)
    with pytest.raises(errors.UsageError, match="no transfer config is enabled"):
        off.hidden_state_key("r", 24)
    with pytest.raises(errors.InvalidPayload, match="no transfer config is enabled") as refusal:
        off.parse_key("r-24", "r")
    assert refusal.value.facts == {"key": "r-24", "rid": "r", "templates": []}
    assert caplog.messages == [str(refusal.value)]


def test_a_category_without_a_template_has_no_keys() -> None:
    found = config(items=["ids"], key_templates={"ids": "{rid}-{id_type}"})
    with pytest.raises(errors.UsageError, match="no key template"):
        found.hidden_state_key("r", 24)
    with pytest.raises(errors.InvalidPayload):
        found.parse_key("r-24")


@pytest.mark.parametrize("layer", [-1, True, 2**63, 1.0, None])
def test_a_layer_id_is_an_int_of_63_bits(layer: Any) -> None:
    with pytest.raises(errors.InvalidPayload, match="layer_id"):
        config().hidden_state_key("r", layer)


@pytest.mark.parametrize("id_type", ["", "0a", "a-b", "a..b", "ids.x", 7])
def test_an_id_type_is_a_name(id_type: Any) -> None:
    with pytest.raises(errors.InvalidPayload):
        config().id_key("r", id_type)


@pytest.mark.parametrize("rid", ["", None, "r" * 1025, "\ud800"])
def test_a_rid_is_checked(rid: Any) -> None:
    with pytest.raises(errors.InvalidPayload, match="rid"):
        config().select(rid, {0: torch.zeros(1)})


# -- what is refused at load ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"key_templates": None}, "key_templates: field required when enabled"),
        ({"key_templates": {}}, "key_templates: field required when enabled"),
        (
            {"key_templates": {"ids": "{rid}-{id_type}"}},
            "key_templates: there is no template for the item 'hidden_states'",
        ),
        ({"items": None}, "items: field required when enabled"),
        ({"enabled": None}, "enabled: field required where another is given"),
    ],
)
def test_what_an_enabled_config_must_say(more: dict[str, Any], told: str) -> None:
    """RFC: key_templates is mandatory. Nor is it guessed whether and what to send."""
    assert f"transfer_config: {told}" in str(
        refused(TransferConfig, {k: v for k, v in (RFC | more).items() if v is not None})
    )


def test_a_disabled_config_may_be_incomplete_but_not_wrong() -> None:
    assert not TransferConfig.from_mapping({"enabled": False}).enabled
    assert not TransferConfig.from_mapping({"enabled": False, "items": ["ids"]}).enabled
    assert "items.0: " in str(refused(TransferConfig, {"enabled": False, "items": ["id"]}))


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("enabled", 1, "enabled: input should be a valid boolean, given 1"),
        ("enabled", "true", "enabled: input should be a valid boolean, given 'true'"),
        ("enabld", True, "enabld: there is no such field; did you mean 'enabled'?"),
        ("qqq", True, "qqq: there is no such field\n"),
        ("items", "ids", "items: this must be a list; [] is none, given 'ids'"),
        ("items", {"ids": True}, "items: this must be a list"),
        ("items", ["ids", "hidden_state"], "items.1: input should be 'hidden_states' or 'ids', given 'hidden_state'; "
         "did you mean 'hidden_states'?"),
        ("items", [7], "items.0: input should be 'hidden_states' or 'ids', given 7"),
        ("items", ["ids", "ids"], "items: 'ids' stands twice"),
        ("hidden_state_layers", [0, True], "hidden_state_layers.1: input should be a valid integer, given True"),
        ("hidden_state_layers", [1.0], "hidden_state_layers.0: input should be a valid integer, given 1.0"),
        ("hidden_state_layers", ["24"], "hidden_state_layers.0: input should be a valid integer, given '24'"),
        ("hidden_state_layers", [-1], "hidden_state_layers.0: input should be greater than or equal to 0, given -1"),
        ("hidden_state_layers", [2**63], "hidden_state_layers.0: input should be less than or equal to"),
        ("hidden_state_layers", [24, 0, 24], "hidden_state_layers: 24 stands twice"),
        ("hidden_state_layers", 24, "hidden_state_layers: this must be a list"),
        ("id_types", ["a", 7], "id_types.1: input should be a valid string, given 7"),
        ("id_types", ["a-b"], "id_types.0: an id type is letters"),
        ("id_types", ["a."], "id_types.0: an id type is letters"),
        ("id_types", ["ids.x"], "'ids.x' is written 'x', given 'ids.x'"),
        ("id_types", ["a", "b", "a"], "id_types: 'a' stands twice"),
        ("key_templates", "{rid}-{layer_id}", "key_templates: input should be a valid dictionary"),
        ("key_templates", {"idz": "{rid}-{id_type}"}, "key_templates.idz: there is no such field; did you mean 'ids'?"),
        ("key_templates", {"ids": 7}, "key_templates.ids: input should be a valid string, given 7"),
        ("key_templates", {"ids": "x-{id_type}"}, "key_templates.ids: a key template holds {rid} once"),
        ("key_templates", {"ids": "{rid}-{id_typ}"}, "nearest='id_type'"),
        ("key_templates", {"ids": "{rid}-{layer_id}"}, "key_templates.ids: keys of this category hold {id_type}"),
        ("key_templates", {"hidden_states": "{rid}0{layer_id}"}, "key_templates.hidden_states: keys of this template "
         "cannot be parsed back"),
        ("key_templates", {"hidden_states": "{rid}-{layer_id}", "ids": "{id_type}-{rid}"}, "key_templates: two key "
         "templates collide"),
    ],
)  # fmt: skip
def test_what_is_refused_at_load(field: str, value: Any, told: str) -> None:
    """By field, with what was given and the nearest valid name; nothing is coerced."""
    message = refused(TransferConfig, RFC | {field: value}).message
    assert message.startswith(f"transfer_config: {field}")
    assert told in message + "\n"


@pytest.mark.parametrize("field", ["hidden_state_layers", "id_types", "items"])
def test_null_is_no_list(field: str) -> None:
    """Where the last entry of a list was taken out, all would leave."""
    assert f"{field}: this must be a list; [] is none, given None" in str(refused(TransferConfig, RFC | {field: None}))


def test_all_problems_are_told_at_once() -> None:
    """A line each."""
    wrong = RFC | {"enabled": 1, "items": ["id"], "key_templates": {"ids": "x", "hidden_states": "y"}, "layers": [1]}
    lines = refused(TransferConfig, wrong).message.splitlines()
    fields = ["enabled", "items.0", "key_templates.hidden_states", "key_templates.ids", "layers"]
    assert [line.split(": ")[1] for line in lines] == fields
    assert refused(TransferConfig, {"enabled": True}).message.splitlines() == [
        "transfer_config: items: field required when enabled: the categories that may leave, [] for none",
        "transfer_config: key_templates: field required when enabled: a template for each category",
    ]


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**64)
    | st.floats()
    | st.sampled_from(["ids", "a", "{rid}-{id_type}", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ids", "hidden_states", "x"]), inner),
    max_leaves=5,
)


@given(st.fixed_dictionaries({}, optional={name: st.just(value) | junk for name, value in (RFC | {"x": 1}).items()}))
def test_any_fields_are_a_config_or_a_config_error(fields: dict[str, Any]) -> None:
    """No other error, and what is taken can be used: its templates make the keys of its items."""
    try:
        found = TransferConfig.from_mapping(fields)
    except errors.ConfigError as error:
        assert error.message.startswith("transfer_config: ")
        return
    for category, name in (("hidden_states", "7"), ("ids", "a")):
        if category in found.chosen:
            assert found.templates is not None
            assert found.parse_key(found.templates.format("r-1", category, name), "r-1") == ("r-1", category, name)


@pytest.mark.parametrize("given", [None, [], "enabled", 3])
@pytest.mark.parametrize("section", [TransferConfig, AdapterConfig])
def test_a_section_is_a_mapping(section: type[TransferConfig], given: Any) -> None:
    assert "must be a mapping of fields" in str(refused(section, given))


def test_a_config_does_not_change() -> None:
    """Nor does it when the lists that it was made of do."""
    fields = {name: list(value) if isinstance(value, list) else value for name, value in RFC.items()}
    found = TransferConfig.from_mapping(fields)
    fields["items"].clear()
    assert found.items == ("hidden_states", "ids")
    with pytest.raises(ValidationError):
        found.enabled = False  # type: ignore[misc]


# -- the adapter's own settings -------------------------------------------------------------------


def test_the_adapters_settings() -> None:
    """Defaults, and every field."""
    found = AdapterConfig.from_mapping({})
    assert (found.migration_phase, found.ranks, found.background_send) == (2, "broadcast", False)
    found = AdapterConfig.from_mapping({"migration_phase": 3, "ranks": "each", "background_send": True})
    assert (found.migration_phase, found.ranks, found.background_send) == (3, "each", True)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("migration_phase", 0, "migration_phase: input should be greater than or equal to 1, given 0"),
        ("migration_phase", 4, "migration_phase: input should be less than or equal to 3, given 4"),
        ("migration_phase", True, "migration_phase: input should be a valid integer, given True"),
        ("ranks", "eech", "ranks: input should be 'broadcast' or 'each', given 'eech'; did you mean 'each'?"),
        ("background_send", 1, "background_send: input should be a valid boolean, given 1"),
        ("rank", "each", "rank: there is no such field; did you mean 'ranks'?"),
    ],
)
def test_settings_that_are_refused(field: str, value: Any, told: str) -> None:
    assert f"runner_adapter: {told}" in str(refused(AdapterConfig, {field: value}))


# -- purity ---------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
from connector import errors
from runner_adapter import config, naming, stagefile
found = config.TransferConfig.from_mapping(
    {"enabled": True, "items": ["ids"], "key_templates": {"ids": "{rid}-{id_type}"}})
assert naming.Naming(found).name("r", "r-a") == "ids.a"
try:
    found.select("r", ids={"a": 7})
except errors.InvalidPayload as error:
    print(error.facts["type"], [name for name in ("torch", "zmq", "posix_ipc") if name in sys.modules])
"""


def test_neither_names_nor_configs_load_torch() -> None:
    """Not even to tell that a value is no Tensor."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("int []\n", "")
