"""One map of tensors per request: merged into, never mixed, never changed once it is handed out."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter import buffer as buffer_module
from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.config import TransferConfig
from runner_adapter.merge import MergeRules

CONFIG = TransferConfig.from_mapping(
    {
        "enabled": True,
        "items": ["hidden_states", "ids"],
        "key_templates": {"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"},
    }
)
RULES = MergeRules(accumulated=["ids.all"], gpu_resident=[("hidden_states", "last")])


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def told(found: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.fixture
def buffer() -> ModelIntermediateBuffer:
    """Requests `a` and `b-1`, both without tensors."""
    made = ModelIntermediateBuffer(CONFIG, rules=RULES)
    made.add("a")
    made.add("b-1")
    return made


@pytest.fixture
def plain() -> ModelIntermediateBuffer:
    """Without a transfer config: one request, `a`."""
    made = ModelIntermediateBuffer(rules=RULES)
    made.add("a", {"codes": {"audio": rows(1)}})
    return made


# -- names and keys ---------------------------------------------------------------------------------


def test_a_map_stands_under_keys_as_the_rfc_shows_it() -> None:
    buffer = ModelIntermediateBuffer(CONFIG)
    buffer.add("req_abc", {"hidden_states": {"layers": {24: rows(1)}}, "ids": {"thinker_input_ids": rows(2)}})
    assert told(buffer["req_abc"]) == {"req_abc-24": [1], "req_abc-thinker_input_ids": [2]}
    assert told(buffer.names("req_abc")) == {"hidden_states.layers[24]": [1], "ids.thinker_input_ids": [2]}


def test_a_name_without_a_key_stands_under_itself(buffer: ModelIntermediateBuffer) -> None:
    buffer.merge("a", {"state": rows(1), "parts": [rows(2), rows(3)]})
    assert told(buffer["a"]) == told(buffer.names("a")) == {"state": [1], "parts<0>": [2], "parts<1>": [3]}


def test_without_a_config_all_names_stand_under_themselves(plain: ModelIntermediateBuffer) -> None:
    assert told(plain["a"]) == {"codes.audio": [1]}


def test_a_models_nested_dicts_come_back_as_they_were(buffer: ModelIntermediateBuffer) -> None:
    nested = {"codes": {"audio": rows(1)}, "hidden_states": {"layers": {0: rows(2), 24: rows(3)}}, "parts": [rows(4)]}
    buffer.merge("a", nested)
    assert repr(buffer.nested("a")) == repr(nested)
    assert buffer.nested("b-1") == {}


@pytest.mark.parametrize(
    "update",
    [
        {"hidden_states": {"layers": {24: rows(7)}}, "codes": {"audio": rows(8)}},
        {"hidden_states.layers[24]": rows(7), "codes.audio": rows(8)},
        {"hidden_states": {"layers": {24: rows(7)}}, ("codes", "audio"): rows(8)},
        {"a-24": rows(7), "a-codes.audio": rows(8)},
    ],
    ids=["nested", "flat", "pair", "keys"],
)
def test_a_hooks_update_may_be_spelled_in_any_form(buffer: ModelIntermediateBuffer, update: dict[Any, Any]) -> None:
    """They all mean the same tensors; twice, so that what was learnt at the first is right."""
    for _ in range(2):
        buffer.merge("a", update)
        assert told(buffer.names("a")) == {"hidden_states.layers[24]": [7], "codes.audio": [8]}


def test_a_rid_with_dots_and_dashes_spells_its_keys_too() -> None:
    buffer = ModelIntermediateBuffer(CONFIG)
    buffer.add("u.7[x]-3", {"u.7[x]-3-24": rows(1)})
    assert told(buffer.names("u.7[x]-3")) == {"hidden_states.layers[24]": [1]}


def test_a_tensor_under_its_name_and_its_key_at_once_is_refused(buffer: ModelIntermediateBuffer) -> None:
    for update in [
        {"a-24": rows(1), "hidden_states.layers[24]": rows(2)},
        {"a-24": rows(1), "hidden_states": {"layers": {24: rows(2)}}},
    ]:
        with pytest.raises(errors.InvalidPayload) as caught:
            buffer.merge("a", update)
        assert caught.value.facts["rid"] == "a"
    assert told(buffer["a"]) == {}


def test_a_name_that_is_anothers_key_is_refused() -> None:
    """One of the two would hide the other in the map."""
    buffer = ModelIntermediateBuffer(CONFIG)
    buffer.add("u.x", {"hidden_states": {"layers": {24: rows(1)}}})
    with pytest.raises(errors.InvalidPayload):
        buffer.merge("u.x", {"u": {"x-24": rows(2)}})
    assert told(buffer["u.x"]) == {"u.x-24": [1]}


# -- what the connector brought -----------------------------------------------------------------------


def test_payloads_are_merged_into_each_requests_own_map(buffer: ModelIntermediateBuffer) -> None:
    failed = buffer.receive(1, {"a": [{"a-24": rows(1)}], "b-1": [{"b-1-24": rows(2)}]})
    assert failed == {}
    assert told(buffer["a"]) == {"a-24": [1]} and told(buffer["b-1"]) == {"b-1-24": [2]}


def test_several_payloads_of_a_step_are_one_merge(buffer: ModelIntermediateBuffer) -> None:
    """In their order: appended rows all stay, of the others the last stands."""
    payloads = [{"a-24": rows(n), "a-all": rows(n, 10 * n)} for n in (1, 2, 3)]
    assert buffer.receive(1, {"a": payloads}) == {}
    assert buffer.counters == {"merged": 1, "dropped_finished": 0, "refused": 0}
    assert told(buffer["a"]) == {"a-24": [3], "a-all": [1, 10, 2, 20, 3, 30]}


def test_payloads_reach_a_request_at_every_step(buffer: ModelIntermediateBuffer) -> None:
    """Not at its first only (PR: decode steps had none, and the talker stopped early)."""
    for step in range(1, 5):
        assert buffer.receive(step, {"a": [{"a-all": rows(step)}]}) == {}
        assert told(buffer["a"]) == {"a-all": list(range(1, step + 1))}


def test_what_the_connector_brings_takes_the_place_of_what_the_request_brought(buffer: ModelIntermediateBuffer) -> None:
    buffer.add("c", {"ids": {"x": rows(1), "y": rows(2)}})
    assert buffer.receive(1, {"c": [{"c-x": rows(3)}]}) == {}
    assert told(buffer["c"]) == {"c-x": [3], "c-y": [2]}


@pytest.mark.parametrize("again", [5, 4])
def test_a_second_merge_of_a_step_is_refused(buffer: ModelIntermediateBuffer, again: int) -> None:
    """PR, review 1: the same payload twice; here it would double its rows."""
    buffer.receive(5, {"a": [{"a-all": rows(1)}]})
    failed = buffer.receive(again, {"a": [{"a-all": rows(1)}], "b-1": [{"b-1-all": rows(2)}]})
    assert list(failed) == ["a"] and type(failed["a"]) is errors.UsageError
    assert failed["a"].facts == {"step": again, "merged": 5, "rid": "a"}
    assert told(buffer["a"]) == {"a-all": [1]} and told(buffer["b-1"]) == {"b-1-all": [2]}


def test_what_was_refused_or_empty_did_not_take_the_step(buffer: ModelIntermediateBuffer) -> None:
    assert buffer.receive(1, {"a": []}) == {}
    assert buffer.receive(1, {"a": [{"a-all": "no tensor"}]}).keys() == {"a"}  # type: ignore[dict-item]
    assert buffer.receive(1, {"a": [{"a-all": rows(1)}]}) == {}
    assert told(buffer["a"]) == {"a-all": [1]}


def test_a_payload_without_tensors_is_a_payload(buffer: ModelIntermediateBuffer) -> None:
    assert buffer.receive(1, {"a": [{}]}) == {}
    assert buffer.receive(1, {"a": [{}]}).keys() == {"a"}


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({"a-24": rows(9), "a-": rows(1)}, errors.InvalidPayload),
        ({"a-24": rows(9), "codes.audio": rows(1)}, errors.InvalidPayload),
        ({"a-24": rows(9), "b-1-24": rows(1)}, errors.InvalidPayload),
        ({"a-24": rows(9), "a-all": torch.tensor(1)}, errors.InvalidPayload),
        ({"a-24": rows(9), "a-x": [1, 2]}, errors.InvalidPayload),
        ({"a-24": rows(9), "a-x": {"y": rows(1)}}, errors.InvalidPayload),
        ({"a-24": rows(9), "a-x": torch.ones(2).to_sparse()}, errors.UnsupportedTensor),
        ("a-24", errors.InvalidPayload),
    ],
    ids="no-template a-name another-rid no-rows list dict sparse no-mapping".split(),
)
def test_a_refused_payload_changes_nothing_of_its_request_and_nothing_of_others(
    buffer: ModelIntermediateBuffer, payload: Any, error: type[Exception]
) -> None:
    """The good payload before it is not applied either."""
    buffer.receive(1, {"a": [{"a-24": rows(1)}]})
    failed = buffer.receive(2, {"a": [{"a-24": rows(8)}, payload], "b-1": [{"b-1-24": rows(2)}]})
    assert list(failed) == ["a"] and type(failed["a"]) is error and failed["a"].facts["rid"] == "a"
    assert told(buffer["a"]) == {"a-24": [1]} and told(buffer["b-1"]) == {"b-1-24": [2]}
    assert buffer.counters == {"merged": 2, "dropped_finished": 0, "refused": 1}


def test_a_key_that_matches_no_template_is_logged(
    buffer: ModelIntermediateBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="runner_adapter"):
        failed = buffer.receive(1, {"a": [{"a_24": rows(1)}]})
    assert failed["a"].facts["key"] == "a_24"
    (record,) = caplog.records
    assert "a_24" in record.getMessage() and "{rid}-{layer_id}" in record.getMessage()


@pytest.mark.parametrize("config", [None, TransferConfig.disabled()], ids=["none", "disabled"])
def test_without_an_enabled_config_every_key_is_refused(config: TransferConfig | None) -> None:
    buffer = ModelIntermediateBuffer(config)
    buffer.add("a")
    failed = buffer.receive(1, {"a": [{"a-24": rows(1)}]})
    assert type(failed["a"]) is errors.InvalidPayload and failed["a"].facts["key"] == "a-24"
    assert told(buffer["a"]) == {}


class Block(bytearray):
    """Stands for a block of shared memory that someone may hold."""


@pytest.mark.parametrize("key", ["a-24", "a-all", "a-hidden_states.last", "a_24", "a-ids.x"])
def test_no_block_is_held_once_a_payload_was_merged_or_refused(
    buffer: ModelIntermediateBuffer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored views would read what the next payload wrote. The last two keys are refused."""
    # pytest keeps what is logged, and with it the error that this log tells of.
    monkeypatch.setattr(logging.getLogger("runner_adapter"), "disabled", True)
    block = Block(b"\x01" + b"\x00" * 7)
    held = weakref.ref(block)
    payload = {key: torch.frombuffer(block, dtype=torch.int64)}
    failed = buffer.receive(1, {"a": [payload]})
    block[0] = 9
    assert told(buffer["a"]) == ({} if failed else {key: [1]})
    assert bool(failed) is (key in ("a_24", "a-ids.x"))
    del block, payload
    assert held() is None


