"""Old fields and new ones become one map, the mirror is phase 1's, and prompt embeddings cover the prompt's rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import runner_adapter
from connector import errors
from runner_adapter import AdapterConfig, RunnerAdapter, phases
from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.overlay import Accepted, PromptOverlay, accept, accept_cached, mirror
from runner_adapter.phases import Phase
from runner_adapter.plan import StepPlan
from runner_adapter.values import as_value
from tests.runner_adapter.models import flat

NEW, OLD = "model_intermediate_buffer", "additional_information"
OLD_PHASES = pytest.mark.parametrize("phase", [Phase.COMPAT, Phase.SWITCH])
ONE, TWO = torch.ones(1), torch.full((1,), 2.0)


@pytest.fixture(autouse=True)
def _warnings_come_anew() -> Iterator[None]:
    phases.forget_warnings()
    yield
    phases.forget_warnings()


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


# -- new requests ------------------------------------------------------------------------------------


@OLD_PHASES
def test_a_request_with_both_fields_loses_neither_and_the_new_one_wins(phase: Phase) -> None:
    found = accept(
        request(
            additional_information={"codes": {"audio": ONE, "ref": ONE}, "speaker": "a"},
            model_intermediate_buffer={"codes": {"audio": TWO}, "ids": {"all": [1, 2]}},
        ),
        phase,
        rid="r",
    )
    assert found.keys() == {"codes.audio", "codes.ref", "speaker", "ids.all"}
    assert (found["codes.audio"], found["codes.ref"]) == (TWO, ONE)
    assert (as_value(found["speaker"]), as_value(found["ids.all"])) == ("a", [1, 2])


@OLD_PHASES
@pytest.mark.parametrize("field", [NEW, OLD])
def test_either_field_alone_is_read(field: str, phase: Phase) -> None:
    for given_request in (request(**{field: {"x": 0}}), request(**{NEW: None, OLD: None, field: {"x": 0}})):
        found = accept(given_request, phase, rid="r")
        assert {name: as_value(tensor) for name, tensor in found.items()} == {"x": 0}


@OLD_PHASES
def test_an_old_payload_object_is_decoded(phase: Phase) -> None:
    entries = {"meta.finished": SimpleNamespace(scalar_data=False), "ids.all": SimpleNamespace(list_data=[7])}
    found = accept(request(additional_information=SimpleNamespace(entries=entries)), phase, rid="r")
    assert {name: as_value(tensor) for name, tensor in found.items()} == {"meta.finished": False, "ids.all": [7]}


@pytest.mark.parametrize("phase", Phase)
def test_a_request_without_any_field_brings_nothing(phase: Phase) -> None:
    assert accept(request(), phase, rid="r") == {}
    assert accept(request(**{NEW: None, OLD: None}), phase, rid="r") == {}


@OLD_PHASES
def test_the_old_field_is_warned_of_once_and_the_new_one_never(phase: Phase, caplog: pytest.LogCaptureFixture) -> None:
    accept(request(**{NEW: {"x": ONE}}), phase, rid="a")
    assert caplog.records == []
    accept(request(**{OLD: {"x": ONE}}), phase, rid="b")
    accept_cached(request(**{OLD: {"c": {"x": ONE}}}), phase)
    told = "additional_information is deprecated: use model_intermediate_buffer"
    assert [record.getMessage() for record in caplog.records] == [told]


@pytest.mark.parametrize("held", [{"x": ONE}, {}, SimpleNamespace(entries={}), 0], ids=["map", "{}", "object", "0"])
def test_phase_3_refuses_the_old_field_whatever_it_holds(held: Any) -> None:
    with pytest.raises(errors.UsageError, match="additional_information") as refused:
        accept(request(**{NEW: {"x": ONE}, OLD: held}), Phase.CLEAN, rid="r")
    assert refused.value.facts == {"name": OLD, "new": NEW, "rid": "r"}


def test_phase_3_converts_no_values() -> None:
    """They reach the buffer, which takes tensors only, as they are."""
    found = accept(request(**{NEW: {"codes": {"audio": ONE}, "meta": {"finished": False}}}), Phase.CLEAN, rid="r")
    assert found == {"codes.audio": ONE, "meta.finished": False}
    with pytest.raises(errors.InvalidPayload, match="must be a Tensor, not bool"):
        ModelIntermediateBuffer().add("r", found)


@OLD_PHASES
def test_what_is_accepted_can_be_added(phase: Phase) -> None:
    buffer = ModelIntermediateBuffer()
    buffer.add("r", accept(request(**{OLD: {"meta": {"n": 0}}, NEW: {"codes": {"audio": ONE}}}), phase, rid="r"))
    assert buffer.nested("r") == {"meta": {"n": torch.tensor(0)}, "codes": {"audio": ONE}}


@pytest.mark.parametrize("phase", Phase)
def test_a_field_that_holds_no_names_is_that_request_s_failure(phase: Phase) -> None:
    with pytest.raises(errors.InvalidPayload) as refused:
        accept(request(**{NEW: [ONE]}), phase, rid="r")
    assert refused.value.facts["rid"] == "r"


@OLD_PHASES
def test_a_tensor_in_one_field_and_a_mapping_in_the_other_is_refused(phase: Phase) -> None:
    """Neither could be kept without the other being lost."""
    with pytest.raises(errors.InvalidPayload, match="both a value and a mapping") as refused:
        accept(request(**{OLD: {"codes": ONE}, NEW: {"codes": {"audio": ONE}}}), phase, rid="r")
    assert refused.value.facts["rid"] == "r"


# -- running requests --------------------------------------------------------------------------------


@OLD_PHASES
def test_running_requests_are_brought_what_both_fields_hold(phase: Phase) -> None:
    found = accept_cached(
        request(
            additional_information={"a": {"x": ONE, "y": ONE}, "b": {"x": ONE}, "gone": None},
            model_intermediate_buffer={"a": {"x": TWO}, "c": {"x": TWO}},
        ),
        phase,
    )
    assert found == Accepted({"a": {"x": TWO, "y": ONE}, "c": {"x": TWO}, "b": {"x": ONE}}, {})


@OLD_PHASES
def test_one_running_request_s_failure_leaves_the_others(phase: Phase) -> None:
    bad = SimpleNamespace(entries={"x": SimpleNamespace(list_data=[1], scalar_data=1)})
    found = accept_cached(request(additional_information={"a": {"x": ONE}, "bad": bad, "b": {"x": TWO}}), phase)
    assert found.maps == {"a": {"x": ONE}, "b": {"x": TWO}}
    assert found.failed.keys() == {"bad"}
    error = found.failed["bad"]
    assert isinstance(error, errors.InvalidPayload) and error.facts["entry"] == "x"
    # Kept without the frames that hold the payload.
    assert error.__traceback__ is None


def test_phase_3_refuses_the_old_field_of_those_that_have_it() -> None:
    found = accept_cached(request(**{OLD: {"a": {"x": ONE}, "b": None}, NEW: {"b": {"x": TWO}}}), Phase.CLEAN)
    assert found.maps == {"b": {"x": TWO}}
    assert {rid: type(error) for rid, error in found.failed.items()} == {"a": errors.UsageError}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("fields", [{}, {OLD: None, NEW: None}, {OLD: {}, NEW: {}}], ids=["none", "None", "{}"])
def test_nothing_for_running_requests_is_nothing(phase: Phase, fields: dict[str, Any]) -> None:
    """Engines have the old field always, mostly empty: that is no use of it."""
    assert accept_cached(request(**fields), phase) == Accepted({}, {})


def test_the_fields_of_running_requests_are_mappings() -> None:
    with pytest.raises(errors.UsageError) as refused:
        accept_cached(request(additional_information=[{"x": ONE}]), Phase.COMPAT)
    assert refused.value.facts == {"field": OLD, "found": "list"}


# -- the mirror --------------------------------------------------------------------------------------


def mirrored(phase: Phase) -> tuple[ModelIntermediateBuffer, list[tuple[str, str, dict[str, Any]]]]:
    buffer = ModelIntermediateBuffer()
    buffer.add("a", {"codes": {"audio": ONE}})
    buffer.add("b")
    told: list[tuple[str, str, dict[str, Any]]] = []
    mirror(buffer, ["b", "unknown", "a"], phase, lambda rid, name, value: told.append((rid, name, value)))
    return buffer, told


def test_phase_1_mirrors_each_request_s_map_under_the_old_name() -> None:
    _, told = mirrored(Phase.COMPAT)
    name = "additional_information_cpu"
    assert told == [("b", name, {}), ("a", name, {"codes": {"audio": ONE}})]


@pytest.mark.parametrize("phase", [Phase.SWITCH, Phase.CLEAN])
def test_later_phases_write_no_mirror(phase: Phase) -> None:
    assert mirrored(phase)[1] == []


def test_what_is_written_into_a_mirror_reaches_no_buffer() -> None:
    buffer, told = mirrored(Phase.COMPAT)
    told[1][2]["codes"]["extra"] = TWO
    told[1][2]["more"] = TWO
    assert buffer.nested("a") == {"codes": {"audio": ONE}}


# -- prompt embeddings -------------------------------------------------------------------------------

WIDTH = 2


def embeds(rows: int, first: float = 100.0) -> torch.Tensor:
    """Row i holds first + i."""
    return (first + torch.arange(rows, dtype=torch.float32))[:, None].expand(rows, WIDTH).contiguous()


def laid(
    prompt: torch.Tensor, span: int, computed: int, prompt_len: int, phase: Phase = Phase.COMPAT
) -> tuple[list[float], dict[str, Any]]:
    """Rows [2, 2 + span) of a step are r's; what stands in the step's first column afterwards."""
    overlay = PromptOverlay(phase)
    overlay.add("r", prompt)
    plan = StepPlan.make(["other", "r", "last"], {"other": 2, "r": span, "last": 1})
    target = torch.zeros(plan.tokens, WIDTH)
    counts = {"other": 5, "r": computed, "last": 9}
    failed = overlay.lay(plan, target, computed=counts, prompt_lens={"other": 8, "r": prompt_len, "last": 9})
    assert torch.equal(target[:, 0], target[:, 1])
    return target[:, 0].tolist(), failed


@pytest.mark.parametrize(
    ("span", "computed", "prompt_len", "rows"),
    [
        (4, 0, 4, [100, 101, 102, 103]),
        (3, 0, 8, [100, 101, 102]),
        (3, 5, 8, [105, 106, 107]),
        (4, 6, 8, [106, 107, 0, 0]),
        (1, 7, 8, [107]),
        (1, 8, 8, [0]),
        (3, 9, 8, [0, 0, 0]),
        (0, 3, 8, []),
    ],
    ids=["all", "first chunk", "last chunk", "into decode", "last prompt token", "first decode", "later", "no token"],
)
@OLD_PHASES
def test_the_prompt_s_rows_of_the_step_are_covered_and_no_others(
    phase: Phase, span: int, computed: int, prompt_len: int, rows: list[float]
) -> None:
    assert laid(embeds(prompt_len), span, computed, prompt_len, phase) == ([0, 0, *rows, 0], {})


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_any_chunks_cover_the_prompt_once(prompt_len: int, spans: list[int]) -> None:
    """Chunk after chunk, as if the embeddings were followed by nothing."""
    expected = [*embeds(prompt_len)[:, 0].tolist(), *[0.0] * sum(spans)]
    done = 0
    for span in spans:
        rows, failed = laid(embeds(prompt_len), span, done, prompt_len)
        assert (rows[2:-1], failed) == (expected[done : done + span], {})
        done += span


def test_rows_come_in_the_model_s_dtype() -> None:
    overlay = PromptOverlay(Phase.COMPAT)
    overlay.add("r", torch.tensor([[1.00390625, -2.0]]))
    target = torch.zeros(1, WIDTH, dtype=torch.bfloat16)
    overlay.lay(StepPlan.make(["r"], {"r": 1}), target, computed={"r": 0}, prompt_lens={"r": 1})
    assert torch.equal(target, torch.tensor([[1.00390625, -2.0]]).bfloat16())


def test_a_payload_object_is_laid_over_too() -> None:
    given_object = SimpleNamespace(data=b"\1\2\3\4", shape=[2, 2], dtype="int8")
    overlay = PromptOverlay(Phase.SWITCH)
    overlay.add("r", given_object)
    target = torch.zeros(2, WIDTH)
    overlay.lay(StepPlan.make(["r"], {"r": 2}), target, computed={"r": 0}, prompt_lens={"r": 2})
    assert target.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("prompt", [embeds(3), torch.ones(8, 3)], ids=["too few rows", "another width"])
def test_embeddings_that_do_not_fit_fail_their_request_alone(prompt: torch.Tensor) -> None:
    overlay = PromptOverlay(Phase.COMPAT)
    overlay.add("bad", prompt)
    overlay.add("good", embeds(2))
    plan = StepPlan.make(["bad", "good"], {"bad": 4, "good": 2})
    target = torch.zeros(6, WIDTH)
    failed = overlay.lay(plan, target, computed={"bad": 0, "good": 0}, prompt_lens={"bad": 8, "good": 2})
    assert target[:, 0].tolist() == [0, 0, 0, 0, 100, 101]
    assert failed.keys() == {"bad"}
    assert failed["bad"].facts == {
        "rid": "bad",
        "entry": "prompt_embeds",
        "shape": list(prompt.shape),
        "needed": [4, WIDTH],
    }


@pytest.mark.parametrize("counts", [({}, {"r": 2}), ({"r": 0}, {}), ({"r": -1}, {"r": 2})], ids=str)
def test_without_its_counts_a_request_fails_alone(counts: tuple[dict[str, int], dict[str, int]]) -> None:
    overlay = PromptOverlay(Phase.COMPAT)
    overlay.add("r", embeds(2))
    target = torch.zeros(2, WIDTH)
    failed = overlay.lay(StepPlan.make(["r"], {"r": 2}), target, computed=counts[0], prompt_lens=counts[1])
    assert {rid: type(error) for rid, error in failed.items()} == {"r": errors.UsageError}
    assert target.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("shape", [[1, WIDTH], [2], [2, WIDTH, 1]], ids=str)
def test_the_model_s_embeddings_have_a_row_for_each_token(shape: list[int]) -> None:
    plan = StepPlan.make(["r"], {"r": 2})
    with pytest.raises(errors.UsageError) as refused:
        PromptOverlay(Phase.COMPAT).lay(plan, torch.zeros(shape), computed={}, prompt_lens={})
    assert refused.value.facts == {"given": str(shape), "tokens": 2}


def test_a_finished_request_s_embeddings_are_gone() -> None:
    overlay = PromptOverlay(Phase.COMPAT)
    overlay.add("r", embeds(2))
    overlay.finish(["r", "unknown"])
    assert len(overlay) == 0
    target = torch.zeros(2, WIDTH)
    overlay.lay(StepPlan.make(["r"], {"r": 2}), target, computed={"r": 0}, prompt_lens={"r": 2})
    assert target.tolist() == [[0, 0], [0, 0]]


def test_a_request_that_comes_anew_has_what_it_brings_now() -> None:
    overlay = PromptOverlay(Phase.COMPAT)
    overlay.add("r", embeds(2))
    overlay.add("r", embeds(2, first=7.0))
    target = torch.zeros(2, WIDTH)
    overlay.lay(StepPlan.make(["r"], {"r": 2}), target, computed={"r": 0}, prompt_lens={"r": 2})
    assert target[:, 0].tolist() == [7, 8]
    overlay.add("r", None)
    assert len(overlay) == 0


def test_phase_3_refuses_prompt_embeddings_by_name() -> None:
    overlay = PromptOverlay(Phase.CLEAN)
    overlay.add("r", None)
    with pytest.raises(errors.UsageError, match="prompt_embeds") as refused:
        overlay.add("r", embeds(2))
    assert refused.value.facts == {"name": "prompt_embeds", "new": NEW, "rid": "r"}
    assert len(overlay) == 0


@OLD_PHASES
def test_prompt_embeddings_are_warned_of_once(phase: Phase, caplog: pytest.LogCaptureFixture) -> None:
    overlay = PromptOverlay(phase)
    overlay.add("a", None)
    assert caplog.records == []
    for rid in ("a", "b"):
        overlay.add(rid, embeds(1))
    told = "prompt_embeds is deprecated: use model_intermediate_buffer"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_a_runner_of_its_own_takes_what_is_old_by_public_names() -> None:
    """As docs/migration.md shows it."""
    adapter = RunnerAdapter(object(), settings=AdapterConfig(migration_phase=1))
    entry = SimpleNamespace(tensor_data=None, list_data=None, scalar_data=0)
    old = SimpleNamespace(additional_information=SimpleNamespace(entries={"meta.count": entry}))
    engines = {"a": SimpleNamespace()}
    adapter.begin_step(new={"a": runner_adapter.accept(old, adapter.phase, rid="a")}, scheduled=["a"])
    cached = SimpleNamespace(additional_information={"a": {"x": [1, 2]}, "b": 5})
    brought = runner_adapter.accept_cached(cached, adapter.phase)
    adapter.bring(brought.maps)
    assert brought.failed.keys() == {"b"}

    def put(rid: str, name: str, value: Any) -> None:
        setattr(engines[rid], name, value)

    runner_adapter.mirror(adapter.buffer, ["a"], adapter.phase, put)
    assert flat(engines["a"].additional_information_cpu) == {"meta": {"count": 0}, "x": [1, 2]}
    assert runner_adapter.decode(old.additional_information, rid="a")["meta.count"].item() == 0
