"""The story of the PR, with a real architecture: a talker hears all that its thinker says, or it speaks garbage.

Eight requests of different lengths, with text, or with image and audio, at once through three processes, each over its
runner adapter, against the library's generate() for each alone in this process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.e2e.crew import Story, StoryCrew

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`:UserWarning"),
]

DEMO = Path(__file__).parents[2] / "scripts" / "demo_job"
#: By request, how many tokens the thinker says. The talker is some frames longer, but for one, which ends before them.
SAYS = {"a": 6, "b": 14, "c": 9, "d": 40, "e": 7, "f": 12, "g": 5, "h": 10}
SHORT = {"d": (3, 5)}
Codes = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def demo() -> Iterator[SimpleNamespace]:
    """Modules of the demo, and the test's own that imports them."""
    sys.path.insert(0, str(DEMO))
    names = ("omni_model", "omni_uncut", "pipelines", "transport")
    modules = {name: importlib.import_module(name) for name in names}
    yield SimpleNamespace(**modules, crew=importlib.import_module("tests.e2e.crew"))
    sys.path.remove(str(DEMO))


@pytest.fixture(scope="module")
def requests(demo: SimpleNamespace) -> list[Any]:
    kinds = demo.pipelines.KINDS * len(SAYS)
    return [
        demo.pipelines.Request(rid, kinds[place], 20 + place, tokens, SHORT.get(rid, (tokens + 4, tokens + 12)))
        for place, (rid, tokens) in enumerate(SAYS.items())
    ]


