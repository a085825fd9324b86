"""The grammar of KEY."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.cli.naming import Target, parse
from connector.core.errors import InvalidPayload
from connector.core.names import MAX_INDEX, Edge

stages = st.text(st.characters(exclude_characters=":/", exclude_categories=["Cs"]), min_size=1, max_size=20)
rids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(stages, stages, st.integers(0, MAX_INDEX), rids, st.integers(0, MAX_INDEX))
def test_a_whole_key_is_read_back_whatever_the_rid(a: str, b: str, replica: int, rid: str, index: int) -> None:
    """Edge and index are found from the outside."""
    target = Target(Edge(a, b, replica), rid, index)
    assert parse(str(target)) == target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("r1", Target(None, "r1", None)),
        ("r1[0]", Target(None, "r1", 0)),
        ("r1[00]", Target(None, "r1[00]", None)),
        ("r1[-1]", Target(None, "r1[-1]", None)),
        ("r1[1][2]", Target(None, "r1[1]", 2)),
        ("[3]", Target(None, "[3]", None)),
        ("a/b", Target(None, "a/b", None)),
        ("a:b", Target(None, "a:b", None)),
        ("a:b/r", Target(Edge("a", "b", 0), "r", None)),
        ("a:b:7/r/x[2]", Target(Edge("a", "b", 7), "r/x", 2)),
        ("a:b:x/r", Target(None, "a:b:x/r", None)),
        (":b/r", Target(None, ":b/r", None)),
        ("r\n[1]", Target(None, "r\n", 1)),
    ],
)
def test_keys(text: str, target: Target) -> None:
    """What looks like no edge or no index belongs to the rid."""
    assert parse(text) == target


@pytest.mark.parametrize("text", ["", "a:b/", f"r[{MAX_INDEX + 1}]", "x" * 1025])
def test_what_is_no_key(text: str) -> None:
    """An empty or too long rid, an index that no chunk has."""
    with pytest.raises(InvalidPayload):
        parse(text)
