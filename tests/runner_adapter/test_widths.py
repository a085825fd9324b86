"""preprocess without embeds of the step: whose width, dtype and device they have, and who fails of another width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter.hooks import Hooks
from runner_adapter.runner import RunnerAdapter
from runner_adapter.talker import Talker
from tests.handover.middle import plan_of
from tests.runner_adapter.models import COUNTS, WIDTH, Given, HookModel, Step, TalkingModel, embeds_of, talks

BAD = WIDTH + 1


def of_width(width: int) -> Callable[[Given], Any]:
    return lambda g: (None, torch.ones(len(g["input_ids"]), width), {"seen": torch.tensor(1)})


def step_of(known: int | None, **hooks: Callable[[Given], Any]) -> Step:
    """A step that brings no embeds, of a model whose width is `known`."""
    model = HookModel(**hooks)
    step = Step(model)
    step.hooks, step.embeds = Hooks(model, width=known), None
    return step.preprocess()


@pytest.mark.parametrize(
    ("known", "widths", "failed"),
    [
        (WIDTH, [BAD, WIDTH, WIDTH], "a"),
        (WIDTH, [BAD, BAD, WIDTH], "ab"),
        (None, [BAD, WIDTH, WIDTH], "a"),
        (None, [WIDTH, BAD, WIDTH], "b"),
        (None, [WIDTH, BAD, BAD + 1], "bc"),
    ],
)
def test_another_width_fails_its_request_alone(known: int | None, widths: list[int], failed: str) -> None:
    """Wherever it stands in the batch, if the model's width is known; or else if it is no more frequent."""
    step = step_of(known, **{rid: of_width(width) for rid, width in zip(COUNTS, widths, strict=True)})
    assert sorted(step.failures) == list(failed)
    for rid, error in step.failures.items():
        assert isinstance(error, errors.InvalidPayload)
        assert (error.facts["rid"], error.facts["limit"]) == (rid, WIDTH)
        assert step.map(rid) == {}
    assert [step.map(rid) for rid in COUNTS if rid not in failed] == [{"seen": 1}] * (3 - len(failed))
    good = [float(row.rid not in failed) for row in step.plan.rows for _ in range(row.tokens)]
    assert step.column == [*good, 0.0]


def test_if_all_have_another_width_there_are_no_embeds() -> None:
    step = step_of(WIDTH, **dict.fromkeys(COUNTS, of_width(BAD)))
    assert step.embeds is None
    assert {rid: error.facts["size"] for rid, error in step.failures.items()} == dict.fromkeys(COUNTS, BAD)  # type: ignore[attr-defined]


def test_the_first_result_does_not_set_the_dtype_of_the_others() -> None:
    step = step_of(
        None,
        a=lambda g: (None, torch.full((2, WIDTH), 2, dtype=torch.int64), None),
        b=lambda g: (None, torch.full((1, WIDTH), 0.5), None),
        c=lambda g: (None, torch.full((3, WIDTH), 0.25), None),
    )
    assert step.column == [2.0, 2.0, 0.5, 0.25, 0.25, 0.25, 0.0]


@pytest.mark.parametrize("width", [0, -1, 2.5, True, "4"])
def test_a_width_is_a_number_of_columns(width: Any) -> None:
    with pytest.raises(errors.UsageError):
        Hooks(HookModel(), width=width)


def test_the_runner_tells_the_width_of_its_model() -> None:
    adapter = RunnerAdapter(HookModel(a=of_width(BAD), b=of_width(WIDTH)), width=WIDTH)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    _, embeds = adapter.preprocess(plan_of(a=1, b=1), torch.tensor([5, 6]))
    assert list(adapter.failures()) == ["a"]
    assert embeds is not None and embeds.tolist() == [[0.0] * WIDTH, [1.0] * WIDTH]


def test_a_talkers_width_is_that_of_the_step() -> None:
    """What does not fit its buffers is one request's failure, and not the step's."""

    def wide(given: Given) -> Any:
        ids, embeds, update = talks(1.0, 2.0)(given)
        return ids, embeds.repeat(1, 2), update

    model = TalkingModel(a=wide, b=talks(3.0, 4.0))
    talker = Talker(model, max_rows=4, dtype=torch.float32, device="cpu")
    adapter = RunnerAdapter(model, talker=talker)
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    _, embeds = adapter.preprocess(plan_of(a=1, b=1), torch.tensor([5, 6]))
    assert list(adapter.failures()) == ["a"]
    assert embeds is not None and torch.equal(embeds, embeds_of(torch.tensor([0, 10])))
