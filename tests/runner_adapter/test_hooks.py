"""preprocess and postprocess: what each hook is given, where its results go, and whose failure a failure is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.hooks import Hooks, isolated
from runner_adapter.plan import StepPlan
from tests.runner_adapter.models import (
    COUNTS,
    IDS,
    WIDTH,
    Given,
    HookModel,
    Step,
    TalkingModel,
    embeds_of,
    flat,
    gives,
    raises,
    talks,
    usual,
)


def at_b(hook: Callable[[Given], Any]) -> HookModel:
    return HookModel(b=hook)


# -- preprocess ---------------------------------------------------------------------------------


def test_each_row_is_prepared_from_its_own_tokens_and_map() -> None:
    model = HookModel()
    Step(model, {"c": {"codes": {"audio": torch.tensor([7])}}}).preprocess()
    seen = [(g["request_id"], g["input_ids"].tolist(), g["input_embeds"].shape[0]) for g in model.calls]
    assert seen == [("a", [10, 11], 2), ("b", [20], 1), ("c", [30, 31, 32], 3)]
    assert [flat(g["codes"]) if "codes" in g else None for g in model.calls] == [None, None, {"audio": [7]}]


def test_ids_and_embeds_go_to_the_row_and_padding_stays() -> None:
    step = Step(HookModel())
    before = (step.ids, step.embeds)
    step.preprocess()
    assert (step.ids, step.embeds) == before, "written in place, for captured graphs"
    assert step.ids.tolist() == [11, 12, 21, 31, 32, 33, 0]
    assert step.column == [10, 11, 20, 30, 31, 32, -1]


def test_an_update_merges_into_the_map() -> None:
    step = Step(HookModel(), {"b": {"meta": {"kept": torch.tensor(5)}, "codes": {"audio": torch.tensor([1])}}})
    step.preprocess()
    assert step.map("b") == {"meta": {"kept": 5, "seen": 1}, "codes": {"audio": [1]}}
    assert step.map("c") == {"meta": {"seen": 3}}


@pytest.mark.parametrize("update", [None, {}])
def test_nothing_to_merge_is_no_failure(update: object) -> None:
    step = Step(at_b(lambda g: (g["input_ids"], embeds_of(g["input_ids"]), update))).preprocess()
    assert step.failures == {}
    assert step.map("b") == {}


def test_a_request_without_state_is_prepared_with_an_empty_map() -> None:
    """It is not in the buffer: only an update of it would be refused."""
    model = at_b(lambda g: (g["input_ids"], embeds_of(g["input_ids"]), None))
    step = Step(model)
    step.buffer.finish(["b"])
    step.preprocess()
    assert step.failures == {}
    assert model.calls[1].keys() == {"input_ids", "input_embeds", "request_id"}


@pytest.mark.parametrize(
    ("rows", "column"),
    [(0, [-1, -1, -1]), (2, [9, 9, -1]), (3, [9, 9, 9]), (5, [9, 9, 9])],
)
def test_embeds_fill_the_first_rows_of_the_span(rows: int, column: list[float]) -> None:
    """No more than it has, and no more than were given."""
    model = HookModel(c=lambda g: (None, torch.full((rows, WIDTH), 9.0), None))
    assert Step(model).preprocess().column == [10, 11, 20, *column, -1]


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (torch.tensor([5, 6, 7]), [5, 6, 7]),
        (torch.tensor([[5], [6], [7]]), [5, 6, 7]),
        (torch.tensor([5, 6]), [30, 31, 32]),
        (torch.tensor([5, 6, 7, 8]), [30, 31, 32]),
        ([5, 6, 7], [30, 31, 32]),
        (None, [30, 31, 32]),
    ],
)
def test_ids_are_written_only_if_there_is_one_a_row(ids: object, found: list[int]) -> None:
    step = Step(HookModel(c=lambda g: (ids, torch.zeros(3, WIDTH), None))).preprocess()
    assert (step.ids.tolist(), step.failures) == ([11, 12, 21, *found, 0], {})


def test_without_embeds_they_are_made_from_the_first_result() -> None:
    """Its width, dtype and device, if no other's are more frequent; a row a token; zero where nobody wrote."""
    half = HookModel(
        a=lambda g: (None, torch.full((1, 2), 3.0).half(), None),
        b=raises(ValueError("no")),
        c=lambda g: (None, torch.full((3, 2), 5.0), None),
    )
    step = Step(half)
    step.embeds = None
    step.preprocess()
    assert step.embeds is not None and step.embeds.dtype == torch.float16
    assert step.embeds.tolist() == [[n, n] for n in (3, 0, 0, 5, 5, 5, 0)]


