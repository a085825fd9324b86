"""Old payload objects come out as tensors, bit by bit and value by value."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector import errors
from runner_adapter import legacy
from runner_adapter.naming import nest
from runner_adapter.values import as_value

ALL_DTYPES = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
QUANTISED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}


def entry(**given: Any) -> SimpleNamespace:
    """As an engine has it: every field is there."""
    fields = ("tensor_data", "tensor_shape", "tensor_dtype", "list_data", "scalar_data")
    return SimpleNamespace(**(dict.fromkeys(fields) | given))


def tensor_entry(data: Any, shape: Any, dtype: Any) -> SimpleNamespace:
    return entry(tensor_data=data, tensor_shape=shape, tensor_dtype=dtype)


def payload(**entries: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(entries=entries)


def decoded(found: Any) -> dict[str, Any]:
    """What the tensors stand for."""
    return {name: as_value(tensor) for name, tensor in legacy.decode(found, rid="r").items()}


# -- the three forms ---------------------------------------------------------------------------------


def test_all_three_forms_survive() -> None:
    found = legacy.decode(
        payload(
            t=tensor_entry(struct.pack("<3f", 1.0, 2.5, -3.0), [3], "float32"),
            l=entry(list_data=[4, 5, 6]),
            s=entry(scalar_data=7),
        ),
        rid="r",
    )
    assert list(found) == ["t", "l", "s"]
    assert torch.equal(found["t"], torch.tensor([1.0, 2.5, -3.0]))
    assert torch.equal(found["l"], torch.tensor([4, 5, 6]))
    assert torch.equal(found["s"], torch.tensor(7))


@pytest.mark.parametrize("value", [0, False, 0.0, "", b""], ids=repr)
def test_a_falsy_scalar_is_a_value(value: Any) -> None:
    (found,) = decoded(payload(x=entry(scalar_data=value))).values()
    assert (found, type(found)) == (value, type(value))


def test_an_empty_list_is_a_value() -> None:
    assert decoded(payload(x=entry(list_data=[]))) == {"x": []}


def test_a_tensor_without_bytes_is_a_value() -> None:
    found = legacy.decode(payload(x=tensor_entry(b"", [2, 0, 5], "bfloat16")), rid="r")
    assert (found["x"].shape, found["x"].dtype) == ((2, 0, 5), torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, []),
        ({"tensor_shape": [1], "tensor_dtype": "int8"}, []),
        ({"list_data": [], "scalar_data": 0}, ["list_data", "scalar_data"]),
        ({"tensor_data": b"", "list_data": []}, ["tensor_data", "list_data"]),
        ({"tensor_data": b"", "list_data": [], "scalar_data": 0}, ["tensor_data", "list_data", "scalar_data"]),
    ],
    ids=["none", "only a shape", "list and scalar", "tensor and list", "all"],
)
def test_an_entry_has_exactly_one_form(given: dict[str, Any], found: list[str]) -> None:
    with pytest.raises(errors.InvalidPayload) as refused:
        legacy.decode(payload(good=entry(scalar_data=1), bad=entry(**given)), rid="r")
    assert refused.value.facts == {"rid": "r", "entry": "bad", "found": found}


# -- tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", legacy.DTYPES)
def test_every_dtype_keeps_its_bits(name: str) -> None:
    """Two elements of bytes that are NaN payloads, negative zeros and odd patterns in one dtype or another."""
    dtype = legacy.DTYPES[name]
    data = (b"\x01\x00\x01\x01" if dtype is torch.bool else bytes.fromhex("0080c17f ff010302 80a5ffbf 55aa7f80")) * 2
    data = data[: 2 * dtype.itemsize]
    found = legacy.decode(payload(x=tensor_entry(data, [2, 1], name)), rid="r")["x"]
    assert (found.dtype, found.shape) == (dtype, (2, 1))
    assert bytes(found.reshape(2).view(torch.uint8).tolist()) == data


def test_every_dtype_that_needs_no_scale_has_its_name() -> None:
    assert set(legacy.DTYPES.values()) == ALL_DTYPES - QUANTISED
    assert {str(dtype).removeprefix("torch.") for dtype in ALL_DTYPES - QUANTISED} <= legacy.DTYPES.keys()


@pytest.mark.parametrize("name", ["quint8", "nn", "Tensor", "float33", "torch.float32", "", None, torch.float32])
def test_a_name_that_is_no_dtype_is_refused(name: Any) -> None:
    """It chooses a row of a table, or nothing."""
    with pytest.raises(errors.UnsupportedTensor) as refused:
        legacy.decode(payload(x=tensor_entry(b"\0" * 4, [1], name)), rid="r")
    assert refused.value.facts == {"rid": "r", "entry": "x", "dtype": str(name)}


@pytest.mark.parametrize(
    ("shape", "size"), [([3], 8), ([2, 3], 11), ([], 0), ([0, 9], 2), ([2**62, 2**62], 8)], ids=str
)
def test_bytes_that_do_not_fit_the_shape_are_refused(shape: list[int], size: int) -> None:
    """A shape beyond any memory, too: nothing is made of it."""
    with pytest.raises(errors.InvalidPayload) as refused:
        legacy.decode(payload(x=tensor_entry(bytes(size), shape, "int16")), rid="r")
    needed = 2
    for dim in shape:
        needed *= dim
    told = {"rid": "r", "entry": "x", "shape": shape, "dtype": "int16", "size": size, "limit": needed}
    assert refused.value.facts == told


@pytest.mark.parametrize("shape", [None, 4, "4", [-1], [2.0], [True], [2**63], [None]], ids=repr)
def test_a_shape_is_a_list_of_ints(shape: Any) -> None:
    with pytest.raises(errors.InvalidPayload, match="shape is a list of ints") as refused:
        legacy.decode(payload(x=tensor_entry(b"\0" * 4, shape, "int8")), rid="r")
    assert (refused.value.facts["rid"], refused.value.facts["entry"]) == ("r", "x")


def test_data_that_is_no_bytes_is_refused() -> None:
    with pytest.raises(errors.InvalidPayload, match="data is bytes") as refused:
        legacy.decode(payload(x=tensor_entry("abcd", [4], "int8")), rid="r")
    assert refused.value.facts == {"rid": "r", "entry": "x", "found": "str"}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_any_kind_are_taken(kind: Any) -> None:
    found = legacy.decode(payload(x=tensor_entry(kind(b"\x01\x02\x03\x04"), [2], "int16")), rid="r")["x"]
    assert found.tolist() == [0x0201, 0x0403]


def test_a_tensor_owns_its_memory() -> None:
    """What the engine does with its bytes afterwards is not seen, and writing into the tensor is allowed."""
    data = bytearray(b"\x01\x02")
    found = legacy.decode(payload(x=tensor_entry(memoryview(data), [2], "int8")), rid="r")["x"]
    data[:] = b"\x09\x09"
    found += 1
    assert found.tolist() == [2, 3]


@pytest.mark.parametrize("shape", [[], [1, 1], [1]], ids=str)
def test_the_number_of_dimensions_stays(shape: list[int]) -> None:
    assert legacy.decode(payload(x=tensor_entry(b"\x05", shape, "uint8")), rid="r")["x"].shape == tuple(shape)


# -- names -------------------------------------------------------------------------------------------

A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)


def test_nested_and_dotted_names_are_the_same_names() -> None:
    nested = {"codes": {"audio": A}, "hidden_states": {"layers": {24: B}}, "latent": C}
    dotted = {"codes.audio": A, "hidden_states.layer_24": B, "latent": C}
    expected = {"codes.audio": A, "hidden_states.layers[24]": B, "latent": C}
    for form in (nested, dotted, expected):
        found = legacy.decode(form, rid="r")
        assert list(found) == list(expected)
        assert all(found[name] is tensor for name, tensor in expected.items())


def test_an_object_s_entries_have_dotted_names() -> None:
    found = decoded(
        SimpleNamespace(entries={"meta.finished": entry(scalar_data=False), "ids.all": entry(list_data=[1])})
    )
    assert found == {"meta.finished": False, "ids.all": [1]}
    assert nest(found) == {"meta": {"finished": False}, "ids": {"all": [1]}}


def test_tensors_in_a_list_stay_a_list() -> None:
    found = legacy.decode({"mtp_inputs": (A, B), "deep": [[A], [B, C]]}, rid="r")
    assert found == {"mtp_inputs<0>": A, "mtp_inputs<1>": B, "deep<0><0>": A, "deep<1><0>": B, "deep<1><1>": C}


def test_none_and_an_empty_mapping_say_that_there_is_nothing() -> None:
    given = {"a": None, "b": {"c": None}, "d": {}, "e": {"f": {"g": None}, "h": 0}}
    assert decoded(given) == {"e.h": 0}


def test_an_entry_may_hold_a_mapping() -> None:
    assert decoded(payload(kv_metadata=entry(scalar_data={"step": 3, "reason": "stop"}))) == {
        "kv_metadata.step": 3,
        "kv_metadata.reason": "stop",
    }


@pytest.mark.parametrize("empty", [{}, SimpleNamespace(entries={})], ids=["mapping", "object"])
def test_an_empty_payload_is_no_tensors(empty: Any) -> None:
    assert legacy.decode(empty, rid="r") == {}


def test_a_mapping_is_never_taken_for_a_payload_object() -> None:
    """Users' data may look like one."""
    assert decoded({"entries": {"x": {"scalar_data": 1}}, "tensor_data": b"\1"}) == {
        "entries.x.scalar_data": 1,
        "tensor_data": b"\1",
    }


