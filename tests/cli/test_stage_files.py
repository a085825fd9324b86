"""`connector config check` of engines' files: told apart by content, the same output, and no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
SHIPPED = ["qwen3-omni", "qwen2.5-omni", "qwen3-tts", "transfer-minimal"]

WRONG = """\
stages:
  - stage_id: 0
    engine_args:
      transfer_config:
        enabled: true
        items: [idz]
      runner_adapter: {rank: each}
"""


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_files_are_right(run: Run, name: str) -> None:
    """Each of the models' files."""
    file = ROOT / "configs" / f"{name}.yaml"
    done = run("config", "check", str(file))
    assert (done.code, done.out.splitlines()[0], done.err) == (0, f"{file}: ok", "")


def test_what_each_stage_hands_on_is_told(run: Run, tmp_path: Path) -> None:
    """A stage of which nothing leaves is seen, before its reader waits."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "stages:\n- stage_id: 0\n  engine_args:\n    transfer_config: &c\n      enabled: true\n"
        "      items: [hidden_states, ids]\n"
        "      key_templates: {hidden_states: '{rid}-{layer_id}', ids: '{rid}-{id_type}'}\n"
        "      id_types: [codes.audio]\n- stage_id: talker\n"
    )
    told = [f"{file}: ok", "  stage 0 hands on all layers; id types codes.audio",
            "  stage talker hands nothing on and knows no key: it has no transfer_config"]  # fmt: skip
    assert run("config", "check", str(file)).out.splitlines() == told
    found = run("config", "check", str(file), "--json").json()["stages"]
    assert [f"  stage {stage['stage_id']} {stage['hands_on']}" for stage in found] == told[1:]
    assert [stage["transfer_config"]["id_types"] for stage in found] == [["codes.audio"], None]


def test_a_base_config_is_a_stage_file_s(run: Run, tmp_path: Path) -> None:
    """Its stages are checked by themselves: that is said, and the file is not taken for a broker's."""
    file = tmp_path / "c.yaml"
    file.write_text("base_config: base.yaml\nasync_chunk: true\n")
    done = run("config", "check", str(file))
    note = f"{file}: the stages of its base_config, base.yaml, are not read: check that file, too"
    assert (done.code, done.out, done.err) == (0, f"{file}: ok\n", f"warning: {note}\n")
    told = run("config", "check", str(file), "--json").json()
    assert (told["ok"], told["warnings"], told["stages"]) == (True, [note], [])


def test_a_misspelled_section_makes_no_broker_s_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engine_arg:\n  transfer_config: {enabled: true}\n")
    done = run("config", "check", str(file))
    line = f"error: {file}:1: engine_arg: there is no such section; did you mean 'engine_args'?\n"
    assert (done.code, done.out, done.err) == (1, "", line)
    done = run("config", "show", "--config", str(file))
    line = f"error: {file}:1: engine_arg: there is no such field [field='engine_arg']\n"
    assert (done.code, done.err) == (1, line), "it is no edge_guard"


def test_a_stage_file_is_known_by_what_it_holds(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without stages is a broker's; the broker's variables say nothing of an engine's file."""
    monkeypatch.setenv("CONNECTOR_WINDOW", "none")
    file = tmp_path / "c.yaml"
    for text, code in [
        ("stages: []\n", 0),
        ("stage_args: []\npool: x\n", 0),
        ("engine_args:\n", 0),
        ("pool: 1GiB\n", 1),
    ]:
        file.write_text(text)
        done = run("config", "check", str(file), "--json")
        assert (text, done.code, done.json()["ok"]) == (text, code, code == 0)
    assert done.json()["problems"][0].startswith("CONNECTOR_WINDOW: window: ")


def test_every_problem_of_a_stage_file_is_a_line(run: Run, tmp_path: Path) -> None:
    """Exit code 1; file, line, field and nearest name; as JSON, too."""
    file = tmp_path / "c.yaml"
    file.write_text(WRONG)
    field = "stages.0.engine_args"
    lines = [
        f"{file}:6: {field}.transfer_config.items.0: input should be 'hidden_states' or 'ids', given 'idz'; "
        "did you mean 'ids'?",
        f"{file}:7: {field}.runner_adapter.rank: there is no such field; did you mean 'ranks'?",
    ]
    done = run("config", "check", str(file))
    assert (done.code, done.out, done.err.splitlines()) == (1, "", [f"error: {line}" for line in lines])
    told = run("config", "check", str(file), "--json")
    assert (told.code, told.err) == (1, "")
    facts = {"field": f"{field}.transfer_config.items.0", "nearest": "ids"}
    assert told.json() == {"ok": False, "problems": lines, "facts": facts}


def test_a_good_stage_file_as_json(run: Run, tmp_path: Path) -> None:
    """The same fields as a broker's, and the stages."""
    file = tmp_path / "c.yaml"
    file.write_text("engine_args: {model: x}\n")
    told = run("config", "check", str(file), "--json").json()
    stages = told.pop("stages")
    assert told == {"ok": True, "file": str(file), "problems": [], "warnings": []}
    assert [stage["stage_id"] for stage in stages] == [None]


@pytest.mark.parametrize(
    "command", [["check"], ["migrate"], ["show", "--config"]], ids=["check", "migrate", "a broker's"]
)
def test_a_pipe_is_no_file(run: Run, tmp_path: Path, command: list[str]) -> None:
    """Nobody writes into it: its reader would wait for ever."""
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    line = f"error: {pipe}: cannot be read: it is no regular file"
    done = run("config", *command, str(pipe))
    assert (done.code, done.out, done.err.partition(" [")[0].rstrip()) == (1, "", line)


CHECK = """
import sys
from connector.cli.main import main
codes = [main(["config", "check", file]) for file in sys.argv[1:]]
print("codes", codes, [name for name in ("torch", "zmq") if name in sys.modules])
"""


def test_checking_a_stage_file_loads_no_torch(tmp_path: Path, environment_of: Callable[..., dict[str, str]]) -> None:
    """A right one and a wrong one."""
    wrong = tmp_path / "c.yaml"
    wrong.write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(ROOT / "configs" / "qwen3-omni.yaml"), str(wrong)],
        env=environment_of(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "codes [0, 1] []", done.stderr