@pytest.fixture(scope="module")
def folder(demo: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    demo.omni_model.save_weights(folder)
    return folder


@pytest.fixture(scope="module")
def crew(demo: SimpleNamespace, folder: Path) -> Iterator[StoryCrew]:
    with demo.transport.Station("main", None) as station, demo.crew.StoryCrew(station, folder) as crew:
        yield crew


@pytest.fixture(scope="module")
def uncut(demo: SimpleNamespace, requests: list[Any], folder: Path, crew: StoryCrew) -> Codes:
    """The codes of each request alone; made while the stages load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    outcomes = demo.omni_uncut.reference(requests, folder).outcomes
    torch.set_num_threads(before)
    return {rid: outcome.codes[0] for rid, outcome in outcomes.items()}


@pytest.fixture(scope="module")
def prompts(demo: SimpleNamespace, requests: list[Any]) -> dict[str, int]:
    """The thinker's rows of each prompt."""
    return {r.rid: demo.omni_model.make_prompt(r.says, r.seed)["input_ids"].shape[1] for r in requests}


def unequal(story: Story, uncut: Codes) -> list[str]:
    """Requests that did not speak the codes of the model that was not cut."""
    return [rid for rid, codes in uncut.items() if rid not in story.codes or not torch.equal(story.codes[rid], codes)]


def rows(story: Story, rids: Iterable[str]) -> dict[str, list[int]]:
    """By request, the thinker's rows that each forward of the talker was given."""
    seen: dict[str, list[int]] = story.reports["talker"]["seen"]["rows"]
    return {rid: seen[rid] for rid in rids}


def whole(prompts: dict[str, int]) -> dict[str, int]:
    """All rows of the thinker. The last token that is said has none: it is not fed back."""
    return {rid: prompts[rid] + said - 1 for rid, said in SAYS.items()}


def one_a_step(prompts: dict[str, int], uncut: Codes) -> dict[str, list[int]]:
    """`rows` if all but the prompt's rows come to a request that decodes, each in the step that needs it. A forward
    gives the prompt's first hidden state, each other one a frame."""
    most = whole(prompts)
    return {
        rid: [min(prompts[rid] + 1 + step, most[rid]) for step in range(codes.shape[1] + 1)]
        for rid, codes in uncut.items()
    }


def test_every_request_speaks_the_codes_of_the_uncut_model(
    crew: StoryCrew, requests: list[Any], uncut: Codes, prompts: dict[str, int]
) -> None:
    """All at once: prompts enter while others decode. All that is sent is read, bit for bit."""
    story = crew.run("usual", requests)
    assert unequal(story, uncut) == []
    assert rows(story, uncut) == one_a_step(prompts, uncut)
    assert len({codes.shape for codes in story.codes.values()}) > 1, "requests of different lengths"
    prompts, decoding = zip(*story.reports["thinker"]["steps"], strict=True)
    assert sum(prompts) == len(SAYS)
    assert any(p and d for p, d in zip(prompts, decoding, strict=True)), "steps that mix both"
    assert max(decoding) > 1
    for sender, reader in (("thinker", "talker"), ("talker", "code2wav")):
        sent, received = story.reports[sender]["sent"], story.reports[reader]["received"]
        assert [flow["digests"] for flow in sent] == [flow["digests"] for flow in received]
    assert (story.failed, story.left) == ({}, 0)


def test_without_delivery_to_decoding_requests_every_request_speaks_garbage(
    crew: StoryCrew, requests: list[Any], uncut: Codes, prompts: dict[str, int]
) -> None:
    """The fault that the PR mends, put in on purpose: the assertion above sees it, in each request."""
    story = crew.run("deaf", requests)
    assert unequal(story, uncut) == list(SAYS)
    assert {rid: set(there) for rid, there in rows(story, uncut).items()} == {r: {n + 1} for r, n in prompts.items()}


def test_with_a_full_payload_a_talker_starts_when_all_is_there_and_speaks_the_same(
    crew: StoryCrew, requests: list[Any], uncut: Codes, prompts: dict[str, int]
) -> None:
    story = crew.run("full payload", requests)
    assert unequal(story, uncut) == []
    assert {rid: set(there) for rid, there in rows(story, uncut).items()} == {r: {n} for r, n in whole(prompts).items()}


def test_a_request_preempted_in_the_middle_speaks_the_same(
    crew: StoryCrew, requests: list[Any], uncut: Codes, prompts: dict[str, int]
) -> None:
    """It rests while the others go on, and has its next rows when it runs again."""
    story = crew.run("preempted", requests)
    assert unequal(story, uncut) == []
    assert rows(story, uncut) == one_a_step(prompts, uncut)
    at, steps = story.reports["talker"]["seen"]["rested"]
    ran = [place for place, rids in enumerate(story.reports["talker"]["seen"]["ran"]) if "a" in rids]
    assert ran[at] - ran[at - 1] > steps
    assert rows(story, "a")["a"][at] < whole(prompts)["a"], "in the middle of what it hears"


def test_a_request_that_fails_in_a_stage_fails_everywhere_and_the_others_finish(
    crew: StoryCrew, requests: list[Any], uncut: Codes, prompts: dict[str, int]
) -> None:
    """b in the thinker, at its prompt; c in the talker, while it speaks; f there, at its prompt; h in code2wav, whose
    input is empty."""
    broken = {"b": {"text_tokens": 0}, "h": {"frames": (1, 1)}}
    requests = [replace(request, **broken.get(request.rid, {})) for request in requests]
    story = crew.run("failing", requests, fails={"c": 4, "f": 0})
    why = {"b": "must be greater than 0", "c": "made to fail", "f": "made to fail", "h": "the input ended before"}
    assert story.failed.keys() == why.keys()
    assert [rid for rid, words in why.items() if words not in story.failed[rid]] == []
    healthy = {rid: codes for rid, codes in uncut.items() if rid not in why}
    assert unequal(story, healthy) == []
    assert story.reports["code2wav"]["seen"]["failed"].keys() == why.keys()
    assert story.reports["talker"]["seen"]["failed"].keys() >= {"b", "c", "f"}
    assert rows(story, "c") == {"c": one_a_step(prompts, uncut)["c"][:4]}, "c failed while rows came to it"
    assert story.left == 0
