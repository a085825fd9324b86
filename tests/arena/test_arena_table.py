"""The headers of ARENA and TABLE, and the entries: what is stored, in which order, and what is refused."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.arena import arena as arenas
from connector.arena import header
from connector.arena.arena import DATA_BEGIN, Arena, create_arena, open_arena, segment_bytes
from connector.arena.table import FREE, QUARANTINED, RESERVED, Entry, Table
from connector.core.errors import (
    BrokerLost,
    BrokerRunning,
    ConfigError,
    ConnectorError,
    InvariantBroken,
    ProtocolViolation,
    UsageError,
)

SIZE = 1 << 20
RUN_DIR = "/run/tensor-connector/größe"


@pytest.fixture
def table(uuid: str) -> Iterator[Table]:
    made = Table.create(uuid, 16, SIZE, RUN_DIR, epoch=3)
    yield made
    made.unlink()
    made.close()


class Spy:
    """Words that remember the order of stores."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.stores: list[int] = []

    def __setitem__(self, at: int, value: int) -> None:
        self.words[at] = value
        self.stores.append(at)

    def __getitem__(self, at: int) -> int:
        return self.words[at]


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, SIZE])
def test_an_arena_opens_as_it_was_created(new_arena: Callable[..., Arena], size: int) -> None:
    """The size is the one asked for, not the one that pages round it up to."""
    made = new_arena(size)
    opened = open_arena(made.uuid, size, readonly=True)
    assert (opened.size, opened.data_begin, opened.epoch, opened.readonly) == (size, DATA_BEGIN, 1, True)
    assert opened.segment.size == segment_bytes(size) >= DATA_BEGIN + size
    made.set_epoch(8)
    assert opened.epoch == 8
    opened.close()


def test_the_arena_page_is_the_documented_one(arena: Arena) -> None:
    page = bytes(arena.segment.buf[:64])
    words = [int.from_bytes(page[at : at + 8], "little") for at in range(0, 64, 8)]
    assert page[:8] == b"TCARENA1" and page[16:32].hex() == arena.uuid
    assert words[1] == 1 and words[4:] == [arena.size, 1, 4096, os.getpid()]


def test_an_arena_without_its_magic_is_not_ready(arena: Arena) -> None:
    arena.segment.words[arenas.W_MAGIC] = 0
    with pytest.raises(BrokerLost, match="not ready"):
        open_arena(arena.uuid, arena.size)


@pytest.mark.parametrize(
    ("word", "check"),
    [
        (arenas.W_MAGIC, "magic"),
        (arenas.W_VERSION, "version"),
        (arenas.W_UUID, "uuid"),
        (arenas.W_UUID + 1, "uuid's end"),
        (arenas.W_SIZE, "size"),
        (arenas.W_DATA_BEGIN, "data_begin"),
    ],
)
def test_each_wrong_word_of_an_arena_is_named(arena: Arena, word: int, check: str) -> None:
    arena.segment.words[word] += 1
    with pytest.raises(ProtocolViolation) as caught:
        open_arena(arena.uuid, arena.size)
    assert caught.value.facts["check"] == check
    assert caught.value.facts["found"] == caught.value.facts["expected"] + 1


def test_an_arena_of_another_size_or_of_no_size_is_refused(arena: Arena, uuid: str) -> None:
    with pytest.raises(ProtocolViolation):
        open_arena(arena.uuid, arena.size * 2)
    with pytest.raises(UsageError):
        create_arena(uuid, 0, epoch=1)


def test_a_table_reopens_as_it_was_created(table: Table) -> None:
    table.reserve(5, DATA_BEGIN + 128, 256, 2**64 - 1, _generation(table))
    table.set_epoch(4)
    table.close()
    opened = Table.open(table.uuid)
    assert (opened.uuid, opened.entries, opened.arena_size, opened.run_dir) == (table.uuid, 16, SIZE, RUN_DIR)
    assert (opened.epoch, opened.ceiling) == (4, 1025)
    assert opened.read(5) == Entry(RESERVED, 1024, DATA_BEGIN + 128, 256, 2**64 - 1)
    opened.close()


