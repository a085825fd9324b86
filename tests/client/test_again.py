"""A chunk like its stream's last goes a shorter way: who reads it, and who puts it wrongly, cannot tell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import connector
from connector import errors
from connector.arena import blocks, tensors
from connector.client import again
from connector.client.outgoing import Ticket
from connector.client.pairs import Pair
from connector.client.session import Session
from connector.core.names import Edge as Name
from connector.wire import messages as msg
from tests.client.told import Stream, both_ends, chunk


class Road(Stream):
    """And which of the writer's puts went the short way."""

    def __init__(self, host: connector.Node, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(host)
        self.short: list[bool] = []
        put = again.put

        def counted(*arguments: Any) -> Any:
            ticket = put(*arguments)
            self.short.append(ticket is not None)
            return ticket

        monkeypatch.setattr(again, "put", counted)

    def send(self, *payloads: dict[str, torch.Tensor]) -> list[bool]:
        """Put them and read them; whether each went the short way."""
        short: list[bool] = []
        for payload in payloads or (chunk(self.sent),):
            self.short.clear()
            ticket = self.out.put("r", payload, last=False)
            assert ticket.index == self.sent
            self.is_next(self.next(), payload)
            short.append(any(self.short))
        return short

    def begin(self, make: Callable[[int], dict[str, torch.Tensor]] = lambda at: chunk(at)) -> None:
        """Until chunks go the short way: the stream is told directly, and a block lies ready."""
        self.into.poll()
        for at in range(200):
            if self.send(make(at)) == [True]:
                return
        raise AssertionError("no chunk went the short way")


@pytest.fixture
def road(told_host: connector.Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:
    made = Road(told_host, monkeypatch)
    with both_ends(made, told_host):
        made.begin()
        yield made


def test_chunks_that_are_alike_go_the_short_way(road: Road) -> None:
    road.writer.flush()
    before = road.writer.status()["payloads_sealed"] - road.sent
    for _ in range(20):
        road.begin()
    road.out.put("r", chunk(0), last=True)
    road.next()
    road.writer.flush()
    assert road.writer.status()["payloads_sealed"] == before + road.sent + 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: {"x": torch.arange(9), "y": torch.zeros(1, 4)},
        lambda: {"x": torch.arange(8, dtype=torch.int32), "y": torch.zeros(1, 4)},
        lambda: {"y": torch.zeros(1, 4), "x": torch.arange(8)},
        lambda: {"x": torch.arange(8)},
        lambda: {"x": torch.arange(8), "y": torch.zeros(1, 4), "z": torch.zeros(1)},
        lambda: {"x": torch.arange(8), "y": torch.zeros(4)},
        lambda: {"x": torch.arange(16)[::2], "y": torch.zeros(1, 4)},
        lambda: {"x": torch.arange(8), "y": torch.arange(4.0).reshape(1, 4)._neg_view()},
        lambda: {"x": torch.arange(8), "y": torch.nn.Parameter(torch.ones(1, 4))},
        dict,
    ],
    ids=["shape", "dtype", "order", "fewer", "more", "dims", "strided", "negated", "subclass", "empty"],
)
def test_one_that_is_not_goes_the_long_way(road: Road, other: Callable[[], dict[str, torch.Tensor]]) -> None:
    assert road.send(other()) == [False]
    road.begin()


