"""Tests against genuine engines: scripts/test-engines runs them in .venv-engines; elsewhere nothing is collected."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import connector
from connector import Node

collect_ignore_glob = ["*.py"]

if os.environ.get("TC_ENGINES") == "1":
    collect_ignore_glob = []
    with warnings.catch_warnings():
        # Engines, and what they import, warn while they load; tests are collected with warnings as errors.
        warnings.simplefilter("ignore")
        importlib.import_module("vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the engines warn of is theirs. What a finaliser raises still fails a test."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*"))
            item.add_marker(pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"))
            item.add_marker(pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"))


@pytest.fixture
def broker() -> Iterator[Node]:
    """A private broker, and a node of it that belongs to no stage."""
    with connector.connect(stage="host", embedded=True, pool="64MiB") as node:
        yield node
