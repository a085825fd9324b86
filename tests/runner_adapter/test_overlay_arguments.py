"""What accept, mirror and the prompt overlay are given: a wrong kind is told by name, and by whose it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter import legacy
from runner_adapter.overlay import PromptOverlay, accept, accept_cached, mirror
from runner_adapter.phases import Phase
from runner_adapter.plan import StepPlan


def brings(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


@pytest.mark.parametrize("phase", ["3", None, 4, 0])
def test_a_phase_that_is_none_is_refused(phase: Any) -> None:
    buffer: Any = {}
    for call in (
        lambda: accept(brings(), phase, rid="r"),
        lambda: accept_cached(brings(), phase),
        lambda: mirror(buffer, [], phase, lambda *one: None),
        lambda: PromptOverlay(phase),
    ):
        with pytest.raises(errors.UsageError, match="is a Phase"):
            call()


def test_a_phase_may_be_its_number() -> None:
    assert accept(brings(model_intermediate_buffer={"x": 1}), 3, rid="r") == {"x": 1}  # type: ignore[arg-type]
    assert accept(brings(model_intermediate_buffer={"x": 1}), 1, rid="r")["x"].item() == 1  # type: ignore[arg-type]


def test_a_shape_of_no_bytes_that_no_tensor_has_is_its_requests_failure() -> None:
    entry = brings(tensor_data=b"", tensor_shape=[0, 2**62, 2**62], tensor_dtype="float32")
    found = accept_cached(brings(model_intermediate_buffer={"good": {"a": 1}, "bad": brings(entries={"x": entry})}), 1)  # type: ignore[arg-type]
    assert found.maps["good"]["a"].item() == 1
    assert isinstance(found.failed["bad"], errors.InvalidPayload) and found.failed["bad"].facts["entry"] == "x"
    small = brings(entries={"x": brings(tensor_data=b"", tensor_shape=[0, 3], tensor_dtype="float32")})
    assert legacy.decode(small, rid="r")["x"].shape == (0, 3)


def lay(**own: Any) -> Any:
    overlay = PromptOverlay(Phase.COMPAT)
    overlay.add("r", torch.ones(3, 4))
    plan = StepPlan.make(["r"], {"r": 3})
    given = {"plan": plan, "target": torch.zeros(3, 4), "computed": {"r": 0}, "prompt_lens": {"r": 3}, **own}
    target = given.pop("target")
    return overlay.lay(given.pop("plan"), target, **given)


@pytest.mark.parametrize(
    "own",
    [
        {"plan": None},
        {"computed": None},
        {"prompt_lens": [3]},
        {"target": None},
        {"target": torch.zeros(2, 4)},
        {"target": torch.zeros(3)},
        {"target": torch.zeros(3, 4, dtype=torch.int64)},
        {"target": torch.zeros(3, 1).expand(3, 4)},
        {"target": torch.zeros(3, 4, requires_grad=True)},
    ],
    ids=["plan", "computed", "prompt_lens", "None", "short", "flat", "ints", "expanded", "gradient"],
)
def test_an_overlay_that_cannot_be_laid_is_refused(own: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        lay(**own)


@pytest.mark.parametrize("own", [{"computed": {"r": None}}, {"computed": {}}, {"prompt_lens": {"r": "3"}}])
def test_a_count_that_is_none_is_its_requests_failure(own: dict[str, Any]) -> None:
    assert {rid: type(error) for rid, error in lay(**own).items()} == {"r": errors.UsageError}


def test_rows_that_are_laid_under_no_grad_may_belong_to_a_graph() -> None:
    target = torch.zeros(3, 4, requires_grad=True)
    with torch.no_grad():
        assert lay(target=target) == {}
    assert target.sum().item() == 12
