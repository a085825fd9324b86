"""`connector config migrate`: where the new file goes, what is told, and that `config check` takes what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector.cli.docs import PAGES
from connector.cli.main import main

ROOT = Path(__file__).parents[2]
OLD = """\
# Two stages.
stages:
  - stage_id: 0  # the talker
    devices: "0"
  - stage_id: 1
    devices: "0"
"""
BY_PIPELINE = (
    "stage 0: a transfer_config, from its pipeline; what its hook made of the output, the runner gives beside it"
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(OLD)
    return file


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, list[str]]:
    code = main(["config", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def test_the_new_file_is_printed_and_what_was_done_is_told(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, "migrate", old, "--pipeline", "qwen3_tts")
    assert code == 0
    assert [line for line in out.splitlines() if line in OLD.splitlines()] == OLD.splitlines()
    assert out.count("transfer_config:") == 2
    assert err == [
        f"done: {old}:3: {BY_PIPELINE}",
        f"done: {old}:5: stage 1: a transfer_config, from its place: it only reads",
    ]
    assert old.read_text() == OLD


def test_the_new_file_is_written_and_check_takes_it(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = old.with_name("new.yaml")
    printed = told(capsys, "migrate", old, "--pipeline", "qwen3_tts")[1]
    code, out, _ = told(capsys, "migrate", old, "--pipeline", "qwen3_tts", "--out", new)
    assert (code, out, new.read_text()) == (0, "", printed)
    code, out, err = told(capsys, "check", new)
    assert (code, out.splitlines()[0], len(out.splitlines()), err) == (0, f"{new}: ok", 3, [])


def test_what_could_not_be_told_is_1_with_its_lines(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the file is written all the same."""
    new = old.with_name("new.yaml")
    code, _, err = told(capsys, "migrate", old, "--out", new)
    assert code == 1
    assert err == [
        f"done: {old}:5: stage 1: a transfer_config, from its place: it only reads",
        f"to do: {old}:3: stage 0: nothing says what it sends: name the pipeline, or write a transfer_config",
    ]
    assert new.read_text().count("transfer_config:") == 1


@pytest.mark.parametrize("named", [True, False], ids=["nothing to do", "something"])
def test_json_tells_the_same(old: Path, capsys: pytest.CaptureFixture[str], run: Any, named: bool) -> None:
    pipeline = ["--pipeline", "qwen3_tts"] if named else []
    text = told(capsys, "migrate", old, *pipeline)[1]
    done = run("config", "migrate", str(old), "--json", *pipeline)
    by_place = {"line": 5, "text": "stage 1: a transfer_config, from its place: it only reads"}
    by_pipeline = {
        "line": 3,
        "text": BY_PIPELINE,
    }
    unsaid = "stage 0: nothing says what it sends: name the pipeline, or write a transfer_config"
    assert done.code == (0 if named else 1)
    assert done.json() == {
        "ok": named,
        "file": str(old),
        "out": None,
        "text": text,
        "written": [by_pipeline, by_place] if named else [by_place],
        "unsaid": [] if named else [{"line": 3, "text": unsaid}],
    }


def test_json_beside_a_file_leaves_the_text_out(old: Path, run: Any) -> None:
    new = old.with_name("new.yaml")
    done = run("config", "migrate", str(old), "--json", "--out", str(new))
    assert done.json()["out"] == str(new)
    assert "text" not in done.json()
    assert new.exists()


def test_line_ends_stay(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old.write_bytes(OLD.replace("\n", "\r\n").encode())
    new = old.with_name("new.yaml")
    told(capsys, "migrate", old, "--out", new)
    assert new.read_bytes().count(b"\r\n") == new.read_bytes().count(b"\n") > OLD.count("\n")


def test_a_file_that_is_there_is_not_overwritten(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The old one is the way back."""
    code, out, err = told(capsys, "migrate", old, "--out", old)
    assert (code, out) == (2, "")
    assert err == [f"error: --out names a file that is there already [file={str(old)!r}]"]
    assert old.read_text() == OLD


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, ": there is no such file"),
        (b"\xff", ":1: this is not UTF-8 [byte=0]"),
        (b"pool: 1GiB\n", ":1: this is no stage config: it has none of stages, stage_args, engine_args, base_config"),
    ],
    ids=["no file", "no text", "a broker's"],
)
def test_what_is_no_stage_config_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, problem: str
) -> None:
    file, new = tmp_path / "x.yaml", tmp_path / "new.yaml"
    if content is not None:
        file.write_bytes(content)
    code, out, (line,) = told(capsys, "migrate", file, "--out", new)
    assert (code, out, line.removesuffix(f" [file={str(file)!r}]")) == (1, "", f"error: {file}{problem}")
    assert not new.exists()


def test_a_new_file_that_cannot_be_written_is_1(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = old.parent / "no" / "new.yaml"
    code, out, err = told(capsys, "migrate", old, "--out", new)
    assert (code, out, err) == (1, "", [f"error: {new}: cannot be written: No such file or directory"])


def test_a_pipeline_that_is_not_known_is_2(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, "migrate", old, "--pipeline", "qwen4")
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith("error: this pipeline is not known [pipeline='qwen4' known=['arktts', ")


def test_it_loads_no_torch(old: Path, environment_of: Callable[..., dict[str, str]]) -> None:
    program = (
        "import sys\n"
        "from connector.cli.main import main\n"
        "code = main(['config', 'migrate', sys.argv[1], '--pipeline', 'qwen3_tts', '--json'])\n"
        "print(code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, os.fspath(old)],
        env=environment_of(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr


def test_the_page_tells_of_it() -> None:
    _, section = PAGES["cli"]().split("\n## connector config migrate\n")
    section = section.split("\n## ")[0]
    assert all(f"| `{option}" in section for option in ("--out", "--pipeline", "--json"))