# -- merging ----------------------------------------------------------------------------------------


def test_a_hooks_update_is_merged_and_does_not_replace_the_map(buffer: ModelIntermediateBuffer) -> None:
    buffer.receive(1, {"a": [{"a-24": rows(1), "a-all": rows(1)}]})
    buffer.merge("a", {"codes": {"audio": rows(2)}, "ids": {"all": rows(2)}})
    buffer.merge("a", {"codes": {"text": rows(3)}})
    assert told(buffer.names("a")) == {
        "hidden_states.layers[24]": [1],
        "ids.all": [1, 2],
        "codes.audio": [2],
        "codes.text": [3],
    }


def test_a_map_that_was_handed_out_never_changes(buffer: ModelIntermediateBuffer) -> None:
    buffer.merge("a", {"x": rows(1), "ids": {"all": rows(1)}})
    views = [buffer["a"], buffer.names("a"), buffer.nested("a")]
    before = repr(views)
    buffer.merge("a", {"x": rows(2), "ids": {"all": rows(2)}, "y": rows(3)})
    buffer.new_segment("a", {"ids": {"all": rows(4)}})
    buffer.replace("a", {"z": rows(5)})
    buffer.finish(["a"])
    assert repr(views) == before


def test_what_is_written_into_a_map_does_not_reach_the_buffer(buffer: ModelIntermediateBuffer) -> None:
    """What a gather wrote into live dicts would reach every later hook."""
    buffer.merge("a", {"codes": {"audio": rows(1)}})
    with pytest.raises(TypeError):
        buffer["a"]["generated_len"] = rows(1)  # type: ignore[index]
    buffer.names("a")["generated_len"] = rows(1)
    nested = buffer.nested("a")
    nested["generated_len"] = nested["codes"]["generated_len"] = rows(1)
    assert told(buffer.names("a")) == {"codes.audio": [1]}


