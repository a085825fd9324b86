"""docs/cli.md and docs/errors.md tell what the command and the error tree are."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector.cli.docs import PAGES
from connector.core.errors import BY_CODE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_page_is_up_to_date(name: str) -> None:
    """`python -m connector.cli.docs NAME > docs/NAME.md` when this fails."""
    assert (ROOT / "docs" / f"{name}.md").read_text() == PAGES[name]()


def test_every_error_has_a_row_and_somebody_whose_fault_it_is() -> None:
    """But for the base of all."""
    rows = [line.split(" | ") for line in PAGES["errors"]().splitlines() if line.startswith("| `")]
    assert [row[0].strip("|` ") for row in rows] == list(BY_CODE)
    assert [row[0] for row in rows if not row[2].strip()] == ["| `ConnectorError`"]


@pytest.mark.parametrize(
    "verb", ["serve", "status", "ls", "show", "rm", "abort", "sweep", "config check", "config show"]
)
def test_every_verb_has_json(verb: str) -> None:
    """And stands in the page."""
    _, section = PAGES["cli"]().split(f"\n## connector {verb}\n")
    assert "| `--json` |" in section.split("\n## ")[0]
