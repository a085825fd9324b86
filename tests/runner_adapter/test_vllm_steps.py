"""The engine's steps as the adapter's, over stand-ins of vLLM's objects; tests/engines has the genuine ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter.adapters.vllm import V1RunnerMixin
from runner_adapter.adapters.vllm.ids import ExternalId, as_it_is
from runner_adapter.adapters.vllm.ledger import Known, Ledger
from runner_adapter.adapters.vllm.steps import Steps
from runner_adapter.config import AdapterConfig
from runner_adapter.merge import MergeRules
from runner_adapter.plan import StepPlan
from runner_adapter.runner import RunnerAdapter
from runner_adapter.staging import DeviceRows, RowSpec
from tests.runner_adapter.models import flat

CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(has_sampling_extra_args=True),
    scheduler_config=SimpleNamespace(async_scheduling=False),
    parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    speculative_config=None,
    cache_config=SimpleNamespace(enable_prefix_caching=False),
)


def request(rid: str, prompt: int = 2, tokens: int | None = None, **brings: Any) -> Any:
    """What a scheduler calls new; `tokens`: of its prompt and what it has generated, if it comes back (V2)."""
    own = {"prompt_embeds": None, "sampling_params": None, **brings}
    return SimpleNamespace(
        req_id=rid, prompt_len=prompt, prefill_token_ids=None if tokens is None else [0] * tokens, **own
    )


def output(
    *new: Any,
    cached: dict[str, int] | None = None,
    finished: Any = (),
    preempted: Any = None,
    drafts: dict[str, list[int]] | None = None,
    counts: dict[str, int] | None = None,
    **brings: Any,
) -> Any:
    """A step; `cached`: generated tokens of those that run, by rid. All of them run if `counts` does not say whom."""
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_output_tokens=list(cached.values()), **brings),
        num_scheduled_tokens=counts or dict.fromkeys([*(one.req_id for one in new), *cached], 1),
        finished_req_ids=set(finished),
        preempted_req_ids=preempted,
        scheduled_spec_decode_tokens=drafts or {},
    )


class Engine:
    """Steps over an adapter, driven as the mixins do."""

    def __init__(
        self,
        model: object | None = None,
        *,
        late: bool = False,
        embeds: bool = True,
        external_id: ExternalId = as_it_is,
        **own: Any,
    ) -> None:
        config = SimpleNamespace(**{**vars(CONFIG), "scheduler_config": SimpleNamespace(async_scheduling=late)})
        self.adapter = RunnerAdapter(model or object(), form="nested", **own)
        self.steps = Steps(self.adapter, model or object(), config, embeds=embeds, external_id=external_id)

    def step(self, one: Any) -> Any:
        self.steps.take(one)
        self.steps.begin(one)
        return one

    def plan(self, **computed: int) -> StepPlan:
        rids = list(computed)
        return self.steps.plan(rids, dict.fromkeys(rids, 1), computed, padded_tokens=len(rids))

    def map(self, rid: str) -> dict[str, Any]:
        return flat(self.adapter.buffer.nested(rid))

    @property
    def failed(self) -> dict[str, type[Exception]]:
        return {rid: type(error) for rid, error in self.adapter.failures().items()}


def tensor(value: Any) -> dict[str, Any]:
    return {"x": torch.tensor(value)}


def test_a_prefix_cache_in_a_stage_that_reads_is_refused() -> None:
    """Of two requests with the same placeholders as prompts, the second would be given what the first was computed
    from."""
    config = SimpleNamespace(**{**vars(CONFIG), "cache_config": SimpleNamespace(enable_prefix_caching=True)})
    inbox: Any = object()
    with pytest.raises(errors.UsageError) as caught:
        Steps(RunnerAdapter(object(), inbox=inbox, abort=lambda rid, why: None), object(), config, embeds=False)
    assert caught.value.facts["setting"] == "enable_prefix_caching"
    Steps(RunnerAdapter(object()), object(), config, embeds=False)


# -- lives ----------------------------------------------------------------------------------------


def test_an_id_finished_and_new_in_one_step_is_another_request() -> None:
    engine = Engine()
    engine.step(output(request("a", model_intermediate_buffer=tensor(1))))
    engine.step(output(cached={"a": 3}))
    engine.step(output(request("a", model_intermediate_buffer={"y": torch.tensor(2)}), finished=["a"]))
    assert engine.map("a") == {"y": 2}
    assert engine.plan(a=0).row("a").generated == 0


def test_an_id_preempted_finished_and_new_in_one_step_is_another_request() -> None:
    engine = Engine()
    engine.step(output(request("a", model_intermediate_buffer=tensor(1))))
    engine.step(output(request("a", tokens=2), finished=["a"], preempted={"a"}))
    assert engine.map("a") == {}


def test_a_preempted_request_that_comes_as_new_goes_on() -> None:
    engine = Engine()
    engine.step(output(request("a", model_intermediate_buffer=tensor(1)), request("b")))
    engine.step(output(cached={"a": 1, "b": 1}, model_intermediate_buffer={"a": tensor(2)}))
    before = engine.adapter.buffer["a"]
    engine.step(output(cached={"b": 2}, preempted={"a"}))
    engine.step(output(request("a", tokens=4, model_intermediate_buffer=tensor(1)), cached={"b": 3}))
    # What it brought at first is merged already, and no segment begins.
    assert engine.map("a") == {"x": 2}
    assert engine.adapter.buffer["a"] is before
    assert engine.plan(a=0, b=4).row("a").generated == 2


def test_a_preempted_request_whose_input_has_grown_is_a_further_segment() -> None:
    engine = Engine()
    engine.step(output(request("a")))
    engine.step(output(request("a", prompt=5, tokens=5, model_intermediate_buffer=tensor(1)), preempted={"a"}))
    assert engine.map("a") == {"x": 1, "meta": {"num_processed_tokens": 0}}


def test_a_preempted_request_that_comes_back_as_running_may_have_further_input_later() -> None:
    engine = Engine()
    engine.step(output(request("a")))
    engine.step(output(preempted={"a"}, counts={}))
    engine.step(output(cached={"a": 1}))
    engine.step(output(request("a", model_intermediate_buffer=tensor(1))))
    assert engine.map("a") == {"x": 1, "meta": {"num_processed_tokens": 0}}


def test_further_input_is_merged_into_the_same_map_and_its_output_counts_from_the_start() -> None:
    engine = Engine(rules=MergeRules(accumulated=["x"]))
    engine.step(output(request("a", model_intermediate_buffer=tensor([1]))))
    engine.step(output(cached={"a": 2}))
    engine.step(output(request("a", prompt=6, model_intermediate_buffer=tensor([2]))))
    assert engine.map("a") == {"x": [1, 2], "meta": {"num_processed_tokens": 0}}
    assert engine.plan(a=3).row("a").generated == 0


def test_a_request_that_waits_keeps_its_map() -> None:
    engine = Engine()
    engine.step(output(request("a", model_intermediate_buffer=tensor(1)), request("b")))
    engine.step(output(cached={"b": 1}))
    engine.step(output(cached={"b": 2, "a": 1}))
    assert engine.map("a") == {"x": 1}


def test_a_finished_request_is_forgotten_everywhere() -> None:
    engine = Engine()
    payload = SimpleNamespace(data=torch.zeros(2, 4).numpy().tobytes(), shape=[2, 4], dtype="float32")
    engine.step(output(request("a", prompt_embeds=payload)))
    engine.step(output(finished=["a"], counts={}))
    assert (len(engine.steps._known), len(engine.steps._overlay), len(engine.adapter.buffer)) == (0, 0, 0)


# -- what requests bring --------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["model_intermediate_buffer", "additional_information"])
def test_what_running_requests_are_brought_is_merged_in_every_step(field: str) -> None:
    engine = Engine()
    engine.step(output(request("a"), request("b")))
    for step in (2, 3):
        engine.step(output(cached={"a": step, "b": step}, **{field: {"a": tensor(step), "b": None}}))
        assert (engine.map("a"), engine.map("b")) == ({"x": step}, {})


def test_what_a_request_brings_is_merged_once_and_by_nobody_else() -> None:
    engine = Engine()
    brings = {"model_intermediate_buffer": tensor(1), "additional_information": {"y": 2}}
    first = engine.step(output(request("a", **brings)))
    assert engine.adapter.buffer.counters["merged"] == 1
    second = engine.step(output(cached={"a": 1}, additional_information={"a": tensor(3)}))
    assert engine.adapter.buffer.counters["merged"] == 2
    # The engine's own code finds nothing to merge.
    (one,) = first.scheduled_new_reqs
    assert (one.model_intermediate_buffer, one.additional_information) == (None, None)
    assert second.scheduled_cached_reqs.additional_information == {}


def test_a_model_that_is_given_snapshots_has_the_last_one_alone() -> None:
    engine = Engine(SimpleNamespace(replace_runtime_additional_information=True))
    engine.step(output(request("a", model_intermediate_buffer=tensor(1))))
    engine.step(output(cached={"a": 1}, model_intermediate_buffer={"a": {"y": torch.tensor(2)}}))
    assert engine.map("a") == {"y": 2}


def test_fields_that_are_refused_fail_their_requests_alone() -> None:
    engine = Engine()
    engine.step(
        output(request("a", additional_information={"x": object()}), request("b", additional_information={"x": 1}))
    )
    assert engine.failed == {"a": errors.InvalidPayload} and engine.map("b") == {"x": 1}
    engine.step(output(cached={"a": 1, "b": 1}, additional_information={"b": {"x": object()}}))
    assert engine.failed == {"b": errors.InvalidPayload}


def test_what_is_brought_to_a_finished_request_is_dropped() -> None:
    engine = Engine()
    engine.step(output(request("a")))
    engine.step(output(finished=["a"], counts={}, additional_information={"a": tensor(1)}))
    assert engine.adapter.buffer.counters["dropped_finished"] == 1 and engine.failed == {}


def test_the_last_phase_refuses_the_old_field_for_its_request_alone() -> None:
    engine = Engine(settings=AdapterConfig(migration_phase=3))
    engine.step(
        output(request("a", additional_information={"x": 1}), request("b", model_intermediate_buffer=tensor(2)))
    )
    assert engine.failed == {"a": errors.UsageError} and engine.map("b") == {"x": 2}


def test_old_prompt_embeddings_fail_their_request_where_the_forward_takes_none() -> None:
    engine = Engine(embeds=False)
    payload = SimpleNamespace(data=torch.zeros(2, 4).numpy().tobytes(), shape=[2, 4], dtype="float32")
    engine.step(output(request("a", prompt_embeds=payload), request("b")))
    assert engine.failed == {"a": errors.UsageError}


def test_the_engines_own_prompt_embeddings_stay_its_own() -> None:
    engine = Engine(settings=AdapterConfig(migration_phase=3))
    own = torch.zeros(2, 4)
    one = engine.step(output(request("a", prompt_embeds=own)))
    assert one.scheduled_new_reqs[0].prompt_embeds is own and engine.failed == {}


# -- the plan -------------------------------------------------------------------------------------


def test_rows_stand_in_the_batchs_order_with_the_scheduler_s_counts() -> None:
    engine = Engine()
    engine.step(output(request("a"), request("b", prompt=3)))
    engine.step(output(cached={"a": 1, "b": 0}))
    plan = engine.steps.plan(["b", "a"], {"a": 1, "b": 2}, {"a": 2, "b": 1}, padded_tokens=4, padded_rows=3)
    assert [(row.rid, row.span, row.generated, row.prefill) for row in plan.rows] == [
        ("b", (0, 2), 0, True),
        ("a", (2, 3), 1, False),
    ]
    assert (plan.padded_tokens, plan.padded_rows) == (4, 3)


@pytest.mark.parametrize(
    ("generated", "computed", "reading"),
    [
        # A prompt of 3: its tokens, then each that was sampled.
        (0, 0, True),
        (0, 2, True),
        (1, 3, False),
        (4, 6, False),
        # Preempted, it reads all that it has but the last, which it would have been given next.
        (4, 0, True),
        (4, 3, True),
        (4, 5, True),
    ],
)
def test_a_request_reads_until_the_token_that_was_sampled_last(generated: int, computed: int, reading: bool) -> None:
    assert Known(3, None, generated=generated).is_reading(computed) is reading


@pytest.mark.parametrize(("late", "expected"), [(False, 5), (True, 2)])
def test_drafted_tokens_that_are_not_accepted_yet_do_not_count(late: bool, expected: int) -> None:
    engine = Engine(late=late)
    engine.step(output(request("a")))
    engine.step(output(cached={"a": 1}, drafts={"a": [-1, -1, -1]}))
    # One token and three drafts are on their way to a scheduler that schedules early.
    engine.step(output(cached={"a": 5}))
    assert engine.plan(a=4).row("a").generated == expected
    # It has heard by now.
    engine.step(output(cached={"a": 4}))
    assert engine.plan(a=5).row("a").generated == 4


def test_extra_arguments_are_those_of_the_last_segment() -> None:
    engine = Engine()
    params = [SimpleNamespace(extra_args={"voice": voice}) for voice in (1, 2)]
    engine.step(output(request("a", sampling_params=params[0]), request("b")))
    engine.plan(b=0, a=0)
    assert engine.steps.kwargs()["sampling_extra_args"] == [{}, {"voice": 1}]
    engine.step(output(request("a", prompt=3, sampling_params=params[1])))
    engine.plan(a=2)
    assert engine.steps.kwargs()["sampling_extra_args"] == [{"voice": 2}]


def test_a_step_without_a_plan_has_empty_maps_for_its_rows() -> None:
    engine = Engine()
    engine.step(output(request("a", model_intermediate_buffer=tensor(1))))
    assert engine.steps.kwargs(2, 5)["model_intermediate_buffer"] == [{}, {}]


def test_declared_rows_are_staged_before_the_forward_and_without_requests_are_zero() -> None:
    """A forward that is replayed is given no kwargs: it reads these."""
    engine = Engine(rows=DeviceRows({"x": RowSpec((), torch.int64)}, max_rows=4))
    assert engine.adapter.rows is not None
    captured = engine.adapter.stage(StepPlan.empty(2, 2))["x"]
    engine.step(output(request("a", model_intermediate_buffer=tensor(1)), request("b")))
    engine.adapter.bring({"b": tensor(2)})
    engine.plan(b=0, a=0)
    engine.steps.kwargs()
    assert captured.tolist() == [2, 1]
    engine.steps.after(torch.zeros(2, 1), lambda plan: {})
    engine.steps.kwargs(2, 2)
    assert captured.tolist() == [0, 0]


def test_the_seed_of_a_talker_is_found_under_either_name_also_0() -> None:
    found = [
        Known(1, SimpleNamespace(extra_args=given)).seed
        for given in ({"tts_local_seed": 0}, {"qwen3_tts_request_seed": 7}, {"tts_local_seed": None}, None)
    ]
    assert found == [0, 7, None, None]


# -- hand-over ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("computed", "tokens", "again", "handed"), [(5, 2, 0, 7), (0, 5, 5, 5), (0, 6, 5, 6), (4, 2, 1, 6), (0, 3, 3, 5)]
)
def test_rows_that_were_handed_over_are_not_again(computed: int, tokens: int, again: int, handed: int) -> None:
    known = Known(3, None, handed=5)
    assert known.hand(computed, tokens) == again
    assert known.handed == handed


def test_a_segment_goes_on_handing_over_and_another_request_begins() -> None:
    ledger = Ledger(drafts_late=False)
    ledger.enter("a", request("a"))
    ledger["a"].hand(0, 4)
    ledger.enter("a", request("a", prompt=6))
    assert ledger["a"].handed == 4
    ledger.leave(["a"], ())
    ledger.enter("a", request("a"))
    assert ledger["a"].handed == 0


# -- the mixins, over stand-ins of the runners ----------------------------------------------------


class V1Engine:
    vllm_config = CONFIG
    model_config = SimpleNamespace(enforce_eager=True)
    supports_mm_inputs, enable_prompt_embeds = False, True

    def load_model(self) -> None:
        self.model = object()
        self.requests: dict[str, Any] = {}

    def _update_states(self, scheduler_output: Any) -> None:
        self.seen = [one.prompt_embeds for one in scheduler_output.scheduled_new_reqs]
        for one in scheduler_output.scheduled_new_reqs:
            self.requests[one.req_id] = SimpleNamespace()

    def execute_model(self, scheduler_output: Any) -> Any:
        self._update_states(scheduler_output)
        return scheduler_output.result

    def sample_tokens(self, grammar: Any) -> Any:
        return SimpleNamespace(tokens=grammar)


class V1Runner(V1RunnerMixin, V1Engine):
    def make_adapter(self) -> RunnerAdapter:
        return RunnerAdapter(self.model, form="nested", settings=AdapterConfig(migration_phase=1))


def test_a_runner_has_its_adapter_once_the_model_is_loaded() -> None:
    runner = V1Runner()
    assert runner.adapter is None
    runner.load_model()
    assert isinstance(runner.adapter, RunnerAdapter)


def test_a_runner_that_does_not_say_what_its_adapter_is_is_told_so() -> None:
    class Silent(V1RunnerMixin, V1Engine):
        pass

    with pytest.raises(errors.UsageError, match="make_adapter"):
        Silent().load_model()


def test_the_engine_never_sees_old_prompt_embeddings_and_the_mirror_is_written_behind_it() -> None:
    runner = V1Runner()
    runner.load_model()
    payload = SimpleNamespace(data=torch.zeros(2, 4).numpy().tobytes(), shape=[2, 4], dtype="float32")
    runner._update_states(output(request("a", prompt_embeds=payload, model_intermediate_buffer=tensor(1))))
    assert runner.seen == [None]
    assert flat(runner.requests["a"].additional_information_cpu) == {"x": 1}


def test_what_failed_is_on_the_next_output_once_and_for_the_caller_once() -> None:
    runner = V1Runner()
    runner.load_model()
    assert runner.adapter is not None
    step = output(request("a"))
    step.result = None
    assert runner.execute_model(step) is None
    runner.adapter.fail("a", ValueError("of a"))
    assert runner.sample_tokens(1).adapter_failures == {"a": "ValueError: of a"}
    assert "adapter_failures" not in vars(runner.sample_tokens(1))
    assert [str(error) for error in runner.adapter_failures().values()] == ["of a"]
    assert runner.adapter_failures() == {}


def test_a_finished_request_that_failed_is_nobodys() -> None:
    runner = V1Runner()
    runner.load_model()
    assert runner.adapter is not None
    runner._update_states(output(request("a")))
    runner.adapter.fail("a", ValueError("of a"))
    runner.sample_tokens(1)
    runner._update_states(output(finished=["a"], counts={}))
    assert runner.adapter_failures() == {}


def test_failures_that_nobody_asks_for_do_not_pile_up() -> None:
    runner = V1Runner()
    runner.load_model()
    assert runner.adapter is not None
    for rid in ("a", "b"):
        runner._update_states(output(request(rid), finished=["a"]))
        runner.adapter.fail(rid, ValueError("of it"))
        runner.sample_tokens(1)
    assert list(runner._failures) == ["b"]
