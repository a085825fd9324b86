"""What the mixins do of a step's sizes and a model's own values, over stand-ins of the runners; tests/engines has the
genuine ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter.adapters.vllm import V1RunnerMixin, V2RunnerMixin
from runner_adapter.plan import StepPlan
from runner_adapter.runner import RunnerAdapter
from runner_adapter.staging import DeviceRows, RowSpec
from runner_adapter.talker import Talker
from tests.runner_adapter.models import WIDTH
from tests.runner_adapter.test_vllm_steps import CONFIG, V1Engine, output, request, tensor


class Speaker:
    """A model with a talker. `order`: what was called, with the rows of a call."""

    has_preprocess = True
    mtp_hidden_size = WIDTH

    def __init__(self) -> None:
        self.order: list[Any] = []
        self.found: list[dict[str, Any]] = []

    def preprocess(self, input_ids: Any, input_embeds: torch.Tensor, **given: Any) -> Any:
        self.found.append(given)
        return input_ids, input_embeds, {"mtp_inputs": (torch.zeros(1, WIDTH), torch.zeros(1, WIDTH))}

    def talker_mtp(self, ids: torch.Tensor, embeds: torch.Tensor, *_: Any) -> Any:
        self.order.append(("talker", len(ids)))
        return embeds, ids[:, None]


def talker(model: Speaker, **own: Any) -> Talker:
    return Talker(model, max_rows=4, dtype=torch.float32, device="cpu", **own)


class Contexts:
    """A runner that tells when its forward context is entered."""

    model: Any

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        self.model.order.append("context")
        yield
        self.model.order.append("left")


class V1Stand(V1Engine):
    """V1's runner as far as a plan and a dummy run need it; `graph_rows`: those of the graph that a step replays."""

    graph_rows: int | None = None

    def __init__(self, model: Any) -> None:
        self.model, self.requests = model, {}
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=[0] * 8)
        self.input_ids = SimpleNamespace(gpu=torch.zeros(8, dtype=torch.int32))
        self.inputs_embeds = SimpleNamespace(gpu=torch.zeros(8, WIDTH))

    def _determine_batch_execution_and_padding(self, num_tokens: int) -> Any:
        return "mode", SimpleNamespace(num_reqs=self.graph_rows, num_tokens=num_tokens), False

    def _preprocess(self, scheduler_output: Any, tokens: int, intermediate: Any = None) -> Any:
        return self.input_ids.gpu[:tokens], None, None

    def _model_forward(self, **kwargs: Any) -> Any:
        self.given = kwargs
        return torch.zeros(8, WIDTH)

    def _dummy_run(self, num_tokens: int, is_profile: bool = False) -> Any:
        self._determine_batch_execution_and_padding(num_tokens)
        self.model.order.append(("dummy", num_tokens, is_profile, torch.is_inference_mode_enabled()))
        return "hidden"

    def step(self, one: Any) -> Any:
        """As execute_model does it."""
        self._update_states(one)
        self.input_batch.req_ids = list(one.num_scheduled_tokens)
        _, batch, *_ = self._determine_batch_execution_and_padding(sum(one.num_scheduled_tokens.values()))
        self._preprocess(one, batch.num_tokens)
        return self._model_forward()


class V1(Contexts, V1RunnerMixin, V1Stand):
    pass


class V2Stand:
    vllm_config = CONFIG
    uses_inputs_embeds = True

    def __init__(self, model: Any) -> None:
        self.model = model
        given = lambda *_: {}  # noqa: E731
        self.model_state = SimpleNamespace(
            prepare_inputs=given, prepare_inputs_embeds=given, prepare_dummy_inputs=given
        )

    def _dummy_run(self, num_tokens: int) -> Any:
        self.model.order.append(("dummy", num_tokens))


class V2(Contexts, V2RunnerMixin, V2Stand):
    pass


# -- a talker's memory ----------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (4, 4), (64, 4)])
def test_a_dummy_run_calls_the_talker_once_before_it_for_as_many_rows_as_it_has(tokens: int, rows: int) -> None:
    runner = V1(Speaker())
    runner.use_adapter(RunnerAdapter(runner.model, talker=talker(runner.model)))
    assert runner._dummy_run(tokens, is_profile=True) == "hidden"
    assert runner.model.order == ["context", ("talker", rows), "left", ("dummy", tokens, True, True)]


