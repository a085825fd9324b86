"""What an adapter closes with itself."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from connector import errors


class Owner:
    """Closes what it owns when it is closed, or left as a context manager; it owns nothing at first."""

    def __init__(self) -> None:
        self._owned = ExitStack()
        self._closed = False

    def owns(self, stack: ExitStack) -> None:
        """What `close` closes: nodes and an outbox that were made for this adapter."""
        self._owned = stack

    def close(self) -> None:
        """Close what the adapter owns (`connect_adapter`); what it was given stays open. Idempotent."""
        self._closed = True
        self._owned.close()

    def check_open(self) -> None:
        """ClientClosed if it was closed, and what it owns with it."""
        if self._closed:
            raise errors.ClientClosed("the adapter was closed", adapter=type(self).__name__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