@pytest.mark.parametrize("given", [None, 5, "x", [1], SimpleNamespace(), SimpleNamespace(entries=[1])], ids=repr)
def test_what_is_no_payload_is_refused(given: Any) -> None:
    with pytest.raises(errors.InvalidPayload) as refused:
        legacy.decode(given, rid="r")
    assert refused.value.facts == {"rid": "r", "found": type(given).__name__}


@pytest.mark.parametrize(
    "given",
    [
        {"codes": {"audio": A}, "codes.audio": B},
        {"hidden_states.layer_2": A, "hidden_states.layers[2]": B},
        {"hidden_states.layer_2": A, "hidden_states": {"layers": {2: B}}},
        {"codes": A, "codes.audio": B},
    ],
    ids=["nested and dotted", "two spellings", "old spelling and nested", "a tensor and a mapping"],
)
def test_no_name_stands_twice(given: dict[str, Any]) -> None:
    """None of the two is lost in silence."""
    with pytest.raises(errors.InvalidPayload) as refused:
        legacy.decode(given, rid="r")
    assert refused.value.facts["rid"] == "r"


@pytest.mark.parametrize(
    "value", [object(), 2**63, {1, 2}, 1j, [None], [1, None]], ids=lambda value: type(value).__name__
)
def test_a_value_that_no_tensor_holds_is_that_request_s_failure(value: Any) -> None:
    for form in ({"good": 1, "bad": value}, payload(good=entry(scalar_data=1), bad=entry(scalar_data=value))):
        with pytest.raises(errors.InvalidPayload) as refused:
            legacy.decode(form, rid="r")
        assert (refused.value.facts["rid"], refused.value.facts["entry"]) == ("r", "bad")


