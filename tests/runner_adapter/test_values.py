"""Copies that own their memory, and Python values as tensors and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from connector.core.specs import DTYPE_BITS
from runner_adapter.values import MAX_DEPTH, as_tensor, as_value, joined, owned, plain

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
CARRIED = sorted(DTYPES.keys() & DTYPE_BITS.keys())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def pattern(dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
    """A tensor of any dtype whose every byte says where it stands."""
    size = rows * width * dtype.itemsize
    return (torch.arange(size) * 37 % 251).to(torch.uint8).view(dtype).view(rows, width)


class Named(torch.Tensor):
    """A subclass that would show itself in whatever it touches."""


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# -- owned ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CARRIED)
def test_every_dtype_is_copied_bit_by_bit(name: str) -> None:
    """Also those for which torch has no copy kernel; transposed, so that no stride survives."""
    source = pattern(DTYPES[name], 4, 6)
    copy = owned(source.t())
    assert copy.dtype == source.dtype and copy.shape == (6, 4) and copy.is_contiguous()
    rows = [source.view(torch.uint8).view(4, 6, -1)[:, at] for at in range(6)]
    assert torch.equal(bits(copy).view(6, 4, -1), torch.stack(rows))


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(6.0),
        torch.arange(12.0).view(3, 4)[:, 1:3],
        torch.zeros(1, 5).expand(4, 5),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).as_subclass(Named),
        torch.ones(3, requires_grad=True) * 2,
    ],
    ids=["contiguous", "strided", "expanded", "0-dim", "empty", "Parameter", "subclass", "in a graph"],
)
def test_a_copy_is_plain_and_shares_nothing(source: torch.Tensor) -> None:
    copy = owned(source)
    assert type(copy) is torch.Tensor and copy.is_contiguous()
    assert not copy.requires_grad and copy.grad_fn is None
    assert torch.equal(copy, source.detach())
    if copy.numel():
        assert copy.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
        assert copy.untyped_storage().nbytes() == copy.numel() * copy.itemsize


def test_a_source_may_be_overwritten_at_once() -> None:
    source = torch.arange(4)
    copy = owned(source)
    source.fill_(9)
    assert copy.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conj_and_neg_views_become_what_they_show(dtype: torch.dtype) -> None:
    source = torch.tensor([[1 + 2j, 3 - 4j]], dtype=dtype)
    conj, neg = owned(source.conj()), owned(source.conj().imag)
    assert not conj.is_conj() and torch.view_as_real(conj).tolist() == [[[1, -2], [3, 4]]]
    assert not neg.is_neg() and neg.tolist() == [[-2, 4]]


def test_a_copy_stays_on_its_device_unless_one_is_named() -> None:
    """`meta` stands for a device that this machine lacks."""
    assert owned(torch.ones(2)).device.type == "cpu"
    away = owned(torch.ones(2, 3, dtype=torch.bfloat16), "meta")
    assert (away.device.type, away.shape, away.dtype) == ("meta", (2, 3), torch.bfloat16)


def test_the_default_device_has_no_say() -> None:
    with torch.device("meta"):
        assert as_tensor([1, 2]).device.type == as_tensor("ab").device.type == as_tensor(b"ab").device.type == "cpu"
        assert owned(as_tensor(1.0)).device.type == "cpu"


@pytest.mark.cuda
def test_a_copy_crosses_to_the_gpu_and_back() -> None:
    source = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    there = owned(source.t(), "cuda")
    assert there.is_cuda and owned(there).is_cuda and owned(there).data_ptr() != there.data_ptr()
    assert torch.equal(owned(there, "cpu"), source.t())
    assert torch.equal(joined([there, owned(source.t(), "cpu")], "cpu"), torch.cat([source.t(), source.t()]))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: [1.0], errors.InvalidPayload),
        (lambda: 1.0, errors.InvalidPayload),
        (lambda: None, errors.InvalidPayload),
        (lambda: torch.ones(2).to_sparse(), errors.UnsupportedTensor),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), errors.UnsupportedTensor),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), errors.UnsupportedTensor),
        (lambda: torch.ones(2, device="meta"), errors.UnsupportedTensor),
        (lambda: torch.nn.UninitializedParameter(), errors.UnsupportedTensor),
        (lambda: torch.ones(2).as_subclass(Dispatching), errors.UnsupportedTensor),
    ],
    ids="list float None sparse nested quantised meta lazy dispatching".split(),
)
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*nested tensors:UserWarning")
def test_what_has_no_bytes_of_its_own_is_refused(make: Any, error: type[errors.ConnectorError]) -> None:
    with pytest.raises(error) as caught:
        owned(make(), name="codes.audio", rid="a")
    assert type(caught.value) is error
    assert caught.value.facts["name"] == "codes.audio" and caught.value.facts["rid"] == "a"
    assert error is errors.InvalidPayload or {"dtype", "layout", "device"} < caught.value.facts.keys()


@pytest.mark.parametrize("source", [torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Named)], ids=type)
def test_plain_is_no_copy(source: torch.Tensor) -> None:
    found = plain(source)
    assert type(found) is torch.Tensor and not found.requires_grad and found.data_ptr() == source.data_ptr()


# -- joined -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CARRIED)
def test_rows_of_every_dtype_are_joined_in_order(name: str) -> None:
    whole = pattern(DTYPES[name], 6, 4)
    first, second = whole[:1], whole[1:].view(torch.uint8).clone().view(DTYPES[name])
    made = joined([first, second], "cpu")
    assert made.dtype == whole.dtype and torch.equal(bits(made), bits(whole))
    assert made.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_bent_and_strided_rows_are_joined_as_they_show() -> None:
    source = torch.tensor([[1 + 2j], [3 - 4j]])
    made = joined([source.conj(), source.t().contiguous().t(), source[:0]], "cpu")
    assert torch.equal(made, torch.tensor([[1 - 2j], [3 + 4j], [1 + 2j], [3 - 4j]]))


@pytest.mark.parametrize(
    "second",
    [torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 3), torch.ones(2), torch.tensor(1.0)],
    ids=["dtype", "width", "dims", "0-dim"],
)
def test_rows_that_do_not_fit_are_refused(second: torch.Tensor) -> None:
    with pytest.raises(errors.InvalidPayload) as caught:
        joined([torch.ones(1, 2), second], "cpu", name="x")
    assert caught.value.facts["there"] == "torch.float32[1, 2]" and caught.value.facts["name"] == "x"
    assert caught.value.facts["found"] == f"{second.dtype}{list(second.shape)}"


# -- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "flat"),
    [
        (True, torch.bool, [], [True]),
        (False, torch.bool, [], [False]),
        (0, torch.int64, [], [0]),
        (-(2**63), torch.int64, [], [-(2**63)]),
        (2**63 - 1, torch.int64, [], [2**63 - 1]),
        (0.1, torch.float64, [], [0.1]),
        ("", torch.int32, [0], []),
        ("é\U0001f600", torch.int32, [2], [0xE9, 0x1F600]),
        (b"", torch.uint8, [0], []),
        (b"\x00\xff", torch.uint8, [2], [0, 255]),
        ([], torch.int64, [0], []),
        ([[], []], torch.int64, [2, 0], []),
        ([1, 2, 3], torch.int64, [3], [1, 2, 3]),
        ([(1.5, 2.0), (3.0, 4.0)], torch.float64, [2, 2], [1.5, 2.0, 3.0, 4.0]),
        (["a", "bcd"], torch.int32, [2, 3], [97, -1, -1, 98, 99, 100]),
        ([b"ab", b"cd"], torch.uint8, [2, 2], [97, 98, 99, 100]),
    ],
    ids=repr,
)
def test_a_value_becomes_the_tensor_of_the_table(value: Any, dtype: Any, shape: list[int], flat: list[Any]) -> None:
    """Falsy ones, too, are tensors (PR: a scalar 0 was dropped as nothing)."""
    made = as_tensor(value)
    assert (made.dtype, list(made.shape), made.flatten().tolist()) == (dtype, shape, flat)


TEXT = st.text(st.characters(), max_size=4)


def lists(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Rectangular lists of a kind, of up to three dimensions."""
    rows = st.integers(0, 3).flatmap(lambda n: st.lists(st.lists(of, min_size=n, max_size=n), max_size=3))
    return st.one_of(of, st.lists(of, max_size=4), rows)


