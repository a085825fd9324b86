"""Manifests and block meta as bytes: they come from a client, and from shared memory."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.core.directory.events import Member
from connector.core.errors import ProtocolViolation
from connector.core.layout import Manifest, Slot, plan
from connector.core.names import MAX_DIMS, MAX_INDEX, MAX_READERS, Edge
from connector.core.specs import DTYPE_BITS, TensorSpec
from connector.wire.fields import MAX_WORD
from connector.wire.manifest import pack_manifest, pack_meta, unpack_manifest, unpack_meta

WORD = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SLOT = st.builds(Slot, TEXT, TEXT.filter(bool).map(lambda t: t[:8]), st.lists(WORD, max_size=4).map(tuple), WORD, WORD)
MANIFEST = st.builds(Manifest, st.lists(SLOT, max_size=4).map(tuple), WORD, WORD)
INDEX = st.integers(0, MAX_INDEX)
MEMBER = st.builds(
    Member,
    TEXT.filter(bool),
    INDEX,
    INDEX,
    st.integers(0, 3),
    st.integers(1, MAX_READERS),
    MANIFEST.map(pack_manifest),
    WORD,
)
SPEC = st.builds(
    TensorSpec, TEXT, st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 5), max_size=3).map(tuple)
)
EDGE = Edge("thinker", "talker", 3)
GOOD_SLOT = ["key", "int64", [2], 0, 16]


@settings(max_examples=300, deadline=None)
@given(MANIFEST)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    """Any well-formed fields; the plan is not this room's to judge."""
    came = unpack_manifest(pack_manifest(manifest))
    assert came == manifest
    assert all(type(slot) is Slot and type(slot.shape) is tuple for slot in came.slots)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(SPEC, max_size=4, unique_by=lambda spec: spec.key), max_size=3))
def test_planned_manifests_come_back(members: list[list[TensorSpec]]) -> None:
    """Those that writers really make; `{}` is one of them."""
    for manifest in plan(members):
        assert unpack_manifest(pack_manifest(manifest)) == manifest


@settings(max_examples=200, deadline=None)
@given(st.lists(MEMBER, max_size=4), st.integers(0, MAX_WORD))
def test_a_meta_comes_back_as_it_was(members: list[Member], begun: int) -> None:
    edge, came, since = unpack_meta(pack_meta(EDGE, members, begun))
    assert (edge, list(came), since) == (EDGE, members, begun)
    assert type(edge) is Edge
    assert all(type(member) is Member for member in came)


def wrong_manifests() -> list[Any]:
    slots: list[Any] = [
        None,
        [],
        GOOD_SLOT[:-1],
        [*GOOD_SLOT, 0],
        *[
            [*GOOD_SLOT[:at], bad, *GOOD_SLOT[at + 1 :]]
            for at in range(5)
            for bad in (None, 1.5, b"b", True, [None], -1)
        ],
        ["x" * 1025, *GOOD_SLOT[1:]],
        ["key", "", *GOOD_SLOT[2:]],
        ["key", "x" * 33, *GOOD_SLOT[2:]],
        ["key", "int64", [-1], 0, 16],
        ["key", "int64", [2**63], 0, 16],
        ["key", "int64", [True], 0, 16],
        ["key", "int64", [1] * (MAX_DIMS + 1), 0, 16],
        ["é", "int64", [[1]], 0, 16],
    ]
    whole: list[Any] = [
        None,
        1,
        "x",
        {},
        [],
        [0, 0],
        [0, 0, [], 0],
        [-1, 0, []],
        [0, True, []],
        [0, 2**63, []],
        [0, 0, {}],
    ]
    return [*whole, *[[0, 16, [slot]] for slot in slots]]


@pytest.mark.parametrize("value", wrong_manifests(), ids=lambda value: repr(value)[:50])
def test_a_wrong_manifest_is_refused(value: Any) -> None:
    """Types and ranges of each field; the size of what was read is told."""
    data = msgpack.packb(value, use_bin_type=True)
    with pytest.raises(ProtocolViolation, match="the manifest is damaged") as caught:
        unpack_manifest(data)
    assert caught.value.facts == {"size": len(data)}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [["a", "b", 0]],
        [["a", "b"], [], 0],
        [["a", "b:c", 0], [], 0],
        [["", "b", 0], [], 0],
        [["a", "b", -1], [], 0],
        [["a", "b", True], [], 0],
        [["a", "b", 0], None, 0],
        [["a", "b", 0], [["r", 0, 0, 4, 1, b"", 0]], 0],
        [["a", "b", 0], [["r", 0, 0, 0, 0, b"", 0]], 0],
        [["a", "b", 0], [["", 0, 0, 0, 1, b"", 0]], 0],
        [["a", "b", 0], [["r", 0, 0, 0, 1, "", 0]], 0],
        [["a", "b", 0], [["r", 0, 0, 0, 1, b"", 0, 0]], 0],
        [["a", "b", 0], []],
        [["a", "b", 0], [], -1],
        [["a", "b", 0], [], None],
    ],
    ids=repr,
)
def test_a_wrong_meta_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolViolation, match="the meta is damaged"):
        unpack_meta(msgpack.packb(value, use_bin_type=True))


def opens(read: Any, data: bytes) -> bool:
    try:
        read(data)
    except ProtocolViolation as error:
        str(error)
        return False
    return True


@pytest.mark.parametrize("levels", [3, 500, 1024, 100_000])
def test_deep_nesting_is_refused(levels: int) -> None:
    """Shared memory can hold anything."""
    for read in (unpack_manifest, unpack_meta):
        assert not opens(read, b"\x91" * levels + b"\xc0")
        assert not opens(read, b"\x93\x00\x00" + b"\x91" * levels + b"\xc0")


def test_cut_grown_and_flipped_bytes_are_refused_or_well_formed() -> None:
    """Every length and every bit of a typical one."""
    manifest = pack_manifest(plan([[TensorSpec("r-24", "bfloat16", (2, 8)), TensorSpec("é", "int64", ())]])[0])
    meta = pack_meta(EDGE, [Member("r", 1, 0, 1, 1, manifest, 40)], 7)
    for read, data in ((unpack_manifest, manifest), (unpack_meta, meta)):
        assert opens(read, data)
        assert [n for n in range(len(data)) if opens(read, data[:n])] == []
        assert not opens(read, data + b"\0")
        refused = 0
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            refused += not opens(read, bytes(flipped))
        assert refused > len(data)


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=150))
def test_garbage_is_refused_or_well_formed(data: bytes) -> None:
    opens(unpack_manifest, data)
    opens(unpack_meta, data)