def test_without_embeds_no_request_is_given_what_another_made() -> None:
    """Whether a request is the first of its batch changes nothing for it."""
    model = HookModel()
    step = Step(model)
    step.embeds = None
    step.preprocess()
    assert [g["input_embeds"] for g in model.calls] == [None, None, None]


def test_without_embeds_and_results_there_are_none() -> None:
    no = raises(ValueError("no"))
    step = Step(HookModel(a=no, b=no, c=no))
    step.embeds = None
    assert step.preprocess().embeds is None


def test_extras_are_given_beside_the_map_and_do_not_enter_it() -> None:
    """They win over a name of the map, and the row's rid over both."""
    model = HookModel()
    step = Step(model, {"b": {"mm": {"x": torch.tensor(1)}}})
    step.preprocess({"b": {"mm": "features", "req_id": "b", "request_id": "other"}})
    assert (model.calls[1]["mm"], model.calls[1]["req_id"], model.calls[1]["request_id"]) == ("features", "b", "b")
    assert "req_id" not in model.calls[2]
    assert step.map("b") == {"mm": {"x": 1}, "meta": {"seen": 1}}


def test_what_a_hook_writes_into_its_keywords_stays_there() -> None:
    def writes(given: Given) -> Any:
        given["meta"]["seen"] = torch.tensor(99)
        given["more"] = torch.tensor(99)
        return given["input_ids"], embeds_of(given["input_ids"]), None

    step = Step(at_b(writes), {"b": {"meta": {"seen": torch.tensor(5)}}}).preprocess()
    assert step.map("b") == {"meta": {"seen": 5}}


def test_a_row_without_tokens_is_not_called() -> None:
    model = HookModel()
    step = Step(model)
    step.plan = StepPlan.make(["a", "b", "c"], {"a": 3, "b": 0, "c": 3})
    step.preprocess().postprocess()
    assert model.called == ["a", "c", "a", "c"]


def test_a_step_without_requests_goes_through() -> None:
    """Profiling and capture."""
    step = Step(HookModel())
    step.plan = StepPlan.empty(padded_rows=2, padded_tokens=7)
    step.preprocess().postprocess()
    assert (step.ids.tolist(), step.mtp, step.failures) == (IDS, [], {})


# -- mtp_inputs ---------------------------------------------------------------------------------


def test_mtp_inputs_of_decode_rows_are_handed_on_and_not_merged() -> None:
    step = Step(TalkingModel(b=talks(1, 2))).preprocess()
    [(row, hidden, text_step)] = step.mtp
    assert (row.rid, row.start) == ("b", 2)
    assert (hidden.tolist(), text_step.tolist()) == ([[1.0] * WIDTH], [[2.0] * WIDTH])
    assert step.map("b") == {"meta": {"seen": 1}}


def test_mtp_inputs_of_other_rows_are_not_used_and_not_merged() -> None:
    """The last token of a prompt may stand alone: one token is not yet decoding."""
    step = Step(TalkingModel(a=talks(1, 2), b=talks(3, 4), c=talks(5, 6)))
    step.plan = StepPlan.make(COUNTS, COUNTS, prefill={"a", "b"})
    step.preprocess()
    assert (step.mtp, step.failures) == ([], {})
    assert [step.map(rid) for rid in COUNTS] == [{"meta": {"seen": n}} for n in (2, 1, 3)]


def test_mtp_inputs_are_copies() -> None:
    """A model may give the same scratch tensor for every request."""
    scratch = torch.zeros(1, WIDTH)

    def reuses(given: Given) -> Any:
        scratch.fill_(given["input_ids"][0])
        return *usual(given)[:2], {"mtp_inputs": (scratch, scratch[0])}

    step = Step(TalkingModel(a=reuses, b=reuses))
    step.plan = StepPlan.make(["a", "b"], {"a": 1, "b": 1})
    step.preprocess()
    assert [(one.row.rid, one.hidden[0, 0].item(), one.text_step[0, 0].item()) for one in step.mtp] == [
        ("a", 10, 10),
        ("b", 11, 11),
    ]


