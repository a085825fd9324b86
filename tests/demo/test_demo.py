"""The main job through its command: equal bits, a proof that it would notice, and a clean end whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import wave
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EDGES = {
    "hibari": ["text:acoustic", "acoustic:vocoder", "vocoder:main"],
    "qwen3-omni-tiny": ["thinker:talker", "talker:code2wav", "code2wav:main"],
}
#: One edge of each model always; the others take minutes together.
EVERY_EDGE = [
    pytest.param(model, edge, marks=() if place == 1 else pytest.mark.long)
    for model, edges in EDGES.items()
    for place, edge in enumerate(edges)
]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _stage_pids(process: subprocess.Popen[str], until: str) -> dict[str, int]:
    """Read the demo's progress up to a line that holds `until`; the stages' pids by then."""
    pids = {}
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"stage (\w+) starts as process (\d+)", line):
            pids[found[1]] = int(found[2])
        if until in line:
            return pids
    raise AssertionError(f"the demo ended before it said {until!r}")


@pytest.mark.parametrize("model", EDGES)
def test_staged_run_is_identical_counted_and_written_down(demo, model):
    """One run: equal bits, a table that equals the broker's counters, requests that ran together where the stages run
    in steps, stages that ended, and WAV files."""
    ended = demo("--model", model, "--requests", "2")
    assert ended.lines[-1] == "identical: yes", (ended.lines, ended.errors)
    assert ended.code == 0
    _assert_counted(ended, EDGES[model])
    if model == "qwen3-omni-tiny":
        _assert_together(ended)
    pids = [stage["pid"] for stage in ended.data["stages"]]
    assert len(set(pids)) == 3
    assert not any(map(_is_alive, pids))
    for request in ended.data["requests"]:
        with wave.open(request["wav"]) as file:
            samples = file.readframes(file.getnframes())
            assert file.getnframes() / file.getframerate() == pytest.approx(request["seconds"])
        assert len(set(samples)) > 100, "silence is no speech"
    assert sorted(path.name for path in ended.out.iterdir()) == [f"{model}-1.wav", f"{model}-2.wav"]


def _assert_counted(ended, edges):
    broker, rows = ended.data["broker"], ended.data["edges"]
    assert [row["edge"] for row in rows] == edges
    for row in rows:
        counted = broker["edges"][f"{row['edge']}:0"]
        assert row["requests"] == 2
        assert row["payloads"] == row["payloads_received"] == counted["payloads_sealed"] > 0
        assert row["bytes"] == row["bytes_received"] == counted["bytes_sealed"] > 0
        assert row["handover_p50_us"] <= row["handover_p99_us"]
        assert f"{row['bytes']:,}" in "\n".join(ended.lines)
    assert broker["payloads_sealed"] == sum(row["payloads"] for row in rows)
    assert broker["bytes_sealed"] == sum(row["bytes"] for row in rows)


def _assert_together(ended):
    """Rows of each step, (in prefill, decoding): the second prompt is read beside the first request's second token."""
    steps = {stage["stage"]: stage["steps"] for stage in ended.data["stages"]}
    assert steps["thinker"][:3] == [[1, 0], [1, 1], [0, 2]]
    assert {stage: sum(prompts for prompts, _ in rows) for stage, rows in steps.items()} == dict.fromkeys(steps, 2)
    frames = next(row["payloads"] for row in ended.data["edges"] if row["edge"] == "talker:code2wav")
    assert sum(decoding for _, decoding in steps["talker"]) == frames
    assert "mixed" in "\n".join(ended.lines)


@pytest.mark.parametrize(("model", "edge"), EVERY_EDGE)
def test_one_flipped_bit_on_an_edge_is_noticed_there(demo, model, edge):
    ended = demo("--model", model, "--requests", "2", "--tamper", edge)
    assert ended.lines[-1] == "identical: no", (ended.lines, ended.errors)
    assert ended.code == 1
    at_ends = [line for line in ended.data["differences"] if "sent and received" in line]
    assert at_ends == [f"{edge} {model}-1: sent and received: payload 0 differs (and 0 more)"]


@pytest.mark.parametrize("model", EDGES)
def test_unknown_edge_is_refused_with_the_edges_there_are(demo, model):
    ended = demo("--model", model, "--tamper", "thinker:vocoder")
    assert ended.code == 2
    assert "thinker:vocoder" in ended.errors
    assert all(edge in ended.errors for edge in EDGES[model])
    assert not ended.out.exists()


def test_users_own_words_are_spoken_from_any_folder(demo):
    """Through scripts/demo itself, from an empty folder that is not the project's."""
    words = "These are my own words. They come in two sentences."
    ended = demo("--text", words, command=[str(ROOT / "scripts" / "demo")])
    assert (ended.code, ended.lines[-1:]) == (0, ["identical: yes"]), (ended.lines, ended.errors)
    assert [(request["says"], request["chunks"]) for request in ended.data["requests"]] == [(words, 2)]


@pytest.mark.parametrize(
    ("text", "told"), [("", "empty"), (" \n", "empty"), ("...", "pronounced"), ("日本語", "pronounced")]
)
def test_text_without_a_word_to_speak_is_refused(demo, text, told):
    ended = demo("--text", text)
    assert ended.code == 2
    assert told in ended.errors.splitlines()[-1]


def test_text_for_the_model_without_a_tokenizer_is_refused(demo):
    ended = demo("--model", "qwen3-omni-tiny", "--text", "Hello.")
    assert ended.code == 2
    assert "no tokenizer" in ended.errors


@pytest.mark.parametrize("model", ["hibari", pytest.param("qwen3-omni-tiny", marks=pytest.mark.long)])
def test_interrupt_ends_every_process(started_demo, model):
    """Ctrl-C reaches the whole process group, as from a terminal."""
    process = started_demo("--model", model, "--requests", "64")
    pids = _stage_pids(process, until="of speech")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "demo: interrupted"
    assert len(pids) == 3
    assert not any(map(_is_alive, pids.values()))


@pytest.mark.parametrize(
    ("model", "stage", "moment"),
    [
        ("hibari", "text", "stage vocoder starts"),
        pytest.param("hibari", "acoustic", "of speech", marks=pytest.mark.long),
        ("hibari", "vocoder", "of speech"),
        pytest.param("qwen3-omni-tiny", "thinker", "the stages begin", marks=pytest.mark.long),
        ("qwen3-omni-tiny", "talker", "of speech"),
        pytest.param("qwen3-omni-tiny", "code2wav", "of speech", marks=pytest.mark.long),
    ],
)
def test_killed_stage_ends_the_demo_with_its_name(started_demo, model, stage, moment):
    """Killed while it loads, or with most of 64 requests still to do."""
    process = started_demo("--model", model, "--requests", "64")
    pids = _stage_pids(process, until=moment)
    os.kill(pids[stage], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{stage} died without a word: killed by SIGKILL" in errors.splitlines()[-1]
    assert not any(map(_is_alive, pids.values()))


def test_a_stage_killed_before_it_reads_its_start_is_named(started_demo):
    """1. It stands still. 2. The demo tells it to begin. 3. It dies with that word unread: the pipe is reset."""
    process = started_demo("--requests", "2")
    pids = _stage_pids(process, until="stage vocoder starts")
    os.kill(pids["vocoder"], signal.SIGSTOP)
    _stage_pids(process, until="the stages begin")
    os.kill(pids["vocoder"], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "vocoder died without a word: killed by SIGKILL" in errors.splitlines()[-1]
