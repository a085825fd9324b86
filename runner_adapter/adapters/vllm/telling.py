"""What a runner and its scheduler tell each other: who waits to begin, whose input is there, and who failed.

vLLM has no word for any of it in what they give each other (`ModelRunnerOutput`, `SchedulerOutput`): `failed_recving`
of a KV connector, the nearest, is heard for requests that wait for its blocks only. So they are attributes of these
objects, which travel with them, whatever processes the two are in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: Of a runner's output: why requests failed, by the engine's ids; and `Fed`, if it reads and was asked.
FAILURES, FED = "adapter_failures", "adapter_fed"
#: Of a scheduler's output: the requests, `Asked`, that wait to begin and were not told of before; and which it is.
ASKED, MADE = "adapter_asked", "adapter_made"
#: Characters of an error that clients are told.
MOST_TOLD = 1000


class Asked(NamedTuple):
    """A request that has not run yet, as `external_id` is given it."""

    req_id: str
    external_req_id: str | None


class Fed(NamedTuple):
    """Requests, by the engine's ids, whose next input is there; and those whose input has come whole."""

    here: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()


def tell(output: Any, failed: Mapping[str, Exception], fed: Fed | None) -> Any:
    """A runner's output that tells who failed, by the engine's ids, and who is fed; the same object if there is nothing
    to tell. One that is still being copied from the device tells it when it is there."""
    told: dict[str, Any] = {}
    if failed:
        told[FAILURES] = {one: f"{type(error).__name__}: {error}"[:MOST_TOLD] for one, error in failed.items()}
    if fed is not None:
        told[FED] = fed
    if not told:
        return output
    get: Callable[[], Any] | None = getattr(output, "get_output", None)
    if get is not None:
        output.get_output = lambda: _marked(get(), told)
        return output
    return _marked(output, told)


def _marked(output: Any, told: Mapping[str, Any]) -> Any:
    # A copy: an empty output is one object for all steps.
    output = copy.copy(output)
    for name, value in told.items():
        setattr(output, name, value)
    return output
