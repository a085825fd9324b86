"""docs/reliability.md is true: every entry is answered, and the tests that it names exist and passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability_table import FAULTS, IN_WORDS, MOST_IN_WORDS, answers, render

ROOT = Path(__file__).parent.parent


def test_every_entry_is_answered() -> None:
    """By a test, or in words, never both; and at most ten in words."""
    tests = answers()
    assert set(FAULTS) - set(tests) == set(IN_WORDS)
    assert len(IN_WORDS) <= MOST_IN_WORDS


def test_the_page_is_what_the_tests_say() -> None:
    """docs/reliability.md as the table writes it now."""
    assert (ROOT / "docs/reliability.md").read_text() == render()


def test_the_tests_named_passed(request: pytest.FixtureRequest, passed_tests: set[str]) -> None:
    """Each test that this run selected and that the page names was run, and passed. Runs last."""
    selected = {item.nodeid.partition("[")[0] for item in request.session.items}
    named = {name for names in answers().values() for name in names}
    ran = {name.partition("[")[0] for name in passed_tests}
    assert (named & selected) - ran == set()
