"""`connector status` and `ls`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import connector
from connector.core.errors import PoolFull

Run = Callable[..., Any]


@pytest.fixture
def filled(clean: connector.Node) -> connector.Node:
    """Two edges: a stream of two chunks, a full payload, one without tensors, END alone."""
    talk, code = clean.edge("thinker", "talker"), clean.edge("talker", "code", replica=2)
    talk.put("r1", {"h": torch.zeros(3, 4), "ids": torch.arange(5)}, index=0, last=False)
    talk.put("r1", {"h": torch.zeros(1, 4)}, index=1, last=True)
    code.put("r2/x", {"h.last": torch.zeros((), dtype=torch.bfloat16)})
    code.put("empty", {})
    code.end("over")
    clean.flush()
    return clean


def test_ls_has_a_row_for_each_tensor_and_none_for_what_has_no_tensor(filled: connector.Node, run: Run) -> None:
    """Oldest first; plain aligned lines, since this is no terminal."""
    done = run("ls")
    assert (done.code, done.err) == (0, "")
    cells = [row.split()[:-1] for row in done.rows]
    assert cells == [
        ["thinker:talker:0", "r1", "0", "h", "float32", "[3,4]", "48", "sealed"],
        ["thinker:talker:0", "r1", "0", "ids", "int64", "[5]", "40", "sealed"],
        ["thinker:talker:0", "r1", "1", "h", "float32", "[1,4]", "16", "sealed"],
        ["talker:code:2", "r2/x", "0", "h.last", "bfloat16", "[]", "2", "sealed"],
    ]
    assert done.out.splitlines()[0].split()[:4] == ["EDGE", "RID", "INDEX", "KEY"]


def test_ls_payloads_has_a_row_for_each_payload(filled: connector.Node, run: Run) -> None:
    """Those without tensors, too; logical and mapped bytes, writer."""
    rows = run("ls", "--payloads", "--json").json()
    assert [(row["rid"], row["index"], row["tensors"], row["nbytes"], row["end_only"]) for row in rows] == [
        ("r1", 0, 2, 88, False),
        ("r1", 1, 1, 16, False),
        ("r2/x", 0, 1, 2, False),
        ("empty", 0, 0, 0, False),
        ("over", 0, 0, 0, True),
    ]
    assert all(row["length"] >= row["nbytes"] for row in rows)
    assert {row["writer"].split(" ")[0] for row in rows} == {"thinker"}
    assert len(run("ls", "--payloads").rows) == 5


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--edge", "thinker:talker"], ["h", "ids", "h"]),
        (["--edge", "talker:code:2"], ["h.last"]),
        (["--edge", "talker:code"], []),
        (["--rid", "r1"], ["h", "ids", "h"]),
        (["--rid", "r"], []),
        (["--prefix", "r"], ["h", "ids", "h", "h.last"]),
        (["--prefix", "r2"], ["h.last"]),
        (["--key-prefix", "h"], ["h", "h", "h.last"]),
        (["--key-prefix", "h", "--limit", "2"], ["h", "h"]),
        (["--state", "sealed"], ["h", "ids", "h", "h.last"]),
        (["--state", "taken"], []),
        (["--limit", "1"], ["h"]),
        (["--limit", "3"], ["h", "ids", "h"]),
    ],
)
def test_ls_filters(filled: connector.Node, run: Run, options: list[str], keys: list[str]) -> None:
    """As JSON and as lines."""
    assert [row["key"] for row in run("ls", "--json", *options).json()] == keys
    assert [row.split()[3] for row in run("ls", *options).rows] == keys


def test_ls_tells_who_holds_a_payload(filled: connector.Node, run: Run) -> None:
    """Taken, by whom; and gone from the listing once it is released."""
    with connector.connect(stage="talker", endpoint=filled.endpoint) as reader:
        with reader.edge("thinker", "talker").take("r1", timeout=30.0):
            reader.status()  # the word that it was taken goes before this question
            (row,) = run("ls", "--json", "--state", "taken", "--payloads").json()
            assert row["holders"] == [f"0: talker (pid {row['writer'].split()[-1][:-1]})"]
        reader.flush()
        assert [row["index"] for row in run("ls", "--json", "--rid", "r1").json()] == [1]


def test_names_cannot_move_the_cursor_or_be_read_as_markup(clean: connector.Node, run: Run) -> None:
    """A rid with control characters, markup and a right-to-left override."""
    clean.edge("a", "b").put("x\x1b[31m\n[bold]\u202e", {"k\t[/]": torch.zeros(1)})
    clean.flush()
    done = run("ls")
    (row,) = done.rows
    assert row.split()[1:4] == ["x\\x1b[31m\\n[bold]\\u202e", "0", "k\\t[/]"]
    assert run("ls", "--json").json()[0]["rid"] == "x\x1b[31m\n[bold]\u202e"


def test_status_is_of_one_moment_and_agrees_with_the_listing(filled: connector.Node, run: Run) -> None:
    """Sums of edges, rows and the summary; nothing negative."""
    told = run("status", "--json").json()
    rows = run("ls", "--payloads", "--json").json()
    summary, edges = told["summary"], {row["edge"]: row for row in told["edges"]}
    assert summary["payloads"] == len(rows) == 5
    assert summary["pool_bytes"] == 64 << 20
    assert summary["used_bytes"] + summary["free_bytes"] == summary["pool_bytes"]
    for edge, row in edges.items():
        mine = [found for found in rows if found["edge"] == edge]
        assert row["payloads_live"] == sum(not found["end_only"] for found in mine)
        assert row["bytes_used"] == sum(found["length"] for found in mine)
    numbers = [v for row in [summary, *told["sessions"], *edges.values()] for v in row.values() if type(v) is int]
    assert min(numbers) >= 0
    assert {row["stage"] for row in told["sessions"]} == {"thinker", "connector-command"}


def test_status_reads_well(filled: connector.Node, run: Run) -> None:
    """Pool, sessions, edges, counters by name."""
    done = run("status")
    assert (done.code, done.err) == (0, "")
    assert "pool      64.0 MiB: used " in done.out
    for word in (
        "largest hole",
        "quarantined",
        "payloads  5 live",
        "puts_refused=",
        "thinker:talker:0",
        "talker:code:2",
    ):
        assert word in done.out


def test_ls_during_churn_shows_no_impossible_number(clean: connector.Node, run: Run) -> None:
    """Payloads come and go under the listing."""
    stop = threading.Event()
    edge = clean.edge("thinker", "talker")

    def churn() -> None:
        number = 0
        while not stop.is_set():
            edge.put(f"c{number}", {"h": torch.zeros(64)})
            if number >= 40:
                clean.abort(f"c{number - 40}")
            number += 1

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        for _ in range(5):
            rows = run("ls", "--json", "--payloads").json()
            serials = [row["serial"] for row in rows]
            assert serials == sorted(set(serials))
            assert all(row["nbytes"] == 256 <= row["length"] and row["age"] >= 0 for row in rows)
            told = run("status", "--json").json()
            assert sum(row["payloads_live"] for row in told["edges"]) == told["summary"]["payloads"]
    finally:
        stop.set()
        writer.join()


def test_ls_answers_when_the_pool_is_full(clean: connector.Node, run: Run) -> None:
    """It needs no room."""
    edge = clean.edge("thinker", "talker")
    edge.put("big", {"h": torch.zeros(40 << 20, dtype=torch.uint8)})
    with pytest.raises(PoolFull):
        edge.put("more", {"h": torch.zeros(40 << 20, dtype=torch.uint8)}, timeout=0.05)
    assert [row.split()[1] for row in run("ls").rows] == ["big"]
