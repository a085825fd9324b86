"""A step's payloads as columns: what is read is what rows of the same would have been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.core.directory.effects import Descriptor
from connector.core.directory.events import Member
from connector.core.names import MAX_INDEX, MAX_READERS, MAX_RID_BYTES, Edge, Handle
from connector.wire import columns, hot
from connector.wire import fields as f

EDGE = Edge("a", "b", 0)
COUNT = 6
Check = Callable[[Any], Any]

#: One wrong value of each sort, for any field.
WRONG: list[Any] = [
    None,
    True,
    "x",
    b"x",
    1.5,
    -2,
    2**63,
    MAX_INDEX + 1,
    [],
    [1],
    {},
    "",
    "é",
    "x" * (MAX_RID_BYTES + 1),
]


def wired(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value), raw=False, strict_map_key=False)


def members() -> list[Member]:
    return [Member(f"r{place}", 7 + place, 0, 1, 1, b"m%d" % place, 80) for place in range(COUNT)]


def descriptors() -> list[Descriptor]:
    where = Handle(4096, 7)
    return [
        Descriptor(EDGE, 0, f"r{place}", 3 + place, 9, 0, 0, where, 8192, 256, place, b"m", 8) for place in range(COUNT)
    ]


def read(check: Check, value: Any) -> Any:
    try:
        return check(value)
    except (f.BadField, UnicodeEncodeError) as error:
        return type(error)


SORTS = pytest.mark.parametrize(
    ("made", "pack", "check", "row", "shared"),
    [
        (members, columns.pack_members, columns.members, hot.member, (2, 3, 4, 6)),
        (descriptors, columns.pack_descriptors, columns.descriptors, hot.descriptor, (0, 1, 5, 6, 7, 8)),
    ],
    ids=["members", "descriptors"],
)


@SORTS
def test_a_step_is_columns_and_comes_as_it_was(
    made: Any, pack: Any, check: Check, row: Check, shared: tuple[int, ...]
) -> None:
    for count in range(COUNT + 1):
        rows = made()[:count]
        packed = pack(rows)
        assert (packed is rows) is (count < columns.FEWEST)
        assert check(wired(packed)) == tuple(rows)
        assert [type(one) for one in check(wired(packed))] == [type(one) for one in rows]
    assert len(msgpack.packb(pack(made()))) < len(msgpack.packb(made()))


@SORTS
def test_payloads_that_share_less_are_rows(
    made: Any, pack: Any, check: Check, row: Check, shared: tuple[int, ...]
) -> None:
    for place in shared:
        rows = made()
        other = Edge("a", "c", 0) if place == 0 else Handle(64, 1) if type(rows[0][place]) is Handle else 2
        rows[-1] = type(rows[0])(*[other if at == place else value for at, value in enumerate(rows[-1])])
        assert pack(rows) is rows
        assert check(wired(rows)) == tuple(rows)


@SORTS
def test_a_wrong_value_anywhere_is_what_it_is_in_a_row(
    made: Any, pack: Any, check: Check, row: Check, shared: tuple[int, ...]
) -> None:
    """In each shared field, and in the first, a middle and the last place of each column."""
    fields = len(made()[0])
    refused = 0
    for field in range(fields):
        for at in (None,) if field in shared else (0, COUNT // 2, COUNT - 1):
            for wrong in WRONG:
                rows = wired(made())
                for place in range(COUNT) if at is None else (at,):
                    rows[place][field] = wrong
                expected = read(f.many(row, 100), [list(one) for one in wired(rows)])
                whole = wired(pack([type(made()[0])(*one) for one in rows]))
                if type(whole[0]) is int:
                    found = read(check, whole)
                    assert found == expected, (field, at, wrong)
                    refused += found is f.BadField
    assert refused > fields * len(WRONG) / 2


@SORTS
@pytest.mark.parametrize("change", ["shorter", "longer", "none", "text"])
def test_columns_of_other_lengths_are_refused(
    made: Any, pack: Any, check: Check, row: Check, shared: tuple[int, ...], change: str
) -> None:
    whole = wired(pack(made()))
    for place, column in enumerate(whole):
        if type(column) is list and len(column) == COUNT:
            other = {"shorter": column[:-1], "longer": [*column, column[0]], "none": None, "text": "x" * COUNT}[change]
            with pytest.raises(f.BadField):
                check([*whole[:place], other, *whole[place + 1 :]])


@SORTS
def test_empty_columns_are_no_payloads(made: Any, pack: Any, check: Check, row: Check, shared: Any) -> None:
    whole = wired(pack(made()))
    assert check([[] if type(part) is list and len(part) == COUNT else part for part in whole]) == ()


def alike(count: int = COUNT, manifest: Any = b"one for all") -> list[Any]:
    return [Member(f"r{place}", 7 + place, 0, 1, 1, manifest, 80) for place in range(count)]


def test_one_manifest_stands_for_all() -> None:
    for count in range(columns.FEWEST, COUNT + 1):
        packed = columns.pack_members(alike(count))
        assert packed[6] == b"one for all"
        found = columns.members(wired(packed))
        assert found == tuple(alike(count))
        assert {type(one) for one in found} == {Member}
    # One that differs has all of them told.
    other = [*alike()[:-1], alike(manifest=b"another")[-1]]
    packed = columns.pack_members(other)
    assert len(packed[6]) == COUNT
    assert columns.members(wired(packed)) == tuple(other)


def test_a_wrong_value_beside_one_manifest_is_what_it_is_in_a_row() -> None:
    """What is shared, among it that manifest, and each place of the two columns."""
    refused = 0
    for field in range(7):
        for at in (None,) if field not in (0, 1) else (0, COUNT // 2, COUNT - 1):
            for wrong in WRONG:
                rows = wired(alike())
                for place in range(COUNT) if at is None else (at,):
                    rows[place][field] = wrong
                whole = wired(columns.pack_members([Member(*row) for row in rows]))
                if type(whole[0]) is int and type(whole[6]) is not list:
                    found = read(columns.members, whole)
                    assert found == read(f.many(hot.member, 100), rows), (field, at, wrong)
                    refused += found is f.BadField
    assert refused > 6 * len(WRONG) / 2


@pytest.mark.parametrize("manifest", ["text", 7, None, True, {}, 1.5])
def test_what_is_no_manifest_stands_for_none(manifest: Any) -> None:
    """Nor is a text as long as the columns taken for one of them."""
    for value in (manifest, "x" * COUNT if manifest == "text" else manifest):
        with pytest.raises(f.BadField):
            columns.members([*wired(columns.pack_members(alike()))[:6], value])


@pytest.mark.parametrize("column", [4, 5])
@pytest.mark.parametrize("change", ["shorter", "longer", "none", "text", "empty"])
def test_columns_of_other_lengths_beside_one_manifest_are_refused(column: int, change: str) -> None:
    whole = wired(columns.pack_members(alike()))
    is_ = whole[column]
    whole[column] = {"shorter": is_[:-1], "longer": [*is_, is_[0]], "none": None, "text": "x" * COUNT, "empty": []}[
        change
    ]
    with pytest.raises(f.BadField):
        columns.members(whole)


NUMBER = st.integers(0, MAX_INDEX)


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=9), NUMBER, st.binary(max_size=9)), min_size=4, max_size=9),
    st.tuples(NUMBER, st.integers(0, 3), st.integers(1, MAX_READERS), NUMBER),
)
def test_any_step_comes_as_it_was(parts: Any, shared: Any) -> None:
    attempt, flags, readers, nbytes = shared
    rows = [Member(rid, index, attempt, flags, readers, manifest, nbytes) for rid, index, manifest in parts]
    found = read(columns.members, wired(columns.pack_members(rows)))
    assert found == read(f.many(hot.member, 100), wired(rows))