def test_a_hooks_tensor_may_be_overwritten_after_the_merge(buffer: ModelIntermediateBuffer) -> None:
    output = torch.zeros(3, dtype=torch.int64)
    buffer.merge("a", {"hidden_states": {"last": output[:1]}, "x": output[1:2], "parts": [output[2:]]})
    output.fill_(9)
    assert told(buffer.names("a")) == {"hidden_states.last": [0], "x": [0], "parts<0>": [0]}


def test_declared_names_live_on_the_device_and_all_others_on_the_host() -> None:
    """`meta` stands for the device; a connector's payload, which comes on the host, goes there too."""
    buffer = ModelIntermediateBuffer(CONFIG, rules=RULES, device="meta")
    buffer.add("a", {"x": rows(0)})
    buffer.receive(1, {"a": [{"a-hidden_states.last": rows(1), "a-24": rows(1)}]})
    assert {name: t.device.type for name, t in buffer.names("a").items()} == {
        "x": "cpu",
        "hidden_states.last": "meta",
        "hidden_states.layers[24]": "cpu",
    }
    buffer.validate()


@pytest.mark.cuda
def test_a_resident_output_is_cloned_on_the_gpu() -> None:
    buffer = ModelIntermediateBuffer(CONFIG, rules=RULES, device="cuda")
    buffer.add("a")
    output = torch.zeros(2, device="cuda")
    buffer.merge("a", {"hidden_states": {"last": output}, "x": output})
    output.fill_(9)
    found = buffer.names("a")
    assert found["hidden_states.last"].is_cuda and found["x"].device.type == "cpu"
    assert told(found) == {"hidden_states.last": [0, 0], "x": [0, 0]}
    buffer.validate()


