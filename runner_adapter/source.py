"""What an adapter reads by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from connector import ConnectorError
from runner_adapter.inbox import Arrived


class Source(Protocol):
    """Where a stage's input comes from: an Inbox, or one of ranks.py."""

    def pull(self, ready: Iterable[str]) -> Arrived: ...

    def waiting(self, rids: Iterable[str]) -> set[str]: ...

    def failing(self, rids: Iterable[str]) -> dict[str, ConnectorError]: ...

    def wait(self, timeout: float) -> bool: ...

    def begin(self, rid: str) -> None: ...

    def fail(self, rid: str, error: ConnectorError) -> None: ...

    def finish(self, rid: str) -> None: ...
