"""How a node behaves in its own process: `connect`'s arguments, or the environment's word where they say nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from connector.core.errors import UsageError

#: Longest spin, in seconds: who spins longer had better not sleep at all.
MOST_SPIN = 1.0


class Options(NamedTuple):
    """`readonly`: takes are mapped without write access. `page_lock`: the pool's pages are page-locked. `spin`: seconds
    that a wait looks again and again before it sleeps."""

    readonly: bool = False
    page_lock: bool = False
    spin: float = 0.0


def options(
    readonly: bool | None, page_lock: bool | None, spin: float | None, env: Mapping[str, str] = os.environ
) -> Options:
    """What was asked for. UsageError: no seconds of a spin."""
    if readonly is None:
        readonly = env.get("CONNECTOR_READONLY_TAKES", "") == "1"
    if page_lock is None:
        page_lock = env.get("CONNECTOR_PAGE_LOCK", "") == "1"
    return Options(readonly, page_lock, _seconds(env.get("CONNECTOR_SPIN") or 0.0 if spin is None else spin))


def _seconds(value: object) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = -1.0
    if isinstance(value, bool) or not 0.0 <= seconds <= MOST_SPIN:
        raise UsageError("spin (or $CONNECTOR_SPIN) is seconds", spin=repr(value)[:40], limit=MOST_SPIN)
    return seconds
