"""A request's two ids: the engine's own, and the rid, which is the same in all stages."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from connector import ConnectorError, errors
from runner_adapter.hooks import isolated
from runner_adapter.requests import check_rid, unknown

logger = logging.getLogger("runner_adapter")

#: The rid of an engine's id; the second argument is what the scheduler calls new, or None if it called nothing so.
ExternalId = Callable[[str, Any], str]
#: What vLLM appends to a client's id (InputProcessor.assign_request_id), if there is an id in front of it.
_APPENDED = re.compile(r"(?<=.)-[0-9a-f]{8}\Z", re.DOTALL)


def client_id(engine_id: str) -> str:
    """The client's id, of which vLLM made this one: `req` of `req-0123abcd`, and of parallel sampling's second child,
    `1_req-0123abcd`, `1_req`. An id of another form is its own."""
    return _APPENDED.sub("", engine_id)


def as_it_is(engine_id: str, request: Any) -> str:
    return engine_id


class Ids:
    """The rids of the live requests. The engine names a request by its own id, everybody else here by its rid.

    Of two live requests with one rid the second is refused: it stands under an id that is nobody's rid until it is
    finished, and the first goes on.
    """

    def __init__(self, external_id: ExternalId = as_it_is) -> None:
        self._external_id = external_id
        self._rids: dict[str, str] = {}
        self._engine_ids: dict[str, str] = {}
        #: The same of requests that wait to begin.
        self._held: dict[str, str] = {}
        self._held_as: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._rids)

    def __iter__(self) -> Iterator[str]:
        """The engine's ids of the live requests."""
        return iter(self._rids)

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self._rids

    @property
    def held(self) -> Mapping[str, str]:
        """By the engine's id, the rids of requests that wait to begin."""
        return self._held

    def hold(self, engine_id: str, request: Any) -> str | None:
        """The rid of a request that waits to begin; None if it is known. Raises as `enter` tells of a refusal."""
        if engine_id in self._rids or engine_id in self._held:
            return None
        rid = self._free(self._external(engine_id, request), engine_id)
        self._held[engine_id], self._held_as[rid] = rid, engine_id
        return rid

    def _let_go(self, engine_id: str) -> str | None:
        rid = self._held.pop(engine_id, None)
        if rid is not None:
            del self._held_as[rid]
        return rid

    def rid(self, engine_id: str) -> str:
        """UnknownRequest if no request that is live has this id of the engine."""
        rid = self._rids.get(engine_id)
        if rid is None:
            raise unknown(engine_id, self._rids, "the engine names a request that is not new, or that it finished")
        return rid

    def engine_id(self, rid: str) -> str:
        """UnknownRequest if no request that is live has this rid."""
        engine_id = self._engine_ids.get(rid)
        if engine_id is None:
            raise unknown(rid, self._engine_ids, "no request that is live has this rid")
        return engine_id

    def leave(self, finished: Iterable[str]) -> list[str]:
        """The rids of these, which are free now. One that never was in a step frees its rid, too: its input may have
        come; but not if another request has it."""
        gone, strangers = [], []
        for engine_id in sorted(finished):
            rid = self._rids.pop(engine_id, None)
            if rid is not None:
                del self._engine_ids[rid]
            else:
                rid = self._let_go(engine_id)
            if rid is not None:
                gone.append(rid)
            else:
                strangers.append(engine_id)
        never = [self._guess(engine_id) for engine_id in strangers]
        taken = self._engine_ids.keys() | self._held_as.keys()
        return list(dict.fromkeys([*gone, *(rid for rid in never if rid and rid not in taken)]))

    def enter(self, request: Any, failed: dict[str, ConnectorError]) -> str:
        """The rid of what the scheduler calls new; that of a request that is live already is what it was. A refusal is
        in `failed`, by the rid that it stands under: UsageError if another request has its rid, or if the engine's
        runner fails to say it, InvalidPayload if that is none."""
        engine_id = str(request.req_id)
        if engine_id in self._rids:
            return self._rids[engine_id]
        try:
            # What it was expected under.
            rid = self._let_go(engine_id) or self._free(self._external(engine_id, request), engine_id)
        except ConnectorError as error:
            rid = engine_id
            while rid in self._engine_ids or rid in self._held_as:
                rid += "'"
            failed[rid] = error.anew()
        self._rids[engine_id], self._engine_ids[rid] = rid, engine_id
        return rid

    def _external(self, engine_id: str, request: Any) -> str:
        """What a runner overrides: its failure is this request's. Raises as `enter` tells."""
        told: list[object] = []
        failures: dict[str, Exception] = {}
        with isolated(failures, [engine_id], "external_id"):
            told.append(self._external_id(engine_id, request))
        if failures:
            error = failures[engine_id]
            what = f"external_id failed: {type(error).__name__}: {error}"
            raise error if isinstance(error, ConnectorError) else errors.UsageError(what, engine_id=engine_id)
        return check_rid(told[0])

    def _guess(self, engine_id: str) -> str | None:
        """The rid of a request that is not known here; None if nobody can say."""
        try:
            return self._external(engine_id, None)
        except ConnectorError as error:
            logger.warning("a request that is not known here has no rid: engine_id=%r %s", engine_id, str(error))
            return None

    def _free(self, rid: str, engine_id: str) -> str:
        other = self._engine_ids.get(rid) or self._held_as.get(rid)
        if other is not None:
            raise errors.UsageError(
                "a request with this id is here: this one is refused, and the first goes on",
                rid=rid,
                engine_id=engine_id,
                first=other,
            )
        return rid

    def by_rid(self, brought: Mapping[str, Any]) -> dict[str, Any]:
        """What requests are brought, by rid. What comes for a request that is not live, because it was finished and
        another one has its rid by now, or because it waits to begin, is dropped."""
        found = {}
        for engine_id, value in brought.items():
            rid = self._rids.get(engine_id)
            if rid is None:
                rid = self._held.get(engine_id) or self._guess(engine_id)
                if rid is None or rid in self._engine_ids or engine_id in self._held:
                    logger.warning(
                        "dropped what came for a request that is not live: engine_id=%r rid=%r", engine_id, rid
                    )
                    continue
            found[rid] = value
        return found
