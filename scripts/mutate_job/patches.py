"""Mutation patches: their headers and hunks, put into a tree, and the tests that they name.

A patch begins with `# promise: TEXT` and one or more `# test: ID [ID ...]` lines; a unified diff follows,
its paths relative to the project's root. Line numbers are not looked at: a hunk belongs where its old
lines stand, and they must stand there once.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/mutations"


class PatchError(Exception):
    """The patch is malformed, or its old lines do not stand in the file exactly once."""


class Hunk(NamedTuple):
    """Whole lines, with their line ends: what stands there, and what shall."""

    old: str
    new: str


class Patch(NamedTuple):
    """`tests`: pytest ids. `files`: hunks by path, in their order."""

    name: str
    promise: str
    tests: tuple[str, ...]
    files: dict[str, list[Hunk]]


def all_names(root: Path = ROOT) -> list[str]:
    """The patches there are, sorted."""
    return sorted(path.stem for path in (root / FOLDER).glob("*.patch"))


def read(name: str, root: Path = ROOT) -> Patch:
    """The patch of this name. PatchError: a header or the diff is missing or malformed."""
    lines = (root / FOLDER / f"{name}.patch").read_text().splitlines(keepends=True)
    promises: list[str] = []
    tests: list[str] = []
    files: dict[str, list[Hunk]] = {}
    path = ""
    for number, line in enumerate(lines, 1):
        if line.startswith("# promise:"):
            promises.append(line.removeprefix("# promise:").strip())
        elif line.startswith("# test:"):
            tests += line.removeprefix("# test:").split()
        elif line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/").strip()
            files[path] = []
        elif line.startswith("@@ ") and path:
            files[path].append(Hunk("", ""))
        elif line[0] in " +-" and not line.startswith("--- ") and path and files[path]:
            old, new = files[path][-1]
            old += line[1:] if line[0] in " -" else ""
            new += line[1:] if line[0] in " +" else ""
            files[path][-1] = Hunk(old, new)
        elif not line.startswith(("--- a/", "#")):
            raise PatchError(f"line {number} is no header and no part of a diff: {line.rstrip()!r}")
    if len(promises) != 1 or not promises[0] or not tests:
        raise PatchError("a patch needs one `# promise:` line and a `# test:` line")
    if not files or any(not hunk.old or hunk.old == hunk.new for hunks in files.values() for hunk in hunks):
        raise PatchError("a patch needs a diff, and each hunk old lines that it changes")
    return Patch(name, promises[0], tuple(tests), files)


def changed(patch: Patch, root: Path) -> dict[Path, str]:
    """The texts of the patched files, by their place in `root`. PatchError if a hunk does not apply."""
    texts: dict[Path, str] = {}
    for name, hunks in patch.files.items():
        file = root / name
        if not file.is_file():
            raise PatchError(f"{name} is not there")
        # Behind a newline each, so that a hunk's first line is a whole one.
        text = "\n" + file.read_text()
        for hunk in hunks:
            # Overlapping ones, too: two matches share the newline between them.
            found = len(re.findall(f"(?={re.escape(chr(10) + hunk.old)})", text))
            if found != 1:
                first = hunk.old.splitlines()[0].strip()
                raise PatchError(f"{name}: the lines from {first!r} stand there {found} times, not once")
            text = text.replace("\n" + hunk.old, "\n" + hunk.new)
        texts[file] = text[1:]
    return texts


def has_test(test: str, root: Path = ROOT) -> bool:
    """Whether the pytest id names a test function, or a test method of a class or of a contract that it inherits."""
    path, *names = test.split("[")[0].split("::")
    file = root / path
    if not file.is_file() or not names:
        return False
    body = _body(file)
    for place, name in enumerate(names):
        found = next(
            (node for node in body if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name == name), None
        )
        if isinstance(found, ast.ClassDef):
            body = [*found.body, *(_contract(root) if found.bases else [])]
        elif found is None:
            return False
        else:
            return place == len(names) - 1
    return False


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def _body(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text()).body


@cache
def _contract(root: Path) -> list[ast.stmt]:
    """What the classes of the shipped contract suites hold."""
    modules = [_body(path) for path in sorted((root / "connector/testing/contracts").glob("*.py"))]
    classes = [node for module in modules for node in module if isinstance(node, ast.ClassDef)]
    return [node for one in classes for node in one.body]
