"""RunnerAdapter without a connector: plain values of hooks and engines by phase, staged rows, and whether the talker is
there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter import phases
from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.config import AdapterConfig, TransferConfig
from runner_adapter.merge import MergeRules
from runner_adapter.phases import Phase
from runner_adapter.plan import StepPlan
from runner_adapter.runner import RunnerAdapter
from runner_adapter.staging import DeviceRows, RowSpec
from runner_adapter.values import as_value
from tests.runner_adapter.models import WIDTH, Given, HookModel, TalkingModel, embeds_of, flat, gives

OLD_PHASES = pytest.mark.parametrize("phase", [Phase.COMPAT, Phase.SWITCH])
CONFIG = TransferConfig.from_mapping(
    {"enabled": True, "items": ["ids"], "key_templates": {"ids": "{rid}-{id_type}"}},
)
VALUES: dict[str, Any] = {
    "num_processed_tokens": 5,
    "finished": True,
    "not_yet": False,
    "zero": 0,
    "scale": 0.1,
    "text": "hé\U0001f600",
    "no_text": "",
    "ids": [1, 2],
    "rows": [[1.5], [2.5]],
    "voices": ["a", "bcd"],
    "none_of_them": [],
    "raw": b"\0\1",
}
#: A way by which a hook or an engine gives `a` an update, beside a request `b`.
Way = Callable[..., RunnerAdapter]


@pytest.fixture(autouse=True)
def _warnings_come_anew() -> Iterator[None]:
    phases.forget_warnings()
    yield
    phases.forget_warnings()


def adapter_of(phase: Phase, model: object | None = None, **more: Any) -> RunnerAdapter:
    return RunnerAdapter(model or object(), settings=AdapterConfig(migration_phase=int(phase)), **more)


def begun(phase: Phase, model: object | None = None, **more: Any) -> RunnerAdapter:
    """With requests a and b in their first step."""
    adapter = adapter_of(phase, model, **more)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    return adapter


def refusal(adapter: RunnerAdapter) -> errors.InvalidPayload:
    """That of a, and of nobody else."""
    [(rid, error)] = adapter.failures().items()
    assert rid == "a" and type(error) is errors.InvalidPayload and error.facts["rid"] == "a"
    return error


def values_of(adapter: RunnerAdapter, rid: str) -> dict[str, Any]:
    return {name: as_value(tensor) for name, tensor in adapter.buffer.names(rid).items()}


def both(given: Given, update: Any) -> Any:
    """What a preprocess gives with this update."""
    return given["input_ids"], embeds_of(given["input_ids"]), update


def plan_of(padded_rows: int | None = None, padded_tokens: int | None = None, **counts: int) -> StepPlan:
    return StepPlan.make(counts, counts, padded_rows=padded_rows, padded_tokens=padded_tokens)


def by_preprocess(phase: Phase, update: Any, **more: Any) -> RunnerAdapter:
    adapter = begun(phase, HookModel(a=lambda given: both(given, update)), **more)
    adapter.preprocess(plan_of(a=1, b=1), torch.zeros(2, dtype=torch.int64))
    return adapter


def by_postprocess(phase: Phase, update: Any, **more: Any) -> RunnerAdapter:
    model = HookModel(a=gives(update))
    model.has_preprocess = False
    adapter = begun(phase, model, **more)
    adapter.postprocess(plan_of(a=1, b=1), torch.zeros(2, WIDTH))
    return adapter


def by_first_map(phase: Phase, update: Any, **more: Any) -> RunnerAdapter:
    adapter = adapter_of(phase, **more)
    adapter.begin_step(new={"a": update, "b": None}, scheduled=["a", "b"])
    return adapter


def by_segment(phase: Phase, update: Any, **more: Any) -> RunnerAdapter:
    adapter = begun(phase, **more)
    adapter.begin_step(new={"a": update}, scheduled=["a"])
    return adapter


def by_bring(phase: Phase, update: Any, **more: Any) -> RunnerAdapter:
    adapter = begun(phase, **more)
    adapter.bring({"a": update, "b": {"x": torch.tensor(1)}})
    return adapter


def by_snapshot(phase: Phase, update: Any, **more: Any) -> RunnerAdapter:
    adapter = begun(phase, **more)
    adapter.bring({"a": update}, replace=True)
    return adapter


WAYS = pytest.mark.parametrize(
    "way",
    [by_preprocess, by_postprocess, by_first_map, by_segment, by_bring, by_snapshot],
    ids=lambda way: way.__name__,
)

# -- plain values ---------------------------------------------------------------------------------


@OLD_PHASES
@WAYS
def test_plain_values_become_tensors_that_give_them_back(way: Way, phase: Phase) -> None:
    adapter = way(phase, {"kept": VALUES, "list": [torch.tensor(1), 2], "codes.audio": [3]})
    assert adapter.failures() == {}
    found = values_of(adapter, "a")
    wanted = {**{f"kept.{name}": value for name, value in VALUES.items()}, "list<0>": 1, "list<1>": 2}
    assert {name: found[name] for name in wanted} == wanted
    # 0 and False, 1 and True are equal in Python.
    assert {name: type(found[name]) for name in wanted} == {name: type(value) for name, value in wanted.items()}
    assert found["codes.audio"] == [3]
    adapter.validate()


@WAYS
@pytest.mark.parametrize("value", [5, True, 0.5, "text", [1], None, {}], ids=repr)
def test_phase_3_takes_tensors_alone_and_fails_the_request_by_name(way: Way, value: Any) -> None:
    adapter = way(Phase.CLEAN, {"codes": {"audio": torch.tensor([1])}, "meta": {"x": value}})
    assert str(refusal(adapter).facts["name"]).startswith("meta.x")
    # Nothing of it is there; b goes on.
    assert "codes.audio" not in adapter.buffer.names("a")
    assert adapter.buffer.counters["refused"] == 1
    adapter.bring({"b": {"y": torch.tensor(2)}})
    assert flat(adapter.buffer.nested("b"))["y"] == 2


@OLD_PHASES
@WAYS
def test_a_value_that_no_tensor_holds_is_that_requests_failure_by_name(way: Way, phase: Phase) -> None:
    adapter = way(phase, {"codes": {"audio": [1]}, "meta": {"deep": {"x": object()}}})
    assert refusal(adapter).facts == {"rid": "a", "entry": "meta.deep.x"}
    assert "codes.audio" not in adapter.buffer.names("a")
    assert adapter.buffer.counters["refused"] == 1


def endless(inner: Any, hold: Callable[[Any], Any]) -> Any:
    for _ in range(5000):
        inner = hold(inner)
    return inner


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(
    "value",
    [
        endless(torch.tensor(1), lambda inner: {"x": inner}),
        endless(1, lambda inner: {"x": inner}),
        endless(torch.tensor(1), lambda inner: [inner]),
        endless(1, lambda inner: [inner]),
    ],
    ids=["mappings", "mappings of a number", "lists", "lists of a number"],
)
def test_what_is_nested_without_end_is_its_requests_failure(value: Any, phase: Phase) -> None:
    adapter = by_bring(phase, {"meta": value})
    assert refusal(adapter).facts["limit"] == 64
    assert flat(adapter.buffer.nested("b")) == {"x": 1}


@OLD_PHASES
@WAYS
def test_none_and_an_empty_mapping_say_nothing(way: Way, phase: Phase) -> None:
    adapter = way(phase, {"x": None, "y": {}, "z": {"deep": None}, "is": 1})
    assert adapter.failures() == {}
    assert {name: value for name, value in values_of(adapter, "a").items() if name != "meta.num_processed_tokens"} == {
        "is": 1
    }


@OLD_PHASES
def test_what_says_nothing_leaves_what_is_there(phase: Phase) -> None:
    adapter = begun(phase)
    adapter.bring({"a": {"x": 1, "y": {"z": 2}}})
    adapter.bring({"a": {"x": None, "y": {}}})
    assert values_of(adapter, "a") == {"x": 1, "y.z": 2}


def test_a_model_reads_a_tensor_where_it_gave_a_number() -> None:
    """And goes on counting with it, as with the number."""
    seen: list[Any] = []

    def counts(given: Given) -> Any:
        before = given.get("meta", {}).get("num_processed_tokens", 0)
        seen.append(before)
        return both(given, {"meta": {"num_processed_tokens": before + 3, "finished": len(seen) == 2}})

    adapter = begun(Phase.SWITCH, HookModel(a=counts))
    for _ in range(3):
        adapter.preprocess(plan_of(a=1), torch.zeros(1, dtype=torch.int64))
        adapter.begin_step(scheduled=["a", "b"])
    assert seen == [0, 3, 6] and [type(one) for one in seen] == [int, torch.Tensor, torch.Tensor]
    assert all(one.shape == () and one.dtype is torch.int64 for one in seen[1:])
    assert values_of(adapter, "a") == {"meta.num_processed_tokens": 9, "meta.finished": False}


def test_rows_given_as_lists_are_appended_and_what_a_model_hands_back_is_not() -> None:
    def echoes(given: Given) -> Any:
        mine = {name: given[name] for name in ("ids", "note") if name in given}
        return both(given, {**mine, "ids": {"all": mine.get("ids", {}).get("all", [1, 2])}, "note": 7})

    adapter = begun(Phase.SWITCH, HookModel(a=echoes), rules=MergeRules(accumulated=["ids.all"]))
    for _ in range(2):
        adapter.preprocess(plan_of(a=1), torch.zeros(1, dtype=torch.int64))
    assert values_of(adapter, "a") == {"ids.all": [1, 2], "note": 7}
    adapter.bring({"a": {"ids": {"all": [3]}}})
    assert values_of(adapter, "a")["ids.all"] == [1, 2, 3]
    adapter.bring({"a": {"ids": {"all": 4}}})
    assert refusal(adapter).facts["name"] == "ids.all"


@pytest.mark.parametrize("rid", ["a", "u.7[x]-3"])
def test_values_may_stand_under_a_key_or_a_pair(rid: str) -> None:
    buffer = ModelIntermediateBuffer(CONFIG, plain_values=True)
    buffer.add(rid, {f"{rid}-codes.audio": [1], ("codes", "text"): "b"})
    assert flat(buffer.names(rid)) == {"codes.audio": [1], "codes.text": [98]}


def test_what_the_connector_brings_is_tensors_in_any_phase() -> None:
    buffer = ModelIntermediateBuffer(CONFIG, plain_values=True)
    buffer.add("a")
    failed = buffer.receive(1, {"a": [{"a-x": [1]}]})  # type: ignore[dict-item]
    assert {rid: type(error) for rid, error in failed.items()} == {"a": errors.InvalidPayload}
    assert buffer.nested("a") == {}


def test_a_finished_requests_values_are_dropped_whatever_they_are() -> None:
    adapter = begun(Phase.SWITCH)
    adapter.begin_step(finished=["a"])
    adapter.bring({"a": {"x": object()}})
    assert adapter.buffer.counters["dropped_finished"] == 1 and adapter.failures() == {}
    with pytest.raises(errors.UnknownRequest):
        adapter.bring({"c": {"x": object()}})


@OLD_PHASES
def test_a_plain_value_is_warned_of_once_a_name_and_a_tensor_never(
    phase: Phase, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = begun(phase, config=CONFIG)
    adapter.bring({"a": {"x": torch.tensor(1)}})
    assert caplog.records == []
    for number in range(2):
        adapter.bring({rid: {"meta": {"n": number}, f"{rid}-tok": [number]} for rid in "ab"})
    told = [f"a value that is no tensor, under {name}, is deprecated: use a tensor" for name in ("meta.n", "ids.tok")]
    assert [record.getMessage() for record in caplog.records] == told


def test_a_model_that_makes_up_names_does_not_fill_the_memory_with_warnings(caplog: pytest.LogCaptureFixture) -> None:
    adapter = begun(Phase.SWITCH)
    adapter.bring({"a": {f"n{number}": number for number in range(phases.MOST_WARNED + 50)}})
    assert len(caplog.records) == phases.MOST_WARNED
    assert len(adapter.buffer.names("a")) == phases.MOST_WARNED + 50


# -- staged rows ----------------------------------------------------------------------------------

SPECS = {"codes.audio": RowSpec((2,), torch.int64), "seen": RowSpec((1,), torch.float32, per_token=True)}


def staging(**more: Any) -> RunnerAdapter:
    return begun(Phase.SWITCH, rows=DeviceRows(SPECS, max_rows=4, max_tokens=8), **more)


def test_rows_are_staged_in_the_steps_order_where_a_graph_was_captured() -> None:
    adapter = staging()
    captured = adapter.stage(StepPlan.empty(padded_rows=3, padded_tokens=4))
    assert [view.any().item() for view in captured.values()] == [False, False]
    adapter.bring({"a": {"codes": {"audio": [1, 2]}}, "b": {"codes": {"audio": [3, 4]}, "seen": torch.ones(2, 1)}})
    plan = plan_of(b=2, a=1, padded_rows=3, padded_tokens=4)
    views = adapter.stage(plan)
    assert {name: view.data_ptr() for name, view in views.items()} == {
        name: view.data_ptr() for name, view in captured.items()
    }
    # As a replayed graph reads them.
    assert captured["codes.audio"].tolist() == [[3, 4], [1, 2], [0, 0]]
    assert captured["seen"].flatten().tolist() == [1, 1, 0, 0]
    adapter.stage(StepPlan.empty(padded_rows=3, padded_tokens=4))
    assert [view.any().item() for view in captured.values()] == [False, False]


def test_what_does_not_fit_its_declaration_fails_its_request_alone() -> None:
    adapter = staging()
    adapter.bring({"a": {"codes": {"audio": [1, 2, 3]}}, "b": {"codes": {"audio": [3, 4]}}})
    views = adapter.stage(plan_of(a=1, b=1))
    assert views["codes.audio"].tolist() == [[0, 0], [3, 4]]
    assert refusal(adapter).facts["name"] == "codes.audio"


def test_what_the_hooks_of_the_step_gave_is_staged() -> None:
    model = HookModel(a=lambda given: both(given, {"codes": {"audio": given["input_ids"].repeat(2)}}))
    adapter = staging(model=model)
    plan = plan_of(a=1)
    adapter.preprocess(plan, torch.tensor([7]))
    assert adapter.stage(plan)["codes.audio"].tolist() == [[7, 7]]


def test_an_adapter_without_declared_rows_says_what_to_pass() -> None:
    with pytest.raises(errors.UsageError, match="rows=DeviceRows"):
        begun(Phase.SWITCH).stage(StepPlan.empty(1, 1))


# -- the talker -----------------------------------------------------------------------------------


def test_a_model_that_talks_without_a_talker_is_refused_and_told_what_to_pass() -> None:
    """What its preprocess gives for talker_mtp would be lost, step by step and unseen."""
    with pytest.raises(errors.UsageError, match=r"talker=Talker\(model.*model='TalkingModel'"):
        RunnerAdapter(TalkingModel())


def test_a_model_that_talks_in_another_stage_needs_no_talker() -> None:
    """One class for all stages: here its preprocess is not called, so it gives nothing."""
    model = TalkingModel()
    model.has_preprocess = False
    RunnerAdapter(model)
