"""Two engines as they are by default: each makes an id of its own of the client's, and their stages meet."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.core.sched.output import OmniNewRequestData
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

import connector
from connector import Node, errors
from runner_adapter import Inbox, MergeRules, Outbox
from runner_adapter.adapters.vllm import V1RunnerMixin, V2RunnerMixin
from tests.engines.v2_twins import TwinRunner, v2
from tests.engines.vllm_steps import TRANSFER, Loop, PlainModel, StageModel, made, numbers, settings, v1, with_adapter


class HandsIds:
    """Hands over the ids of its rows; a model's own value is what the engine calls the request."""

    def ids(self) -> torch.Tensor:
        return self.input_ids.gpu  # type: ignore[attr-defined,no-any-return]

    def beside(self, plan: Any) -> Any:
        return {row.rid: {"ids.tokens": self.ids()[row.start : row.stop].clone()} for row in plan.rows}

    def extras(self, plan: Any) -> Any:
        return {rid: {"mm_features": ["of", self.engine_id(rid)]} for rid in plan.rids}  # type: ignore[attr-defined]


class VllmRunner(HandsIds, V1RunnerMixin, CPUModelRunner):
    pass


class OmniRunner(HandsIds, V1RunnerMixin, OmniGPUModelRunner, CPUModelRunner):
    pass


class V2Runner(HandsIds, V2RunnerMixin, TwinRunner):
    def ids(self) -> torch.Tensor:
        return self.input_buffers.input_ids


KINDS = {"vllm": (VllmRunner, v1), "omni": (OmniRunner, v1), "v2": (V2Runner, v2)}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)


def loop(kind: str, model: StageModel | None = None, **own: Any) -> Loop:
    runner, make = KINDS[kind]
    return with_adapter(make(runner, settings(), model or PlainModel()), **own)


def submitted(client: str) -> Any:
    """A request as the engine's front end leaves it."""
    request = SimpleNamespace(request_id=client, external_req_id=None, params=SamplingParams(n=2))
    InputProcessor.assign_request_id(request)
    return request


def engine_id(client: str) -> str:
    made: str = submitted(client).request_id
    return made


class Stages:
    """A thinker and a talker, in engines of their own."""

    def __init__(self, kind: str, endpoint: str) -> None:
        self.nodes = [connector.connect(stage=stage, endpoint=endpoint) for stage in ("thinker", "talker")]
        one, two = self.nodes
        out = Outbox(one, one.edge("thinker", "talker"), TRANSFER)
        rules = MergeRules(row_axes={"ids.tokens": 0})
        self.thinker = loop(kind, transfer=TRANSFER, outbox=out, rules=rules)
        inbox = Inbox(two, two.edge("thinker", "talker"))
        self.talker = loop(kind, transfer=TRANSFER, inbox=inbox, abort=two.abort, form="keys")

    def step(self) -> dict[str, Any]:
        """The thinker's step, and the talker's that reads it: the maps that its forward was given, without the rows of
        the thinker's output."""
        self.thinker.step()
        return self.read()

    def read(self) -> dict[str, Any]:
        """The talker's alone, when its input is there: what it was given last."""
        for node in self.nodes:
            node.status()
        # Its scheduler hears in one step that input is there, and the request is in the next.
        for _ in range(3):
            if self.talker.step().num_scheduled_tokens:
                break
        maps = self.talker.runner.model.seen[-1]["model_intermediate_buffer"]
        kept = {rid: {key: one for key, one in maps[rid].items() if "hidden_states" not in key} for rid in maps.keys()}
        return {rid: numbers(found) for rid, found in kept.items()}

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.close()


@pytest.fixture
def stages(kind: str, broker: Node) -> Iterator[Stages]:
    made = Stages(kind, broker.endpoint)
    yield made
    made.close()


# -- what the engines' ids are --------------------------------------------------------------------


