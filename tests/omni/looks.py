"""What the tests look at: what comes, what lies at the broker, who waits there."""

from __future__ import annotations

import time
from typing import Any

from connector import Node
from runner_adapter.adapters.vllm_omni import hub
from runner_adapter.adapters.vllm_omni.bridge import OmniBridge

#: Seconds after which something hangs.
HANG = 20.0


def other_process(broker: Node) -> hub.Hub:
    """A second hub: sessions of its own, as another process has."""
    return hub.Hub(broker.endpoint, "other")


def got(bridge: OmniBridge, key: str, edge: tuple[str, str] = ("0", "1")) -> Any:
    """The key's data, polled for as vLLM-Omni does."""
    until = time.monotonic() + HANG
    while time.monotonic() < until:
        found = bridge.get(*edge, key)
        if found is not None:
            return found[0]
    raise AssertionError(f"nothing came for {key}")


def unread(broker: Node) -> list[str]:
    return sorted(row["rid"] for row in broker.payloads())


def waiting_takes(broker: Node) -> int:
    return sum(session["waiting_takes"] for session in broker.status("sessions")["sessions"])
