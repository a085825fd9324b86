"""Each use of a rid is a life: a request is given what came of its own, whatever came of others meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from connector import Polled, errors
from runner_adapter.inbox import Inbox
from tests.handover.links import FROM, TO, Link, ids, keyed, link, read


@pytest.fixture
def pair(endpoint: str) -> Iterator[Link]:
    with link(endpoint) as made:
        yield made
        gc.collect()
        made.settle()
        assert list(made.sender.payloads()) == [], "no payload is left at the broker"


def test_a_request_finished_and_new_in_one_step_is_two(pair: Link) -> None:
    """The former's payloads are gone, the new one's are all there (B54)."""
    inbox = pair.inbox()
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    pair.settle()
    assert read(inbox.pull(["r"]).payloads) == {"r": [[1]]}
    outbox.send(2, {"r": ids(2)})
    outbox.finish("r")
    outbox.send(3, {"r": ids(3)})
    outbox.send(4, {"r": ids(4)}, last=["r"])
    pair.settle()
    inbox.finish("r")
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (read(arrived.payloads), arrived.ended) == ({"r": [[3], [4]]}, {"r"})
    inbox.finish("r")
    outbox.finish("r")


@pytest.mark.parametrize("last", [(), ("r",)], ids=["ended by finish", "ended by its last chunk"])
def test_a_newer_use_of_a_rid_is_not_given_to_the_request_before(pair: Link, last: tuple[str, ...]) -> None:
    """The sender is faster: both uses are here, ends and all, before this stage has finished the first."""
    inbox = pair.inbox()
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    pair.settle()
    assert read(inbox.pull(["r"]).payloads) == {"r": [[1]]}
    pair.settle()
    for step in (2, 3):
        outbox.finish("r")
        outbox.send(step, {"r": ids(step)}, last=last)
        pair.settle()
    outbox.finish("r")
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (arrived.payloads, arrived.ended, arrived.failed) == ({}, {"r"}, {})
    assert not inbox.pull(["r"])
    for step in (2, 3):
        inbox.finish("r")
        pair.settle()
        arrived = inbox.pull(["r"])
        assert (read(arrived.payloads), arrived.ended) == ({"r": [[step]]}, {"r"})
        pair.settle()
        inbox.validate()
    inbox.finish("r")
    assert list(inbox) == []


def test_the_new_use_of_a_rid_goes_on_when_the_former_is_finished(pair: Link) -> None:
    """The new one is half here: finish means the former, here and at the broker."""
    inbox = pair.inbox()
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)}, last=["r"])
    pair.settle()
    inbox.waiting(["r"])
    outbox.finish("r")
    outbox.send(2, {"r": ids(2)})
    pair.settle()
    inbox.waiting(["r"])
    former = inbox.pull(["r"])
    assert (read(former.payloads), former.ended, former.failed) == ({"r": [[1]]}, {"r"}, {})
    inbox.finish("r")
    outbox.send(3, {"r": ids(3)}, last=["r"])
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (read(arrived.payloads), arrived.ended) == ({"r": [[2], [3]]}, {"r"})
    inbox.finish("r")
    outbox.finish("r")


def test_a_rid_aborted_and_sent_anew_starts_clean(pair: Link) -> None:
    inbox = pair.inbox()
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    pair.settle()
    inbox.waiting(["r"])
    outbox.abort("r", "cancelled")
    outbox.finish("r")
    pair.settle()
    assert list(inbox.pull(["r"]).failed) == ["r"]
    outbox.send(2, {"r": ids(2)}, last=["r"])
    pair.settle()
    inbox.finish("r")
    pair.settle()
    assert read(inbox.pull(["r"]).payloads) == {"r": [[2]]}
    inbox.finish("r")
    outbox.finish("r")


def test_the_finish_of_an_aborted_request_does_not_mean_the_next_one(pair: Link) -> None:
    """The next one's first chunk is on its way when the former, of which the inbox knows that it is aborted, is
    finished."""
    edge = pair.reader.edge(FROM, TO)
    inbox = Inbox(pair.reader, edge)
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    pair.settle()
    inbox.waiting(["r"])
    outbox.abort("r", "cancelled")
    outbox.finish("r")
    pair.settle()
    inbox.waiting(["r"])
    outbox.send(2, {"r": ids(2)})
    pair.settle()
    vars(edge)["poll"] = Polled
    inbox.finish("r")
    del vars(edge)["poll"]
    outbox.send(3, {"r": ids(3)}, last=["r"])
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (read(arrived.payloads), arrived.ended) == ({"r": [[2], [3]]}, {"r"})
    inbox.finish("r")
    outbox.finish("r")


@pytest.mark.parametrize("last", [False, True], ids=["open", "ended"])
def test_an_end_alone_that_comes_with_the_next_use_is_the_formers(pair: Link, last: bool) -> None:
    """From a writer that is no Outbox: one poll brings the former's END and the next one's first chunk."""
    inbox = pair.inbox()
    out = pair.out()
    out.put("r", keyed("r", 1), last=False)
    pair.settle()
    assert read(inbox.pull(["r"]).payloads) == {"r": [[1]]}
    pair.settle()
    pair.sender.finish("r")
    out.put("r", keyed("r", 2), last=last)
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (arrived.payloads, arrived.ended) == ({}, {"r"})
    inbox.finish("r")
    if not last:
        out.put("r", keyed("r", 3), last=True)
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (read(arrived.payloads), arrived.ended) == ({"r": [[2]] if last else [[2], [3]]}, {"r"})
    inbox.finish("r")


def test_a_use_that_is_followed_by_another_without_its_end_failed(pair: Link) -> None:
    """As when the broker was started anew between them: nobody says what became of the former."""
    edge = pair.reader.edge(FROM, TO)
    inbox = Inbox(pair.reader, edge)
    out = pair.out()
    out.put("r", keyed("r", 1), last=False)
    pair.settle()
    assert read(inbox.pull(["r"]).payloads) == {"r": [[1]]}
    pair.settle()
    pair.sender.finish("r")
    out.put("r", keyed("r", 2), last=True)
    pair.settle()
    came = [edge.poll()]
    came[0].ended.clear()
    vars(edge)["poll"] = came.pop
    arrived = inbox.pull(["r"])
    del vars(edge)["poll"]
    assert (arrived.payloads, arrived.ended) == ({}, set())
    assert isinstance(arrived.failed["r"], errors.WriterDied)
    inbox.finish("r")
    arrived = inbox.pull(["r"])
    assert (read(arrived.payloads), arrived.ended) == ({"r": [[2]]}, {"r"})
    inbox.finish("r")