REFUSED: list[tuple[Any, type[Exception]]] = [
    ({"x": 1}, errors.InvalidPayload),
    ({"x": None}, errors.InvalidPayload),
    ({"x": {}}, errors.InvalidPayload),
    ({"x..y": rows(1)}, errors.InvalidPayload),
    ({"x": torch.ones(2).to_sparse()}, errors.UnsupportedTensor),
    (None, errors.InvalidPayload),
    ([rows(1)], errors.InvalidPayload),
]


@pytest.mark.parametrize("verb", ["merge", "replace", "new_segment"])
@pytest.mark.parametrize(("update", "error"), REFUSED, ids=repr)
def test_a_refused_update_changes_nothing(verb: str, update: Any, error: type[errors.ConnectorError]) -> None:
    if verb == "new_segment" and update is None:
        update = 0
    buffer = ModelIntermediateBuffer(CONFIG)
    buffer.add("a", {"ok": rows(1)})
    with pytest.raises(error) as caught:
        getattr(buffer, verb)("a", {"ok": rows(2), **update} if isinstance(update, dict) else update)
    assert type(caught.value) is error and caught.value.facts["rid"] == "a"
    assert told(buffer["a"]) == {"ok": [1]}
    assert buffer.counters == {"merged": 1, "dropped_finished": 0, "refused": 1}


