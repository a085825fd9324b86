"""A broker, and connectors of it as two stages of vLLM-Omni have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import connector
from connector import Node
from runner_adapter.adapters.vllm_omni.bridge import OmniBridge


@pytest.fixture(scope="module")
def broker() -> Iterator[Node]:
    with connector.connect(stage="host", embedded=True, pool="32MiB") as node:
        yield node


@pytest.fixture
def made(broker: Node) -> Iterator[Callable[..., OmniBridge]]:
    """Makes connectors of the broker; closes them, and ends what they left."""
    bridges: list[OmniBridge] = []

    def make(stage_id: int = 0, **extra: Any) -> OmniBridge:
        bridges.append(OmniBridge({"endpoint": broker.endpoint, "stage_id": stage_id, **extra}))
        return bridges[-1]

    yield make
    for bridge in bridges:
        bridge.close()
    for rid in {row["rid"] for row in broker.payloads()}:
        broker.abort(rid)


@pytest.fixture
def pair(made: Callable[..., OmniBridge]) -> tuple[OmniBridge, OmniBridge]:
    """A sending and a receiving stage's connector."""
    return made(0), made(1)
