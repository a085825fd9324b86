"""Requests that failed: each is told to the other stages once, and to the runner once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Protocol

from connector import ConnectorError, errors

logger = logging.getLogger("runner_adapter")

#: Characters of an error that the other stages are told.
MOST_TOLD = 1000


class Input(Protocol):
    """What of an Inbox is told of a failure."""

    def fail(self, rid: str, error: ConnectorError) -> None: ...


class Failing:
    """The first error of each request that failed, until it is finished.

    `abort` ends a request everywhere and returns or raises as `Node.abort` does; None where there is no other stage.
    """

    def __init__(self, inbox: Input | None, abort: Callable[[str, str], object] | None) -> None:
        self._inbox, self._abort = inbox, abort
        #: By rid. Who writes here calls `settle`.
        self.errors: dict[str, Exception] = {}
        #: Those that the other stages were told of, those that had ended there already, and those told to the runner.
        self._settled: set[str] = set()
        self._ended: set[str] = set()
        self._told: set[str] = set()

    def __contains__(self, rid: object) -> bool:
        return rid in self.errors

    def add(self, rid: str, error: Exception, *, ended: bool = False) -> None:
        """The request failed; of several errors the first stays. `ended`: it is aborted already, and another abort
        could meet the next use of the rid."""
        self.errors.setdefault(rid, error)
        if ended:
            self._ended.add(rid)
        self.settle()

    def settle(self) -> None:
        """Tell the other stages of those that failed since the last call."""
        for rid in [rid for rid in self.errors if rid not in self._settled]:
            self._settled.add(rid)
            error = self.errors[rid]
            reason = f"{type(error).__name__}: {error}"[:MOST_TOLD]
            logger.error("request failed: rid=%r %s", rid, reason)
            if self._inbox is not None:
                # Of what is aborted an inbox finishes nothing: that could be the next request's.
                self._inbox.fail(rid, errors.RequestAborted(reason, rid=rid))
            if self._abort is not None and rid not in self._ended:
                try:
                    self._abort(rid, reason)
                except errors.BrokerLost as lost:
                    logger.warning("the other stages hear when the broker is back: rid=%r %s", rid, str(lost))

    def fresh(self, live: Container[str]) -> dict[str, Exception]:
        """Those of the live requests that it has not given before."""
        found = {rid: error for rid, error in self.errors.items() if rid not in self._told and rid in live}
        self._told |= found.keys()
        return found

    def forget(self, rid: str) -> None:
        """The request is finished: the rid may be another's."""
        self._settled.discard(rid)
        self._ended.discard(rid)
        self._told.discard(rid)
        self.errors.pop(rid, None)
