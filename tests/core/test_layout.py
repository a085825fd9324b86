"""Layouts of blocks: what plan makes passes check, and nothing else does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from connector.core.errors import Broken, UnsupportedTensor
from connector.core.layout import ALIGN, Manifest, Slot, check, data_bytes, plan
from connector.core.names import MAX_KEYS
from connector.core.specs import TensorSpec

NUMBERS = st.integers(-65, 300) | st.sampled_from([-(2**63), 2**63, 2**64, 64, 128])
WRONG_TYPES: list[Any] = [None, True, 0.0, 64.0, "64", b"", [], 2**80]


@given(st.data())
def test_a_plan_passes_its_check_and_its_slots_are_apart(members: st.SearchStrategy[Any], data: st.DataObject) -> None:
    payloads = data.draw(members)
    manifests = plan(payloads)
    size = data_bytes(manifests)
    assert size % ALIGN == 0
    assert manifests == plan(payloads)
    for specs, manifest in zip(payloads, manifests, strict=True):
        assert check(manifest, size) is manifest
        assert [slot.spec for slot in manifest.slots] == specs
        assert all(slot.offset % ALIGN == 0 and slot.nbytes == slot.spec.nbytes for slot in manifest.slots)
    ranges = [(slot.offset, slot.offset + slot.nbytes) for manifest in manifests for slot in manifest.slots]
    assert all(0 <= before[1] <= after[0] < before[1] + ALIGN for before, after in pairwise(ranges))
    assert size - sum(-(-(end - begin) // ALIGN) * ALIGN for begin, end in ranges) == 0


def _replaced(manifest: Manifest, at: int, field: str, value: Any) -> Manifest:
    if field in ("begin", "end"):
        return manifest._replace(**{field: value})
    slots = list(manifest.slots)
    slots[at] = slots[at]._replace(**{field: value})
    return manifest._replace(slots=tuple(slots))


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "offset": NUMBERS,
    "nbytes": NUMBERS,
    "begin": NUMBERS,
    "end": NUMBERS,
    "shape": st.lists(st.integers(-2, 9), max_size=4).map(tuple),
    "dtype": st.sampled_from(["bool", "int16", "int32", "float32", "float64", "complex128", "qint8", "object", ""]),
}


@given(st.data(), st.sampled_from(sorted(VALUES)))
def test_a_mutated_manifest_is_refused(members: st.SearchStrategy[Any], data: st.DataObject, field: str) -> None:
    """Only another view of the same bytes (4 x int16 as 2 x int32) is beyond what a check can see."""
    manifests = [m for m in plan(data.draw(members)) if m.slots]
    assume(manifests)
    size = data_bytes(manifests)
    manifest = data.draw(st.sampled_from(manifests))
    at = data.draw(st.integers(0, len(manifest.slots) - 1))
    mutated = _replaced(manifest, at, field, data.draw(VALUES[field]))
    if mutated == manifest:
        assert check(mutated, size) is mutated
        return
    try:
        check(mutated, size)
    except Broken:
        return
    assert field in ("shape", "dtype")
    assert mutated.slots[at].spec.nbytes == manifest.slots[at].nbytes


@given(st.data(), st.sampled_from(sorted(VALUES)), st.sampled_from(WRONG_TYPES))
def test_a_field_of_another_type_is_refused(
    members: st.SearchStrategy[Any], data: st.DataObject, field: str, value: Any
) -> None:
    manifests = [m for m in plan(data.draw(members)) if m.slots]
    assume(manifests)
    manifest = data.draw(st.sampled_from(manifests))
    at = data.draw(st.integers(0, len(manifest.slots) - 1))
    with pytest.raises(Broken) as caught:
        check(_replaced(manifest, at, field, value), data_bytes(manifests))
    assert str(caught.value)


A, B = Slot("a", "int8", (64,), 0, 64), Slot("b", "int32", (3,), 64, 12)
GOOD = Manifest((A, B), 0, 76)


@pytest.mark.parametrize(
    ("manifest", "size"),
    [
        (GOOD, 64),
        (GOOD._replace(slots=(B, A)), 128),
        (GOOD._replace(slots=(A, B._replace(offset=0))), 128),
        (GOOD._replace(slots=(A, B._replace(offset=128)), end=140), 192),
        (GOOD._replace(slots=(A, B._replace(key="a"))), 128),
        (GOOD._replace(slots=(A,)), 128),
        (GOOD._replace(end=128), 128),
        (Manifest((A._replace(offset=32),), 32, 96), 128),
        (Manifest((A._replace(offset=-64),), -64, 0), 128),
        (Manifest((), 64, 64), 0),
        (Manifest((), 0, 64), 64),
        (Manifest((), 2**70, 2**70), 64),
        (Manifest((Slot("a", "int8", (2**62,), 0, 2**62),), 0, 2**62), 64),
    ],
    ids=[
        "short",
        "order",
        "overlap",
        "gap",
        "twice",
        "less",
        "more",
        "misaligned",
        "low",
        "out",
        "wide",
        "far",
        "huge",
    ],
)
def test_manifests_that_cannot_be_are_broken(manifest: Manifest, size: int) -> None:
    assert check(GOOD, 128) is GOOD
    with pytest.raises(Broken):
        check(manifest, size)


@pytest.mark.parametrize(
    ("at", "field", "value"),
    [
        (0, "begin", 0.0),
        (0, "begin", False),
        (0, "end", 76.0),
        (0, "offset", 0.0),
        (0, "offset", False),
        (1, "nbytes", 12.0),
        (1, "shape", (3.0,)),
        (1, "shape", [3]),
    ],
)
def test_a_number_that_only_equals_the_right_one_is_broken(at: int, field: str, value: Any) -> None:
    with pytest.raises(Broken):
        check(_replaced(GOOD, at, field, value), 128)


@pytest.mark.parametrize("begin", [1, 32, 63])
def test_a_begin_in_the_padding_before_the_first_slot_is_broken(begin: int) -> None:
    """It rounds up to the right offset, but it is not where the payload begins."""
    slot = A._replace(offset=64)
    assert check(Manifest((slot,), 64, 128), 128)
    for manifest in (Manifest((slot,), begin, 128), Manifest((), begin, begin)):
        with pytest.raises(Broken):
            check(manifest, 128)


def test_a_broken_slot_is_named_with_key_offset_size_and_limit() -> None:
    with pytest.raises(Broken) as caught:
        check(GOOD, 64)
    assert caught.value.facts == {"key": "b", "offset": 64, "size": 12, "limit": 64}


def test_an_invalid_spec_in_a_manifest_is_broken_and_named() -> None:
    with pytest.raises(Broken, match="dtype") as caught:
        check(GOOD._replace(slots=(A, B._replace(dtype="qint8"))), 128)
    assert caught.value.facts == {"key": "b", "dtype": "qint8"}


def test_too_many_slots_are_broken() -> None:
    slots = tuple(Slot(str(n), "int8", (0,), 0, 0) for n in range(MAX_KEYS + 1))
    assert check(Manifest(slots[:-1], 0, 0), 0)
    with pytest.raises(Broken, match="too many"):
        check(Manifest(slots, 0, 0), 0)


def test_empty_payloads_and_empty_tensors_take_no_bytes() -> None:
    assert plan([]) == []
    assert data_bytes([]) == 0
    empty = [TensorSpec("x", "int64", (0, 16)), TensorSpec("y", "bool", (3, 0))]
    manifests = plan([[], empty, [], empty])
    assert [(m.begin, m.end) for m in manifests] == [(0, 0)] * 4
    assert data_bytes(manifests) == 0
    assert all(check(manifest, 0) for manifest in manifests)


def test_a_known_block_has_this_layout() -> None:
    """The picture of the module: an empty payload between two, padding nowhere but before a slot."""
    members = [[TensorSpec("a", "int8", (64,)), TensorSpec("b", "int32", (3,))], [], [TensorSpec("c", "bool", ())]]
    first, second, third = plan(members)
    assert first == GOOD
    assert second == Manifest((), 128, 128)
    assert third == Manifest((Slot("c", "bool", (), 128, 1),), 128, 129)
    assert data_bytes([first, second, third]) == 192


def test_planning_a_dtype_that_is_not_carried_is_refused() -> None:
    with pytest.raises(UnsupportedTensor):
        plan([[TensorSpec("q", "quint8", (2,))]])
