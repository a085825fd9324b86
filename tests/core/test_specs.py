"""Tensor specs: sizes, and what an untrusted spec may not be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.core.errors import InvalidPayload, PayloadTooLarge, UnsupportedTensor
from connector.core.names import MAX_DIMS, MAX_KEY_BYTES, MAX_KEYS
from connector.core.specs import (
    DTYPE_BITS,
    MAX_DIM,
    MAX_NBYTES,
    REFUSED_DTYPES,
    TensorSpec,
    check_spec,
    check_specs,
    measure,
)


@given(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 1000), max_size=5))
def test_a_spec_weighs_its_elements_and_passes_its_check(dtype: str, dims: list[int]) -> None:
    spec = TensorSpec("h", dtype, tuple(dims))
    assert spec.numel == math.prod(dims)
    assert spec.nbytes * 8 == spec.numel * DTYPE_BITS[dtype]
    assert measure(*spec) == spec.nbytes
    assert check_spec(spec) is spec


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("float32", (), 4), ("bfloat16", (7, 5), 70), ("int64", (0, 16), 0), ("complex128", (2,), 32), ("uint3", (5,), 5)],
)
def test_known_sizes(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert TensorSpec("h", dtype, shape).nbytes == nbytes


@pytest.mark.parametrize("dtype", [*sorted(REFUSED_DTYPES), "float", "torch.float32", "", "Float32", "__class__"])
def test_a_dtype_that_is_not_carried_is_refused_by_key_and_name(dtype: str) -> None:
    spec = TensorSpec("codes", dtype, (2,))
    for refused in (lambda: check_spec(spec), lambda: spec.nbytes):
        with pytest.raises(UnsupportedTensor) as caught:
            refused()
        assert caught.value.facts == {"key": "codes", "dtype": dtype}


@pytest.mark.parametrize("dtype", [None, 3, b"float32", ["float32"], pytest.param(10**5000, id="huge")])
def test_a_dtype_that_is_no_text_is_refused(dtype: object) -> None:
    with pytest.raises(UnsupportedTensor) as caught:
        check_spec(TensorSpec("codes", dtype, ()))  # type: ignore[arg-type]
    assert caught.value.facts == {"key": "codes", "dtype": type(dtype).__name__}


@pytest.mark.parametrize(
    "shape",
    [
        (-1,),
        (2, -3),
        (True,),
        (2.0,),
        ("2",),
        (None,),
        (MAX_DIM + 1, 0),
        pytest.param((10**5000,), id="huge"),
        [2, 3],
        None,
        (1,) * (MAX_DIMS + 1),
    ],
)
def test_what_is_no_shape_is_refused_by_key_and_dtype(shape: object) -> None:
    with pytest.raises(UnsupportedTensor) as caught:
        check_spec(TensorSpec("h", "float32", shape))  # type: ignore[arg-type]
    assert caught.value.facts["key"] == "h"
    assert caught.value.facts["dtype"] == "float32"
    assert str(caught.value)


def test_the_most_dimensions_pass() -> None:
    assert measure("h", "int8", (1,) * MAX_DIMS) == 1


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("uint8", (MAX_NBYTES + 1,)), ("complex128", (2**59,)), ("int64", (2**32, 2**32)), ("int8", (MAX_DIM,) * 64)],
)
def test_too_many_bytes_are_refused_however_they_multiply(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(PayloadTooLarge) as caught:
        check_spec(TensorSpec("h", dtype, shape))
    assert MAX_NBYTES < caught.value.facts["size"] < 2**63
    assert caught.value.facts["limit"] == MAX_NBYTES


def test_the_most_bytes_pass() -> None:
    assert measure("h", "uint8", (MAX_NBYTES,)) == measure("h", "complex128", (2**58,)) == MAX_NBYTES


def test_an_empty_tensor_passes_as_far_as_its_strides_have_64_bits() -> None:
    assert measure("h", "complex128", (0, MAX_DIM)) == measure("h", "int8", (2**31, 0, 2**31)) == 0
    with pytest.raises(UnsupportedTensor, match="strides"):
        measure("h", "int8", (2**32, 2**31, 0))


@pytest.mark.parametrize("key", ["", " ", "a.b", "日本", "nul\0", "k" * MAX_KEY_BYTES])
def test_any_text_up_to_the_limit_is_a_key(key: str) -> None:
    assert check_spec(TensorSpec(key, "bool", ())).key == key


@pytest.mark.parametrize("key", ["k" * (MAX_KEY_BYTES + 1), "\ud800", None, 1, b"k", ["k"]])
def test_what_is_no_key_is_refused(key: object) -> None:
    with pytest.raises(InvalidPayload):
        check_spec(TensorSpec(key, "bool", ()))  # type: ignore[arg-type]


def test_a_payload_may_be_empty_and_each_of_its_specs_is_checked() -> None:
    assert list(check_specs([])) == []
    good = [TensorSpec("a", "bool", ()), TensorSpec("", "int8", (3,))]
    assert check_specs(good) is good
    with pytest.raises(UnsupportedTensor):
        check_specs([*good, TensorSpec("q", "qint8", ())])


def test_a_key_twice_in_one_payload_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="twice") as caught:
        check_specs([TensorSpec("a", "bool", ()), TensorSpec("b", "bool", ()), TensorSpec("a", "int8", (3,))])
    assert caught.value.facts == {"key": "a"}


def test_too_many_keys_are_refused_and_the_most_pass() -> None:
    specs = [TensorSpec(str(n), "bool", ()) for n in range(MAX_KEYS + 1)]
    assert check_specs(specs[:-1])
    with pytest.raises(InvalidPayload, match="too many") as caught:
        check_specs(specs)
    assert caught.value.facts == {"size": MAX_KEYS + 1, "limit": MAX_KEYS}


def test_tensors_that_fit_alone_may_be_too_large_together() -> None:
    half = [TensorSpec(k, "uint8", (MAX_NBYTES // 2,)) for k in "ab"]
    assert check_specs(half) is half
    with pytest.raises(PayloadTooLarge, match="payload"):
        check_specs([*half, TensorSpec("c", "uint8", (1,))])


def test_the_table_of_dtypes_cannot_be_written() -> None:
    with pytest.raises(TypeError):
        DTYPE_BITS["qint8"] = 8  # type: ignore[index]
