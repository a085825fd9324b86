"""Every mutation patch names a promise and tests that are there, and applies. `scripts/mutate` runs them."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load() -> ModuleType:
    """The runner's own reading of patches: scripts are no package."""
    spec = util.spec_from_file_location("mutation_patches", ROOT / "scripts/mutate_job/patches.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


patches = _load()
NAMES: list[str] = patches.all_names()
#: Each of these words begins the promise of at least one patch.
PROMISES = (
    """
1 bits, 2 order, 2 once, 2 attempts, 3 failures travel, 3 deadlines, 4 no silent gap, 5 lives, 6 room, 7 death,
8 no reuse by time, 9 clean, Readers, Liveness, 4a, 5 hot path, Rooms, Wire, 9 security,
copy-on-gather, Failures, Hand-over, Hooks, Migration, Names, PR, Staging, packed rows, vLLM-Omni
""".replace("\n", " ")
    .strip()
    .split(", ")
)
#: docs/points.md: what a runner adapter must not leave out.
FIFTEEN = tuple(f"{number} of fifteen" for number in range(1, 16))


def fault(name: str) -> str:
    """What is wrong with a patch, "" if nothing: a patch that breaks the tree, too, proves nothing."""
    try:
        patch = patches.read(name, ROOT)
        for path, text in patches.changed(patch, ROOT).items():
            ast.parse(text, str(path))
    except (patches.PatchError, SyntaxError) as error:
        return f"does not apply: {error}"
    missing = [test for test in patch.tests if not patches.has_test(test, ROOT)]
    return f"names what is no test: {missing}" if missing else ""


def test_every_patch_applies_and_names_tests_that_are_there() -> None:
    faults = {name: fault(name) for name in NAMES}
    assert {name: what for name, what in faults.items() if what} == {}


def test_every_promise_has_a_patch() -> None:
    told = [patches.read(name, ROOT).promise for name in NAMES]
    assert [word for word in (*PROMISES, *FIFTEEN) if not any(promise.startswith(word) for promise in told)] == []


def test_a_patch_takes_out_of_the_product_not_of_its_tests() -> None:
    touched = {path for name in NAMES for path in patches.read(name, ROOT).files}
    assert {path for path in touched if not path.startswith(("connector/", "runner_adapter/"))} == set()


HEADER = "# promise: p\n# test: tests/test_mutations.py::test_every_promise_has_a_patch\n"
DIFF = "--- a/f.py\n+++ b/f.py\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / patches.FOLDER).mkdir(parents=True)
    return tmp_path


def write(tree: Path, text: str) -> None:
    (tree / patches.FOLDER / "m.patch").write_text(text)


def test_a_hunk_goes_where_its_lines_stand_whatever_their_number(tree: Path) -> None:
    write(tree, HEADER + DIFF)
    (tree / "f.py").write_text("zero\nzero\none\ntwo\nfour\n")
    assert patches.changed(patches.read("m", tree), tree) == {tree / "f.py": "zero\nzero\none\nthree\nfour\n"}


@pytest.mark.parametrize("text", ["one\n", "zone\ntwo\n", "one\ntwo\none\ntwo\n", None], ids=str)
def test_lines_that_do_not_stand_there_once_do_not_apply(tree: Path, text: str | None) -> None:
    """Gone, a part of a longer line, twice, and no such file."""
    write(tree, HEADER + DIFF)
    if text is not None:
        (tree / "f.py").write_text(text)
    with pytest.raises(patches.PatchError):
        patches.changed(patches.read("m", tree), tree)


@pytest.mark.parametrize(
    "text",
    [DIFF, HEADER, HEADER.splitlines(keepends=True)[0] + DIFF, HEADER + "oops\n" + DIFF, HEADER + DIFF[:-7] + "+two\n"],
    ids=["no headers", "no diff", "no test", "a stray line", "nothing changed"],
)
def test_a_malformed_patch_is_refused(tree: Path, text: str) -> None:
    write(tree, text)
    with pytest.raises(patches.PatchError):
        patches.read("m", tree)


@pytest.mark.parametrize(
    ("test", "there"),
    [
        ("tests/test_mutations.py::test_a_malformed_patch_is_refused[no diff]", True),
        ("tests/client/test_contract_sync.py::TestBlocking::test_a_take_waits_for_its_put", True),
        ("tests/test_mutations.py::test_that_is_not_there", False),
        ("tests/client/test_contract_sync.py::TestBlocking", False),
        ("tests/no_such_file.py::test_x", False),
        ("tests/test_mutations.py", False),
    ],
)
def test_a_named_test_is_looked_for(test: str, there: bool) -> None:
    assert patches.has_test(test, ROOT) is there


def test_the_list_is_printed_from_any_folder(tmp_path: Path) -> None:
    """With each patch, what it takes out, and the tests."""
    job = str(ROOT / "scripts/mutate_job/main.py")
    done = subprocess.run([sys.executable, job, "--list"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f" {name} " in done.stdout for name in NAMES)
