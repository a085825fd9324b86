"""Which blocks a session keeps ahead, by size class, within what the broker lets it have."""

from __future__ import annotations

import itertools
from typing import Any

from connector.client.blocks import BlockCache, ReservedBlock, size_class
from connector.core.names import Handle

LARGE, SMALL = size_class(2 << 20), size_class(4096)
_numbers = itertools.count(1)


def fill(cache: BlockCache, size: int) -> int:
    """Misses of one size, until as much of it is ahead as may be; how many blocks that is."""
    arena: Any = None
    for _ in range(8):
        assert cache.pop(size) is None
    count = cache.to_ask(size)
    cache.add(size, count, [ReservedBlock(arena, Handle(64 * next(_numbers), 1), size) for _ in range(count)])
    return count


def test_a_class_that_misses_gets_room_from_the_one_that_has_all_of_it() -> None:
    """Else each of its puts would ask the broker, and wait."""
    cache = BlockCache()
    cache.limit = 16 * LARGE
    assert fill(cache, LARGE) == 8
    assert cache.pop(SMALL) is None and cache.to_ask(SMALL) == 0
    assert [block.length for block in cache.make_room(SMALL)] == [LARGE]
    assert cache.to_ask(SMALL) == 8
    assert cache.bytes + 8 * SMALL <= cache.limit // 2


def test_a_large_class_does_not_drive_out_the_small_ones() -> None:
    cache = BlockCache()
    cache.limit = 4 * LARGE
    assert (fill(cache, SMALL), fill(cache, LARGE)) == (256, 1)
    assert cache.make_room(LARGE) == []