@pytest.mark.parametrize("client", ["req", "chatcmpl-8f14e45f-ceea-467f-a0e6-0123456789ab", "req-deadbeef", "0_a b/c"])
@pytest.mark.parametrize("kept", ["0", "1"])
def test_the_rid_is_what_the_client_called_it(client: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", kept)
    request = submitted(client)
    assert (request.request_id == client) == (kept == "1")
    runner = v1(VllmRunner, settings(), PlainModel())
    assert runner.external_id(request.request_id, None) == client
    children = [ParentRequest(request).get_child_info(index)[0] for index in range(2)]
    assert [runner.external_id(child, None) for child in children] == [f"0_{client}", f"1_{client}"]


def test_vllm_omnis_scheduler_says_what_the_client_called_it() -> None:
    (new,) = made({"internal": 1}, new=[("internal", [1])]).scheduled_new_reqs
    omni = OmniNewRequestData.from_base(new, SimpleNamespace(external_req_id="req-0123abcd"))
    assert v1(OmniRunner, settings(), PlainModel()).external_id("internal", omni) == "req-0123abcd"


# -- two engines ----------------------------------------------------------------------------------


def test_stages_whose_engines_name_a_request_differently_hand_over(stages: Stages) -> None:
    one, two = engine_id("req"), engine_id("req")
    assert one != two
    stages.thinker.add(one, 1, 2, tokens=3)
    stages.talker.add(two, 9, tokens=8)
    assert stages.step() == {"req": {"req-tokens": [1, 2]}}
    assert stages.step() == {"req": {"req-tokens": [3]}}
    assert stages.talker.runner.model.seen[-1]["request_ids"] == ["req"]
    stages.step()
    stages.step()
    # Clients and schedulers know their own.
    assert stages.thinker.tokens == {one: [3, 4, 5]} and list(stages.talker.tokens) == [two]
    assert stages.talker.adapter.input_ended("req") and not stages.thinker.adapter.buffer


def test_the_children_of_a_request_meet_their_own(stages: Stages) -> None:
    for stage, first in ((stages.thinker, 10), (stages.talker, 20)):
        parent = ParentRequest(submitted("req"))
        for index in range(2):
            stage.add(parent.get_child_info(index)[0], first + index)
    assert stages.step() == {"0_req": {"0_req-tokens": [10]}, "1_req": {"1_req-tokens": [11]}}
    assert stages.step() == {"0_req": {"0_req-tokens": [11]}, "1_req": {"1_req-tokens": [12]}}


def test_a_request_aborted_and_submitted_again_is_another_one_in_both(stages: Stages) -> None:
    first = [engine_id("req"), engine_id("req")]
    again = [engine_id("req"), engine_id("req")]
    both = (stages.thinker, stages.talker)
    for stage, name in zip(both, first, strict=True):
        stage.add(name, 1, 2, model_intermediate_buffer={"own": torch.tensor(7)})
    assert stages.step() == {"req": {"own": 7, "req-tokens": [1, 2]}}
    for stage, old, new in zip(both, first, again, strict=True):
        stage.abort(old)
        stage.add(new, 51, 52)
    # The talker ends the first one's input in this step, so the second one's may come behind it.
    assert "own" not in stages.step()["req"]
    assert stages.read() == {"req": {"req-tokens": [51, 52]}}
    assert stages.step() == {"req": {"req-tokens": [53]}}
    assert stages.thinker.ended == {} and list(stages.thinker.tokens) == [first[0], again[0]]


def test_further_input_of_a_request_is_the_same_ones(stages: Stages) -> None:
    one, two = engine_id("req"), engine_id("req")
    stages.thinker.add(one, 1, 2, tokens=1, resumable=True)
    stages.talker.add(two, 9, tokens=8)
    assert stages.step() == {"req": {"req-tokens": [1, 2]}}
    stages.thinker.add(one, 31, 32, tokens=2, resumable=True)
    assert stages.step() == {"req": {"req-tokens": [31, 32]}}
    assert stages.thinker.runner.adapter_failures() == {}


def test_of_two_requests_with_one_id_the_later_ends_with_an_error_and_the_first_goes_on(stages: Stages) -> None:
    one, later, two = (engine_id("req") for _ in range(3))
    stages.thinker.add(one, 1, 2, tokens=3)
    stages.talker.add(two, 9, tokens=8)
    stages.step()
    stages.thinker.add(later, 71, 72, tokens=3)
    assert stages.step() == {"req": {"req-tokens": [3]}}
    assert stages.thinker.ended[later].finish_reason is FinishReason.ERROR
    told = stages.thinker.ended[later].stop_reason
    assert told.startswith("UsageError") and one in told and later in told
    assert stages.step() == {"req": {"req-tokens": [4]}}
    assert stages.thinker.tokens[one] == [3, 4, 5] and stages.thinker.ended[one].finish_reason is FinishReason.LENGTH
    stages.step()
    assert stages.talker.adapter.input_ended("req") and stages.talker.runner.adapter_failures() == {}
    assert len(stages.thinker.runner._steps.ids) == 0


def test_a_caller_is_told_of_the_refusal_by_the_engines_id(kind: str) -> None:
    run = loop(kind)
    one, later = engine_id("req"), engine_id("req")
    run.add(one, 1)
    run.add(later, 2)
    output = run.schedule()
    done = run.run(output)
    assert list(done.adapter_failures) == [later]
    assert {rid: type(error) for rid, error in run.runner.adapter_failures().items()} == {later: errors.UsageError}


# -- what a model and an engine see ---------------------------------------------------------------


def test_hooks_are_given_the_rid_and_the_models_own_values(kind: str) -> None:
    run = loop(kind, StageModel())
    names = {client: engine_id(client) for client in ("a", "b")}
    for client, name in names.items():
        run.add(name, 1 + ord(client) - ord("a"))
    run.step()
    run.step()
    # StageModel notes the rid that its hook is given.
    found = run.runner.model.found
    assert sorted(rid for rid, _ in found) == ["a", "a", "b", "b"]
    assert all(given["mm_features"] == ["of", names[rid]] for rid, given in found)
    assert all("mm_features" not in run.adapter.buffer.nested(rid) for rid in names)


@pytest.mark.parametrize("kind", ["vllm", "omni"])
def test_the_old_mirror_is_on_the_engines_own_request(kind: str) -> None:
    run = loop(kind, phase=1)
    name = engine_id("req")
    run.add(name, 1, model_intermediate_buffer={"x": torch.tensor(1)})
    run.step()
    assert numbers(run.runner.requests[name].additional_information_cpu) == {"x": 1}


def test_a_request_that_comes_back_from_preemption_has_its_map(kind: str) -> None:
    run = loop(kind)
    names = {client: engine_id(client) for client in ("a", "b")}
    for number, name in enumerate(names.values(), start=1):
        run.add(name, number, model_intermediate_buffer={"x": torch.tensor(number)})
    run.step()
    run.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert run.step().preempted_req_ids == {*names.values()}
    maps = run.runner.model.seen[-1]["model_intermediate_buffer"]
    assert {rid: numbers(maps[rid]) for rid in maps.keys()} == {"a": {"x": 1}, "b": {"x": 2}}
