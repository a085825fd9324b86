"""The same story without a model: what the thinker says at each step is in the talker's map at its next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch

import connector
from connector import Node
from runner_adapter import Inbox, MergeRules, Outbox, RunnerAdapter, StepPlan, TransferConfig

ROWS, KEY = "hidden_states.layers[0]", "a-0"
CONFIG = TransferConfig.from_mapping(
    {
        "enabled": True,
        "items": ["hidden_states"],
        "key_templates": {"hidden_states": "{rid}-{layer_id}"},
        "hidden_state_layers": [0],
    }
)


class Stages(NamedTuple):
    thinker: RunnerAdapter
    talker: RunnerAdapter
    nodes: tuple[Node, Node]

    def settle(self) -> None:
        """What the thinker has put has come to the talker: the broker keeps the order of what it is told and tells."""
        for node in self.nodes:
            node.status()


@pytest.fixture
def stages() -> Iterator[Stages]:
    with ExitStack() as stack:
        thinker = stack.enter_context(connector.connect(stage="thinker", embedded=True, pool="8MiB", log_level="error"))
        talker = stack.enter_context(connector.connect(stage="talker", endpoint=thinker.endpoint))
        inbox = Inbox(talker, talker.edge("thinker", "talker"))
        # Subscribed: what is put from now on is sent to it.
        inbox.pull(())
        rules = MergeRules(accumulated=[ROWS])
        yield Stages(
            RunnerAdapter(object(), CONFIG, outbox=Outbox(thinker, thinker.edge("thinker", "talker"), CONFIG)),
            RunnerAdapter(object(), CONFIG, rules=rules, inbox=inbox, abort=talker.abort),
            (thinker, talker),
        )


def says(adapter: RunnerAdapter, number: float, last: bool = False) -> None:
    """One step of the thinker: a row."""
    adapter.begin_step(new=["a"] if "a" not in adapter.requests else [], scheduled=["a"])
    plan = StepPlan.make(["a"], {"a": 1})
    adapter.send(plan, (torch.full((1, 2), number), {0: torch.full((1, 2), number)}), last=["a"] if last else [])


def hears(adapter: RunnerAdapter, generated: int) -> list[float]:
    """One step of the talker: the rows that its forward is given."""
    adapter.begin_step(new=["a"] if "a" not in adapter.requests else [], scheduled=["a"])
    adapter.receive()
    plan = StepPlan.make(["a"], {"a": 1}, generated={"a": generated}, prefill={"a"} if not generated else set())
    rows: torch.Tensor = adapter.forward_kwargs(plan)["model_intermediate_buffer"]["a"][KEY]
    return rows[:, 0].tolist()


def test_what_comes_while_a_request_decodes_is_in_its_next_forward(stages: Stages) -> None:
    heard = []
    for step in range(4):
        says(stages.thinker, float(step), last=step == 3)
        stages.settle()
        heard.append(hears(stages.talker, step))
    assert heard == [[0.0], [0.0, 1.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]]
    assert stages.talker.input_ended("a")


def test_rows_that_came_together_are_all_there_in_order(stages: Stages) -> None:
    """The talker was slow: several payloads in one step, none lost and none twice."""
    says(stages.thinker, 0.0)
    stages.settle()
    assert hears(stages.talker, 0) == [0.0]
    for number in (1.0, 2.0, 3.0):
        says(stages.thinker, number)
    stages.settle()
    assert hears(stages.talker, 1) == [0.0, 1.0, 2.0, 3.0]
    assert hears(stages.talker, 2) == [0.0, 1.0, 2.0, 3.0]
