"""A signal's handler raises anywhere in a put of a chunk that shares its block: it is put, or it never was; the others
are, either way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

import connector
from connector.arena import blocks as arena_blocks
from connector.client import again, growing, outgoing, telling
from connector.wire import alike
from tests.client.grown import HANG, Streams, handle, nothing_left, unsaid
from tests.client.interrupting import LOOKS, interrupted

PUTTING = {module.__file__ for module in (again, alike, arena_blocks, growing, outgoing, telling)}


@pytest.fixture
def streams(told_host: connector.Node) -> Iterator[Streams]:
    with nothing_left(Streams(told_host.endpoint, 12), told_host) as made:
        made.begin()
        yield made


def read(streams: Streams, maybe: str) -> list[connector.Payload]:
    """All that was put; of this stream's last two chunks the first may never have been."""
    found: dict[str, list[connector.Payload]] = {rid: [] for rid in streams.rids}
    last = {rid: sent[-1] for rid, sent in streams.sent.items() if len(sent) > streams.came[rid]}
    while any(not found[rid] or int(found[rid][-1]["x"][0]) != number for rid, number in last.items()):
        assert streams.into.wait(HANG)
        polled = streams.into.poll()
        assert not polled.failed
        for rid, payloads in polled.items():
            found[rid] += payloads
    if len(found[maybe]) < len(streams.sent[maybe]) - streams.came[maybe]:
        del streams.sent[maybe][-2]
    for rid, payloads in found.items():
        for payload in payloads:
            streams.is_next(rid, payload)
    return [payload for payloads in found.values() for payload in payloads]


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "second", "third"])
def test_a_put_of_a_step_that_is_interrupted_anywhere(streams: Streams, place: int) -> None:
    at, on_its_way, whole, shared = 0, True, 0, 0
    while on_its_way:
        with unsaid(streams.writer):
            tickets = streams.put_all(("r0", "r1")[:place]) if place else []
            on_its_way = interrupted(lambda: streams.put("r2"), at, PUTTING, behind=LOOKS)
            tickets += streams.put_all([*streams.rids[3:7], "r2", *streams.rids[7:]])
        found = read(streams, "r2")
        whole += len(found) > len(tickets)
        shared += len(found) - len(set(map(handle, found)))
        assert streams.headers(found) == Counter(map(handle, found))
        del found
        streams.settle()
        assert [ticket.result() for ticket in tickets] == ["stored"] * len(tickets)
        at += 1
    assert at > 20 and shared > at
    assert 0 < whole < at