# -- snapshots and segments -----------------------------------------------------------------------------


def test_a_snapshot_takes_the_maps_place(buffer: ModelIntermediateBuffer) -> None:
    """Appended rows, too, are the snapshot's alone; what the runner keeps stays."""
    buffer.merge("a", {"x": rows(1), "ids": {"all": rows(1)}, "meta": {"num_processed_tokens": rows(5), "y": rows(6)}})
    buffer.replace("a", {"ids": {"all": rows(2)}})
    assert told(buffer.names("a")) == {"meta.num_processed_tokens": [5], "ids.all": [2]}


def test_a_snapshot_says_more_than_what_is_kept(buffer: ModelIntermediateBuffer) -> None:
    buffer.merge("a", {"meta": {"num_processed_tokens": rows(5), "resumable": rows(1)}})
    buffer.replace("a", {"meta": {"num_processed_tokens": rows(6)}})
    assert told(buffer.names("a")) == {"meta.resumable": [1], "meta.num_processed_tokens": [6]}


def test_a_snapshot_appends_nothing_to_what_is_kept() -> None:
    buffer = ModelIntermediateBuffer(rules=MergeRules(accumulated=["x"], kept=["x"]))
    buffer.add("a", {"x": rows(1)})
    buffer.replace("a", {"x": rows(2)})
    assert told(buffer["a"]) == {"x": [2]}


def test_a_segment_appends_overwrites_and_starts_counting_anew(buffer: ModelIntermediateBuffer) -> None:
    first = {"x": rows(1), "y": rows(2), "ids": {"all": rows(1, 2)}, "meta": {"num_processed_tokens": torch.tensor(7)}}
    buffer.add("c", first)
    buffer.new_segment("c", {"x": rows(3), "ids": {"all": rows(3)}, "meta": {"num_processed_tokens": torch.tensor(9)}})
    found = buffer.names("c")
    assert told(found) == {"x": [3], "y": [2], "ids.all": [1, 2, 3], "meta.num_processed_tokens": 0}
    processed = found["meta.num_processed_tokens"]
    assert processed.dtype is torch.int64 and processed.device.type == "cpu"


def test_a_segment_that_brings_nothing_starts_counting_too(buffer: ModelIntermediateBuffer) -> None:
    buffer.new_segment("a")
    assert told(buffer["a"]) == {"a-meta.num_processed_tokens": 0}


# -- lives ------------------------------------------------------------------------------------------


def test_a_finished_request_is_gone(buffer: ModelIntermediateBuffer) -> None:
    buffer.finish(["a"])
    assert "a" not in buffer and list(buffer) == ["b-1"] and len(buffer) == 1


def test_an_id_that_comes_again_has_nothing_of_its_former_life(buffer: ModelIntermediateBuffer) -> None:
    """In one step: the old one leaves before the new one enters, and receives for itself."""
    buffer.receive(1, {"a": [{"a-all": rows(1)}]})
    buffer.finish(["a"])
    buffer.add("a")
    assert told(buffer["a"]) == {}
    assert buffer.receive(1, {"a": [{"a-all": rows(2)}]}) == {}
    assert told(buffer["a"]) == {"a-all": [2]}


UPDATES: dict[str, Callable[[ModelIntermediateBuffer, str], Any]] = {
    "merge": lambda buffer, rid: buffer.merge(rid, {"x": rows(1)}),
    "replace": lambda buffer, rid: buffer.replace(rid, {"x": rows(1)}),
    "new_segment": lambda buffer, rid: buffer.new_segment(rid, {"x": rows(1)}),
    "receive": lambda buffer, rid: buffer.receive(1, {rid: [{f"{rid}-x": rows(1)}]}),
}


@pytest.mark.parametrize("verb", UPDATES)
@pytest.mark.parametrize("rid", ["a", "never-seen"])
def test_what_comes_late_for_a_finished_request_is_dropped_and_counted(
    buffer: ModelIntermediateBuffer, verb: str, rid: str
) -> None:
    """Also if it was aborted before it was added. It opens no new life, and is nobody's error."""
    buffer.finish([rid])
    assert UPDATES[verb](buffer, rid) in (None, {})
    assert rid not in buffer
    assert buffer.counters == {"merged": 0, "dropped_finished": 1, "refused": 0}