def _generation(table: Table) -> int:
    return table.raise_ceiling() - 1


def test_the_table_magic_is_stored_after_the_rest(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in between, a table is unfinished: opened by nobody, and known as such."""
    original = header.MAGIC
    monkeypatch.setattr(header, "MAGIC", 0)
    made = Table.create(uuid, 1, SIZE, RUN_DIR, epoch=1)
    monkeypatch.setattr(header, "MAGIC", original)
    page = bytes(made.segment.buf[:4096])
    assert header.unfinished(page) and page[8] == 1
    made.close()
    with pytest.raises(BrokerLost, match="never finished"):
        Table.open(uuid)
    made.unlink()


def test_a_held_table_cannot_be_opened(table: Table, child: Callable[..., object]) -> None:
    script = """
import sys
from connector.arena.table import Table
from connector.core.errors import BrokerRunning
try:
    Table.open(sys.argv[1])
except BrokerRunning:
    print("held")
"""
    assert child(script, table.uuid).communicate()[0] == "held\n"  # type: ignore[attr-defined]
    with pytest.raises(BrokerRunning):
        Table.open(table.uuid)


@pytest.mark.parametrize(
    ("at", "check"),
    [
        (0, "magic"),
        (8, "version"),
        (17, "checksum"),
        (32, "checksum"),
        (40, "checksum"),
        (75, "checksum"),
        (70, "run_dir"),
    ],
)
def test_a_damaged_table_header_is_refused_and_its_lock_given_back(table: Table, at: int, check: str) -> None:
    table.segment.buf[at] ^= 0x41
    table.close()
    for _ in range(2):
        with pytest.raises(ProtocolViolation) as caught:
            Table.open(table.uuid)
        assert caught.value.facts["check"] == check


def test_a_table_of_another_length_than_its_entries_is_refused(table: Table) -> None:
    table.close()
    with open(f"/dev/shm/tc-{table.uuid}-table", "ab") as file:
        file.write(b"\0" * 64)
    with pytest.raises(ProtocolViolation) as caught:
        Table.open(table.uuid)
    assert caught.value.facts["check"] == "size"


@given(st.binary(max_size=300), st.integers(0, 5000))
def test_any_bytes_parse_or_are_refused(start: bytes, length: int) -> None:
    """Nothing but ProtocolViolation comes out of a page of garbage."""
    page = (start + bytes(5000))[:length]
    with pytest.raises(ProtocolViolation):
        header.parse(page, "0" * 32, length)


def test_the_checksum_covers_what_never_changes() -> None:
    page = header.pack(header.TableHeader("ab" * 16, 2, SIZE, 1, 9, "/x"))
    expected = zlib.crc32(page[8:48] + page[64:1096])
    assert int.from_bytes(page[1096:1104], "little") == expected


@pytest.mark.parametrize("run_dir", ["relative", "", "/" + "x" * 1024, "/a\0b", "/" + "ü" * 600])
def test_a_run_directory_that_does_not_fit_is_refused(uuid: str, run_dir: str) -> None:
    with pytest.raises(ConfigError):
        Table.create(uuid, 1, SIZE, run_dir, epoch=1)


@pytest.mark.parametrize("entries", [0, -1, header.MAX_ENTRIES + 1])
def test_entries_out_of_range_are_refused(uuid: str, entries: int) -> None:
    with pytest.raises(ConfigError):
        Table.create(uuid, entries, SIZE, "/x", epoch=1)


def test_the_longest_run_directory_fits(uuid: str) -> None:
    made = Table.create(uuid, 1, SIZE, "/" + "x" * 1023, epoch=1)
    made.close()
    opened = Table.open(uuid)
    assert opened.run_dir == "/" + "x" * 1023
    opened.unlink()
    opened.close()


def test_the_body_is_stored_before_the_entry_word(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = _generation(table)
    spy = Spy(table.segment.words)
    monkeypatch.setattr(type(table.segment), "words", property(lambda _: spy))
    table.reserve(2, DATA_BEGIN, 64, 1, generation)
    word = 512 + 2 * 8
    assert sorted(spy.stores[:-1]) == [word + 1, word + 2, word + 3] and spy.stores[-1] == word
    spy.stores.clear()
    table.set_free(2, generation)
    assert spy.stores == [word]


def test_states_pass_and_free_entries_are_not_committed(table: Table) -> None:
    top = table.raise_ceiling()
    for number, generation in enumerate(range(top - 4, top - 1)):
        table.reserve(number, DATA_BEGIN + number * 64, 64, number, generation)
    table.set_free(0, top - 4)
    table.quarantine(1)
    assert table.read(0)[:2] == (FREE, top - 4)
    found = {one.number: one for one in table.committed()}
    assert sorted(found) == [1, 2]
    assert found[1].entry == Entry(QUARANTINED, top - 3, DATA_BEGIN + 64, 64, 1)
    assert found[2].entry.state == RESERVED
    assert not any(one.fault for one in found.values())


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((3 << 62 | 1, DATA_BEGIN, 64, 0), "state"),
        ((1 << 62, DATA_BEGIN, 64, 0), "generation"),
        ((1 << 62 | 5000, DATA_BEGIN, 64, 0), "generation"),
        ((1 << 62 | 1, 0, 64, 0), "offset"),
        ((1 << 62 | 1, DATA_BEGIN + 8, 64, 0), "offset"),
        ((1 << 62 | 1, DATA_BEGIN, 0, 0), "extent"),
        ((1 << 62 | 1, DATA_BEGIN, SIZE + 1, 0), "extent"),
        ((2 << 62 | 1, 2**64 - 64, 2**64 - 1, 0), "extent"),
    ],
)
def test_damaged_entries_come_with_their_fault_and_can_be_quarantined(
    table: Table, words: tuple[int, ...], fault: str
) -> None:
    table.raise_ceiling()
    for at, value in enumerate(words):
        table.segment.words[512 + 3 * 8 + at] = value
    (found,) = table.committed()
    assert found.number == 3 and fault in found.fault
    table.quarantine(3)
    assert table.read(3).state == QUARANTINED


def test_a_wrong_reservation_changes_nothing(table: Table) -> None:
    top = table.raise_ceiling()
    wrong = [
        (0, DATA_BEGIN, 64, 0, top),
        (0, DATA_BEGIN, 64, 0, 0),
        (0, DATA_BEGIN, 64, 0, 1 << 62),
        (0, DATA_BEGIN + 1, 64, 0, 1),
        (0, DATA_BEGIN, SIZE + 64, 0, 1),
        (16, DATA_BEGIN, 64, 0, 1),
        (-1, DATA_BEGIN, 64, 0, 1),
    ]
    for arguments in wrong:
        with pytest.raises(InvariantBroken):
            table.reserve(*arguments)
    assert bytes(table.segment.buf[4096:]) == bytes(16 * 64)


def test_the_ceiling_only_rises(table: Table) -> None:
    assert [table.ceiling, table.raise_ceiling(), table.raise_ceiling(by=1), table.ceiling] == [1, 1025, 1026, 1026]
    for by in (0, -1, 1 << 62):
        with pytest.raises(InvariantBroken):
            table.raise_ceiling(by)
    assert table.ceiling == 1026


def test_a_killed_broker_leaves_a_table_that_opens(uuid: str, child: Callable[..., object]) -> None:
    script = """
import os, sys
from connector.arena.table import Table
table = Table.create(sys.argv[1], 4, 1 << 20, "/x", epoch=1)
table.raise_ceiling()
table.reserve(1, 4096, 64, 7, 1)
os.kill(os.getpid(), 9)
"""
    child(script, uuid).wait()  # type: ignore[attr-defined]
    opened = Table.open(uuid)
    assert [one.entry.session for one in opened.committed()] == [7]
    opened.unlink()
    opened.close()


def test_no_descriptor_and_no_mapping_survive_a_refused_open(table: Table) -> None:
    table.segment.buf[8] = 9
    table.close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectorError):
        Table.open(table.uuid)
    assert len(os.listdir("/proc/self/fd")) == before
    assert table.uuid not in Path("/proc/self/maps").read_text()
