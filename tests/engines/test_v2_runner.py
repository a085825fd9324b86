"""V2RunnerMixin over vLLM's genuine V2 runner, fed by its genuine scheduler; v2_twins.py says what is not genuine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import is_forward_context_available
from vllm.v1.engine import FinishReason
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

import connector
from connector import Node, errors
from runner_adapter.adapters.vllm import V2RunnerMixin
from runner_adapter.merge import MergeRules
from runner_adapter.outbox import Outbox
from runner_adapter.runner import RunnerAdapter
from runner_adapter.talker import Talker
from tests.engines.v2_twins import TwinRunner, v2
from tests.engines.vllm_steps import (
    TRANSFER,
    WIDTH,
    Loop,
    PlainModel,
    StageModel,
    foreign,
    made,
    numbers,
    rows,
    settings,
    with_adapter,
)


class Runner(V2RunnerMixin, TwinRunner):
    def beside(self, plan: Any) -> Any:
        ids = self.input_buffers.input_ids
        return {row.rid: {"ids.tokens": ids[row.start : row.stop].clone()} for row in plan.rows}


def loop(model: StageModel | None = None, config: Any = None, **own: Any) -> Loop:
    return with_adapter(v2(Runner, config or settings(), model or StageModel()), **own)


def pad(run: Loop) -> None:
    """Each batch runs with three more tokens and two more rows, as a captured graph may have."""
    graphs = run.runner.cudagraph_manager
    own = graphs.dispatch

    def padded(num_reqs: int, num_tokens: int, *more: Any, **options: Any) -> BatchExecutionDescriptor:
        found = own(num_reqs, num_tokens, *more, **options)
        return BatchExecutionDescriptor(found.cg_mode, num_tokens + 3, num_reqs + 2)

    graphs.dispatch = padded


# -- lives and order ------------------------------------------------------------------------------


def test_a_map_follows_its_request_from_prompt_to_end() -> None:
    run = loop()
    model = run.runner.model
    run.add("A", 1, 2, 3, tokens=3)
    run.step()
    assert rows(model) == [("A", (0, 3), 0, 1, None)]
    run.add("B", 11, 12)
    run.step()
    assert rows(model) == [("A", (0, 1), 1, 2, 3), ("B", (1, 3), 0, 1, None)]
    run.step()
    assert rows(model) == [("A", (0, 1), 2, 3, 4), ("B", (1, 2), 1, 2, 12)]
    run.step()
    assert rows(model) == [("B", (0, 1), 2, 3, 13)]
    assert list(run.adapter.buffer) == ["B"]
    assert run.tokens == {"A": [4, 5, 6], "B": [13, 14, 15]}


def test_rows_are_those_of_the_batch_that_the_engine_sorted() -> None:
    run = loop()
    run.add("A", 1, 2, 3, model_intermediate_buffer={"own": {"x": torch.tensor(7)}})
    run.add("B", 11, 12)
    run.step()
    # Shorter rows come first.
    assert rows(run.runner.model) == [("B", (0, 2), 0, 1, None), ("A", (2, 5), 0, 1, None)]
    assert [one.get("own") for one in run.runner.model.seen[-1]["model_intermediate_buffer"]] == [None, {"x": 7}]
    run.step()
    run.add("C", 21)
    run.step()
    assert [rid for rid, *_ in rows(run.runner.model)] == ["A", "B", "C"]


def test_a_preempted_request_goes_on_with_its_map_in_whatever_slot() -> None:
    run = loop()
    slots = run.runner.req_states.req_id_to_index
    run.add("A", 1, 2, model_intermediate_buffer={"own": {"x": torch.tensor(1)}})
    run.add("B", 11, model_intermediate_buffer={"own": {"x": torch.tensor(2)}})
    run.step()
    run.step({"A": {"own": {"x": 3}}})
    before = dict(slots)
    run.scheduler.reset_prefix_cache(reset_running_requests=True)
    output = run.step()
    assert output.preempted_req_ids == {"A", "B"}
    assert sorted(one.req_id for one in output.scheduled_new_reqs) == ["A", "B"]
    assert rows(run.runner.model) == [("B", (0, 3), 2, 3, 12), ("A", (3, 7), 2, 3, 3)]
    # Neither new, which would begin with what it brought, nor a segment, which would count from 0.
    maps = run.runner.model.seen[-1]["model_intermediate_buffer"]
    assert numbers(maps["A"])["own"] == {"x": 3} and "num_processed_tokens" not in maps["A"]["meta"]
    assert slots != before


def test_a_request_whose_place_went_to_another_comes_back_with_its_map() -> None:
    run = loop(blocks=4)
    model = run.runner.model
    run.add("A", *range(1, 16), tokens=20)
    run.add("B", *range(101, 116), tokens=20)
    resumed = None
    while resumed is None:
        output = run.step()
        if [one.req_id for one in output.scheduled_new_reqs] == ["B"] and len(model.seen) > 1:
            resumed = rows(model)
    assert resumed == [("B", (0, 17), 2, 3, 116)]
    assert model.found[-1][1]["_omni_is_prefill"] is True
    run.step()
    # The slot's last tenant is long gone: the next row decodes.
    assert rows(model) == [("B", (0, 1), 3, 4, 117)]


def test_an_id_aborted_and_submitted_again_in_one_step_is_another_request() -> None:
    run = loop()
    run.add("A", 1, 2, model_intermediate_buffer={"own": {"x": torch.tensor(7)}})
    run.add("B", 11)
    run.step()
    run.step()
    run.abort("A")
    run.add("A", 51, 52, 53)
    output = run.step()
    assert output.finished_req_ids == {"A"} and [one.req_id for one in output.scheduled_new_reqs] == ["A"]
    assert rows(run.runner.model) == [("B", (0, 1), 2, 3, 12), ("A", (1, 4), 0, 1, None)]
    assert "own" not in run.adapter.buffer.nested("A")


def test_an_id_preempted_aborted_and_submitted_again_is_another_request() -> None:
    run = loop()
    run.add("A", 1, 2)
    run.step()
    run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.abort("A")
    run.add("A", 1, 2)
    output = run.step()
    assert output.preempted_req_ids == {"A"} == output.finished_req_ids
    assert rows(run.runner.model) == [("A", (0, 2), 0, 1, None)]


def test_further_input_accumulates_in_the_same_map() -> None:
    run = loop(rules=MergeRules(accumulated=["embed.rows"]))
    run.add("A", 1, 2, tokens=2, resumable=True, model_intermediate_buffer={"embed": {"rows": torch.tensor([1])}})
    run.add("B", 11)
    run.step()
    run.step()
    slot = run.runner.req_states.req_id_to_index["A"]
    before = run.adapter.buffer["A"]
    run.add("A", 31, 32, tokens=2, resumable=True, model_intermediate_buffer={"embed": {"rows": torch.tensor([2, 3])}})
    run.step()
    assert run.runner.req_states.req_id_to_index["A"] == slot
    assert rows(run.runner.model) == [("B", (0, 1), 2, 3, 12), ("A", (1, 3), 0, 3, 3)]
    found = numbers(run.adapter.buffer.nested("A"))
    assert found["embed"] == {"rows": [1, 2, 3]} and found["meta"] == {"num_processed_tokens": 0, "steps": 3}
    # What a hook was given does not change under it.
    assert before["embed.rows"].tolist() == [1]


def test_eight_requests_never_see_each_others_maps() -> None:
    run = loop(blocks=20)
    prompts = {f"r{i}": [10 * i + 1 + j for j in range(i % 3 + 1)] for i in range(8)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        run.add(rid, *prompt, tokens=3 + i, model_intermediate_buffer={"own": {"first": torch.tensor(prompt[0])}})
    for step in range(10):
        if step == 4:
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
        run.step({rid: {"own": {"step": step}} for rid in run.adapter.buffer})
        given = run.runner.model.seen[-1]
        for rid, one in zip(given["request_ids"], given["model_intermediate_buffer"], strict=True):
            assert int(one["own"]["first"]) == prompts[rid][0]
            assert step == 0 or int(one["own"]["step"]) == step
            assert int(one["meta"]["steps"]) == step + 1
            assert step == 0 or one["hidden_states"]["last"][0] / 2 == prompts[rid][-1] + step - 1
    expected = {rid: [prompt[-1] + 1 + j for j in range(3 + i)] for i, (rid, prompt) in enumerate(prompts.items())}
    assert run.tokens == expected
    run.step()
    assert len(run.adapter.buffer) == 0


# -- what requests bring --------------------------------------------------------------------------


def test_what_decoding_requests_are_brought_is_there_in_that_step() -> None:
    run = loop()
    run.add("A", 1, 2)
    run.add("B", 11)
    run.step()
    for step in (2, 3, 4):
        run.step({"A": {"thinker": {"decode": torch.tensor([step])}}, "B": None})
        found = dict(run.runner.model.found[-2:])
        assert numbers(found["A"])["thinker"] == {"decode": [step]} and "thinker" not in found["B"]
        maps = run.runner.model.seen[-1]["model_intermediate_buffer"]
        assert numbers(maps["A"])["thinker"] == {"decode": [step]} and "thinker" not in maps["B"]


def test_what_a_request_is_brought_is_merged_once() -> None:
    run = loop(PlainModel())
    counts = []
    for i in range(8):
        run.add(f"r{i}", i + 1, model_intermediate_buffer={"x": torch.tensor(i)}, additional_information={"y": i})
    for step in range(4):
        if step == 3:
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
        run.step({f"r{i}": {"y": step} for i in range(8)} if 0 < step < 3 else None)
        counts.append(run.adapter.buffer.counters["merged"])
    # The preempted ones bring their first map again, and it is not taken again.
    assert counts == [8, 16, 24, 24]


def test_one_requests_undecodable_field_is_its_own_failure() -> None:
    run = loop()
    run.add("A", 1, additional_information=SimpleNamespace(entries={"x": SimpleNamespace()}))
    run.add("B", 11, additional_information={"y": 1})
    run.step()
    assert list(run.runner.adapter_failures()) == ["A"]
    assert numbers(run.adapter.buffer.nested("B"))["y"] == 1


# -- what the forward is given --------------------------------------------------------------------


def test_tokens_on_their_way_to_the_scheduler_count() -> None:
    run = loop(late=True)
    run.add("A", 1, 2, tokens=5)
    waiting: list[Any] = []
    lengths = []
    for _ in range(5):
        output = run.schedule()
        waiting.append((output, run.run(output)))
        lengths.append(rows(run.runner.model)[0][2])
        if len(waiting) == 2:
            run.update(*waiting.pop(0))
    assert lengths == [0, 1, 2, 3, 4]


def test_extra_sampling_arguments_stand_in_the_order_of_the_batch() -> None:
    config = settings()
    config.model_config.has_sampling_extra_args = True
    run = loop(config=config)
    run.add("A", 1, 2)
    run.add("B", 11, extra={"voice": "b"})
    run.step()
    assert run.runner.model.seen[-1]["request_ids"] == ["B", "A"]
    assert run.runner.model.seen[-1]["sampling_extra_args"] == [{"voice": "b"}, {}]
    run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.step()
    assert run.runner.model.seen[-1]["sampling_extra_args"] == [{"voice": "b"}, {}]


def test_the_forward_has_the_embeddings_that_the_hook_made_at_one_address() -> None:
    run = loop()
    given = []
    forward = run.runner.model.forward
    run.runner.model.forward = lambda **more: given.append(more["inputs_embeds"].data_ptr()) or forward(**more)
    run.add("A", 1, 2)
    run.step()
    run.step()
    assert [one["embeds"][:, 0].tolist() for one in run.runner.model.seen] == [[1001, 1002], [1003]]
    captured = run.runner.model_state.prepare_dummy_inputs(2, 4)
    assert given == [captured["inputs_embeds"].data_ptr()] * 2


def test_the_engines_own_embeddings_reach_the_hook() -> None:
    model = StageModel()
    found = []
    own = model.preprocess
    model.preprocess = lambda **more: found.append(more["input_embeds"][:, 0].tolist()) or own(**more)  # type: ignore
    run = loop(model, config=settings(enable_prompt_embeds=True))
    run.add("A", 1, 2)
    run.step()
    assert found == [[1, 2]]
    assert model.seen[-1]["embeds"][:, 0].tolist() == [1001, 1002]
    assert model.seen[-1]["ids"] is None
    # A step of profiling has its own.
    run.runner._dummy_run(4, skip_attn=True, is_profile=True)
    assert len(model.seen[-1]["embeds"]) == 4


def test_rows_and_tokens_of_padding_belong_to_nobody() -> None:
    run = loop()
    pad(run)
    run.add("A", 1, 2)
    run.step()
    given = run.runner.model.seen[-1]
    assert given["request_ids"] == ["A", "", ""] and len(given["ids"]) == 5
    assert given["request_token_spans"] == [(0, 2), (2, 2), (2, 2)]
    assert given["model_intermediate_buffer"][1:] == [{}, {}]
    assert given["embeds"][:, 0].tolist() == [1001, 1002, 0, 0, 0]
    assert numbers(run.adapter.buffer.nested("A"))["hidden_states"]["last"][0] == 4


def test_steps_without_requests_have_maps_without_anything() -> None:
    run = loop()
    run.add("A", 1, 2)
    run.step()
    before = numbers(run.adapter.buffer.nested("A"))
    run.runner._dummy_run(4, skip_attn=True, is_profile=True)
    given = run.runner.model.seen[-1]
    assert given["model_intermediate_buffer"] == [{}] * 4 and given["request_ids"] == [""] * 4
    captured = run.runner.model_state.prepare_dummy_inputs(2, 4)
    assert captured["model_intermediate_buffer"] == [{}] * 2
    assert numbers(run.adapter.buffer.nested("A")) == before


def test_profiling_and_capture_call_the_talker_first_in_their_size() -> None:
    class Talking(StageModel):
        mtp_hidden_size = WIDTH

        def talker_mtp(self, ids: Any, embeds: Any, hidden: Any, text_step: Any) -> Any:
            assert is_forward_context_available()
            self.seen.append({"talker": len(ids)})
            return embeds, ids[:, None]

    model = Talking()
    run = loop(model, talker=Talker(model, max_rows=8, dtype=torch.float32, device="cpu"))
    run.runner._dummy_run(64, skip_attn=True, is_profile=True)
    run.runner.model_state.prepare_dummy_inputs(2, 4)
    assert [one.get("talker") for one in model.seen] == [8, None, 2]


def test_requests_that_the_engine_makes_up_to_warm_up_are_none() -> None:
    run = loop()
    rid = "_warmup_0_"
    run.run(made({rid: 2}, new=[(rid, [1, 2])]))
    assert len(run.adapter.requests) == 0
    run.run(made({rid: 1}, cached=[(rid, 2, 1)]))
    assert run.runner.model.seen[-1]["model_intermediate_buffer"] == [{}]
    run.run(made({}, finished_req_ids={rid}))
    assert len(run.adapter.requests) == 0 and run.runner.model.found == []


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_old_names_are_written_in_the_first_phase_alone(phase: int) -> None:
    run = loop(phase=phase)
    run.add("A", 1, model_intermediate_buffer={"x": torch.tensor(1)})
    run.step()
    run.step()
    given = run.runner.model.seen[-1]
    assert ("runtime_additional_information" in given) == (phase == 1)
    assert ("generated_len" in given["model_intermediate_buffer"][0]) == (phase == 1)


def test_old_prompt_embeddings_are_laid_over_prompt_tokens_alone() -> None:
    model = StageModel()
    found = []
    own = model.preprocess
    model.preprocess = lambda **more: found.append(more["input_embeds"][:, 0].tolist()) or own(**more)  # type: ignore
    run = loop(model)
    laid = torch.tensor([[7.0] * WIDTH, [8.0] * WIDTH])
    run.add("A", 1, 2, prompt_embeds=SimpleNamespace(data=laid.numpy().tobytes(), shape=[2, WIDTH], dtype="float32"))
    run.step()
    run.step()
    # Also those that it computes anew after preemption.
    run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.step()
    assert found == [[7, 8], [0], [7, 8, 0, 0]]


def test_without_an_adapter_the_engine_is_as_it_was() -> None:
    run = Loop(v2(Runner, settings(), PlainModel()), v2=True)
    run.add("A", 1, 2, tokens=2)
    # In the first step the scheduler learns that nobody reads.
    for _ in range(3):
        output = run.schedule()
        run.update(output, run.run(output))
    assert run.tokens == {"A": [3, 4]} and run.runner.adapter is None


# -- failures and hand-over -----------------------------------------------------------------------


def test_one_requests_hook_fails_and_its_client_is_told_while_the_others_go_on() -> None:
    run = loop()
    run.runner.model.raises["A"] = ValueError("of A")
    run.add("A", 1, 2, tokens=4)
    run.add("B", 11, tokens=4)
    run.step()
    assert run.ended["A"].finish_reason is FinishReason.ERROR and run.ended["A"].stop_reason == "ValueError: of A"
    while "B" not in run.ended:
        run.step()
    assert run.tokens["B"] == [12, 13, 14, 15] and run.ended["B"].finish_reason is FinishReason.LENGTH


def test_each_token_is_handed_over_once_also_after_preemption(broker: Node) -> None:
    with connector.connect(stage="thinker", endpoint=broker.endpoint) as sender:
        with connector.connect(stage="talker", endpoint=broker.endpoint) as reader:
            edge = reader.edge("thinker", "talker")
            out = Outbox(sender, sender.edge("thinker", "talker"), TRANSFER)
            rules = MergeRules(row_axes={"ids.tokens": 0})
            run = loop(PlainModel(), transfer=TRANSFER, outbox=out, rules=rules)
            run.add("A", 1, 2, tokens=4)
            run.add("B", 11, tokens=4)
            run.step()
            run.step()
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
            while run.adapter.buffer:
                run.step()
            for rid, tokens in {"A": [1, 2, 3, 4, 5], "B": [11, 12, 13, 14]}.items():
                payloads = list(edge.stream(rid, timeout=10.0))
                assert [t for one in payloads for t in one.get(f"{rid}-tokens", torch.tensor([])).tolist()] == tokens
            del payloads


def test_rows_of_a_padded_step_are_handed_over_without_the_padding(broker: Node) -> None:
    class WithLayer(PlainModel):
        def forward(self, **given: Any) -> Any:
            hidden = super().forward(**given)
            return hidden, [hidden[:, :1]]

    with connector.connect(stage="thinker", endpoint=broker.endpoint) as sender:
        with connector.connect(stage="talker", endpoint=broker.endpoint) as reader:
            edge = reader.edge("thinker", "talker")
            out = Outbox(sender, sender.edge("thinker", "talker"), TRANSFER)
            rules = MergeRules(row_axes={"ids.tokens": 0})
            run = loop(WithLayer(), transfer=TRANSFER, outbox=out, rules=rules, aux_layers=[24])
            run.runner.use_aux_hidden_state_outputs = True
            pad(run)
            run.add("A", 1, 2)
            run.step()
            taken = numbers(edge.take("A", timeout=10.0))
            assert (taken["A-24"], taken["A-tokens"]) == ([[2], [4]], [1, 2])


def test_a_state_that_keeps_a_buffer_by_slot_is_refused() -> None:
    runner = v2(Runner, settings(), StageModel())
    runner.model_state.intermediate_buffer = object()
    with pytest.raises(errors.UsageError, match="V1 runner"):
        runner.use_adapter(RunnerAdapter(runner.model))


def test_a_runner_has_one_adapter() -> None:
    run = loop()
    with pytest.raises(errors.UsageError):
        run.runner.use_adapter(RunnerAdapter(run.runner.model))


def test_the_mixin_overrides_what_it_means_to_and_nothing_else() -> None:
    overridden = {"load_model", "execute_model", "sample_tokens", "add_requests", "update_requests", "prepare_inputs"}
    overridden |= {"_dummy_run"}
    assert foreign(V2RunnerMixin, v2(TwinRunner, settings(), StageModel()), overridden) == set()