@pytest.mark.parametrize("verb", UPDATES)
def test_an_update_for_an_unknown_request_is_refused_with_near_matches(verb: str) -> None:
    buffer = ModelIntermediateBuffer(CONFIG)
    buffer.add("req-123")
    try:
        error = UPDATES[verb](buffer, "req-124")["req-124"]
    except errors.UnknownRequest as caught:
        error = caught
    assert type(error) is errors.UnknownRequest
    assert error.facts == {"rid": "req-124", "near": ["req-123"]}
    assert "req-124" not in buffer and buffer.counters["refused"] == 1


def test_one_unknown_request_does_not_stop_the_others(buffer: ModelIntermediateBuffer) -> None:
    failed = buffer.receive(1, {"z": [{"z-24": rows(1)}], "a": [{"a-24": rows(1)}]})
    assert list(failed) == ["z"] and told(buffer["a"]) == {"a-24": [1]}


def test_reading_an_unknown_request_says_so(buffer: ModelIntermediateBuffer) -> None:
    for read in (buffer.__getitem__, buffer.names, buffer.nested):
        with pytest.raises(errors.UnknownRequest):
            read("b-2")
    assert buffer.counters["refused"] == 0


def test_a_request_is_added_once(buffer: ModelIntermediateBuffer) -> None:
    buffer.merge("a", {"x": rows(1)})
    with pytest.raises(errors.UsageError) as caught:
        buffer.add("a", {"x": rows(2)})
    assert caught.value.facts == {"rid": "a"} and told(buffer["a"]) == {"x": [1]}


def test_a_request_whose_first_update_is_refused_is_not_added(buffer: ModelIntermediateBuffer) -> None:
    with pytest.raises(errors.InvalidPayload):
        buffer.add("c", {"x": 1})
    assert "c" not in buffer
    buffer.add("c", {"x": rows(1)})
    assert told(buffer["c"]) == {"x": [1]}


@pytest.mark.parametrize("rid", ["", 3, None], ids=repr)
def test_what_is_no_rid_is_refused(buffer: ModelIntermediateBuffer, rid: Any) -> None:
    for call in (lambda: buffer.add(rid), lambda: buffer.finish([rid]), lambda: buffer.merge(rid, {"x": rows(1)})):
        with pytest.raises(errors.InvalidPayload):
            call()


@pytest.mark.parametrize("rids", ["a", ["a", ""]])
def test_a_refused_finish_ends_nobody(buffer: ModelIntermediateBuffer, rids: Any) -> None:
    with pytest.raises(errors.UsageError):
        buffer.finish(rids)
    assert "a" in buffer


def test_finished_rids_are_not_remembered_without_end(
    buffer: ModelIntermediateBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go first; to finish a rid again makes it the youngest."""
    monkeypatch.setattr(buffer_module, "MOST_FINISHED", 2)
    buffer.finish(["a", "b-1", "a", "c"])
    buffer.merge("a", {"x": rows(1)})
    buffer.merge("c", {"x": rows(1)})
    assert buffer.counters["dropped_finished"] == 2
    with pytest.raises(errors.UnknownRequest):
        buffer.merge("b-1", {"x": rows(1)})
    buffer.validate()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda buffer: buffer._finished.update(a=None),
        lambda buffer: buffer._held["a"].names.clear(),
        lambda buffer: buffer._held["a"].names.update(x=rows(1)),
        lambda buffer: buffer._held["a"].keys.update(x="y"),
        lambda buffer: setattr(buffer, "rules", MergeRules(gpu_resident=["x"])),
    ],
    ids="both gone other another-key another-place".split(),
)
def test_tables_that_contradict_each_other_are_found(spoil: Callable[[Any], None]) -> None:
    buffer = ModelIntermediateBuffer(CONFIG, device="meta")
    buffer.add("a", {"x": rows(1)})
    buffer.validate()
    spoil(buffer)
    with pytest.raises(errors.InvariantBroken):
        buffer.validate()