def test_a_models_own_update_is_not_changed() -> None:
    """It may give the same dict in every step."""
    row = torch.zeros(1, WIDTH)
    update = {"mtp_inputs": (row, row)}
    Step(TalkingModel(b=gives((None, row, update)))).preprocess()
    assert update.keys() == {"mtp_inputs"}


def test_what_is_taken_over_has_no_gradient() -> None:
    row = torch.zeros(1, WIDTH, requires_grad=True)
    step = Step(TalkingModel(b=gives((None, row * 1, {"mtp_inputs": (row * 1, row * 1)})))).preprocess()
    assert step.embeds is not None
    assert [part.requires_grad for part in (step.embeds, *step.mtp[0][1:])] == [False] * 3


def test_a_decode_row_without_mtp_inputs_fails() -> None:
    """Codes that nobody predicted must not be missed in silence."""
    step = Step(TalkingModel()).preprocess()
    assert "mtp_inputs" in str(step.failures["b"])
    assert (step.map("b"), step.ids[2].item(), step.column[2]) == ({}, 20, -1)


def test_without_talker_mtp_the_name_is_like_any_other() -> None:
    model = at_b(lambda g: (None, embeds_of(g["input_ids"]), {"mtp_inputs": torch.tensor([1])}))
    assert Step(model).preprocess().map("b") == {"mtp_inputs": [1]}


# -- failures -----------------------------------------------------------------------------------


def half_written(given: Given) -> Any:
    given["input_ids"].fill_(99)
    given["input_embeds"].fill_(99)
    raise ValueError("no such voice")


def refused(given: Given) -> Any:
    return *usual(given)[:2], {"meta": {"seen": torch.tensor(1), "bad": object()}}


@pytest.mark.parametrize("hook", [half_written, refused])
def test_a_failed_request_leaves_its_rows_and_its_map_and_the_others_go_on(hook: Callable[[Given], Any]) -> None:
    """It raises after it wrote in place, or its update is refused."""
    step = Step(at_b(hook), {"b": {"meta": {"seen": torch.tensor(5)}}}).preprocess()
    assert list(step.failures) == ["b"]
    assert step.ids.tolist() == [11, 12, 20, 31, 32, 33, 0]
    assert step.column == [10, 11, -1, 30, 31, 32, -1]
    assert [step.map(rid) for rid in COUNTS] == [{"meta": {"seen": n}} for n in (2, 5, 3)]


def test_a_failure_is_the_error_itself() -> None:
    error = ValueError("no such voice")
    assert Step(at_b(raises(error))).preprocess().failures == {"b": error}


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (None, "(ids, embeds, update)"),
        ((None, torch.zeros(1, WIDTH)), "(ids, embeds, update)"),
        ((None, None, {}), "[tokens, width]"),
        ((None, torch.zeros(WIDTH), {}), "[tokens, width]"),
        ((None, torch.zeros(1, 1, WIDTH), {}), "[tokens, width]"),
        ((None, torch.zeros(1, WIDTH + 1), {}), f"size={WIDTH + 1} limit={WIDTH}"),
        ((None, torch.zeros(1, WIDTH), [1]), "a hook's update is a dict"),
        ((torch.tensor([1.5]), torch.zeros(1, WIDTH), {}), "the ids of preprocess are integers"),
        ((None, torch.zeros(1, WIDTH, dtype=torch.complex64), {}), "complex"),
        ((None, torch.zeros(1, WIDTH), {"mtp_inputs": torch.zeros(2, WIDTH)}), "mtp_inputs"),
        ((None, torch.zeros(1, WIDTH), {"mtp_inputs": (torch.zeros(WIDTH),)}), "mtp_inputs"),
        ((None, torch.zeros(1, WIDTH), {"mtp_inputs": (torch.zeros(WIDTH), 1)}), "mtp_inputs"),
    ],
)
def test_a_result_that_does_not_fit_is_refused(answer: object, what: str) -> None:
    step = Step(TalkingModel(b=gives(answer))).preprocess()
    assert list(step.failures) == ["b"]
    assert type(step.failures["b"]) is errors.InvalidPayload
    assert what in str(step.failures["b"]) and "rid='b'" in str(step.failures["b"])
    assert (step.map("b"), step.ids[2].item(), step.column[2]) == ({}, 20, -1)


