"""The ARENA: one segment that broker and clients map; its first page says what it is.

     0        8        16                32        40        48        56       64
     +--------+--------+--------+--------+--------+--------+--------+--------+
     | MAGIC  |version | uuid (16 bytes) |  size  | epoch  | data   |  pid   |
     |        |        |                 |        |        | begin  |(broker)|
     +--------+--------+--------+--------+--------+--------+--------+--------+
word   0        1        2        3        4        5        6        7

`size` is the capacity for blocks; the segment is DATA_BEGIN + size, rounded up to pages. MAGIC
is stored last: an opener that does not see it finds the arena not ready. The pid is for people
who look; nothing is decided by it.
"""

from __future__ import annotations

import mmap
import os

from connector.arena.segment import Segment, arena_name, check_uuid
from connector.core.errors import BrokerLost, ProtocolViolation, UsageError

MAGIC = int.from_bytes(b"TCARENA1", "little")
VERSION = 1
#: Where blocks begin, in bytes from the segment's start, whatever the page size.
DATA_BEGIN = 4096
W_MAGIC, W_VERSION, W_UUID, W_SIZE, W_EPOCH, W_DATA_BEGIN, W_PID = 0, 1, 2, 4, 5, 6, 7


def segment_bytes(size: int) -> int:
    """Bytes of the segment for `size` bytes of blocks: with the first page, whole pages."""
    return -(-(DATA_BEGIN + size) // mmap.PAGESIZE) * mmap.PAGESIZE


def uuid_words(uuid: str) -> tuple[int, int]:
    """The uuid's 16 bytes as two little-endian words."""
    raw = bytes.fromhex(check_uuid(uuid))
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


class Arena:
    """A mapped ARENA. uuid: 32 hex digits; size: bytes for blocks; data_begin: where they begin."""

    __slots__ = ("address", "data_begin", "end", "readonly", "segment", "size", "uuid")

    def __init__(self, segment: Segment, uuid: str, size: int) -> None:
        self.segment = segment
        self.uuid = uuid
        self.size = size
        self.data_begin = DATA_BEGIN
        #: Where blocks end, in bytes from the segment's start.
        self.end = DATA_BEGIN + size
        #: Whether this mapping faults on a write.
        self.readonly = segment.readonly
        #: Where the mapping begins in this process, for as long as anything keeps it.
        self.address = segment.address

    @property
    def epoch(self) -> int:
        """The broker's life, as the header says now."""
        return int(self.segment.words[W_EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """A new broker's life begins on this arena."""
        self.segment.words[W_PID] = os.getpid()
        self.segment.words[W_EPOCH] = epoch

    @property
    def page_locked(self) -> bool:
        """This mapping is page-locked (cuda.lock_pages)."""
        return self.segment.mapping.before_unmap is not None

    def close(self) -> None:
        """As Segment.close: views that are alive stay valid."""
        self.segment.close()

    def unlink(self) -> None:
        """As Segment.unlink."""
        self.segment.unlink()

    def __repr__(self) -> str:
        return f"<Arena {self.uuid} {self.segment!r}>"


def create_arena(uuid: str, size: int, epoch: int, mode: int = 0o600, gid: int | None = None) -> Arena:
    """A new arena for `size` bytes of blocks, its memory reserved; errors as Segment.create.

    Create the TABLE first: an arena alone looks like a leftover to a sweeper.
    """
    if size <= 0:
        raise UsageError("an arena needs at least one byte", size=size)
    first, second = uuid_words(uuid)
    segment = Segment.create(arena_name(uuid), segment_bytes(size), mode=mode, gid=gid)
    words = segment.words
    words[W_VERSION] = VERSION
    words[W_UUID] = first
    words[W_UUID + 1] = second
    words[W_SIZE] = size
    words[W_EPOCH] = epoch
    words[W_DATA_BEGIN] = DATA_BEGIN
    words[W_PID] = os.getpid()
    words[W_MAGIC] = MAGIC
    return Arena(segment, uuid, size)


def open_arena(uuid: str, expected_size: int, readonly: bool = False) -> Arena:
    """The arena that a broker named, checked word by word; errors as Segment.open, and

    BrokerLost: not ready (its creator is at work, or died). ProtocolViolation: magic, version,
    uuid, size or data_begin is another; `check` says which, `found` and `expected` the values.
    """
    expected = {
        "magic": (W_MAGIC, MAGIC),
        "version": (W_VERSION, VERSION),
        "uuid": (W_UUID, uuid_words(uuid)[0]),
        "uuid's end": (W_UUID + 1, uuid_words(uuid)[1]),
        "size": (W_SIZE, expected_size),
        "data_begin": (W_DATA_BEGIN, DATA_BEGIN),
    }
    segment = Segment.open(arena_name(uuid), segment_bytes(expected_size), readonly=readonly)
    words = segment.words
    if words[W_MAGIC] == 0:
        segment.close()
        raise BrokerLost("the arena is not ready: its broker has not finished, or died making it", segment=segment.name)
    for check, (at, value) in expected.items():
        found = words[at]
        if found != value:
            segment.close()
            raise ProtocolViolation(
                f"the arena's {check} is another", segment=segment.name, check=check, found=found, expected=value
            )
    return Arena(segment, uuid, expected_size)
