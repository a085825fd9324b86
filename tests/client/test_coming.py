"""A chunk that its reader opened before it came: a guess, which may be right or wrong, and nobody can tell."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import connector
from connector import errors
from connector.arena import blocks
from connector.client import layouts
from connector.client.coming import Coming
from connector.client.payload import open_ahead
from connector.client.rid_queue import Arrived
from connector.core.directory.effects import Descriptor
from connector.core.names import Edge, Handle
from connector.core.specs import TensorSpec
from connector.wire.alike import MOST_KNOWN, TAIL, ToldAlike, Where, tail
from tests.client.told import Stream, both_ends, chunk

EDGE = Edge("a", "b", 0)


class Road(Stream):
    """Its reader waits before each chunk; and which frames told of what had been opened."""

    def __init__(self, host: connector.Node, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        super().__init__(host, **options)
        self.guessed: list[bool] = []
        read = Coming.read

        def counted(coming: Coming, frame: bytes) -> Any:
            found = read(coming, frame)
            self.guessed.append(isinstance(found[0], Arrived))
            return found

        monkeypatch.setattr(Coming, "read", counted)
        self.into.poll()

    def send(self, value: dict[str, torch.Tensor] | None = None, **how: Any) -> connector.Payload:
        """Put the next chunk while its reader has nothing, and take it."""
        assert not self.into.wait(0.0)
        payload = chunk(self.sent) if value is None else value
        self.guessed.clear()
        self.out.put("r", payload, last=False)
        found = self.next(**how)
        self.is_next(found, payload)
        return found

    def begin(self) -> None:
        """Until the guesses are right."""
        for _ in range(200):
            self.send()
            if self.guessed == [True]:
                return
        raise AssertionError("nothing was opened before it came")


@pytest.fixture(params=[{}, {"readonly": True}], ids=["", "readonly"])
def road(told_host: connector.Node, monkeypatch: pytest.MonkeyPatch, request: Any) -> Iterator[Road]:
    made = Road(told_host, monkeypatch, **request.param)
    with both_ends(made, told_host):
        made.begin()
        yield made


def held(node: connector.Node) -> int:
    """Payloads that lie in the pool."""
    node.flush()
    return int(node.status()["payloads"])


def test_right_again_and_again(road: Road) -> None:
    for _ in range(20):
        road.send()
        assert road.guessed == [True]


def test_the_block_stays_for_as_long_as_a_view_does(road: Road) -> None:
    view = road.send()["x"][2:]
    expected = view.clone()
    assert road.guessed == [True]
    for _ in range(20):
        road.send()
    assert torch.equal(view, expected)
    assert held(road.reader) == 1
    del view
    assert held(road.reader) == 0


def test_copies_pin_nothing(road: Road) -> None:
    kept = road.send(copy=True)
    assert road.guessed == [True]
    assert held(road.reader) == 0
    assert torch.equal(kept["x"], chunk(road.sent - 1)["x"])


def test_another_shape_is_no_surprise(road: Road) -> None:
    road.send({"x": torch.arange(3)})
    assert road.guessed == [False]
    road.begin()


def test_a_block_that_was_given_back_meanwhile(road: Road) -> None:
    with road.writer.session.lock:
        road.writer.session.give_back(road.writer.session.blocks.take_all())
    road.send()
    assert road.guessed == [False]
    road.begin()


def test_a_block_that_was_given_back_is_not_written(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header is another's by now: neither of the next chunk's, nor of the one behind it."""
    written: list[Handle] = []
    write = blocks.write_header

    def noted(arena: Any, offset: int, generation: int, *more: Any) -> None:
        written.append(Handle(offset, generation))
        write(arena, offset, generation, *more)

    session = road.writer.session
    stream = session.outgoing.streams[(EDGE, "r")]
    assert stream.again is not None and stream.again.next is not None
    following = stream.again.next.following
    assert following is not None
    monkeypatch.setattr(blocks, "write_header", noted)
    with session.lock:
        del session.blocks._promised[following.handle]
        session.give_back([following])
    road.send()
    assert road.guessed == [True]
    assert following.handle not in written
    with session.lock:
        back = session.blocks.take_all()
        session.give_back(back)
    written.clear()
    road.send()
    assert not {block.handle for block in back} & set(written)
    road.begin()