# -- any payload -------------------------------------------------------------------------------------

INTS, FLOATS = st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)
#: A few characters of every width, and NUL: the tables of all of Unicode take too long to make.
TEXT = st.text("a\0 é\uffff\U0001f600", max_size=4)
LISTS = st.one_of(*(st.lists(kind, max_size=4) for kind in (st.booleans(), INTS, FLOATS, TEXT)))
VALUES = st.one_of(st.booleans(), INTS, FLOATS, TEXT, st.binary(max_size=8), LISTS)
PARTS = st.text("abcdefgh_0123456789", min_size=1, max_size=6)


def same(left: Any, right: Any) -> bool:
    """Equal, and of one type all the way down: 0, 0.0 and False are three values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


@settings(deadline=None)
@given(st.dictionaries(PARTS, VALUES | st.dictionaries(PARTS, VALUES, min_size=1, max_size=3), max_size=4))
def test_any_nested_values_come_back(values: dict[str, Any]) -> None:
    """As a mapping, and as the object that the old encoder makes of it."""

    def names(nested: dict[str, Any]) -> dict[str, Any]:
        return {
            f"{name}.{inner}" if isinstance(value, dict) else name: part
            for name, value in nested.items()
            for inner, part in (value.items() if isinstance(value, dict) else [("", value)])
        }

    forms = {
        name: entry(list_data=value) if isinstance(value, list) else entry(scalar_data=value)
        for name, value in names(values).items()
    }
    for form in (values, SimpleNamespace(entries=forms)):
        found = decoded(form)
        assert found.keys() == names(values).keys()
        assert all(same(found[name], value) for name, value in names(values).items())


# -- prompt embeddings -------------------------------------------------------------------------------


def test_no_prompt_embeddings_are_none() -> None:
    assert legacy.prompt_embeds(None, rid="r") is None


def test_a_tensor_of_prompt_embeddings_is_copied() -> None:
    given = torch.arange(6.0).reshape(3, 2).t()
    found = legacy.prompt_embeds(given, rid="r")
    assert found is not None and torch.equal(found, given)
    given[0, 0] = 9.0
    assert found.is_contiguous() and found[0, 0] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_a_payload_of_prompt_embeddings_keeps_its_bits(dtype: str) -> None:
    """bfloat16 too, which NumPy has not."""
    width = 8 // legacy.DTYPES[dtype].itemsize
    data = bytes.fromhex("0080c17f01800100") * 3
    found = legacy.prompt_embeds(SimpleNamespace(data=data, shape=[3, width], dtype=dtype), rid="r")
    assert found is not None
    assert (found.shape, found.dtype) == ((3, width), legacy.DTYPES[dtype])
    assert bytes(found.flatten().view(torch.uint8).tolist()) == data


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(3),
        SimpleNamespace(data=bytes(12), shape=[3], dtype="float32"),
        SimpleNamespace(data=bytes(12), shape=[3, 2], dtype="float32"),
        SimpleNamespace(data=bytes(12), shape=[3, 1], dtype="float"[::-1]),
        SimpleNamespace(shape=[3, 1], dtype="float32"),
        "embeddings",
    ],
    ids=["a vector", "bytes of a vector", "too few bytes", "no dtype", "no data", "text"],
)
def test_what_are_no_prompt_embeddings_is_refused(given: Any) -> None:
    with pytest.raises(errors.UsageError) as refused:
        legacy.prompt_embeds(given, rid="r")
    assert (refused.value.facts["rid"], refused.value.facts["entry"]) == ("r", "prompt_embeds")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ([1, "a"], [1, "a"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([1, 2.5, True], [1, 2.5, True]),
        ([[1, "x"], 2], [[1, "x"], 2]),
    ],
    ids=str,
)
def test_a_list_that_no_tensor_holds_stays_a_list(value: Any, parts: list[Any]) -> None:
    """Ragged, or of several kinds: each part is a tensor of its own, or such a list."""

    def back(found: Any) -> Any:
        return [back(part) for part in found] if isinstance(found, list) else as_value(found)

    for form in ({"x": value}, payload(x=entry(list_data=value))):
        assert back(nest(legacy.decode(form, rid="r"), rid="r")["x"]) == parts


def test_numbers_and_arrays_of_numpy_become_tensors() -> None:
    found = legacy.decode(
        {"scalar": np.float32(0.5), "rows": np.arange(6).reshape(2, 3), "flag": np.bool_(False)}, rid="r"
    )
    assert {name: (str(t.dtype), t.tolist()) for name, t in found.items()} == {
        "scalar": ("torch.float32", 0.5),
        "rows": ("torch.int64", [[0, 1, 2], [3, 4, 5]]),
        "flag": ("torch.bool", False),
    }
    with pytest.raises(errors.InvalidPayload, match="no tensor holds this array"):
        legacy.decode({"x": np.array(["a"], dtype=object)}, rid="r")
