"""A broker for each file of tests, and the command as a test calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import connector
from connector.cli.main import main

ROOT = Path(__file__).parents[2]
#: Hang guard of a child, in seconds.
PATIENCE = 60.0


class Done(NamedTuple):
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[str]:
        """The lines of a plain listing, without its head."""
        return self.out.splitlines()[1:]

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def node() -> Iterator[connector.Node]:
    """The stage `thinker`, with a private broker."""
    with connector.connect(stage="thinker", embedded=True, pool="64MiB") as found:
        yield found


@pytest.fixture
def clean(node: connector.Node) -> Iterator[connector.Node]:
    """A new session of that stage; whatever it leaves live is aborted."""
    with connector.connect(stage="thinker", endpoint=node.endpoint) as found:
        yield found
        # A stream that failed has nothing live, and stands in the way of the next test all the same.
        for rid in sorted({row["rid"] for row in found.payloads()} | {"r", "r1"}):
            found.abort(rid)


@pytest.fixture
def run(node: connector.Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls the command in this process, with the file's broker as the one that is found."""
    for name in [name for name in os.environ if name.startswith("CONNECTOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CONNECTOR_ENDPOINT", node.endpoint)

    def command(*arguments: str) -> Done:
        capsys.readouterr()
        code = main(arguments)
        told = capsys.readouterr()
        return Done(code, told.out, told.err)

    return command


def environment(**more: str) -> dict[str, str]:
    """A child's: this one's without settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CONNECTOR_")}
    return kept | {"PYTHONPATH": str(ROOT)} | more


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command as a process of its own; whatever is left of it at the end is killed."""
    children: list[subprocess.Popen[str]] = []

    def starts(*arguments: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
        command = [sys.executable, "-m", "connector.cli", *arguments]
        children.append(subprocess.Popen(command, env=environment(**(env or {})), cwd=ROOT, **how))
        return children[-1]

    yield starts
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait(PATIENCE)
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def environment_of() -> Callable[..., dict[str, str]]:
    return environment
