"""Which requests there are: who enters, leaves, pauses and comes back in a step. No torch.

Finished requests leave before new ones enter, so one id that is both is two requests (the runner,
`_update_states`). A live request that a step does not schedule, preempted or not, waits and keeps its state.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import connector
from connector import errors

#: Rids looked at for near matches: an error must not cost a walk over all.
NEAR_LIMIT = 500


class StepChange(NamedTuple):
    """What a step changed; all rids once, in the order they were given."""

    #: Finished ones, known here or not: what is kept for them anywhere goes, before `added` enters.
    removed: tuple[str, ...]
    added: tuple[str, ...]
    #: New ones that are live: a further segment of their streaming input.
    resegmented: tuple[str, ...]
    #: Scheduled ones that were live and waiting, and are not in `resegmented`.
    resumed: tuple[str, ...]
    #: Live ones that are not scheduled, in order of arrival.
    waiting: tuple[str, ...]


class Requests:
    """The live requests of a runner, in order of arrival, and which of them the last step scheduled.

    One thread at a time: the model's.
    """

    def __init__(self) -> None:
        self._live: dict[str, None] = {}
        self._active: dict[str, None] = {}
        #: Steps so far.
        self.steps = 0

    def step(
        self, *, finished: Iterable[str] = (), new: Iterable[str] = (), scheduled: Iterable[str] = ()
    ) -> StepChange:
        """Apply a step: `finished` leave, then `new` enter, then `scheduled` run, in batch order.

        Raises UnknownRequest, with near matches, for a scheduled rid that is not live then; UsageError for a rid
        twice in `new` or `scheduled`, or what is not several rids; InvalidPayload for what is no rid. The step
        then changed nothing.
        """
        removed = tuple(dict.fromkeys(rids_of("finished", finished)))
        entering, rows = _once("new", new), _once("scheduled", scheduled)
        gone = set(removed)
        stayed = {rid: None for rid in self._live if rid not in gone}
        live = {**stayed, **dict.fromkeys(entering)}
        for rid in rows:
            if rid not in live:
                raise unknown(rid, live, "a scheduled request is not live: it is not new, or it finished")
        waited = stayed.keys() - self._active.keys() - set(entering)
        self._live, self._active = live, dict.fromkeys(rows)
        self.steps += 1
        return StepChange(
            removed,
            added=tuple(rid for rid in entering if rid not in stayed),
            resegmented=tuple(rid for rid in entering if rid in stayed),
            resumed=tuple(rid for rid in rows if rid in waited),
            waiting=tuple(rid for rid in live if rid not in self._active),
        )

    def is_active(self, rid: str) -> bool:
        """Whether the last step scheduled it."""
        return rid in self._active

    def __contains__(self, rid: object) -> bool:
        return rid in self._live

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def validate(self) -> None:
        """InvariantBroken if the tables contradict each other."""
        strangers = [rid for rid in self._active if rid not in self._live]
        if strangers:
            raise errors.InvariantBroken("scheduled requests are not live", rids=strangers)


def check_rid(rid: object) -> str:
    """A rid as the connector takes it: any str but the empty one, of UTF-8, not too long; InvalidPayload otherwise."""
    if not isinstance(rid, str) or not rid:
        raise errors.InvalidPayload("a rid must be a str, and not empty", rid=repr(rid)[:80])
    return connector.check_rid(rid)


def unknown(rid: str, live: Iterable[str], message: str) -> errors.UnknownRequest:
    """The error for a rid that is not among the live ones; `near` holds up to three that are like it."""
    near = difflib.get_close_matches(rid, list(islice(live, NEAR_LIMIT)), n=3, cutoff=0.6)
    return errors.UnknownRequest(message, rid=rid, near=near or None)


def rids_of(what: str, several: object) -> tuple[str, ...]:
    """The rids that an argument, `what`, gives; UsageError if it is a str or not iterable, and as `check_rid`."""
    if isinstance(several, str):
        raise errors.UsageError(f"`{what}` takes several rids, not one str", rid=several)
    if not isinstance(several, Iterable):
        raise errors.UsageError(f"`{what}` takes several rids, such as a list", given=type(several).__name__)
    return tuple(check_rid(rid) for rid in several)


def _once(what: str, several: Iterable[str]) -> tuple[str, ...]:
    rids = rids_of(what, several)
    if len(set(rids)) < len(rids):
        twice = next(rid for rid in rids if rids.count(rid) > 1)
        raise errors.UsageError(f"a rid stands twice in `{what}` of one step", rid=twice)
    return rids
