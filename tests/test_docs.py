"""What README and docs show works, and what they link to is there."""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_s_example_runs() -> None:
    """The ten lines, as a user would paste them."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{i} tensor([[{i}., {i}., {i}., {i}.]])" for i in range(3)]
    assert done.stderr == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file of the project."""
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def pasted(page: Path) -> list[str]:
    """Examples that begin with an import, as one that is to be pasted does; others are parts of one."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return [block for block in blocks if re.match(r"import |from ", block)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_compile_and_what_they_import_is_there(page: Path) -> None:
    """The names of this project; an engine's are looked for in tests/engines."""
    for block in pasted(page):
        for node in ast.walk(ast.parse(block, page.name)):
            if isinstance(node, ast.Import):
                names = [(found.name, None) for found in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(str(node.module), found.name) for found in node.names]
            else:
                continue
            for module, name in names:
                if module.partition(".")[0] in ("connector", "runner_adapter"):
                    found = importlib.import_module(module)
                    assert name is None or hasattr(found, name), f"{module} has no {name}"


BEGINNINGS = ["README.md", "docs/use-with-your-runner.md", "docs/engine-transformers.md", "docs/engine-vllm.md"]


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_page_s_first_example_names_nothing_that_it_has_not_made(name: str) -> None:
    """It can be pasted."""
    first = re.search(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert first is not None
    made, used = set(dir(builtins)), set()
    for node in ast.walk(ast.parse(first[1], name)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    assert used - made == set()


@pytest.mark.parametrize("script", ["demo", "test", "lint", "setup-venv", "bench", "mutate"])
def test_scripts_can_be_run(script: str) -> None:
    """They are executable, and so after a clone."""
    assert os.access(ROOT / "scripts" / script, os.X_OK)