VALUES = st.one_of(
    lists(st.booleans()),
    lists(st.integers(-(2**63), 2**63 - 1)),
    lists(st.floats(allow_nan=False)),
    lists(TEXT),
    lists(st.binary(min_size=2, max_size=2)),
)


def exact(value: Any) -> Any:
    """A value with its types: True is not 1, -0.0 is not 0.0."""
    return [exact(part) for part in value] if isinstance(value, list) else (type(value), repr(value))


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert exact(as_value(as_tensor(value))) == exact(value)


def test_tuples_come_back_as_lists() -> None:
    assert as_value(as_tensor(((1, 2), [3, 4]))) == [[1, 2], [3, 4]]


def test_a_nan_and_a_lone_surrogate_survive() -> None:
    assert math.isnan(as_value(as_tensor(math.nan)))
    assert as_value(as_tensor("a\ud800")) == "a\ud800"


SELF: list[Any] = []
SELF.append(SELF)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, {}),
        ({}, {}),
        ({1}, {}),
        (1j, {}),
        (torch.ones(1), {}),
        ([torch.ones(1)], {}),
        (2**63, {"limit": 2**63 - 1}),
        ([0, -(2**63) - 1], {"limit": 2**63 - 1}),
        ([1, 2.0], {"kinds": ["float", "int"]}),
        ([True, 1], {"kinds": ["bool", "int"]}),
        (["a", b"a"], {"kinds": ["bytes", "str"]}),
        ([None, 1], {"kinds": ["NoneType", "int"]}),
        ([1, [1]], {"kinds": ["int", "list"]}),
        ([[1], 1], {}),
        ([[1], [1, 2]], {}),
        ([[], [[]]], {"kinds": None}),
        ([b"a", b"bc"], {}),
        (SELF, {"limit": MAX_DEPTH}),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_would_lose_something_is_refused(value: Any, told: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidPayload) as caught:
        as_tensor(value, rid="a", name="x")
    wanted = {k: v for k, v in told.items() if v is not None}
    assert caught.value.facts == {"rid": "a", "name": "x", **wanted}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0),
        torch.tensor(1, dtype=torch.uint8),
        torch.tensor(1, dtype=torch.int32),
        torch.tensor([97, 0x110000], dtype=torch.int32),
        torch.tensor([-1, 97], dtype=torch.int32),
        torch.tensor([-2], dtype=torch.int32),
    ],
    ids=["float32", "0-dim bytes", "0-dim text", "no code point", "a hole", "negative"],
)
def test_a_tensor_that_no_value_makes_stands_for_none(tensor: torch.Tensor) -> None:
    with pytest.raises(errors.InvalidPayload) as caught:
        as_value(tensor, name="x")
    assert caught.value.facts["name"] == "x"
