"""This connector as a system: put and put_many on an edge, wait and poll at its end.

As in a stage worker, a process joins once and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import connector
from connector.bench.payloads import Tensors
from connector.bench.systems import Place
from connector.bench.waiting import until_idle
from connector.bench.workloads import Workload

#: Seconds without a payload after which a run is given up: longer than a put waits for room, which says more.
PATIENCE = 60.0
GIVEN_UP = "the benchmark was given up"


class _End:
    def __init__(self, node: connector.Node, place: Place, workload: Workload) -> None:
        self._node = node
        self._rids = [f"{place.name}-{stream}" for stream in range(workload.streams)]
        self._edge = node.edge(place.source, place.target)

    def close(self, given_up: bool = False) -> None:
        if given_up:
            self._abort()
            return
        self._settle()
        for rid in self._rids:
            self._node.finish(rid)
        self._node.flush()

    def _settle(self) -> None:
        raise NotImplementedError

    def _abort(self) -> None:
        """What lies at the broker goes, unread or not; a broker that is away holds nothing."""
        try:
            for rid in self._rids:
                self._node.abort(rid, GIVEN_UP)
                self._node.finish(rid)
            self._node.flush()
        except connector.ConnectorError:
            return


class _Writer(_End):
    needs_fresh = False
    spans = None

    def put(self, stream: int, payload: Tensors) -> None:
        self._edge.put(self._rids[stream], payload, last=False)

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        self._edge.put_many(dict(zip(self._rids, payloads, strict=True)))

    def acked(self, count: int) -> None:
        return

    def _settle(self) -> None:
        for rid in self._rids:
            self._edge.end(rid)


class _Reader(_End):
    def __init__(self, node: connector.Node, place: Place, workload: Workload) -> None:
        super().__init__(node, place, workload)
        self._edge.poll()
        self._ended: set[str] = set()

    def get(self) -> list[Tensors]:
        while True:
            arrived = self._poll()
            if arrived:
                return arrived
            self._wait()

    def _wait(self) -> None:
        if not self._edge.wait(PATIENCE):
            raise connector.errors.NotYet("no payload has come", edge=repr(self._edge), seconds=PATIENCE)

    def _poll(self) -> list[Tensors]:
        found = self._edge.poll()
        if found.failed:
            raise next(iter(found.failed.values()))
        self._ended |= found.ended
        return [dict(payload) for payloads in found.values() for payload in payloads]

    def _settle(self) -> None:
        """The writer ends its streams before it closes: hear that, so that nothing is left at the broker."""
        while not self._ended.issuperset(self._rids):
            self._wait()
            self._poll()


class _Connector:
    stays = True

    def __init__(self) -> None:
        self._node: connector.Node | None = None

    def _join(self, stage: str, place: Place) -> connector.Node:
        if self._node is None:
            self._node = connector.connect(stage=stage, endpoint=place.endpoint)
            until_idle()
        return self._node

    def writer(self, place: Place, workload: Workload) -> _Writer:
        return _Writer(self._join(place.source, place), place, workload)

    def reader(self, place: Place, workload: Workload) -> _Reader:
        return _Reader(self._join(place.target, place), place, workload)

    def leave(self) -> None:
        if self._node is not None:
            self._node.close()
            self._node = None


BROKER_PATH = _Connector()
