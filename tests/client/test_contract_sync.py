"""The blocking client keeps the contract, with writable and with read-only takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import connector
from connector.core.errors import NotYet
from connector.core.names import Edge
from connector.testing.contracts.client_contract import ClientContract
from connector.testing.contracts.facade import Bench, NodeFace


class TestBlocking(ClientContract):
    """`connector.connect`."""

    @pytest.fixture
    def bench(self, open_blocking: Callable[..., NodeFace]) -> Iterator[Bench]:
        bench = Bench(open_blocking)
        yield bench
        bench.close()


class TestBlockingReadonly(ClientContract):
    """`connector.connect(readonly=True)`."""

    @pytest.fixture
    def bench(self, open_blocking: Callable[..., NodeFace]) -> Iterator[Bench]:
        bench = Bench(lambda stage: open_blocking(stage, readonly=True))
        yield bench
        bench.close()


def test_an_open_ticket_has_no_result_yet() -> None:
    """NotYet, by rid, edge and index, until the broker has answered."""
    ticket = connector.Ticket(Edge("a", "b"), "r", 3)
    assert not ticket.done()
    with pytest.raises(NotYet) as told:
        ticket.result()
    assert told.value.facts == {"rid": "r", "edge": "a:b:0", "index": 3}
