"""The story of the PR (tests/e2e/test_pr_story.py), its thinker and talker in the runners of genuine engines.

Three processes; eight requests of different lengths at once, which vLLM's own scheduler feeds to its V1 runner, to
vLLM-Omni's, and to V2's; against the library's generate() for each request alone in this process.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import test_pr_story as story

if TYPE_CHECKING:
    from tests.e2e.crew import Story
    from tests.engines.story_crew import EngineCrew

pytestmark = pytest.mark.timeout(300)

demo, requests, folder, uncut = story.demo, story.requests, story.folder, story.uncut


@pytest.fixture(scope="module")
def crew(demo: SimpleNamespace, folder: Path) -> Iterator[EngineCrew]:
    module = importlib.import_module("tests.engines.story_crew")
    with demo.transport.Station("main", None) as station, module.EngineCrew(station, folder) as crew:
        yield crew


@pytest.fixture(scope="module")
def prompts(demo: SimpleNamespace, requests: list[Any]) -> dict[str, int]:
    """The thinker's rows of each prompt."""
    return {r.rid: demo.omni_model.make_prompt(r.says, r.seed)["input_ids"].shape[1] for r in requests}


def digests(told: Story, sender: str, reader: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """By request, what was put on an edge, and what was read of it."""
    (sent,), (received,) = told.reports[sender]["sent"], told.reports[reader]["received"]
    return sent["digests"], received["digests"]


@pytest.mark.parametrize("version", ["v1", "v1-omni", "v2"])
def test_every_request_speaks_the_codes_of_the_uncut_model(
    crew: EngineCrew, requests: list[Any], uncut: story.Codes, prompts: dict[str, int], version: str
) -> None:
    """All at once: prompts enter while others decode. All that a request lives to read is read, bit for bit."""
    told = crew.run(f"{version}, usual", requests)
    assert story.unequal(told, uncut) == []
    # Every row but the first one that is said comes to a request that decodes.
    assert told.reports["talker"]["seen"]["starts"] == {rid: rows + 1 for rid, rows in prompts.items()}
    for stage in ("thinker", "talker"):
        entering, going_on = zip(*told.reports[stage]["steps"], strict=True)
        assert sum(entering) == len(story.SAYS)
        assert any(n and d for n, d in zip(entering, going_on, strict=True)), "steps that mix both"
        assert max(going_on) > 1
        seen = told.reports[stage]["seen"]
        assert (seen["maps"], seen["caches"]) == (0, 0)
    sent, received = digests(told, "talker", "code2wav")
    assert sent == received
    sent, received = digests(told, "thinker", "talker")
    # The talker of these has ended before its thinker.
    short = {rid: sent[rid][: len(received[rid])] for rid in story.SHORT}
    assert {**sent, **short} == received
    assert told.reports["talker"]["seen"]["unread"] == []
    assert (told.failed, told.left) == ({}, 0)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_without_delivery_to_decoding_requests_every_request_speaks_garbage(
    crew: EngineCrew, requests: list[Any], uncut: story.Codes, version: str
) -> None:
    """The fault that the PR mends, put in on purpose: the assertion above sees it, in each request."""
    told = crew.run(f"{version}, deaf", requests)
    assert story.unequal(told, uncut) == list(story.SAYS)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_with_a_full_payload_a_talker_starts_when_all_is_there_and_speaks_the_same(
    crew: EngineCrew, requests: list[Any], uncut: story.Codes, prompts: dict[str, int], version: str
) -> None:
    told = crew.run(f"{version}, full payload", requests)
    assert story.unequal(told, uncut) == []
    # The last token that is said has no row: it is not fed back.
    whole = {rid: prompts[rid] + said - 1 for rid, said in story.SAYS.items()}
    assert told.reports["talker"]["seen"]["starts"] == whole
