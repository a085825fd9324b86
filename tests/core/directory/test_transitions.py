"""The two tables: what they list happens, everything else is refused and changes nothing."""

from __future__ import annotations

import itertools
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from connector.core.directory import transitions as tr
from connector.core.directory.transitions import BlockState, ShareState
from connector.core.errors import InvariantBroken

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
VERBS = sorted({verb for _, verb in [*tr.BLOCK_TABLE, *tr.SHARE_TABLE]} | {"", "wake up"})

BLOCKS = {
    (BlockState.RESERVED, "seal"): BlockState.SEALED,
    (BlockState.RESERVED, "return"): BlockState.FREE,
    (BlockState.RESERVED, "writer died"): BlockState.FREE,
    (BlockState.SEALED, "last release"): BlockState.FREE,
}
SHARES = {
    (ShareState.PENDING, "deliver"): ShareState.DELIVERED,
    (ShareState.PENDING, "drop"): ShareState.RELEASED,
    (ShareState.DELIVERED, "take"): ShareState.TAKEN,
    (ShareState.DELIVERED, "release"): ShareState.RELEASED,
    (ShareState.TAKEN, "release"): ShareState.RELEASED,
    (ShareState.DELIVERED, "reader died"): ShareState.PENDING,
    (ShareState.TAKEN, "reader died"): ShareState.PENDING,
}


@pytest.mark.parametrize(("state", "verb"), list(itertools.product(BlockState, VERBS)))
def test_blocks(state: BlockState, verb: str) -> None:
    check(tr.next_block, BLOCKS, state, verb)


@pytest.mark.parametrize(("state", "verb"), list(itertools.product(ShareState, VERBS)))
def test_shares(state: ShareState, verb: str) -> None:
    check(tr.next_share, SHARES, state, verb)


def check(step: Any, table: Any, state: Enum, verb: str) -> None:
    """`step` does what the table says, and refuses the rest by state and verb."""
    if (state, verb) in table:
        assert step(state, verb) is table[(state, verb)]
        return
    with pytest.raises(InvariantBroken) as refused:
        step(state, verb)
    assert refused.value.facts == {"state": state.value, "verb": verb}


def test_nothing_leaves_an_end_state() -> None:
    assert not [key for key in tr.BLOCK_TABLE if key[0] is BlockState.FREE]
    assert not [key for key in tr.SHARE_TABLE if key[0] is ShareState.RELEASED]


def test_the_page_shows_the_tables() -> None:
    """The diagram between the markers of the architecture page is printed from the tables."""
    text = PAGE.read_text()
    shown = text.split("<!-- transitions -->")[1].split("<!-- /transitions -->")[0]
    assert shown.strip() == f"```mermaid\n{tr.diagram()}\n```"


def test_a_session_number_is_used_once(rig: Any) -> None:
    session = rig.join()
    with pytest.raises(InvariantBroken):
        rig.again()
    assert list(rig.state.sessions) == [session]