@pytest.mark.parametrize("verb", ["preprocess", "postprocess"])
def test_a_failure_is_logged_once_with_rid_and_hook(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    step = Step(at_b(raises(ValueError("no such voice"))))
    with caplog.at_level(logging.DEBUG, "runner_adapter"):
        getattr(step, verb)()
    [record] = caplog.records
    assert (record.name, record.levelname) == ("runner_adapter", "ERROR")
    assert record.getMessage() == f"{verb} failed for request 'b': no such voice"
    assert "raise error" in caplog.text, "with its traceback"


def test_a_kept_failure_holds_no_frames() -> None:
    """They hold the step's tensors."""

    def caused(given: Given) -> Any:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner

    error = Step(at_b(caused)).preprocess().failures["b"]
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


@pytest.mark.parametrize("verb", ["preprocess", "postprocess"])
def test_a_request_that_failed_already_is_not_called(verb: str) -> None:
    """Its first error stays."""
    first = errors.InvalidPayload("a payload that matches no template")
    model = at_b(raises(ValueError("second")))
    step = Step(model)
    step.failures["b"] = first
    getattr(step, verb)()
    assert model.called == ["a", "c"]
    assert step.failures == {"b": first}


def test_the_first_failure_of_a_request_is_kept() -> None:
    """Also where a failure of several holds one that failed before."""
    failures: dict[str, Exception] = {}
    first, second = ValueError("first"), ValueError("second")
    for error, rids in ((first, ["b"]), (second, ["a", "b"])):
        with isolated(failures, rids, "hook"):
            raise error
    assert failures == {"b": first, "a": second}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("verb", ["preprocess", "postprocess"])
def test_what_ends_the_process_passes(verb: str, error: type[BaseException]) -> None:
    step = Step(at_b(raises(error())))
    with pytest.raises(error):
        getattr(step, verb)()
    assert step.failures == {}


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.booleans(),
)
def test_failures_change_nothing_for_the_others(counts: list[int], failing: set[int], with_embeds: bool) -> None:
    """Each row is what it is alone, or as it was."""
    sizes = {f"r{n}": count for n, count in enumerate(counts)}
    model = HookModel(**{f"r{n}": half_written if with_embeds else raises(ValueError("no")) for n in failing})
    plan = StepPlan.make(sizes, sizes)
    buffer = ModelIntermediateBuffer()
    for rid in sizes:
        buffer.add(rid)
    failures: dict[str, Exception] = {}
    ids = torch.arange(plan.tokens) + 1
    embeds = torch.zeros(plan.tokens, WIDTH) if with_embeds else None
    _, embeds, _ = Hooks(model).preprocess(plan, buffer, ids, embeds, failures=failures)
    bad = {f"r{n}" for n in failing if sizes.get(f"r{n}")}
    assert set(failures) == bad
    assert [flat(buffer.nested(rid)) for rid in sizes] == [
        {"meta": {"seen": n}} if n and rid not in bad else {} for rid, n in sizes.items()
    ]
    whose = [row.rid for row in plan.rows for _ in range(row.tokens)]
    assert ids.tolist() == [n + 1 if rid in bad else n + 2 for n, rid in enumerate(whose)]
    if embeds is not None:
        assert embeds[:, 0].tolist() == [0 if rid in bad else n + 1 for n, rid in enumerate(whose)]


# -- postprocess --------------------------------------------------------------------------------


def test_postprocess_is_given_the_rows_hidden_states_and_the_steps_outputs() -> None:
    model, outputs = HookModel(), {"audio": [1, 2]}
    Step(model).postprocess(outputs)
    assert [(g["request_id"], g["hidden"][:, 0].tolist()) for g in model.calls] == [
        ("a", [0, 1]),
        ("b", [2]),
        ("c", [3, 4, 5]),
    ]
    assert all(g["multimodal_outputs"] is outputs for g in model.calls)


def test_the_update_of_postprocess_merges_and_the_next_preprocess_sees_it() -> None:
    model = HookModel()
    step = Step(model, {"c": {"hidden_states": {"first": torch.tensor(1)}, "meta": {"kept": torch.tensor(2)}}})
    step.postprocess()
    assert step.map("c") == {"hidden_states": {"first": 1, "last": [5.0] * WIDTH}, "meta": {"kept": 2}}
    step.preprocess()
    assert flat(model.calls[-1]["hidden_states"]) == {"first": 1, "last": [5.0] * WIDTH}


