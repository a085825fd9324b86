"""V1RunnerMixin over genuine runners: the sizes that a step is padded to, and those of profiling and capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.forward_context import BatchDescriptor, is_forward_context_available
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

from runner_adapter import DeviceRows, RowSpec, StepPlan, Talker
from runner_adapter.adapters.vllm import V1RunnerMixin
from tests.engines.vllm_steps import WIDTH, Loop, PlainModel, StageModel, settings, v1, with_adapter


class VllmRunner(V1RunnerMixin, CPUModelRunner):
    pass


class OmniRunner(V1RunnerMixin, OmniGPUModelRunner, CPUModelRunner):
    # Its `load_model`, which is not called here, asks the model.
    has_talker_mtp = False


@pytest.fixture(params=[VllmRunner, OmniRunner], ids=["vllm", "omni"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


class Talking(StageModel):
    """`order`: what ran, the talker with its rows and the forward with its tokens."""

    mtp_hidden_size = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[str, int]] = []

    def talker_mtp(self, ids: Any, embeds: Any, hidden: Any, text_step: Any) -> Any:
        assert is_forward_context_available() and torch.is_inference_mode_enabled()
        assert not ids.any() and not hidden.any()
        self.order.append(("talker", len(ids)))
        return embeds, ids[:, None]

    def forward(self, **given: Any) -> Any:  # type: ignore[override]
        self.order.append(("forward", len(given["positions"])))
        return super().forward(**given)


def dummy(run: Loop, tokens: int, **more: Any) -> None:
    with set_current_vllm_config(run.runner.vllm_config):
        run.runner._dummy_run(tokens, **more)


def test_the_engines_dummy_runs_call_the_talker_first_and_count_its_memory(kind: Any) -> None:
    model = Talking()
    talker = Talker(model, max_rows=8, dtype=torch.float32, device="cpu")
    run = with_adapter(v1(kind, settings(), model), talker=talker)
    # As it profiles, with all its tokens; and before a graph of a size is captured.
    dummy(run, run.runner.max_num_tokens, is_profile=True)
    dummy(run, 4, uniform_decode=True, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    assert model.order == [("talker", 8), ("forward", run.runner.max_num_tokens), ("talker", 4), ("forward", 4)]


def test_without_a_talker_a_dummy_run_is_a_forward(kind: Any) -> None:
    run = with_adapter(v1(kind, settings(), PlainModel()))
    dummy(run, 4)
    assert len(run.runner.model.seen) == 1


def test_rows_behind_the_batch_are_zero_up_to_those_of_the_graph(kind: Any) -> None:
    rows = DeviceRows({"x": RowSpec((), torch.int64)}, max_rows=8)
    run = with_adapter(v1(kind, settings(), PlainModel()), rows=rows)
    captured = run.adapter.stage(StepPlan.empty(5, 5))["x"]
    for number, rid in enumerate("ABC", start=1):
        run.add(rid, number, tokens=2 if rid == "B" else 1, model_intermediate_buffer={"x": torch.tensor(number)})
    run.step()
    assert captured.tolist() == [1, 2, 3, 0, 0]
    graphs = run.runner.cudagraph_dispatcher
    own = graphs.dispatch
    # A graph for five requests, of one token each.
    graphs.dispatch = lambda **_: (CUDAGraphMode.NONE, BatchDescriptor(num_tokens=5, num_reqs=5, uniform=True))
    run.step()
    assert captured.tolist() == [2, 0, 0, 0, 0]
    given = run.runner.model.seen[-1]
    assert given["request_ids"] == ["B", "", "", "", ""] and len(given["positions"]) == 5
    # What comes behind it runs as it is.
    graphs.dispatch = own
    run.add("D", 4)
    run.step()
    assert run.runner.model.seen[-1]["request_ids"] == ["D"]
