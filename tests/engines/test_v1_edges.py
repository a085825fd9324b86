"""V1RunnerMixin over genuine runners: failures, hand-over, what vLLM-Omni's has of its own, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine import FinishReason
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

import connector
from connector import Node, errors
from runner_adapter.adapters.vllm import V1RunnerMixin
from runner_adapter.merge import MergeRules
from runner_adapter.outbox import Outbox
from runner_adapter.runner import RunnerAdapter
from tests.engines.vllm_steps import (
    TRANSFER,
    WIDTH,
    Loop,
    PlainModel,
    StageModel,
    foreign,
    made,
    numbers,
    settings,
    v1,
    with_adapter,
)


class VllmRunner(V1RunnerMixin, CPUModelRunner):
    pass


class OmniRunner(V1RunnerMixin, OmniGPUModelRunner, CPUModelRunner):
    pass


@pytest.fixture(params=[VllmRunner, OmniRunner], ids=["vllm", "omni"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def loop(kind: Any, model: StageModel | None = None, config: Any = None, **own: Any) -> Loop:
    return with_adapter(v1(kind, config or settings(), model or StageModel()), **own)


# -- failures -------------------------------------------------------------------------------------


def test_one_requests_hook_fails_and_its_client_is_told_while_the_others_go_on(kind: Any) -> None:
    run = loop(kind)
    run.runner.model.raises["A"] = ValueError("of A")
    run.add("A", 1, 2, tokens=4)
    run.add("B", 11, tokens=4)
    run.step()
    assert run.ended["A"].finish_reason is FinishReason.ERROR and run.ended["A"].stop_reason == "ValueError: of A"
    while "B" not in run.ended:
        run.step()
    assert run.tokens["B"] == [12, 13, 14, 15] and run.ended["B"].finish_reason is FinishReason.LENGTH
    assert list(run.adapter.buffer) == [] or run.step() and list(run.adapter.buffer) == []


def test_a_failure_is_there_for_the_caller_too_once(kind: Any) -> None:
    run = loop(kind)
    run.runner.model.raises["A"] = ValueError("of A")
    run.add("A", 1)
    output = run.schedule()
    run.run(output)
    assert {rid: str(error) for rid, error in run.runner.adapter_failures().items()} == {"A": "of A"}
    assert run.runner.adapter_failures() == {}


def test_an_output_that_is_one_object_for_all_steps_is_not_marked(kind: Any) -> None:
    run = loop(kind)
    run.add("A", 1)
    run.step()
    run.adapter.fail("A", ValueError("of A"))
    first = run.run(made({}))
    assert first.adapter_failures == {"A": "ValueError: of A"}
    second = run.run(made({}))
    assert getattr(second, "adapter_failures", None) is None


# -- vLLM-Omni's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [True, False], ids=["async_chunk", "full_payload"])
def test_what_vllm_omnis_connector_brings_is_merged_too(chunks: bool) -> None:
    config = settings()
    config.model_config.async_chunk = chunks
    run = loop(OmniRunner, PlainModel(), config=config)
    run.add("A", 1)
    run.step()
    run.runner._local_stage_payload_cache = {
        "A": {"codes": {"audio": torch.tensor([5])}, "meta": {"finished": True}},
        "later": {"codes": {"audio": torch.tensor([6])}},
    }
    run.step()
    found = numbers(run.runner.model.seen[-1]["model_intermediate_buffer"]["A"])
    assert found == {"codes": {"audio": [5]}, "meta": {"finished": True}}
    assert list(run.runner._local_stage_payload_cache) == ["later"]


def test_what_vllm_omni_reads_of_its_requests_stays_where_it_is() -> None:
    run = loop(OmniRunner)
    run.add("A", 1, additional_information={"omni_final_stage_id": 2, "global_request_id": ["g"]})
    run.add("B", 11, model_intermediate_buffer={"omni_final_stage_id": 3})
    run.step()
    run.step({"A": {"thinker": torch.tensor([1])}})
    assert run.runner.model_intermediate_buffer == {
        "A": {"omni_final_stage_id": 2, "global_request_id": ["g"]},
        "B": {"omni_final_stage_id": 3},
    }


def test_vllm_omnis_runner_calls_no_hook_itself() -> None:
    run = loop(OmniRunner)
    called: list[str] = []
    run.add("A", 1)
    run.step()
    run.runner.model.postprocess = lambda *_, **__: called.append("A")
    # After sampling, and perhaps in another thread.
    run.runner._process_additional_information_updates(torch.zeros(1, WIDTH), {}, torch.tensor([1]).numpy(), None)
    assert called == []
    assert [rid for rid, _ in run.runner.model.found] == ["A"]
    assert run.runner.model.has_preprocess and "has_preprocess" not in vars(run.runner.model)


def test_vllm_omnis_other_kwargs_are_given_too() -> None:
    class Eligible(StageModel):
        requires_request_sample_eligibility = True

    run = loop(OmniRunner, Eligible())
    run.add("A", 1, 2)
    run.step()
    assert run.runner.model.seen[-1]["request_sample_eligible"] == [True]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [("parallel_config", "pipeline_parallel_size", 2), ("parallel_config", "enable_dbo", True)],
)
def test_an_engine_that_splits_its_batch_is_refused(kind: Any, part: str, name: str, value: Any) -> None:
    runner = v1(kind, settings(), StageModel())
    setattr(getattr(runner.vllm_config, part), name, value)
    with pytest.raises(errors.UsageError, match="splits"):
        runner.use_adapter(RunnerAdapter(runner.model))
    assert runner.adapter is None


def test_a_hook_whose_embeddings_would_not_reach_a_compiled_forward_is_refused() -> None:
    runner = v1(VllmRunner, settings(), StageModel())
    runner.model_config.enforce_eager = False
    with pytest.raises(errors.UsageError, match="enable_prompt_embeds"):
        runner.use_adapter(RunnerAdapter(runner.model))
    runner.enable_prompt_embeds = True
    runner.use_adapter(RunnerAdapter(runner.model))


def test_a_postprocess_hook_without_the_rows_of_a_prefix_cache_is_refused() -> None:
    runner = v1(OmniRunner, settings(), StageModel())
    runner.cache_config.enable_prefix_caching = True
    with pytest.raises(errors.UsageError, match="prefix_caching"):
        runner.use_adapter(RunnerAdapter(runner.model))


def test_a_runner_has_one_adapter(kind: Any) -> None:
    run = loop(kind)
    with pytest.raises(errors.UsageError):
        run.runner.use_adapter(RunnerAdapter(run.runner.model))


# -- hand-over ------------------------------------------------------------------------------------


class Sending:
    """A runner whose output another stage reads."""

    def __init__(self, kind: Any, endpoint: str, **own: Any) -> None:
        self.sender = connector.connect(stage="thinker", endpoint=endpoint)
        self.reader = connector.connect(stage="talker", endpoint=endpoint)
        self.edge = self.reader.edge("thinker", "talker")
        out = Outbox(self.sender, self.sender.edge("thinker", "talker"), TRANSFER)

        class Handing(kind):  # type: ignore[misc]
            def beside(self, plan: Any) -> Any:
                ids = self.input_ids.gpu
                return {row.rid: {"ids.tokens": ids[row.start : row.stop].clone()} for row in plan.rows}

        rules = MergeRules(row_axes={"ids.tokens": 0})
        self.run = loop(Handing, PlainModel(), outbox=out, rules=rules, **own)

    def tokens(self, rid: str) -> list[int]:
        """All that was handed over of a rid, in order."""
        payloads = list(self.edge.stream(rid, timeout=10.0))
        return [token for payload in payloads for token in payload.get(f"{rid}-tokens", torch.tensor([])).tolist()]

    def close(self) -> None:
        self.reader.close()
        self.sender.close()


@pytest.fixture
def sending(kind: Any, broker: Node) -> Iterator[Any]:
    made: list[Sending] = []

    def make(**own: Any) -> Sending:
        made.append(Sending(kind, broker.endpoint, **own))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_each_token_is_handed_over_once_also_after_preemption(sending: Any) -> None:
    stage = sending()
    stage.run.add("A", 1, 2, tokens=4)
    stage.run.add("B", 11, tokens=4)
    stage.run.step()
    stage.run.step()
    stage.run.scheduler.reset_prefix_cache(reset_running_requests=True)
    while stage.run.adapter.buffer:
        stage.run.step()
    assert stage.tokens("A") == [1, 2, 3, 4, 5]
    assert stage.tokens("B") == [11, 12, 13, 14]


def test_rows_that_a_prefix_cache_spares_are_not_handed_over_as_if_there_were_none(sending: Any) -> None:
    stage = sending()
    stage.run.add("A", 1, 2, 3)
    stage.run.add("B", 11)
    output = stage.run.schedule()
    # The scheduler found two of its tokens in the cache.
    output.scheduled_new_reqs[0].num_computed_tokens = 2
    output.num_scheduled_tokens["A"], output.total_num_scheduled_tokens = 1, 2
    stage.run.run(output)
    assert {rid: error.facts["computed"] for rid, error in stage.run.runner.adapter_failures().items()} == {"A": 2}
    with pytest.raises(errors.RequestAborted):
        stage.tokens("A")


def test_a_stage_that_drafts_tokens_hands_nothing_over(sending: Any) -> None:
    stage = sending()
    runner = stage.run.runner
    outbox, runner._steps = stage.run.adapter.outbox, None
    runner.vllm_config.speculative_config = SimpleNamespace()
    with pytest.raises(errors.UsageError, match="drafts"):
        runner.use_adapter(RunnerAdapter(runner.model, TRANSFER, outbox=outbox))
    runner.use_adapter(RunnerAdapter(runner.model, TRANSFER))


def test_the_mixin_overrides_what_it_means_to_and_nothing_else() -> None:
    overridden = {"load_model", "execute_model", "sample_tokens", "_update_states", "_preprocess", "_model_forward"}
    overridden |= {"_dummy_run", "_determine_batch_execution_and_padding"}
    omni = {"_build_model_kwargs_extra", "_gather_runtime_additional_information", "_update_intermediate_buffer"}
    omni |= {"_process_additional_information_updates"}
    assert foreign(V1RunnerMixin, v1(CPUModelRunner, settings(), StageModel()), overridden) == set()

    class Engine(OmniGPUModelRunner, CPUModelRunner):
        pass

    assert foreign(V1RunnerMixin, v1(Engine, settings(), StageModel()), overridden | omni) == set()
