"""The TABLE's first page, as bytes: what the broker writes once and a sweeper reads without mapping.

     0        8        16                32        40        48        56       64
     +--------+--------+--------+--------+--------+--------+--------+--------+
     | MAGIC  |version | uuid (16 bytes) |entries | arena  |ceiling | epoch  |
     |        |        |                 |        |  size  |        |        |
     +--------+--------+--------+--------+--------+--------+--------+--------+
word   0        1        2        3        4        5        6        7

     64       72                          1096     1104              4096
     +--------+---------------------------+--------+------ ... ------+
     |run_dir | run_dir, UTF-8,           | crc32  |      zeros      | entries
     | bytes  | at most 1024 bytes        |        |                 |
     +--------+---------------------------+--------+------ ... ------+
word   8        9                           137

MAGIC is stored last. The checksum covers version ... arena size and run_dir with its length;
the ceiling and the epoch change, so they stand outside it.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import NamedTuple

from connector.arena.arena import uuid_words
from connector.core.errors import ConfigError, ProtocolViolation

MAGIC = int.from_bytes(b"TCTABLE1", "little")
VERSION = 1
#: Bytes of the header page, and where entries begin.
HEADER_BYTES = 4096
MAX_RUN_DIR_BYTES = 1024
#: Most entries a table may have: 64 MiB of them.
MAX_ENTRIES = 1 << 20
ENTRY_BYTES = 64
W_MAGIC, W_CEILING, W_EPOCH, W_RUN_DIR_BYTES, W_CRC = 0, 6, 7, 8, 137
_RUN_DIR_AT = 72
_CRC_AT = W_CRC * 8
_WORDS = struct.Struct("<9Q")


class TableHeader(NamedTuple):
    """uuid: 32 hex digits; arena_size: bytes for blocks; ceiling: generations below it may be in use."""

    uuid: str
    entries: int
    arena_size: int
    ceiling: int
    epoch: int
    run_dir: str


def table_bytes(entries: int) -> int:
    """Bytes of the table's segment: the header page and its entries."""
    return HEADER_BYTES + entries * ENTRY_BYTES


def pack(header: TableHeader) -> bytes:
    """The page's bytes with MAGIC still 0. ConfigError: entries or run_dir out of range."""
    if not 0 < header.entries <= MAX_ENTRIES:
        raise ConfigError("a table's entries are out of range", entries=header.entries, limit=MAX_ENTRIES)
    run_dir = os.fsencode(header.run_dir)
    if not run_dir.startswith(b"/") or b"\0" in run_dir or len(run_dir) > MAX_RUN_DIR_BYTES:
        raise ConfigError(
            "the run directory must be an absolute path that fits the table's header",
            path=header.run_dir[:80],
            size=len(run_dir),
            limit=MAX_RUN_DIR_BYTES,
        )
    first, second = uuid_words(header.uuid)
    page = bytearray(HEADER_BYTES)
    page[: _WORDS.size] = _WORDS.pack(
        0,
        VERSION,
        first,
        second,
        header.entries,
        header.arena_size,
        header.ceiling,
        header.epoch,
        len(run_dir),
    )
    page[_RUN_DIR_AT : _RUN_DIR_AT + len(run_dir)] = run_dir
    page[_CRC_AT : _CRC_AT + 8] = _checksum(page).to_bytes(8, "little")
    return bytes(page)


def unfinished(page: bytes) -> bool:
    """True if the creator never came to store MAGIC: nobody can have used such a table."""
    return not any(page[:8])


def parse(page: bytes, uuid: str, size: int) -> TableHeader:
    """The header on a private copy of a table's first page; `size` is the file's, in bytes.

    ProtocolViolation, with `check`, if a field cannot be what a broker wrote.
    """
    if len(page) < HEADER_BYTES:
        raise ProtocolViolation("the table is shorter than its header", check="length", size=size, limit=HEADER_BYTES)
    magic, version, first, second, entries, arena_size, ceiling, epoch, length = _WORDS.unpack_from(page)
    crc = int.from_bytes(page[_CRC_AT : _CRC_AT + 8], "little")
    checks = {
        "magic": magic == MAGIC,
        "version": version == VERSION,
        "run_dir": 0 < length <= MAX_RUN_DIR_BYTES,
        "checksum": crc == _checksum(page),
        "uuid": (first, second) == uuid_words(uuid),
        "size": 0 < entries <= MAX_ENTRIES and size == table_bytes(entries),
    }
    for check, good in checks.items():
        if not good:
            raise ProtocolViolation(f"the table's header is damaged: {check}", check=check, uuid=uuid, size=size)
    run_dir = os.fsdecode(page[_RUN_DIR_AT : _RUN_DIR_AT + length])
    return TableHeader(uuid, entries, arena_size, ceiling, epoch, run_dir)


def _checksum(page: bytes | bytearray) -> int:
    return zlib.crc32(page[64:_CRC_AT], zlib.crc32(page[8:48]))
