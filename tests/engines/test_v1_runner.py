"""V1RunnerMixin over the genuine V1 runners of vLLM and vLLM-Omni, fed by vLLM's genuine scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import is_forward_context_available
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

from connector import errors
from runner_adapter.adapters.vllm import V1RunnerMixin
from runner_adapter.merge import MergeRules
from runner_adapter.runner import RunnerAdapter
from runner_adapter.talker import Talker
from tests.engines.vllm_steps import (
    WIDTH,
    Loop,
    PlainModel,
    StageModel,
    made,
    numbers,
    rows,
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


# -- lives and order ------------------------------------------------------------------------------


def test_a_map_follows_its_request_from_prompt_to_end(kind: Any) -> None:
    run = loop(kind)
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


def test_rows_are_those_of_the_batch_after_it_was_condensed(kind: Any) -> None:
    run = loop(kind)
    run.add("A", 1, 2, tokens=2)
    run.add("B", 11)
    run.add("C", 21)
    run.step()
    run.step()
    run.step()
    # The last row took the place of the first.
    assert run.runner.input_batch.req_ids == ["C", "B"]
    assert rows(run.runner.model) == [("C", (0, 1), 2, 3, 22), ("B", (1, 2), 2, 3, 12)]


def test_rows_are_those_of_the_batch_after_it_was_reordered(kind: Any) -> None:
    class Reordering(kind):  # type: ignore[misc]
        def _may_reorder_batch(self, scheduler_output: Any) -> None:
            if scheduler_output.total_num_scheduled_tokens:
                self.input_batch.swap_states(0, 1)

    run = loop(Reordering)
    run.add("A", 1, 2, model_intermediate_buffer={"own": {"x": torch.tensor(7)}})
    run.add("B", 11)
    run.step()
    assert rows(run.runner.model) == [("B", (0, 1), 0, 1, None), ("A", (1, 3), 0, 1, None)]
    assert [one.get("own") for one in run.runner.model.seen[-1]["model_intermediate_buffer"]] == [None, {"x": 7}]
    run.step()
    assert rows(run.runner.model) == [("A", (0, 1), 1, 2, 2), ("B", (1, 2), 1, 2, 11)]


def test_an_unscheduled_request_keeps_its_map_and_comes_back_with_it(kind: Any) -> None:
    run = loop(kind)
    run.run(made({"A": 2, "B": 1}, new=[("A", [1, 2]), ("B", [11])]))
    run.run(made({"B": 1}, cached=[("B", 1, 1)]))
    assert rows(run.runner.model) == [("B", (0, 1), 1, 2, 11)]
    assert numbers(run.adapter.buffer.nested("A"))["meta"] == {"steps": 1}
    run.run(made({"B": 1, "A": 1}, cached=[("B", 2, 2), ("A", 2, 1)]))
    assert rows(run.runner.model) == [("B", (0, 1), 2, 3, 12), ("A", (1, 2), 1, 2, 2)]


def test_a_preempted_request_goes_on_with_its_map(kind: Any) -> None:
    run = loop(kind, blocks=4)
    model = run.runner.model
    run.add("A", *range(1, 16), tokens=20)
    run.add("B", *range(101, 116), tokens=20)
    gone = resumed = None
    while gone is None or resumed is None:
        output = run.step()
        if output.preempted_req_ids:
            gone = dict(numbers(run.adapter.buffer.nested("B")))
        if output.scheduled_cached_reqs.resumed_req_ids:
            resumed = rows(model)
    # Three blocks hold 48 tokens: B's place went when A needed a second block, before B's 17th token was computed.
    assert gone["meta"] == {"steps": 2} and gone["hidden_states"]["last"][0] / 2 == 116
    assert resumed == [("B", (0, 17), 2, 3, 116)]
    assert run.tokens["B"][:3] == [116, 117, 118]
    assert model.found[-1][1]["_omni_is_prefill"] is True


def test_all_requests_preempted_at_once_go_on_with_their_maps(kind: Any) -> None:
    run = loop(kind)
    run.add("A", 1, 2)
    run.add("B", 11)
    run.step()
    run.step()
    run.scheduler.reset_prefix_cache(reset_running_requests=True)
    output = run.step()
    assert output.preempted_req_ids == {"A", "B"} == output.scheduled_cached_reqs.resumed_req_ids
    assert rows(run.runner.model) == [("A", (0, 4), 2, 3, 3), ("B", (4, 7), 2, 3, 12)]


def test_an_id_aborted_and_submitted_again_in_one_step_is_another_request(kind: Any) -> None:
    run = loop(kind)
    run.add("A", 1, 2, model_intermediate_buffer={"own": {"x": torch.tensor(7)}})
    run.add("B", 11)
    run.step()
    run.step()
    run.abort("A")
    run.add("A", 51, 52, 53)
    output = run.step()
    assert output.finished_req_ids == {"A"} and [one.req_id for one in output.scheduled_new_reqs] == ["A"]
    assert sorted(rows(run.runner.model)) == [("A", (0, 3), 0, 1, None), ("B", (3, 4), 2, 3, 12)]
    assert numbers(run.adapter.buffer.nested("A"))["meta"] == {"steps": 1}
    assert "own" not in run.adapter.buffer.nested("A")


def test_further_input_accumulates_in_the_same_map(kind: Any) -> None:
    run = loop(kind, rules=MergeRules(accumulated=["embed.rows"]))
    run.add("A", 1, 2, tokens=2, resumable=True, model_intermediate_buffer={"embed": {"rows": torch.tensor([1])}})
    run.step()
    run.step()
    run.add("A", 31, 32, tokens=2, resumable=True, model_intermediate_buffer={"embed": {"rows": torch.tensor([2, 3])}})
    run.step()
    assert rows(run.runner.model) == [("A", (0, 2), 0, 3, 3)]
    found = numbers(run.adapter.buffer.nested("A"))
    assert found["embed"] == {"rows": [1, 2, 3]} and found["meta"] == {"num_processed_tokens": 0, "steps": 3}
    run.step()
    assert rows(run.runner.model) == [("A", (0, 1), 1, 4, 32)]


def test_eight_requests_never_see_each_others_maps(kind: Any) -> None:
    run = loop(kind, blocks=20)
    prompts = {f"r{i}": [10 * i + 1 + j for j in range(i % 3 + 1)] for i in range(8)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        run.add(rid, *prompt, tokens=3 + i, model_intermediate_buffer={"own": {"first": torch.tensor(prompt[0])}})
    for step in range(10):
        run.step({rid: {"own": {"step": step}} for rid in run.adapter.buffer})
        for one in run.runner.model.seen[-1]["model_intermediate_buffer"]:
            first = int(one["own"]["first"])
            rid = f"r{first // 10}"
            # Its last id is that of its own prompt, and of as many tokens as it has.
            assert "hidden_states" not in one or one["hidden_states"]["last"][0] / 2 == (
                prompts[rid][-1] + int(one["meta"]["steps"]) - 2
            )
            assert step == 0 or int(one["own"].get("step", step)) == step
    expected = {rid: [prompt[-1] + 1 + j for j in range(3 + i)] for i, (rid, prompt) in enumerate(prompts.items())}
    assert run.tokens == expected
    run.step()
    assert len(run.adapter.buffer) == 0


# -- what requests bring --------------------------------------------------------------------------


def test_what_decoding_requests_are_brought_is_there_in_that_step(kind: Any) -> None:
    run = loop(kind)
    run.add("A", 1, 2)
    run.add("B", 11)
    run.step()
    for step in (2, 3, 4):
        run.step({"A": {"thinker": {"decode": torch.tensor([step])}}, "B": None})
        # In the hook that prepares the step's input, and in its forward.
        assert numbers(dict(run.runner.model.found[-2][1]))["thinker"] == {"decode": [step]}
        maps = run.runner.model.seen[-1]["model_intermediate_buffer"]
        assert numbers(maps["A"])["thinker"] == {"decode": [step]} and "thinker" not in maps["B"]


def test_what_a_request_is_brought_is_merged_once(kind: Any) -> None:
    run = loop(kind, PlainModel())
    counts = []
    for i in range(8):
        run.add(f"r{i}", i + 1, model_intermediate_buffer={"x": torch.tensor(i)}, additional_information={"y": i})
    for step in range(3):
        run.step({f"r{i}": {"y": step} for i in range(8)} if step else None)
        counts.append(run.adapter.buffer.counters["merged"])
    assert counts == [8, 16, 24]


def test_old_and_new_fields_of_a_request_are_one_map(kind: Any) -> None:
    run = loop(kind, PlainModel())
    entry = SimpleNamespace(tensor_data=None, list_data=None, scalar_data=0, tensor_shape=None, tensor_dtype=None)
    run.add(
        "A",
        1,
        model_intermediate_buffer={"ids": {"x": torch.tensor([7])}},
        additional_information=SimpleNamespace(entries={"ids.y": entry}),
    )
    run.step()
    assert numbers(run.runner.model.seen[-1]["model_intermediate_buffer"]["A"]) == {"ids": {"x": [7], "y": 0}}


def test_a_model_that_is_given_snapshots_has_the_last_one_alone(kind: Any) -> None:
    model = PlainModel()
    model.replace_runtime_additional_information = True
    run = loop(kind, model)
    run.add("A", 1, model_intermediate_buffer={"x": torch.tensor(1)})
    run.step()
    run.step({"A": {"y": torch.tensor(2)}})
    assert numbers(model.seen[-1]["model_intermediate_buffer"]["A"]) == {"y": 2}


def test_one_requests_undecodable_field_is_its_own_failure(kind: Any) -> None:
    run = loop(kind)
    run.add("A", 1, additional_information=SimpleNamespace(entries={"x": SimpleNamespace()}))
    run.add("B", 11, additional_information={"y": 1})
    run.step()
    assert list(run.runner.adapter_failures()) == ["A"]
    assert numbers(run.adapter.buffer.nested("B"))["y"] == 1
    run.step({"B": {"y": object()}})
    assert list(run.runner.adapter_failures()) == ["B"]


# -- what the forward is given --------------------------------------------------------------------


def test_the_output_length_is_the_runners_own(kind: Any) -> None:
    run = loop(kind)
    run.add("A", 1, 2)
    run.add("B", 11, tokens=4)
    for _ in range(6):
        output = run.schedule()
        before = {rid: len(state.output_token_ids) for rid, state in run.runner.requests.items()}
        run.update(output, run.run(output))
        assert [(rid, n) for rid, _, n, *_ in rows(run.runner.model)] == [
            (rid, before.get(rid, 0)) for rid in run.runner.model.seen[-1]["request_ids"]
        ]


def test_tokens_on_their_way_to_the_scheduler_count(kind: Any) -> None:
    run = loop(kind, late=True)
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


def test_extra_sampling_arguments_stand_in_the_order_of_the_batch(kind: Any) -> None:
    config = settings()
    config.model_config.has_sampling_extra_args = True
    run = loop(kind, config=config)
    run.add("A", 1, tokens=1)
    run.add("B", 11, extra={"voice": "b"})
    run.add("C", 21)
    run.step()
    assert run.runner.model.seen[-1]["sampling_extra_args"] == [{}, {"voice": "b"}, {}]
    run.step()
    assert run.runner.model.seen[-1]["request_ids"] == ["C", "B"]
    assert run.runner.model.seen[-1]["sampling_extra_args"] == [{}, {"voice": "b"}]


def test_extra_sampling_arguments_are_given_to_models_that_have_them_alone(kind: Any) -> None:
    run = loop(kind)
    run.add("A", 1, extra={"voice": "b"})
    run.step()
    assert "sampling_extra_args" not in run.runner.model.seen[-1]


def test_the_forward_has_the_embeddings_that_the_hook_made_at_one_address(kind: Any) -> None:
    run = loop(kind)
    given = []
    forward = run.runner.model.forward
    run.runner.model.forward = lambda **more: given.append(more["inputs_embeds"].data_ptr()) or forward(**more)
    run.add("A", 1, 2)
    run.step()
    run.step()
    assert [one["embeds"][:, 0].tolist() for one in run.runner.model.seen] == [[1001, 1002], [1003]]
    assert given == [run.runner.inputs_embeds.gpu.data_ptr()] * 2


def test_the_engines_own_embeddings_reach_the_hook(kind: Any) -> None:
    run = loop(kind, config=settings(enable_prompt_embeds=True))
    found = []
    own = run.runner.model.preprocess
    run.runner.model.preprocess = lambda **more: found.append(more["input_embeds"][:, 0].tolist()) or own(**more)
    run.runner._steps = None
    run.runner.use_adapter(RunnerAdapter(run.runner.model))
    run.add("A", 1, 2)
    run.step()
    assert found == [[1, 2]]
    assert run.runner.model.seen[-1]["embeds"][:, 0].tolist() == [1001, 1002]
    # vLLM's forward is given embeddings alone, vLLM-Omni's the ids, too.
    assert run.runner.model.seen[-1]["ids"] == (None if kind is VllmRunner else [1, 2])


def test_a_model_without_the_hook_is_given_what_the_engine_gives(kind: Any) -> None:
    run = loop(kind, PlainModel(), config=settings(enable_prompt_embeds=True))
    run.add("A", 1, 2)
    run.step()
    given = run.runner.model.seen[-1]
    assert given["ids"] is None and given["embeds"][:, 0].tolist() == [1, 2]


def test_old_prompt_embeddings_are_laid_over_prompt_tokens_alone(kind: Any) -> None:
    run = loop(kind)
    found = []
    own = run.runner.model.preprocess
    run.runner.model.preprocess = lambda **more: found.append(more["input_embeds"][:, 0].tolist()) or own(**more)
    run.runner._steps = None
    run.runner.use_adapter(RunnerAdapter(run.runner.model))
    rows_of = torch.tensor([[7.0] * WIDTH, [8.0] * WIDTH])
    payload = SimpleNamespace(data=rows_of.numpy().tobytes(), shape=[2, WIDTH], dtype="float32")
    run.add("A", 1, 2, prompt_embeds=payload)
    run.step()
    run.step()
    assert found == [[7, 8], [0]]


def test_a_talker_gets_decode_rows_and_each_requests_own_seed(kind: Any) -> None:
    class Talking(StageModel):
        mtp_hidden_size = WIDTH

        def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
            row = torch.ones(1, WIDTH)
            ids, embeds, update = super().preprocess(input_ids, input_embeds, **info)
            return ids, embeds, {**update, "mtp_inputs": (row, row)}

        def talker_mtp(self, ids: Any, embeds: Any, hidden: Any, text_step: Any, generator: Any = None) -> Any:
            assert is_forward_context_available()
            draws = torch.randint(10**9, ids.shape, generator=generator)
            return embeds, torch.stack([ids.long(), draws], dim=1)

    model = Talking()
    run = loop(kind, model, talker=Talker(model, max_rows=8, dtype=torch.float32, device="cpu"))
    run.add("A", 1, 2, extra={"tts_local_seed": 5})
    run.add("B", 12)
    run.step()
    # One token of a prompt is not one that was sampled.
    assert not any("codes" in run.adapter.buffer.nested(rid) for rid in "AB")
    run.step()
    drawn = torch.randint(10**9, (1,), generator=torch.Generator().manual_seed(5))
    assert numbers(run.adapter.buffer.nested("A"))["codes"] == {"audio": [[3, int(drawn)]]}
    assert numbers(run.adapter.buffer.nested("B"))["codes"]["audio"][0][0] == 13


def test_profiling_runs_without_maps_and_leaves_them_as_they_are(kind: Any) -> None:
    run = loop(kind, PlainModel())
    run.add("A", 1, model_intermediate_buffer={"x": torch.tensor(1)})
    run.step()
    run.runner.has_talker_mtp = False
    with set_current_vllm_config(run.runner.vllm_config):
        run.runner._dummy_run(4)
    assert set(run.runner.model.seen[-1]) == {"ids", "positions", "embeds"}
    assert numbers(run.adapter.buffer.nested("A")) == {"x": 1}


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_old_names_are_written_in_the_first_phase_alone(kind: Any, phase: int) -> None:
    run = loop(kind, phase=phase)
    run.add("A", 1, model_intermediate_buffer={"x": torch.tensor(1)})
    run.step()
    run.step()
    given = run.runner.model.seen[-1]
    state = run.runner.requests["A"]
    if phase == 1:
        assert given["runtime_additional_information"] is given["model_intermediate_buffer"]
        assert given["model_intermediate_buffer"][0]["generated_len"] == 1
        assert numbers(state.additional_information_cpu)["meta"] == {"steps": 2}
    else:
        assert "runtime_additional_information" not in given
        assert "generated_len" not in given["model_intermediate_buffer"][0]
        if kind is VllmRunner:
            assert getattr(state, "additional_information_cpu", None) is None


def test_the_last_phase_refuses_the_old_field_for_its_request_alone(kind: Any) -> None:
    run = loop(kind, PlainModel(), phase=3)
    run.add("A", 1, additional_information={"x": 1})
    run.add("B", 11, model_intermediate_buffer={"x": torch.tensor(2)})
    run.step()
    assert {rid: type(e) for rid, e in run.runner.adapter_failures().items()} == {"A": errors.UsageError}
    assert numbers(run.runner.model.seen[-1]["model_intermediate_buffer"]["B"]) == {"x": 2}


def test_without_an_adapter_the_engine_is_as_it_was(kind: Any) -> None:
    model = PlainModel()
    runner = v1(kind, settings(), model)
    run = Loop(runner)
    run.add("A", 1, 2, tokens=2)
    # In the first step the scheduler learns that nobody reads.
    for _ in range(3):
        output = run.schedule()
        run.update(output, run.run(output))
    assert run.tokens == {"A": [3, 4]} and runner.adapter is None and runner.adapter_failures() == {}
