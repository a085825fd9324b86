"""Kind I: what is said on the command line has its effect, and wins."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from connector.cli.main import main

Show = Callable[[list[str], dict[str, str]], dict[str, dict[str, object]]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """What `connector config show` says of each field: value and source."""

    def run(arguments: list[str], env: dict[str, str]) -> dict[str, dict[str, object]]:
        for name in [name for name in os.environ if name.startswith("CONNECTOR_")]:
            monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        assert main(["config", "show", "--json", *arguments]) == 0
        fields: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)["fields"]
        return fields

    return run


@pytest.mark.parametrize("in_file", [None, "human", "json"])
@pytest.mark.parametrize("in_env", [None, "human", "json"])
@pytest.mark.parametrize("on_line", [None, "human", "json"])
def test_b89_not_given_differs_from_given(
    show: Show, tmp_path: Path, in_file: str | None, in_env: str | None, on_line: str | None
) -> None:
    """A two-valued setting, unset or either way at each of three places: the strongest that was given counts."""
    file = tmp_path / "broker.yaml"
    file.write_text(f"log_format: {in_file}\n" if in_file else "")
    arguments = ["--config", str(file), *(["--set", f"log_format={on_line}"] if on_line else [])]
    field = show(arguments, {"CONNECTOR_LOG_FORMAT": in_env} if in_env else {})["log_format"]
    assert field["value"] == (on_line or in_env or in_file or "human")
    source = str(field["source"])
    if on_line:
        assert source == "command line"
    elif in_env:
        assert "CONNECTOR_LOG_FORMAT" in source
    elif in_file:
        assert source.startswith(f"file {file}:1")
    else:
        assert source == "default"


def test_b90_the_command_line_wins_over_the_file(show: Show, tmp_path: Path) -> None:
    """1 GiB in the file, 2 GiB on the command line: 2 GiB, and the source is told."""
    file = tmp_path / "broker.yaml"
    file.write_text("pool: 1GiB\nwindow: 7\n")
    fields = show(["--config", str(file), "--pool", "2GiB"], {"CONNECTOR_WINDOW": "9"})
    assert (fields["pool"]["value"], fields["pool"]["source"]) == (2 << 30, "command line")
    assert fields["window"]["value"] == 9
