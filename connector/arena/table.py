"""The TABLE: which extents of the arena are blocks. The broker's alone; no client maps it.

After the header page (header.py) one 64-byte entry per block that can live at once:

     0           8        16       24       32                               64
     +-----------+--------+--------+--------+--------+--------+--------+--------+
     |entry word | offset | length |session |        4 spare words, zero        |
     +-----------+--------+--------+--------+--------+--------+--------+--------+
      63 62 61                  0
     +-----+---------------------+
     |state|     generation      |   FREE 0, RESERVED 1, QUARANTINED 2
     +-----+---------------------+

Body first, entry word last: killed in between, the entry is still what its old word says. Each
word is one store, never struct.pack_into, which writes a zero first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from connector.arena import header
from connector.arena.arena import DATA_BEGIN
from connector.arena.header import HEADER_BYTES, TableHeader, table_bytes
from connector.arena.segment import Segment, table_name
from connector.core.errors import BrokerLost, ConnectorError, InvariantBroken
from connector.core.layout import ALIGN

FREE, RESERVED, QUARANTINED = 0, 1, 2
STATE_SHIFT = 62
MAX_GENERATION = (1 << STATE_SHIFT) - 1
#: Generations taken at once: the ceiling is raised before any of them is used.
CEILING_STEP = 1024
_FIRST = HEADER_BYTES // 8
_STEP = header.ENTRY_BYTES // 8


class Entry(NamedTuple):
    """One entry: state, generation, and the block's offset and length in bytes, and its session."""

    state: int
    generation: int
    offset: int
    length: int
    session: int


class Committed(NamedTuple):
    """An entry that is not FREE, by its number; `fault` says what is wrong with it, "" if nothing is."""

    number: int
    entry: Entry
    fault: str


class Table:
    """A mapped TABLE, its lock held by this process. Create one, or open one to adopt it."""

    __slots__ = ("arena_size", "entries", "run_dir", "segment", "uuid")

    def __init__(self, segment: Segment, found: TableHeader) -> None:
        self.segment = segment
        self.uuid = found.uuid
        self.entries = found.entries
        self.arena_size = found.arena_size
        self.run_dir = found.run_dir

    @classmethod
    def create(
        cls,
        uuid: str,
        entries: int,
        arena_size: int,
        run_dir: str,
        epoch: int,
        mode: int = 0o600,
        gid: int | None = None,
    ) -> Table:
        """A new table of FREE entries, locked from its first moment; errors as Segment.create.

        ConfigError: entries or run_dir (absolute, at most 1024 bytes of UTF-8) out of range.
        Generation 0 is never used, so the ceiling begins at 1.
        """
        found = TableHeader(uuid, entries, arena_size, 1, epoch, run_dir)
        page = header.pack(found)
        segment = Segment.create(table_name(uuid), table_bytes(entries), mode=mode, gid=gid, lock=True)
        segment.buf[8:HEADER_BYTES] = page[8:]
        segment.words[header.W_MAGIC] = header.MAGIC
        return cls(segment, found)

    @classmethod
    def open(cls, uuid: str) -> Table:
        """The table that a dead broker left: its lock taken, then its header checked.

        Raises BrokerRunning (the lock is held), BrokerLost (not there, or never finished),
        ProtocolViolation (damaged header; `check` says where). On failure the lock is given back.
        """
        segment = Segment.open(table_name(uuid), lock=True)
        page = bytes(segment.buf[:HEADER_BYTES])
        try:
            if header.unfinished(page):
                raise BrokerLost("the table was never finished: its broker died making it", segment=segment.name)
            return cls(segment, header.parse(page, uuid, segment.size))
        except ConnectorError:
            segment.close()
            raise

    @property
    def ceiling(self) -> int:
        """Generations below it may have been handed out; the next one to use after a crash."""
        return int(self.segment.words[header.W_CEILING])

    def raise_ceiling(self, by: int = CEILING_STEP) -> int:
        """Allows `by` more generations; call before using any of them. Returns the new ceiling."""
        ceiling = self.ceiling + by
        if by <= 0 or ceiling > MAX_GENERATION:
            raise InvariantBroken("the generation ceiling cannot be raised so", ceiling=self.ceiling, by=by)
        self.segment.words[header.W_CEILING] = ceiling
        return ceiling

    @property
    def epoch(self) -> int:
        """The broker's life, as the header says now."""
        return int(self.segment.words[header.W_EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """A new broker's life begins on this table."""
        self.segment.words[header.W_EPOCH] = epoch

    def reserve(self, entry: int, offset: int, length: int, session: int, generation: int) -> None:
        """Commits a reservation. offset, length: bytes in the arena's segment. InvariantBroken: out of range."""
        words = self.segment.words
        fault = self._fault(Entry(RESERVED, generation, offset, length, session))
        if fault:
            raise InvariantBroken(
                f"a reservation is wrong: {fault}", offset=offset, length=length, generation=generation
            )
        word = RESERVED << STATE_SHIFT | generation
        at = self._at(entry)
        words[at + 1] = offset
        words[at + 2] = length
        words[at + 3] = session
        words[at] = word

    def set_free(self, entry: int, generation: int) -> None:
        """Commits that the block of this generation is gone. Its body stays, unread."""
        self.segment.words[self._at(entry)] = self._word(FREE, generation)

    def quarantine(self, entry: int) -> None:
        """Commits that the entry's extent must not be used, nor read, until someone decides."""
        at = self._at(entry)
        self.segment.words[at] = self._word(QUARANTINED, self.segment.words[at] & MAX_GENERATION)

    def read(self, entry: int) -> Entry:
        """The entry as it stands. State 3 exists only in a damaged table."""
        at = self._at(entry)
        word, offset, length, session = self.segment.words[at : at + 4]
        return Entry(word >> STATE_SHIFT, word & MAX_GENERATION, offset, length, session)

    def committed(self) -> Iterator[Committed]:
        """Every entry that is not FREE, in order, for recovery; damaged ones come with their fault."""
        for index in range(self.entries):
            entry = self.read(index)
            if entry.state != FREE:
                yield Committed(index, entry, self._fault(entry))

    def close(self) -> None:
        """Gives the lock back and forgets the mapping."""
        self.segment.close()

    def unlink(self) -> None:
        """Removes the name; do it while the lock is held, and after the arena's."""
        self.segment.unlink()

    def __repr__(self) -> str:
        return f"<Table {self.uuid} entries={self.entries} {self.segment!r}>"

    def _at(self, entry: int) -> int:
        if not 0 <= entry < self.entries:
            raise InvariantBroken("no such table entry", entry=entry, limit=self.entries)
        return _FIRST + entry * _STEP

    @staticmethod
    def _word(state: int, generation: int) -> int:
        if not 0 <= generation <= MAX_GENERATION:
            raise InvariantBroken("a generation is out of range", generation=generation, limit=MAX_GENERATION)
        return state << STATE_SHIFT | generation

    def _fault(self, entry: Entry) -> str:
        if entry.state not in (RESERVED, QUARANTINED):
            return "no such state"
        if not 0 < entry.generation < self.ceiling:
            return "the generation was never handed out"
        if entry.offset < DATA_BEGIN or entry.offset % ALIGN:
            return "the offset is before the data, or not aligned"
        if entry.length <= 0 or entry.offset + entry.length > DATA_BEGIN + self.arena_size:
            return "the extent is empty, or reaches behind the arena"
        return ""
