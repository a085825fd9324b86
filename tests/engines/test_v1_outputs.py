"""V1RunnerMixin over vLLM-Omni's genuine runner: what a model's `make_omni_output` makes is the step's output."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.model_executor.models.output_templates import OmniOutput
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

import connector
from connector import Node
from runner_adapter.adapters.vllm import V1RunnerMixin
from runner_adapter.merge import MergeRules
from runner_adapter.outbox import Outbox
from tests.engines.vllm_steps import TRANSFER, WIDTH, Loop, StageModel, numbers, settings, v1, with_adapter


class OmniRunner(V1RunnerMixin, OmniGPUModelRunner, CPUModelRunner):
    """vLLM's `execute_model` takes no output of this kind: vLLM-Omni's own, which cannot be loaded here, takes it apart
    with the method that is called here."""

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        text, self.extracted = self.extract_multimodal_outputs(super()._model_forward(*args, **kwargs))
        return text


class Vocal(StageModel):
    """Its codes are ten times the ids of its rows; postprocess keeps those it is given for the last row."""

    have_multimodal_outputs = True

    def make_omni_output(self, hidden: torch.Tensor, **given: Any) -> OmniOutput:
        self.rids = given["request_ids"]
        return OmniOutput(text_hidden_states=hidden, multimodal_outputs={"codes": {"audio": hidden[:, :1] * 5}})

    def postprocess(self, hidden: torch.Tensor, multimodal_outputs: Any, **info: Any) -> Any:
        # The step's outputs whole: the hook is given all rows.
        return {"codes": {"rows": torch.tensor(len(multimodal_outputs["codes"]["audio"]))}}


def loop(**own: Any) -> Loop:
    return with_adapter(v1(OmniRunner, settings(), Vocal()), **own)


def test_postprocess_is_given_what_the_model_made_of_its_output() -> None:
    run = loop()
    run.add("A", 1, 2)
    run.add("B", 11)
    run.step()
    assert run.runner.model.rids == ["A", "B"]
    assert [numbers(run.adapter.buffer.nested(rid))["codes"] for rid in "AB"] == [{"rows": 3}] * 2
    # The engine has it, too, for what it does behind sampling.
    assert run.runner._omni_last_model_output.text_hidden_states.shape == (3, WIDTH)
    assert run.runner.extracted["codes"]["audio"].shape == (3, 1)
    assert run.tokens == {"A": [3], "B": [12]}


def test_each_request_hands_on_its_rows_of_what_the_model_made(broker: Node) -> None:
    with connector.connect(stage="talker", endpoint=broker.endpoint) as sender:
        with connector.connect(stage="code2wav", endpoint=broker.endpoint) as reader:
            edge = reader.edge("talker", "code2wav")
            out = Outbox(sender, sender.edge("talker", "code2wav"), TRANSFER)
            run = loop(transfer=TRANSFER, outbox=out, rules=MergeRules(row_axes={"codes.audio": 0}))
            run.add("A", 1, 2)
            run.add("B", 11)
            run.step()
            for rid, codes in {"A": [[10], [20]], "B": [[110]]}.items():
                payload = edge.take(rid, timeout=10.0)
                assert numbers(payload)[f"{rid}-codes.audio"] == codes
                del payload
