"""The story of the PR, with a real architecture: a talker hears all that its thinker says, or it speaks garbage.

Eight requests of different lengths, with text, or with image and audio, at once through three processes, each over its
runner adapter, against the library's generate() for each alone in this process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
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


def unequal(story: Story, uncut: Codes) -> list[str]:
    """Requests whose codes are not those of the model that was not cut."""
    return [rid for rid, codes in uncut.items() if not torch.equal(story.codes[rid], codes)]


def test_every_request_speaks_the_codes_of_the_uncut_model(crew: StoryCrew, requests: list[Any], uncut: Codes) -> None:
    """All at once: prompts enter while others decode. All that is sent is read, bit for bit."""
    story = crew.run("usual", requests)
    assert unequal(story, uncut) == []
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
    crew: StoryCrew, requests: list[Any], uncut: Codes
) -> None:
    """The fault that the PR mends, put in on purpose: the assertion above sees it, in each request."""
    story = crew.run("deaf", requests)
    assert unequal(story, uncut) == list(SAYS)


def test_with_a_full_payload_a_talker_starts_when_all_is_there_and_speaks_the_same(
    crew: StoryCrew, requests: list[Any], uncut: Codes, demo: SimpleNamespace
) -> None:
    story = crew.run("full payload", requests)
    assert unequal(story, uncut) == []
    prompts = {r.rid: demo.omni_model.make_prompt(r.says, r.seed)["input_ids"].shape[1] for r in requests}
    # The last token that is said has no row: it is not fed back.
    whole = {rid: prompts[rid] + said - 1 for rid, said in SAYS.items()}
    assert story.reports["talker"]["seen"]["starts"] == whole


def test_a_request_preempted_in_the_middle_speaks_the_same(crew: StoryCrew, requests: list[Any], uncut: Codes) -> None:
    story = crew.run("preempted", requests)
    assert unequal(story, uncut) == []
    ran = [place for place, rids in enumerate(story.reports["talker"]["seen"]["ran"]) if "a" in rids]
    gaps = [later - earlier for earlier, later in zip(ran, ran[1:], strict=False)]
    assert max(gaps) > 3, "it rested while the others went on"


def test_a_request_that_fails_in_a_stage_fails_everywhere_and_the_others_finish(
    crew: StoryCrew, requests: list[Any], uncut: Codes
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
    assert story.left == 0
