"""What a dead writer's growing block says: all that was counted, or, if anything of it is damaged, nothing."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator

import pytest

from connector.arena import blocks
from connector.arena.arena import Arena, create_arena
from connector.broker import unsent
from connector.core.directory import Directory, Settings
from connector.core.directory import effects as ef
from connector.core.directory import events as ev
from connector.core.names import Edge, Handle
from connector.wire.manifest import pack_meta

EDGE = Edge("a", "b")
SIZE, DATA, STRIDE = 2048, 512, 128
WRITER = 1


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = create_arena(secrets.token_hex(16), 1 << 20, epoch=1)
    yield made
    made.unlink()
    made.close()


def member(rid: str, edge: Edge = EDGE, begun: int = 0) -> bytes:
    return pack_meta(edge, [ev.Member(rid, 0, 0, 0, 1, b"m", 8)], begun)


class Dead:
    """A writer that grew two blocks before it died, and the directory that has heard of neither."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.directory = Directory(Settings(begin=arena.data_begin, end=arena.end, max_blocks=8))
        self.directory.handle(ev.Joined(0.0, WRITER, "a", 7, 0))
        said = self.directory.handle(ev.Reserve(0.0, WRITER, 1, EDGE, (SIZE, SIZE), 0.0, (), True))
        (granted,) = [effect for effect in said if isinstance(effect, ef.Granted)]
        self.first, self.second = (handle for handle, _ in granted.blocks)
        for letter, handle in (("p", self.first), ("q", self.second)):
            self.grow(handle, [member(f"{letter}{at}") for at in range(3)])

    def grow(self, handle: Handle, metas: list[bytes]) -> None:
        offset, generation = handle
        blocks.clear_ready(self.arena, offset)
        blocks.begin_growing(self.arena, offset, generation, WRITER, DATA, STRIDE)
        used = 0
        for place, meta in enumerate(metas):
            blocks.grow(self.arena, offset, used, place, meta)
            used += blocks.record_bytes(meta)
        blocks.seal(self.arena, offset, generation)

    def seals(self) -> list[ev.Sealed]:
        return unsent.seals(self.arena, self.directory.state.sessions[WRITER], 1.0)

    def count(self, handle: Handle, meta_bytes: int, members: int) -> None:
        self.arena.segment.words[(handle.offset + 32) >> 3] = meta_bytes | members << 32

    def counted(self, handle: Handle) -> tuple[int, int]:
        word = self.arena.segment.words[(handle.offset + 32) >> 3]
        return word & 0xFFFFFFFF, word >> 32


@pytest.fixture
def dead(arena: Arena) -> Dead:
    return Dead(arena)


def rids(seal: ev.Sealed) -> list[str]:
    return [member.rid for member in seal.members]


def test_all_that_was_counted_is_sealed(dead: Dead) -> None:
    seals = dead.seals()
    assert [(seal.number, rids(seal)) for seal in seals] == [(1, ["p0", "p1", "p2"]), (2, ["q0", "q1", "q2"])]
    assert {(seal.data_offset, seal.stride, seal.unsaid, seal.strange) for seal in seals} == {
        (DATA, STRIDE, True, False)
    }
    for seal in seals:
        dead.directory.handle(seal)
    dead.directory.validate()
    assert dead.directory.state.shelf.payloads == 6


def one_more(dead: Dead) -> None:
    used, members = dead.counted(dead.first)
    dead.count(dead.first, used, members + 1)


def one_less(dead: Dead) -> None:
    used, members = dead.counted(dead.first)
    dead.count(dead.first, used, members - 1)


def too_many(dead: Dead) -> None:
    dead.count(dead.first, dead.counted(dead.first)[0], 1 << 20)


def too_long(dead: Dead) -> None:
    dead.count(dead.first, DATA, 3)


def no_payload(dead: Dead) -> None:
    dead.count(dead.first, 0, 0)


def bad_record(dead: Dead) -> None:
    dead.arena.segment.buf[dead.first.offset + blocks.HEADER + dead.counted(dead.first)[0] - 1] ^= 1


def no_meta(dead: Dead) -> None:
    dead.grow(dead.first, [b"\xc1"])


def cut_meta(dead: Dead) -> None:
    dead.grow(dead.first, [member("r")[:-1]])


def no_members(dead: Dead) -> None:
    """Those behind it would not lie where they are said to."""
    dead.grow(dead.first, [pack_meta(EDGE, [], 0), member("r")])


def two_members(dead: Dead) -> None:
    two = [ev.Member(rid, 0, 0, 0, 1, b"m", 8) for rid in ("r", "s")]
    dead.grow(dead.first, [pack_meta(EDGE, two, 0), member("t")])


def two_edges(dead: Dead) -> None:
    dead.grow(dead.first, [member("r"), member("s", Edge("a", "c"))])


@pytest.mark.parametrize(
    "damage",
    [
        one_more,
        one_less,
        too_many,
        too_long,
        no_payload,
        bad_record,
        no_meta,
        cut_meta,
        no_members,
        two_members,
        two_edges,
    ],
)
def test_a_damaged_block_is_named_and_dropped_alone(
    dead: Dead, damage: Callable[[Dead], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(dead)
    with caplog.at_level(logging.ERROR, "connector.broker"):
        (seal,) = dead.seals()
    assert (seal.number, rids(seal)) == (1, ["q0", "q1", "q2"])
    (record,) = caplog.records
    assert "fails its check" in record.message
    dead.directory.handle(seal)
    dead.directory.handle(ev.Died(2.0, WRITER, "killed"))
    dead.directory.validate()


def test_a_use_that_one_of_them_had_not_said_is_none_s(dead: Dead) -> None:
    """The last word of all of them counts."""
    dead.grow(dead.first, [member("p", begun=9), member("r")])
    assert [seal.strange for seal in dead.seals()] == [True, False]