def test_none_was_ready(road: Road) -> None:
    """The chunk came before its reader looked."""
    road.out.put("r", chunk(road.sent), last=False)
    road.out.put("r", chunk(road.sent + 1), last=False)
    values: list[int] = []
    while len(values) < 2:
        assert road.into.wait(30.0)
        values += [int(payload["x"][0]) for payload in road.into.poll()["r"]]
    assert values == [road.sent, road.sent + 1]


def test_an_end_goes_by_the_broker(road: Road) -> None:
    road.guessed.clear()
    road.out.put("r", chunk(7), last=True)
    assert road.next().last
    assert road.guessed == []


def test_an_abort_drops_what_was_opened(road: Road) -> None:
    assert not road.into.wait(0.0)
    road.writer.abort("r", "enough")
    with pytest.raises(errors.RequestAborted):
        road.next()
    assert held(road.reader) == 0


def test_a_new_use_of_the_rid(road: Road) -> None:
    assert not road.into.wait(0.0)
    for node in (road.writer, road.reader):
        node.finish("r")
    road.sent = 0
    road.send()
    assert road.guessed == []
    road.begin()


def test_a_payload_that_was_opened_and_is_none(road: Road) -> None:
    """What the ready word says when it comes counts, not what was there when it was opened."""
    assert not road.into.wait(0.0)
    road.out.put("r", chunk(road.sent), last=False)
    arena = road.writer.session.arena
    assert arena is not None and road.writer.session.sealing is not None
    offset = road.writer.session.sealing.handle.offset
    arena.segment.words[offset >> 3] += 1
    with pytest.raises(errors.Broken, match="another generation"):
        road.next()


def test_closed_nodes_keep_nothing(told_host: connector.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    road = Road(told_host, monkeypatch)
    road.begin()
    assert not road.into.wait(0.0)
    arena = road.reader.session.arena
    assert arena is not None
    mapping = arena.segment.mapping
    road.reader.close()
    road.writer.close()
    gone = weakref.ref(mapping)
    del arena, mapping, road
    gc.collect()
    assert gone() is None


def alike(rid: str = "r") -> ToldAlike:
    packed = layouts.lay((TensorSpec("x", "int64", (8,)),), 0).packed
    return ToldAlike(EDGE, rid, 1, packed)


def head(told: ToldAlike, index: int, handle: Handle) -> bytes:
    return told.head(index, Where(handle, 4608, 256, 0))


@pytest.mark.parametrize("beyond", [1 << 40, 7, -64], ids=["far", "odd", "header"])
def test_a_writer_that_announces_nonsense_is_not_believed(host: connector.Node, beyond: int) -> None:
    arena = host.session.arena
    assert arena is not None
    ahead = Handle(arena.data_begin + beyond, 9)
    coming, told = Coming(), alike()
    coming.told.read(head(told, 1, Handle(arena.data_begin, 1)) + tail(ahead))
    assert len(coming.told.announced) == 1
    coming.open(open_ahead, arena, arena)
    assert not coming.told.announced
    (found,) = coming.read(head(told, 2, ahead) + tail(Handle(0, 0)))
    assert type(found) is Descriptor


def test_what_is_announced_and_never_comes_does_not_pile_up(host: connector.Node) -> None:
    arena = host.session.arena
    assert arena is not None
    coming = Coming()
    for index in range(1, 3 * MOST_KNOWN):
        coming.told.read(head(alike(f"r{index}"), 1, Handle(arena.data_begin, 1)) + tail(Handle(arena.data_begin, 2)))
        assert len(coming.told.announced) <= MOST_KNOWN
        if index % 2:
            coming.open(open_ahead, arena, arena)
    assert len(coming._opened) <= MOST_KNOWN


def test_a_frame_that_ends_wrongly_is_none_that_was_opened(host: connector.Node) -> None:
    arena = host.session.arena
    assert arena is not None
    coming, told = Coming(), alike()
    block = Handle(arena.data_begin, 2)
    coming.told.read(head(told, 1, Handle(arena.data_begin, 1)) + tail(block))
    coming.open(open_ahead, arena, arena)
    with pytest.raises(errors.ProtocolViolation):
        coming.read(head(told, 2, block) + b"\xc1" * TAIL)
