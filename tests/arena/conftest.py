"""Uuids whose segments must be gone at the test's end, arenas on them, and child processes."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from connector.arena.arena import Arena, create_arena

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def left_behind(uuid: str) -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if uuid in name)


@pytest.fixture
def new_uuid() -> Iterator[Callable[[], str]]:
    """A maker of uuids; the test fails if a segment of one is left."""
    made: list[str] = []

    def make() -> str:
        made.append(secrets.token_hex(16))
        return made[-1]

    yield make
    left = [name for uuid in made for name in left_behind(uuid)]
    for name in left:
        os.unlink(f"/dev/shm/{name}")
    assert left == []


@pytest.fixture
def uuid(new_uuid: Callable[[], str]) -> str:
    return new_uuid()


@pytest.fixture
def new_arena(new_uuid: Callable[[], str]) -> Iterator[Callable[..., Arena]]:
    """A maker of arenas of `size` bytes, unlinked and closed at the end."""
    made: list[Arena] = []

    def make(size: int = MIB) -> Arena:
        made.append(create_arena(new_uuid(), size, epoch=1))
        return made[-1]

    yield make
    for arena in made:
        arena.unlink()
        arena.close()


@pytest.fixture
def arena(new_arena: Callable[..., Arena]) -> Arena:
    return new_arena()


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts python on a script with arguments; its stdout and stdin are pipes. Killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
