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

demo, requests, folder, uncut, prompts = story.demo, story.requests, story.folder, story.uncut, story.prompts
STAGES = ("thinker", "talker", "code2wav")


@pytest.fixture(scope="module")
def crew(demo: SimpleNamespace, folder: Path) -> Iterator[EngineCrew]:
    module = importlib.import_module("tests.engines.story_crew")
    with demo.transport.Station("main", None) as station, module.EngineCrew(station, folder) as crew:
        yield crew


def digests(told: Story, sender: str, reader: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """By request, what was put on an edge, and what was read of it."""
    (sent,), (received,) = told.reports[sender]["sent"], told.reports[reader]["received"]
    return sent["digests"], received["digests"]


def rows_there(told: Story) -> dict[str, set[int]]:
    """By request, the thinker's rows that its talker's forwards were given."""
    return {rid: set(rows) for rid, rows in story.rows(told, story.SAYS).items()}


#: What stays of requests that are over: maps and caches of both stages, payloads at the talker and at the broker.
NOTHING = ([(0, 0), (0, 0)], [], 0)


def kept(told: Story) -> tuple[list[tuple[int, int]], list[str], int]:
    """As NOTHING."""
    seen = [told.reports[stage]["seen"] for stage in STAGES[:2]]
    return [(one["maps"], one["caches"]) for one in seen], seen[1]["unread"], told.left


@pytest.mark.parametrize("version", ["v1", "v1-omni", "v2"])
def test_every_request_speaks_the_codes_of_the_uncut_model(
    crew: EngineCrew, requests: list[Any], uncut: story.Codes, prompts: dict[str, int], version: str
) -> None:
    """All at once: prompts enter while others decode. All that a request lives to read is read, bit for bit."""
    told = crew.run(f"{version}, usual", requests)
    assert story.unequal(told, uncut) == []
    assert story.rows(told, uncut) == story.one_a_step(prompts, uncut)
    for stage in STAGES[:2]:
        entering, going_on = zip(*told.reports[stage]["steps"], strict=True)
        assert sum(entering) == len(story.SAYS)
        assert any(n and d for n, d in zip(entering, going_on, strict=True)), "steps that mix both"
        assert max(going_on) > 1
    sent, received = digests(told, "talker", "code2wav")
    assert sent == received
    sent, received = digests(told, "thinker", "talker")
    # The talker of these has ended before its thinker.
    short = {rid: sent[rid][: len(received[rid])] for rid in story.SHORT}
    assert {**sent, **short} == received
    assert told.failed == {}
    assert kept(told) == NOTHING


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_without_delivery_to_decoding_requests_every_request_speaks_garbage(
    crew: EngineCrew, requests: list[Any], uncut: story.Codes, prompts: dict[str, int], version: str
) -> None:
    """The fault that the PR mends, put in on purpose: the assertion above sees it, in each request."""
    told = crew.run(f"{version}, deaf", requests)
    assert story.unequal(told, uncut) == list(story.SAYS)
    assert rows_there(told) == {rid: {rows + 1} for rid, rows in prompts.items()}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_with_a_full_payload_a_talker_starts_when_all_is_there_and_speaks_the_same(
    crew: EngineCrew, requests: list[Any], uncut: story.Codes, prompts: dict[str, int], version: str
) -> None:
    told = crew.run(f"{version}, full payload", requests)
    assert story.unequal(told, uncut) == []
    assert rows_there(told) == {rid: {rows} for rid, rows in story.whole(prompts).items()}
    sent, received = digests(told, "thinker", "talker")
    assert sent == received and {len(payloads) for payloads in sent.values()} == {1}
    assert kept(told) == NOTHING


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_request_that_fails_while_it_decodes_fails_in_every_stage_and_the_others_finish(
    crew: EngineCrew, requests: list[Any], uncut: story.Codes, prompts: dict[str, int], version: str
) -> None:
    """In the talker's hook, with rows of the thinker still to come, and frames behind it."""
    told = crew.run(f"{version}, failing", requests, fails={"c": 4})
    assert told.failed.keys() == {"c"} and "made to fail" in told.failed["c"]
    failed = {stage: list(told.reports[stage]["seen"]["failed"]) for stage in STAGES}
    assert failed == dict.fromkeys(STAGES, ["c"])
    healthy = {rid: codes for rid, codes in uncut.items() if rid != "c"}
    assert story.unequal(told, healthy) == []
    assert story.rows(told, healthy) == story.one_a_step(prompts, healthy)
    assert digests(told, "talker", "code2wav")[0]["c"]
    assert kept(told) == NOTHING
