"""Listings of what is many: pages that never stall the broker's loop."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import connector

Run = Callable[..., Any]
PAYLOADS, KEYS = 200, 1000


@pytest.fixture(scope="module")
def node() -> Iterator[connector.Node]:
    """200 000 live keys."""
    payload = {f"layer.{number:04}": torch.full((1,), number) for number in range(KEYS)}
    with connector.connect(stage="thinker", embedded=True, pool="64MiB", put_timeout=60.0) as found:
        edge = found.edge("thinker", "talker")
        for start in range(0, PAYLOADS, 10):
            edge.put_many({f"r{start + i}": payload for i in range(10)}, last=True)
        found.flush(60.0)
        yield found


def test_ls_prints_every_one_of_200_000_keys(node: connector.Node, run: Run) -> None:
    """In the order of the puts."""
    done = run("ls", "--timeout", "60")
    assert (done.code, done.err) == (0, "")
    assert len(done.rows) == PAYLOADS * KEYS
    seen = [tuple(row.split()[1:4:2]) for row in done.rows]
    assert seen == [(f"r{rid}", f"layer.{key:04}") for rid in range(PAYLOADS) for key in range(KEYS)]


def test_a_page_has_at_most_1000_keys_or_one_payload(node: connector.Node) -> None:
    """Payloads are never cut: two of 600 keys are two pages, and one of 3000 is one."""
    edge = node.edge("thinker", "wide")
    for rid, count in (("a", 600), ("b", 600), ("c", 400), ("d", 3000), ("e", 1)):
        edge.put(rid, {f"k{number}": torch.zeros(1) for number in range(count)})
    node.flush(60.0)
    wide = [[row["rid"] for row in page] for page in node.pages(edge="thinker:wide")]
    assert [page for page in wide if page] == [["a"], ["b", "c"], ["d"], ["e"]]
    sizes = [(len(page), sum(len(row["tensors"]) for row in page)) for page in node.pages()]
    assert all(keys <= 1000 or count == 1 for count, keys in sizes)
    assert sum(keys for _, keys in sizes) == PAYLOADS * KEYS + 4601
    for rid in "abcde":
        node.abort(rid)


def test_a_filter_that_hides_all_but_a_little_costs_many_short_pages_not_one_long(node: connector.Node) -> None:
    """What a filter hides counts as looked at."""
    pages = list(node.pages(key_prefix="layer.0999"))
    assert [row["tensors"][0][0] for page in pages for row in page] == ["layer.0999"] * PAYLOADS
    assert len(pages) >= PAYLOADS
    assert [row for page in node.pages(key_prefix="nothing") for row in page] == []


def test_a_closed_pipe_is_quiet(node: connector.Node, start: Callable[..., subprocess.Popen[str]]) -> None:
    """`connector ls | head` ends without a word: what is printed exceeds what any pipe holds."""
    child = start("ls", "--timeout", "60", env={"CONNECTOR_ENDPOINT": node.endpoint})
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline().startswith("EDGE"), child.stderr.read()
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait(60.0) == 141


def test_limit_asks_for_no_more_pages_than_it_needs(node: connector.Node, run: Run) -> None:
    """Nor does it hold more."""
    rows = run("ls", "--limit", "1500", "--json").json()
    assert [rows[0]["rid"], rows[-1]["rid"], len(rows)] == ["r0", "r1", 1500]
