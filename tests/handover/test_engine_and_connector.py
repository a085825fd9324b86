"""A step in which the engine brings something and the other stage, too: each once, and what the stage sent stands."""

from __future__ import annotations

import pytest
import torch

from tests.handover.links import CONFIG, Link, keyed
from tests.runner_adapter.test_vllm_steps import Engine, output, request

RIDS = ["a"]


def brings(number: int) -> dict[str, dict[str, torch.Tensor]]:
    """An engine's map: a name that the other stage sends as well, and one that it does not."""
    return {"ids": {"thinker_input_ids": torch.tensor([number]), "own": torch.tensor([number])}}


@pytest.mark.parametrize("full_payload", [True, False], ids=["full payload", "chunks"])
@pytest.mark.parametrize("field", ["model_intermediate_buffer", "additional_information"])
def test_what_the_other_stage_sent_stands_over_what_the_engine_brings(
    pair: Link, full_payload: bool, field: str
) -> None:
    """In the step in which a request enters, and in one in which it decodes; other names of the engine's stay."""
    engine = Engine(config=CONFIG, inbox=pair.inbox(full_payload=full_payload), abort=pair.reader.abort)
    pair.out().put("a", keyed("a", 1), last=full_payload)
    pair.settle()
    engine.step(output(request("a", **{field: brings(5)})))
    assert engine.map("a")["ids"] == {"thinker_input_ids": [1], "own": [5]}
    if not full_payload:
        pair.out().put("a", keyed("a", 2), last=True)
        pair.settle()
    engine.step(output(cached={"a": 1}, **{field: {"a": brings(6)}}))
    assert engine.map("a")["ids"] == {"thinker_input_ids": [6] if full_payload else [2], "own": [6]}
    assert engine.adapter.buffer.counters["merged"] == (3 if full_payload else 4)
    engine.step(output(finished=["a"], counts={}))
