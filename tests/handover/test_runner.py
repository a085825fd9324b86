"""RunnerAdapter: all of it in the order of a step, over a real broker where something is handed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter.config import AdapterConfig
from runner_adapter.merge import MergeRules
from runner_adapter.plan import StepPlan
from runner_adapter.runner import Received, RunnerAdapter
from runner_adapter.talker import Talker
from tests.handover.links import CONFIG, IDS, LAYER_0, TO, Link, ids
from tests.handover.middle import NEXT, Middle, hidden, only_reads, plan_of
from tests.runner_adapter.models import WIDTH, HookModel, TalkingModel, flat, raises, talks

BROKER = {"put_timeout": 5.0}
RIDS = ["a", "b", "c"]


# -- the beginning of a step ----------------------------------------------------------------------


def test_a_new_request_has_the_map_that_it_brings_and_another_an_empty_one() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new={"a": {"x": {"y": torch.tensor([1])}}, "b": None}, scheduled=["a", "b"])
    assert flat(adapter.buffer.nested("a")) == {"x": {"y": [1]}}
    assert adapter.buffer.nested("b") == {}
    assert adapter.buffer.counters["merged"] == 1


def test_an_id_that_is_finished_and_new_in_one_step_is_another_request() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new={"a": {"x": torch.tensor(1)}}, scheduled=["a"])
    adapter.fail("a", ValueError("the first one's"))
    adapter.begin_step(finished=["a"], new={"a": {"y": torch.tensor(2)}}, scheduled=["a"])
    assert flat(adapter.buffer.nested("a")) == {"y": 2}
    assert adapter.failures() == {}
    adapter.validate()


def test_a_request_that_waits_keeps_its_map() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new={"a": {"x": torch.tensor(1)}, "b": None}, scheduled=["a", "b"])
    adapter.begin_step(scheduled=["b"])
    adapter.begin_step(scheduled=["b", "a"])
    assert flat(adapter.buffer.nested("a")) == {"x": 1}


def test_a_live_id_that_is_new_again_is_a_further_segment() -> None:
    adapter = RunnerAdapter(object(), rules=MergeRules(accumulated=["x.y"]))
    adapter.begin_step(new={"a": {"x": {"y": torch.tensor([1])}, "z": torch.tensor(3)}}, scheduled=["a"])
    adapter.begin_step(new={"a": {"x": {"y": torch.tensor([2])}}}, scheduled=["a"])
    assert flat(adapter.buffer.nested("a")) == {"x": {"y": [1, 2]}, "z": 3, "meta": {"num_processed_tokens": 0}}


def test_a_segment_that_brings_nothing_begins_all_the_same() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.begin_step(new=["a"], scheduled=["a"])
    assert flat(adapter.buffer.nested("a")) == {"meta": {"num_processed_tokens": 0}}


def test_a_first_map_that_is_refused_fails_its_request_alone() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new={"a": {"x": object()}, "b": {"x": torch.tensor(2)}}, scheduled=["a", "b"])
    assert {rid: type(error) for rid, error in adapter.failures().items()} == {"a": errors.InvalidPayload}
    assert flat(adapter.buffer.nested("b")) == {"x": 2}


def test_what_the_engine_brings_to_running_requests_is_merged() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new={"a": {"x": {"y": torch.tensor(1)}}, "b": None}, scheduled=["a", "b"])
    adapter.bring({"b": {"x": torch.tensor(2)}, "a": {"x": {"z": torch.tensor(3)}}})
    assert flat(adapter.buffer.nested("a")) == {"x": {"y": 1, "z": 3}}
    assert flat(adapter.buffer.nested("b")) == {"x": 2}


def test_what_the_engine_brings_may_take_the_place_of_the_map() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new={"a": {"x": torch.tensor(1)}}, scheduled=["a"])
    adapter.bring({"a": {"y": torch.tensor(2)}}, replace=True)
    assert flat(adapter.buffer.nested("a")) == {"y": 2}


def test_what_is_brought_and_refused_fails_its_request_alone() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    adapter.bring({"a": {"x": object()}, "b": {"x": torch.tensor(2)}})
    assert list(adapter.failures()) == ["a"]
    assert flat(adapter.buffer.nested("b")) == {"x": 2}


def test_nothing_is_merged_for_a_request_that_failed() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.fail("a", ValueError("away"))
    adapter.bring({"a": {"x": torch.tensor(1)}})
    assert adapter.buffer.nested("a") == {}


def test_what_is_brought_to_a_finished_request_is_dropped_and_to_none_is_an_error() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.begin_step(finished=["a"])
    adapter.bring({"a": {"x": torch.tensor(1)}})
    assert adapter.buffer.counters["dropped_finished"] == 1
    with pytest.raises(errors.UnknownRequest):
        adapter.bring({"b": {"x": torch.tensor(1)}})
    assert adapter.failures() == {}


# -- what arrives ---------------------------------------------------------------------------------


def test_what_arrived_is_merged_for_new_and_decoding_requests(middle: Middle) -> None:
    adapter = middle.adapter
    middle.put("a", 1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    assert adapter.receive() == Received({"a"}, set())
    middle.put("a", 2, last=True)
    middle.put("b", 3)
    adapter.begin_step(new=["b"], scheduled=["b", "a"])
    assert adapter.receive() == Received({"a", "b"}, {"a"})
    assert flat(adapter.buffer["a"]) == {"a-thinker_input_ids": [2]}
    assert flat(adapter.buffer["b"]) == {"b-thinker_input_ids": [3]}
    assert [adapter.input_ended(rid) for rid in "ab"] == [True, False]


def test_several_payloads_of_a_step_are_one_merge(middle: Middle) -> None:
    for number in range(3):
        middle.put("a", number)
    middle.adapter.begin_step(new=["a"], scheduled=["a"])
    middle.adapter.receive()
    assert middle.adapter.buffer.counters["merged"] == 1


def test_what_arrived_for_a_waiting_request_waits(middle: Middle) -> None:
    adapter = middle.adapter
    adapter.begin_step(new=["a", "b"], scheduled=["b"])
    middle.put("a", 1)
    assert adapter.receive() == Received(set(), set())
    adapter.begin_step(scheduled=["a"])
    assert adapter.receive() == Received({"a"}, set())


def test_a_step_receives_once_and_the_second_time_loses_nothing(middle: Middle) -> None:
    adapter = middle.adapter
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.receive()
    middle.put("a", 1)
    with pytest.raises(errors.UsageError):
        adapter.receive()
    adapter.begin_step(scheduled=["a"])
    assert adapter.receive() == Received({"a"}, set())
    assert adapter.failures() == {}


def test_an_abort_upstream_fails_the_request(middle: Middle) -> None:
    adapter = middle.adapter
    middle.put("a", 1)
    middle.put("b", 2)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    middle.pair.sender.abort("a", "changed my mind")
    middle.pair.settle()
    assert adapter.receive().fresh == {"b"}
    assert {rid: type(error) for rid, error in adapter.failures().items()} == {"a": errors.RequestAborted}


def test_a_payload_that_no_template_matches_fails_its_request(middle: Middle, caplog: pytest.LogCaptureFixture) -> None:
    middle.before.put("a", {"a-what else": torch.tensor(1)})
    middle.put("b", 2)
    middle.adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    # What pytest keeps of the log holds the error, and with it the payload.
    with caplog.filtering(lambda record: False):
        assert middle.adapter.receive().fresh == {"b"}
    assert list(middle.adapter.failures()) == ["a"]


def test_those_wait_whose_next_input_is_still_to_come(middle: Middle) -> None:
    adapter = middle.adapter
    middle.put("a", 1, last=True)
    middle.put("b", 1)
    adapter.begin_step(new=["a", "b", "c"], scheduled=["a", "b", "c"])
    assert adapter.waiting(["a", "b", "c"]) == {"c"}
    adapter.receive()
    # The first has had all of its input.
    assert adapter.waiting(["a", "b", "c"]) == {"b", "c"}
    adapter.fail("c", ValueError("away"))
    assert adapter.waiting(["a", "b", "c"]) == {"b"}


def test_a_first_stage_receives_nothing_and_waits_for_nothing() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new=["a"], scheduled=["a"])
    assert adapter.receive() == Received(set(), set())
    assert adapter.waiting(["a"]) == set()


# -- around the forward ---------------------------------------------------------------------------


def test_hooks_merge_back_and_the_next_step_finds_it() -> None:
    model = HookModel()
    adapter = RunnerAdapter(model)
    plan = plan_of(a=2, b=1)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    token_ids, embeds = adapter.preprocess(plan, torch.tensor([5, 6, 7]), extras={"a": {"more": 1}})
    assert token_ids.tolist() == [6, 7, 8] and embeds is not None and embeds[:, 0].tolist() == [5, 6, 7]
    adapter.postprocess(plan, hidden(plan))
    assert flat(adapter.buffer.nested("a")) == {"meta": {"seen": 2}, "hidden_states": {"last": [1.0] * WIDTH}}
    assert model.calls[0]["more"] == 1 and model.calls[2]["multimodal_outputs"] == {}


def test_one_requests_hook_fails_and_the_others_go_on_to_the_end() -> None:
    model = HookModel(a=raises(ValueError("of a")))
    adapter = RunnerAdapter(model)
    plan = plan_of(a=1, b=1)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    adapter.preprocess(plan, torch.tensor([5, 6]))
    adapter.postprocess(plan, hidden(plan))
    assert model.called == ["a", "b", "b"]
    assert {rid: str(error) for rid, error in adapter.failures().items()} == {"a": "of a"}


def test_the_talker_runs_for_decode_rows_and_forgets_finished_requests() -> None:
    model = TalkingModel(a=talks(1.0, 2.0), b=talks(3.0, 4.0))
    talker = Talker(model, max_rows=4, dtype=torch.float32, device="cpu")
    adapter = RunnerAdapter(model, talker=talker)
    plan = plan_of(a=1, b=1)
    drawn = []
    for finished in ((), ["a", "b"]):
        adapter.begin_step(finished=finished, new=["a", "b"], scheduled=["a", "b"])
        _, embeds = adapter.preprocess(plan, torch.tensor([5, 6]), torch.zeros(2, WIDTH), seeds={"a": 1})
        assert embeds is not None and embeds[:, 0].tolist() == [7.0, 10.0]
        drawn.append(flat(adapter.buffer.nested("a"))["codes"])
    # The same id again draws its seed's numbers from the first.
    assert drawn[0] == drawn[1] and model.sizes == [1, 1, 1, 1]


def test_a_request_whose_codes_are_refused_fails_alone() -> None:
    model = TalkingModel(a=talks(1.0, 2.0, codes=torch.tensor(1)), b=talks(3.0, 4.0))
    adapter = RunnerAdapter(
        model,
        rules=MergeRules(spans={"codes.audio": ("codes.start", "codes.end")}),
        talker=Talker(model, max_rows=4, dtype=torch.float32, device="cpu"),
    )
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.preprocess(plan_of(a=1), torch.tensor([5]), torch.zeros(1, WIDTH))
    assert list(adapter.failures()) == ["a"]


@pytest.mark.parametrize(("phase", "given"), [(1, {"x": 1, "generated_len": 7}), (2, {"x": 1}), (3, {"x": 1})])
def test_only_the_first_phase_tells_the_output_length_in_the_map(phase: int, given: dict[str, int]) -> None:
    adapter = RunnerAdapter(object(), settings=AdapterConfig(migration_phase=phase))
    adapter.begin_step(new={"a": {"x": torch.tensor(1)}, "b": None}, scheduled=["a", "b"])
    plan = StepPlan.make(["a", "b"], {"a": 1, "b": 1}, generated={"a": 7, "b": 8})
    kwargs = adapter.forward_kwargs(plan)
    maps = kwargs["model_intermediate_buffer"]
    assert [{k: int(v) for k, v in one.items()} for one in maps] == [given, {}]
    assert kwargs["generated_len"] == [7, 8]
    assert ("runtime_additional_information" in kwargs) == (phase == 1)
    # The map of the next step says nothing old.
    assert list(adapter.buffer["a"]) == ["x"]


def test_extra_sampling_arguments_stand_in_the_rows_order_if_the_model_has_them() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    plan = plan_of(b=1, a=1)
    assert adapter.forward_kwargs(plan, sampling_extra_args={"a": {"k": 1}})["sampling_extra_args"] == [{}, {"k": 1}]
    assert "sampling_extra_args" not in adapter.forward_kwargs(plan)


@pytest.mark.parametrize(("form", "keys"), [("keys", ["a-0"]), ("names", [LAYER_0]), ("nested", ["hidden_states"])])
def test_maps_have_the_form_that_was_asked_for(form: Any, keys: list[str]) -> None:
    adapter = RunnerAdapter(object(), CONFIG, form=form)
    adapter.begin_step(new={"a": {LAYER_0: torch.tensor(1)}}, scheduled=["a"])
    assert list(adapter.gather(plan_of(a=1))[0]) == keys


@pytest.mark.parametrize("output", [(None, {}), (1, 2, 3), "text"])
def test_a_hook_without_its_text_fails_the_requests_of_the_step(output: object) -> None:
    adapter = RunnerAdapter(HookModel())
    adapter.begin_step(new=["a", "b", "idle"], scheduled=["a", "b"])
    adapter.postprocess(plan_of(a=1, b=1), output)
    failed = adapter.failures()
    assert {rid: (type(error), error.facts["rid"]) for rid, error in failed.items()} == {
        rid: (errors.InvalidPayload, rid) for rid in "ab"
    }


def test_a_model_without_the_hook_may_give_no_text(pair: Link) -> None:
    """As every code2wav of vLLM-Omni."""
    middle, plan = Middle(pair, object()), plan_of(a=2)
    adapter = middle.adapter
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.postprocess(plan, (None, {"model_outputs": [torch.zeros(3)]}))
    adapter.send(plan, (None, {IDS: torch.tensor([1, 2])}), last=["a"])
    assert adapter.failures() == {} and middle.take("a") == [1, 2]


def test_an_output_of_no_form_fails_the_requests_of_the_step(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.send(plan, (hidden(plan), {}, {}))
    assert {rid: type(error) for rid, error in adapter.failures().items()} == {"a": errors.InvalidPayload}


# -- the end of a step ----------------------------------------------------------------------------


def test_each_request_hands_on_its_own_rows(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(b=1, a=2)
    adapter.begin_step(new=["a", "b"], scheduled=["b", "a"])
    adapter.send(plan, (hidden(plan), {0: torch.tensor([[10], [20], [21]])}))
    assert middle.take("a") == [[20], [21]]
    assert middle.take("b") == [[10]]


def test_what_does_not_leave_may_be_anything(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.send(plan, (object(), {"ids": {"other": object()}, "state": torch.zeros(9)}), beside={"a": ids(4)})
    assert middle.take("a") == [4] and adapter.failures() == {}


def test_layers_that_come_without_names_are_those_that_were_asked_for(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=1)
    own = RunnerAdapter(object(), CONFIG, outbox=adapter.outbox, aux_layers=[24])
    own.begin_step(new=["a"], scheduled=["a"])
    own.send(plan, (hidden(plan), [torch.tensor([[7]])]))
    payload = middle.after.edge(TO, NEXT).take("a", timeout=10.0)
    assert flat(payload) == {"a-24": [[7]]}


def test_what_stands_beside_the_output_goes_with_it_and_the_last_ends(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.send(plan, hidden(plan), beside={"a": ids(4, 5)}, last=["a"])
    found = list(middle.after.edge(TO, NEXT).stream("a", timeout=10.0))
    assert [flat(payload) for payload in found] == [{"a-thinker_input_ids": [4, 5]}]


def test_a_row_without_tokens_hands_nothing_on(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=0, b=1)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    adapter.send(plan, (hidden(plan), {0: torch.tensor([[1]])}), beside={"a": ids(1)})
    assert adapter.outbox is not None and [adapter.outbox.sent(rid) for rid in "ab"] == [0, 1]


def test_a_request_that_failed_hands_nothing_on(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=1, b=1)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    adapter.fail("a", ValueError("away"))
    adapter.send(plan, (hidden(plan), {0: torch.tensor([[1], [2]])}), last=["a", "b"])
    assert middle.take("b") == [[2]]
    with pytest.raises(errors.RequestAborted):
        middle.take("a")


def test_a_part_that_is_refused_fails_its_request_alone(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=1, b=1)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    adapter.send(plan, (hidden(plan), {"ids": {"thinker_input_ids": ["no tensor", torch.tensor([2])]}}))
    assert middle.take("b") == [2]
    assert list(adapter.failures()) == ["a"]


def test_finishing_ends_the_output_and_leaves_what_is_unread(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.send(plan, hidden(plan), beside={"a": ids(4)})
    adapter.begin_step(finished=["a"])
    found = list(middle.after.edge(TO, NEXT).stream("a", timeout=10.0))
    # The END alone is an empty last payload.
    assert [flat(payload) for payload in found] == [{"a-thinker_input_ids": [4]}, {}]


def test_a_last_stage_sends_nothing(pair: Link) -> None:
    adapter = only_reads(pair)
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.send(plan_of(a=1), object())
    assert adapter.failures() == {}


def test_tables_that_contradict_each_other_are_found() -> None:
    adapter = RunnerAdapter(object())
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.validate()
    adapter.buffer.finish(["a"])
    with pytest.raises(errors.InvariantBroken):
        adapter.validate()
