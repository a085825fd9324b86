"""What the demo says of a run in which a request failed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

DEMO = Path(__file__).parents[2] / "scripts" / "demo_job"


@pytest.fixture(scope="module")
def demo() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(DEMO))
    names = ("pipelines", "report", "transport")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(DEMO))


@pytest.mark.parametrize("code", [5, 6])
def test_a_request_that_failed_is_told_as_that_and_the_others_are_compared(demo: SimpleNamespace, code: int) -> None:
    """Its payloads stop somewhere, and the broker's counts are not those of whole requests: no news of their own."""
    pipeline = demo.pipelines.PIPELINES["qwen3-omni-tiny"]
    requests = demo.pipelines.make_requests(pipeline, 2, None)
    good, bad = (request.rid for request in requests)

    def flows(digests: dict[str, list[str]]) -> dict[str, object]:
        return {edge: demo.transport.Flow(edge, digests) for edge in pipeline.edges}

    def outcome(value: int) -> object:
        return demo.pipelines.Outcome(torch.zeros(4), torch.tensor([[value]]))

    run = demo.report.Run(
        pipeline,
        requests,
        pids={},
        outcomes={good: outcome(code)},
        failed={bad: "talker: made to fail"},
        sent=flows({good: ["x"], bad: ["y", "z"]}),
        received=flows({good: ["x"], bad: ["y"]}),
        steps={},
        counters={"edges": {}, "payloads_sealed": 0, "bytes_sealed": 0, "payloads_live": 0},
    )
    whole = {edge: {good: ["x"], bad: ["y", "z", "z"]} for edge in pipeline.edges}
    found = demo.report.differences(run, demo.pipelines.Reference({good: outcome(5), bad: outcome(5)}, whole))
    others = [] if code == 5 else [f"{good}: the codes are not those of the one process"]
    assert found == [f"{bad}: failed: talker: made to fail", *others]
