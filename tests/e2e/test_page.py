"""The example of docs/use-with-your-runner.md works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_page_runs() -> None:
    """As a user would paste it; it prints what the page says."""
    page = (ROOT / "docs" / "use-with-your-runner.md").read_text()
    (code,) = re.findall(r"```python\n(import .*?)```", page, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[[0.0, 0.0]]", "[[1.0, 1.0]]", "[[2.0, 2.0]]"]
    assert all(f"`{line}`" in page for line in done.stdout.splitlines())
    assert done.stderr == ""
