"""docs/points.md is true: the tests and mutations that it names are there, and each mutation is of its row's tests."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.test_mutations import ROOT, patches

PAGE = ROOT / "docs/points.md"


class Row(NamedTuple):
    """A point; `number`: which of the fifteen it is a part of, 0 for none."""

    number: int
    point: str
    held_by: str
    tests: list[str]
    mutations: list[str]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or cells[-1] == "mutations":
            continue
        number = int(cells.pop(0)) if len(cells) == 4 else 0
        point, held_by, mutations = cells
        names = [re.findall(r"`([^`]+)`", cell) for cell in (held_by, mutations)]
        found.append(Row(number, point, held_by, *names))
    return found


ROWS = rows()


def test_the_tests_that_are_named_are_there() -> None:
    assert [test for row in ROWS for test in row.tests if not patches.has_test(test)] == []
    assert sum(len(row.tests) for row in ROWS) > len(ROWS)


def test_the_mutations_that_are_named_are_there() -> None:
    there = set(patches.all_names())
    assert [name for row in ROWS for name in row.mutations if name not in there] == []


def test_each_point_has_a_test_or_is_said_to_need_none() -> None:
    assert [
        row.point for row in ROWS if not row.tests and not row.held_by.startswith(("out of scope", "no such"))
    ] == []


@pytest.mark.parametrize("number", range(1, 16))
def test_each_part_of_the_fifteen_has_mutations_that_its_tests_see(number: int) -> None:
    parts = [row for row in ROWS if row.number == number]
    assert parts and all(row.tests and row.mutations for row in parts)
    promises = [patches.read(name).promise for row in parts for name in row.mutations]
    assert any(promise.startswith(f"{number} of fifteen: ") for promise in promises)


def test_a_mutation_stands_where_a_test_that_sees_it_stands() -> None:
    seen = {name: {test.partition("[")[0] for test in patches.read(name).tests} for name in patches.all_names()}
    assert [(row.point, name) for row in ROWS for name in row.mutations if not seen[name] & set(row.tests)] == []
