"""Chunks of several streams that share a block and a Seal: who reads them cannot tell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import connector
from tests.client.grown import Streams, handle, left, nothing_left, unsaid


@pytest.fixture
def streams(told_host: connector.Node) -> Iterator[Streams]:
    with nothing_left(Streams(told_host.endpoint, 12), told_host) as made:
        made.begin()
        yield made


def test_many_rounds_are_read_before_the_broker_hears_of_them(streams: Streams, told_host: connector.Node) -> None:
    shared = 0
    for _ in range(40):
        sealed = told_host.status()["payloads_sealed"]
        with unsaid(streams.writer):
            tickets = streams.put_all()
            found = streams.read()
            assert told_host.status()["payloads_sealed"] == sealed
            assert not any(ticket.done() for ticket in tickets)
            shared += len(streams.rids) - len({handle(one) for (one,) in found.values()})
            del found
        streams.settle()
        assert [ticket.result() for ticket in tickets] == ["stored"] * len(streams.rids)
        assert left(told_host)[0] == 0
    assert shared > 300