def test_complex_chunks_keep_their_values(road: Road) -> None:
    value = torch.arange(4).to(torch.complex64) * (1 + 2j)
    road.begin(lambda at: {"x": value + at})
    assert road.send({"x": value.conj()}) == [False]


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda road: road.out.put("r", {"x": torch.arange(8), "y": 1}, last=False), errors.InvalidPayload),
        (lambda road: road.out.put("r", [1], last=False), errors.InvalidPayload),
        (lambda road: road.out.put(["r"], chunk(0), last=False), errors.InvalidPayload),
        (lambda road: road.out.put("r", chunk(0), last=False, timeout=-1.0), errors.InvalidPayload),
        (lambda road: road.out.put("r", chunk(0), last=False, attempt=False), errors.InvalidPayload),
        (lambda road: road.out.put("r", chunk(0), last=False, attempt=-1), errors.InvalidPayload),
    ],
)
def test_what_is_refused_is_refused_as_ever(road: Road, act: Callable[[Road], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        act(road)
    road.begin()


def test_behind_end_is_refused(road: Road) -> None:
    road.out.end("r")
    with pytest.raises(errors.StreamEnded):
        road.out.put("r", chunk(0), last=False)


def test_behind_an_abort_is_refused(road: Road) -> None:
    road.writer.flush()
    road.reader.abort("r", "enough")
    while road.writer.aborted("r") is None:
        road.writer.status()
    with pytest.raises(errors.RequestAborted, match="aborted"):
        road.out.put("r", chunk(0), last=False)


@pytest.mark.parametrize("word", ["finish", "begin"])
def test_behind_a_finish_the_stream_begins_anew(road: Road, word: str) -> None:
    {"finish": road.writer.finish, "begin": road.writer.begin}[word]("r")
    road.reader.finish("r")
    road.sent = 0
    assert road.send() == [False]
    road.begin()


def test_behind_another_word_of_the_use_a_block_says_which(road: Road) -> None:
    """`open` numbers the use anew: what a dead writer's block says of it must be its last."""
    road.out.open("r")
    assert road.send() == [False]
    road.begin()


def test_after_closing_it_is_refused(road: Road) -> None:
    road.writer.close()
    with pytest.raises(errors.ClientClosed):
        road.out.put("r", chunk(0), last=False)


def test_a_fork_is_refused(road: Road) -> None:
    child = os.fork()
    if not child:
        try:
            road.out.put("r", chunk(0), last=False)
        except errors.ForkedClient:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_full_socket_sends_the_rest_through_the_broker(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "send", lambda self, frame: False)
    assert road.send(chunk(1), chunk(2)) == [True, False]


def test_another_number_of_readers_is_refused(road: Road) -> None:
    ticket = road.writer.edge("a", "b", readers=2).put("r", chunk(0), last=False)
    with pytest.raises(errors.ReadersMismatch):
        road.writer.flush()
    with pytest.raises(errors.ReadersMismatch):
        ticket.result()


def test_what_a_put_that_was_refused_left_is_raised_by_the_next(road: Road) -> None:
    """A refusal that comes later, of a chunk that went the short way, too."""
    stream = road.writer.session.outgoing.streams[(Name("a", "b"), "r")]
    ticket = road.out.put("r", chunk(0), last=False)
    with road.writer.session.lock:
        road.writer.session.outgoing.refuse(ticket, errors.StreamPoisoned("refused", rid="r"))
    assert stream.refused
    with pytest.raises(errors.StreamPoisoned, match="refused"):
        road.out.put("r", chunk(1), last=False)
    road.next()


def large(value: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1 << 14,), float(value))}


def while_copying(road: Road, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Ticket:
    """Put a large chunk, and do something while it is copied, the first time: the session's lock is free."""
    copy = tensors.Places.copy

    def copied(places: tensors.Places, address: int, found: Any) -> None:
        monkeypatch.setattr(tensors.Places, "copy", copy)
        act()
        copy(places, address, found)

    monkeypatch.setattr(tensors.Places, "copy", copied)
    return road.out.put("r", large(road.sent), last=False)


def test_large_chunks_go_it_too(road: Road) -> None:
    road.begin(large)
    assert road.send(large(7)) == [True]


def test_what_is_put_while_a_large_one_is_copied_comes_before_it(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    road.begin(large)
    sent = road.sent
    ticket = while_copying(road, lambda: road.out.put("r", large(sent + 1), last=False), monkeypatch)
    assert ticket.index == sent + 1
    came: list[tuple[int, float]] = []
    while len(came) < 2:
        assert road.into.wait(30.0)
        came += [(found.index, found["x"][0].item()) for found in road.into.poll()["r"]]
    assert came == [(sent, sent + 1), (sent + 1, sent)]


def test_a_use_that_ends_while_a_large_one_is_copied_has_not_got_it(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    road.begin(large)
    assert while_copying(road, lambda: road.writer.finish("r"), monkeypatch).index == 0
    road.reader.finish("r")
    found = road.next()
    assert (found.index, found["x"][0].item()) == (0, road.sent)


def test_a_node_that_is_closed_while_a_large_one_is_copied_has_not_put_it(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    road.begin(large)
    with pytest.raises(errors.ClientClosed):
        while_copying(road, road.writer.close, monkeypatch)


def test_bytes_come_first_then_the_header_the_ready_word_the_reader_and_the_broker(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in writing.py: killed before the ready word, the payload never existed; nobody hears of one that does not."""
    done: list[str] = []
    headers: list[int] = []
    sealed: list[tuple[int, bool]] = []

    def note(kind: Any, name: str, also: Callable[..., bool] = lambda *arguments: True) -> None:
        call = getattr(kind, name)

        def told(*arguments: Any, **more: Any) -> Any:
            if also(*arguments):
                done.append(name)
            return call(*arguments, **more)

        monkeypatch.setattr(kind, name, told)

    note(tensors.Places, "copy")
    note(blocks, "write_header", lambda arena, offset, *more: headers.append(offset))
    note(blocks, "seal", lambda arena, offset, generation: sealed.append((offset, headers.count(offset) > 0)) or True)
    note(Pair, "send")
    note(Session, "post", lambda session, message, *more: isinstance(message, msg.Seal))
    road.begin()
    road.send(chunk(1), chunk(2))
    assert done[-4:] == ["copy", "seal", "send", "post"]
    assert [had_header for _, had_header in sealed[-2:]] == [True, True]