def test_hidden_states_are_no_keyword_of_postprocess_but_stay_in_the_map() -> None:
    """Only the map's own are kept out: the argument has that name."""
    model = HookModel(c=gives(None))
    step = Step(model, {"c": {"hidden_states": {"last": torch.tensor(1)}, "codes": {"audio": torch.tensor(2)}}})
    step.postprocess()
    assert model.calls[2].keys() == {"hidden", "multimodal_outputs", "codes", "request_id"}
    assert step.map("c") == {"hidden_states": {"last": 1}, "codes": {"audio": 2}}


def test_what_is_combined_by_rid_goes_to_its_request() -> None:
    """With a prefix cache, also the rows that this step did not compute."""
    model = HookModel()
    hidden = {rid: torch.full((9, WIDTH), float(n)) for n, rid in enumerate("cab")}
    outputs = {"audio": {"a": 1, "b": 2, "c": 3}, "text": {"a": 4, "b": 5, "c": 6}}
    Step(model).postprocess("whole", combined_hidden_states=hidden, combined_multimodal_outputs=outputs)
    assert [g["hidden"][:, 0].tolist() for g in model.calls] == [[1.0] * 9, [2.0] * 9, [0.0] * 9]
    assert [g["multimodal_outputs"] for g in model.calls] == [
        {"audio": 1, "text": 4},
        {"audio": 2, "text": 5},
        {"audio": 3, "text": 6},
    ]


@pytest.mark.parametrize("there", ["ac", ""])
@pytest.mark.parametrize("combined", ["hidden_states", "multimodal_outputs"])
def test_a_request_that_is_missing_in_what_is_combined_fails(combined: str, there: str) -> None:
    """It is never given its span instead, nor another's."""
    by_rid = {rid: torch.zeros(1, WIDTH) for rid in there}
    model = HookModel()
    step = Step(model).postprocess(
        **{f"combined_{combined}": {"audio": by_rid} if combined == "multimodal_outputs" else by_rid}
    )
    assert model.called == list(there)
    assert list(step.failures) == [rid for rid in "abc" if rid not in there]
    assert type(step.failures["b"]) is errors.InvalidPayload and "rid='b'" in str(step.failures["b"])


def test_combined_outputs_without_a_name_are_none() -> None:
    model = HookModel()
    Step(model).postprocess("whole", combined_multimodal_outputs={})
    assert [g["multimodal_outputs"] for g in model.calls] == [{}] * 3


def test_only_the_asked_requests_are_postprocessed() -> None:
    model = HookModel()
    step = Step(model).postprocess(only={"c", "gone"})
    assert (model.called, step.failures) == (["c"], {})
    assert step.postprocess(only=()).failures == {}
    assert model.called == ["c"]


@pytest.mark.parametrize(
    "hook", [raises(ValueError("no")), gives([1]), gives({"meta": {"good": torch.tensor(1), "bad": object()}})]
)
def test_a_request_that_fails_in_postprocess_keeps_its_map_and_the_others_go_on(hook: Callable[[Given], Any]) -> None:
    step = Step(at_b(hook), {"b": {"meta": {"seen": torch.tensor(5)}}}).postprocess()
    assert list(step.failures) == ["b"]
    assert step.map("b") == {"meta": {"seen": 5}}
    assert [step.map(rid) for rid in "ac"] == [{"hidden_states": {"last": [n] * WIDTH}} for n in (1.0, 5.0)]


# -- the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["preprocess", "postprocess"])
def test_a_model_that_does_not_say_it_has_a_hook_is_not_called(verb: str) -> None:
    class Silent(HookModel):
        has_preprocess = verb != "preprocess"
        has_postprocess = verb != "postprocess"

    model = Silent()
    step = getattr(Step(model), verb)()
    assert model.calls == []
    assert (step.ids.tolist(), step.column, step.mtp) == (IDS, [-1.0] * 7, [])


@pytest.mark.parametrize("verb", ["preprocess", "postprocess"])
def test_a_model_that_says_it_has_a_hook_must_have_it(verb: str) -> None:
    class Liar:
        pass

    setattr(Liar, f"has_{verb}", True)
    with pytest.raises(errors.UsageError, match=f"has_{verb}.*Liar"):
        Hooks(Liar())
