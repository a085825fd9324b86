"""`connector rm` and `abort`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import connector
from connector.core.errors import RequestAborted, StreamPoisoned

Run = Callable[..., Any]
PAYLOAD = {"h": torch.zeros(16)}


@pytest.fixture
def edge(clean: connector.Node) -> connector.Edge:
    """One with a payload of rid `r`."""
    found = clean.edge("thinker", "talker")
    found.put("r", PAYLOAD)
    clean.flush()
    return found


def answering(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """A terminal, and somebody at it."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer))


def test_rm_frees_and_fails_the_stream(edge: connector.Edge, run: Run) -> None:
    """The reader is told; a second rm finds nothing, at once."""
    done = run("rm", "thinker:talker/r")
    assert (done.code, done.out, done.err) == (0, "thinker:talker:0/r: 1 payloads freed\n", "")
    assert run("ls").rows == []
    with pytest.raises(StreamPoisoned):
        edge.take("r", timeout=30.0)
    again = run("rm", "thinker:talker/r")
    assert again.code == 1
    assert again.err.startswith("error: no such live payload")


def test_rm_of_a_rid_takes_it_from_every_edge(edge: connector.Edge, clean: connector.Node, run: Run) -> None:
    """One report an edge."""
    clean.edge("thinker", "code").put("r", PAYLOAD)
    clean.flush()
    told = run("rm", "r", "--json").json()["removed"]
    assert [(row["edge"], row["payloads"]) for row in told] == [("thinker:code:0", 1), ("thinker:talker:0", 1)]
    assert run("rm", "r").code == 1


def test_rm_leaves_what_a_live_reader_holds_and_force_does_not(
    edge: connector.Edge, clean: connector.Node, run: Run
) -> None:
    """--force prints its risk."""
    with connector.connect(stage="talker", endpoint=clean.endpoint) as reader:
        with reader.edge("thinker", "talker").take("r", timeout=30.0):
            held = run("rm", "r")
            assert held.out == "thinker:talker:0/r: 0 payloads freed; 1 still held, freed when their readers let go\n"
            assert clean.status()["payloads"] == 1
            forced = run("rm", "r", "--force")
            assert forced.code == 0
            assert "can then see the bytes of another payload" in " ".join(forced.err.split())
            assert forced.out == "thinker:talker:0/r: 1 payloads freed\n"
            assert clean.status()["payloads"] == 0


@pytest.mark.parametrize(
    ("answer", "options", "code", "left"),
    [("n\n", [], 1, 1), ("y\n", [], 0, 0), ("n\n", ["--yes"], 0, 0), ("\n", ["--force"], 1, 1)],
)
def test_rm_asks_at_a_terminal(
    edge: connector.Edge,
    clean: connector.Node,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    options: list[str],
    code: int,
    left: int,
) -> None:
    """Unless --yes; no answer means no."""
    answering(monkeypatch, answer)
    assert run("rm", "r", *options).code == code
    assert clean.status()["payloads"] == left


def test_abort_says_what_it_freed(edge: connector.Edge, run: Run) -> None:
    """Everybody who uses the rid gets the reason."""
    done = run("abort", "r", "--reason", "drained")
    assert (done.code, done.err) == (0, "")
    assert done.out == "aborted r: 1 payloads freed, 64 bytes\n"
    with pytest.raises(RequestAborted, match="drained"):
        edge.take("r", timeout=30.0)


def test_abort_of_an_unknown_rid_says_so(clean: connector.Node, run: Run) -> None:
    """The answer is no; the reason still stands for late puts."""
    done = run("abort", "never-seen")
    assert (done.code, done.out) == (1, "")
    assert "nothing was known of never-seen" in done.err
    told = run("abort", "never-seen-2", "--json")
    assert (told.code, told.json()["known"], told.json()["payloads"]) == (1, False, 0)


def test_abort_refuses_what_is_no_rid(clean: connector.Node, run: Run) -> None:
    """Empty and too long."""
    assert [run("abort", rid).code for rid in ("", "x" * 1025)] == [2, 2]
