"""What an engine's runner does around a step, at the doors of the adapter and its mixins: what only meets there."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner_adapter.adapters.vllm import V1RunnerMixin
from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.merge import MergeRules
from runner_adapter.plan import StepPlan
from runner_adapter.runner import RunnerAdapter
from tests.runner_adapter.models import WIDTH, Given, HookModel, Step, flat, usual
from tests.runner_adapter.test_vllm_steps import Engine, V1Engine, output, request

# -- hooks ----------------------------------------------------------------------------------------


def test_what_a_prefix_cache_combines_reaches_the_hook_through_the_adapter() -> None:
    """By rid, also the rows that this step did not compute; and those who are not asked for are left out."""
    model = HookModel()
    adapter = RunnerAdapter(model)
    adapter.begin_step(new=["a", "b", "c"], scheduled=["a", "b", "c"])
    plan = StepPlan.make(["a", "b", "c"], {"a": 1, "b": 1, "c": 1})
    adapter.postprocess(
        plan,
        torch.zeros(3, WIDTH),
        combined_hidden_states={rid: torch.full((5, WIDTH), number) for rid, number in (("c", 3.0), ("a", 1.0))},
        combined_multimodal_outputs={"audio": {"c": 30, "a": 10}},
        only={"a", "c"},
    )
    assert [(one["request_id"], one["hidden"][:, 0].tolist()) for one in model.calls] == [
        ("a", [1.0] * 5),
        ("c", [3.0] * 5),
    ]
    assert [one["multimodal_outputs"] for one in model.calls] == [{"audio": 10}, {"audio": 30}]
    assert adapter.failures() == {}


@pytest.mark.parametrize("rid", ["a", "b"])
def test_what_a_hook_writes_into_its_extras_stays_there(rid: str) -> None:
    """A model's own values are given anew in each step: whoever gives them keeps them as they are."""

    def writes(given: Given) -> Any:
        given["mm_features"] = given["more"] = "written"
        return usual(given)

    extras = {rid: {"mm_features": "image"}}
    step = Step(HookModel(**{rid: writes}))
    step.preprocess(extras)
    assert extras == {rid: {"mm_features": "image"}}
    assert "mm_features" not in step.map(rid)


# -- what is stored -------------------------------------------------------------------------------


def test_appended_rows_stay_on_the_host_wherever_resident_names_live() -> None:
    """`meta` stands for the device; the first rows, those of a chunk, and those of a further segment."""
    rules = MergeRules(accumulated=["embed.rows"], gpu_resident=["embed.last"])
    buffer = ModelIntermediateBuffer(rules=rules, device="meta")
    buffer.add("a", {"embed": {"rows": torch.ones(1, 2), "last": torch.ones(2)}})
    buffer.merge("a", {"embed": {"rows": torch.ones(2, 2) * 2}})
    buffer.new_segment("a", {"embed": {"rows": torch.ones(1, 2) * 3}})
    found = buffer.names("a")
    assert {name: tensor.device.type for name, tensor in found.items()} == {
        "embed.rows": "cpu",
        "embed.last": "meta",
        "meta.num_processed_tokens": "cpu",
    }
    assert found["embed.rows"][:, 0].tolist() == [1.0, 2.0, 2.0, 3.0]


def test_tensors_in_lists_are_stored_as_others_are() -> None:
    """Contiguous, without a gradient, and no views of what the hook gave."""
    grid = torch.arange(6.0).view(2, 3).requires_grad_()
    buffer = ModelIntermediateBuffer()
    buffer.add("a", {"parts": [grid.t(), grid[:, 1:]], "grid": grid.t()})
    with torch.no_grad():
        grid.zero_()
    found = buffer.nested("a")
    stored = [found["grid"], *found["parts"]]
    assert all(one.is_contiguous() and not one.requires_grad for one in stored)
    assert [one.tolist() for one in stored] == [
        [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
        [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
        [[1.0, 2.0], [4.0, 5.0]],
    ]


# -- the mixins -----------------------------------------------------------------------------------


def test_a_payload_object_is_decoded_for_a_running_request_too() -> None:
    """PR: raw payload objects reached the buffer's update, which takes mappings; and only lists survived."""
    entries = {
        "thinker_decode_embeddings": SimpleNamespace(
            tensor_data=struct.pack("<2f", 1.5, 2.5), tensor_shape=[1, 2], tensor_dtype="float32"
        ),
        "thinker_output_token_ids": SimpleNamespace(list_data=[7, 8]),
        "meta.finished": SimpleNamespace(scalar_data=False),
    }
    engine = Engine()
    engine.step(output(request("a"), request("b")))
    brought = {"a": SimpleNamespace(entries=entries), "b": None}
    engine.step(output(cached={"a": 1, "b": 1}, additional_information=brought))
    assert engine.map("a") == {
        "thinker_decode_embeddings": [[1.5, 2.5]],
        "thinker_output_token_ids": [7, 8],
        "meta": {"finished": False},
    }
    assert (engine.map("b"), engine.failed) == ({}, {})


@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(),
        SimpleNamespace(has_preprocess=False, has_postprocess=False),
        SimpleNamespace(enable_update_additional_information=True),
        HookModel(),
    ],
    ids=["declares nothing", "no hooks", "a vocoder's word", "hooks"],
)
def test_each_model_is_fed_in_every_step_whatever_it_declares(model: object) -> None:
    """A vocoder has no preprocess, and reads what was brought in its forward."""
    engine = Engine(model)
    engine.step(output(request("a")))
    for step in (1, 2):
        engine.step(output(cached={"a": step}, additional_information={"a": {"codes": {"audio": [step]}}}))
        engine.plan(a=step)
        assert flat(engine.steps.kwargs()["model_intermediate_buffer"]["a"]["codes"]) == {"audio": [step]}


def test_what_the_engine_does_when_drafts_are_known_is_handed_on() -> None:
    """Its runner calls what its own update of states returned; a None is one, too."""

    class Correcting(V1Engine):
        later: Callable[[], None] | None = None

        def _update_states(self, scheduler_output: Any) -> Any:
            super()._update_states(scheduler_output)
            return self.later

    class Runner(V1RunnerMixin, Correcting):
        def make_adapter(self) -> RunnerAdapter:
            return RunnerAdapter(self.model)

    runner = Runner()
    runner.load_model()
    runner.later = lambda: None
    assert runner._update_states(output(request("a"))) is runner.later
    runner.later = None
    assert runner._update_states(output(cached={"a": 1})) is None