def test_it_runs_with_the_rows_that_the_talker_is_padded_to() -> None:
    runner = V1(Speaker())
    runner.use_adapter(RunnerAdapter(runner.model, talker=talker(runner.model, padded=lambda rows: 4)))
    runner._dummy_run(num_tokens=2)
    assert runner.model.order[1] == ("talker", 4)


def test_v2_captures_behind_the_talkers_call_of_that_size() -> None:
    runner = V2(Speaker())
    runner.use_adapter(RunnerAdapter(runner.model, talker=talker(runner.model)))
    assert runner.model_state.prepare_dummy_inputs(2, 2)["request_ids"] == ["", ""]
    runner._dummy_run(8)
    assert runner.model.order == [
        *("context", ("talker", 2), "left"),
        *("context", ("talker", 4), "left", ("dummy", 8)),
    ]


def test_without_a_talker_or_an_adapter_a_dummy_run_is_the_engines() -> None:
    runner = V1(SimpleNamespace(order=[]))
    runner._dummy_run(2)
    runner.use_adapter(RunnerAdapter(runner.model))
    runner._dummy_run(2)
    assert runner.model.order == [("dummy", 2, False, True)] * 2


# -- padded rows ----------------------------------------------------------------------------------


def test_rows_behind_v1s_batch_are_zero_up_to_those_that_the_graph_reads() -> None:
    runner = V1(SimpleNamespace(order=[]))
    runner.use_adapter(RunnerAdapter(runner.model, rows=DeviceRows({"x": RowSpec((), torch.int64)}, max_rows=8)))
    assert runner.adapter is not None
    captured = runner.adapter.stage(StepPlan.empty(4, 4))["x"]  # type: ignore[union-attr]
    runner.step(
        output(*(request(rid, model_intermediate_buffer=tensor(n)) for n, rid in ((1, "a"), (2, "b"), (3, "c"))))
    )
    assert captured.tolist() == [1, 2, 3, 0]
    runner.graph_rows = 4
    runner.step(output(cached={"b": 1}, finished=["a", "c"]))
    assert captured.tolist() == [2, 0, 0, 0]
    assert runner.given["request_ids"] == ["b", "", "", ""]
    # A step that replays nothing has its own rows alone; a dummy run in between says nothing of it.
    runner.graph_rows = 8
    runner._dummy_run(8)
    runner.graph_rows = None
    runner.step(output(cached={"b": 2}))
    assert runner.given["request_ids"] == ["b"]


# -- a model's own values -------------------------------------------------------------------------


def test_a_models_own_values_stand_over_what_the_engine_tells_its_hook() -> None:
    class Own(V1):
        def extras(self, plan: StepPlan) -> Any:
            own = {"mm_features": "image", "_omni_is_prefill": "own", "request_id": "own"}
            return {"a": own, "nobody": {"mm_features": "lost"}}

    runner = Own(Speaker())
    runner.use_adapter(RunnerAdapter(runner.model, talker=talker(runner.model)))
    runner.step(output(request("a"), request("b")))
    found = {given["request_id"]: given for given in runner.model.found}
    assert (found["a"]["mm_features"], found["a"]["_omni_is_prefill"]) == ("image", "own")
    assert found["a"]["_omni_prompt_len"] == 2 and "mm_features" not in found["b"]
    assert found["b"]["_omni_is_prefill"] is True and runner.adapter_failures() == {}
    assert "mm_features" not in runner.adapter.buffer.nested("a")  # type: ignore[union-attr]


def test_by_default_a_hook_is_told_what_the_engine_tells_it() -> None:
    runner = V1(Speaker())
    runner.use_adapter(RunnerAdapter(runner.model, talker=talker(runner.model)))
    runner.step(output(request("a")))
    assert runner.extras(StepPlan.empty()) == {}
    assert sorted(runner.model.found[0])[:2] == ["_omni_is_prefill", "_omni_max_tokens"]


def test_the_engines_id_is_asked_of_a_runner_with_an_adapter() -> None:
    with pytest.raises(errors.UsageError, match="no adapter"):
        V1(Speaker()).engine_id("a")
