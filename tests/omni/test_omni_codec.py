"""vLLM-Omni's data as payloads and back. The genuine serializer is compared with in tests/engines."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector import errors
from runner_adapter.adapters.vllm_omni import codec
from runner_adapter.adapters.vllm_omni.codec import RESERVED, decode, encode


def same(one: Any, other: Any) -> bool:
    """Equal in type, too; a tensor or array in dtype, shape and bits."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.contiguous().reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def made(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


tensors = st.builds(
    made,
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.complex64]),
    st.lists(st.integers(0, 3), max_size=3),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=8)
    | tensors
    | st.sampled_from([np.arange(6).reshape(2, 3), np.empty((0, 2), np.float32), np.array("text"), np.array(3, "<u2")])
)
trees = st.recursive(
    leaves,
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(texts | st.integers(-(2**31), 2**31), below, max_size=4)
    ),
    max_leaves=12,
)


@given(trees)
@settings(deadline=None)
def test_what_comes_back_is_what_was_given(data: Any) -> None:
    assert same(data, decode(encode(data, "k"), "k"))


@pytest.mark.parametrize(
    ("given_", "back"),
    [
        ((1, (2,)), [1, [2]]),
        (slice(1, 5, None), [1, 5, None]),
        (frozenset({7}), [7]),
        (bytearray(b"ab"), b"ab"),
        (enum.Enum("Kind", {"A": "a"}).A, "a"),
        (dataclasses.make_dataclass("D", ["x", "y"])(1, None), {"x": 1, "y": None}),
    ],
)
def test_other_types_come_back_as_msgpack_would_give_them(given_: object, back: object) -> None:
    assert same(back, decode(encode(given_, "k"), "k"))


class Struct:
    """As msgspec makes them."""

    __struct_fields__ = ("codes", "meta", "request_id")

    def __init__(self, **given_: object) -> None:
        self.codes, self.meta, self.request_id = (given_.get(name) for name in self.__struct_fields__)


def test_a_struct_is_a_dict_without_what_it_lacks() -> None:
    struct = Struct(codes=Struct(codes=torch.ones(2)), request_id="r")
    assert same({"codes": {"codes": torch.ones(2)}, "request_id": "r"}, decode(encode(struct, "k"), "k"))


def test_each_tensor_is_a_tensor_of_the_payload_and_is_not_copied() -> None:
    big = torch.ones(100)
    payload = encode({"codes": {"audio": big, "24": [torch.zeros(2)]}, "n": 1}, "k")
    assert list(payload) == ["0:codes.audio", "1:codes.24[0]", RESERVED]
    assert payload["0:codes.audio"].data_ptr() == big.data_ptr()
    assert payload[RESERVED].dtype == torch.uint8 and payload[RESERVED].numel() < 40


def test_a_tensor_that_needs_a_gradient_is_handed_over_without_it() -> None:
    back = decode(encode(torch.ones(2, requires_grad=True), "k"), "k")
    assert same(torch.ones(2), back) and not back.requires_grad


def test_what_comes_back_is_owned() -> None:
    payload = encode({"t": torch.ones(3), "a": np.ones(3), "b": b"xyz"}, "k")
    back = decode(payload, "k")
    for tensor in payload.values():
        tensor.zero_()
    assert same({"t": torch.ones(3), "a": np.ones(3), "b": b"xyz"}, back)
    back["a"][0] = 2.0
    assert back["a"][0] == 2.0


@pytest.mark.parametrize(
    "data",
    [
        {"__tensor__": True, "dtype": "float32", "shape": [1], "data": b"\0\0\0\0"},
        {"finished": True, "images": []},
        {"index": 0, "text": "", "token_ids": [], "finish_reason": None},
    ],
)
def test_a_dict_stays_a_dict_whatever_its_keys_are(data: dict[str, Any]) -> None:
    assert same(data, decode(encode(data, "k"), "k"))


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"a": [1, object()]}, "a[1]"),
        ({"a": {True: 1}}, "a"),
        ({"a": {(1, 2): 1}}, "a"),
        ({"a": np.array([object()])}, "a"),
        ({"a": np.zeros(1, [("x", "i4")])}, "a"),
        (print, "the payload itself"),
        (nested(65), "[0]" * 65),
    ],
)
def test_what_is_not_carried_is_refused_by_its_place(data: object, place: str) -> None:
    with pytest.raises(errors.InvalidPayload) as refused:
        encode(data, "req_0_1")
    assert refused.value.facts["key"] == "req_0_1"
    assert refused.value.facts["place"] == place


@pytest.mark.parametrize("data", [2**64, {"a": "\ud800"}])
def test_what_has_no_msgpack_form_is_refused(data: object) -> None:
    with pytest.raises(errors.InvalidPayload, match="msgpack form"):
        encode(data, "k")


def test_the_deepest_nesting_passes() -> None:
    assert same(nested(64), decode(encode(nested(64), "k"), "k"))


def packed(found: object, **tensors_: torch.Tensor) -> dict[str, torch.Tensor]:
    raw = found if isinstance(found, bytes) else msgpack.packb(found)
    return {**tensors_, RESERVED: torch.frombuffer(bytearray(raw), dtype=torch.uint8)}


def ext(kind: int, *inside: object) -> msgpack.ExtType:
    return msgpack.ExtType(kind, msgpack.packb(list(inside)))


ROW = torch.zeros(4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({}, "not one of vLLM-Omni's"),
        ({"hidden": torch.ones(2)}, "not one of vLLM-Omni's"),
        ({RESERVED: torch.ones(3)}, "not one of vLLM-Omni's"),
        ({RESERVED: torch.ones(3, 1, dtype=torch.uint8)}, "not one of vLLM-Omni's"),
        (packed([2, {}]), "not .1, data"),
        (packed({"a": 1}), "not .1, data"),
        (packed([codec.VERSION, {}, 0]), "not .1, data"),
        (packed(msgpack.packb([1, {}]) + b"\0"), "cannot be read"),
        (packed(msgpack.packb([1, {"a": 1}])[:-1]), "cannot be read"),
        (packed(b"\x92\x01\xa1\xff"), "cannot be read"),
        (packed(b"\x92\x01\x82\xa1a\x01\xa1a\x02"), "each once"),
        (packed([1, {1.5: 0}]), "texts or ints"),
        (packed([1, 0], t=ROW), "no place"),
        (packed([1, [ext(1, 0), ext(1, 0)]], t=ROW), "twice"),
        (packed([1, ext(1, 1)], t=ROW), "tensor 1 of 1"),
        (packed([1, ext(1, -1)], t=ROW), "tensor -1 of 1"),
        (packed([1, ext(1, True)], t=ROW), "tensor True of 1"),
        (packed([1, ext(1, 0, 0)], t=ROW), "not known"),
        (packed([1, ext(9, 0)], t=ROW), "not known"),
        (packed([1, ext(2, 0)], t=torch.ones(4)), "no row of bytes"),
        (packed([1, ext(3, 0, "<f4", [2])], t=ROW), "no array"),
        (packed([1, ext(3, 0, "|O", [1])], t=ROW), "no array"),
        (packed([1, ext(3, 0, "<f4", [-1])], t=ROW), "an array of dtype"),
        (packed([1, ext(3, 0, 4, [1])], t=ROW), "an array of dtype"),
        (packed([1, ext(3, 0, "nonsense", [1])], t=ROW), "cannot be read"),
    ],
)
def test_what_encode_did_not_make_is_a_violation_that_names_the_key(payload: dict[str, torch.Tensor], why: str) -> None:
    with pytest.raises(errors.ProtocolViolation, match=why) as refused:
        decode(payload, "req_0_1")
    assert refused.value.facts["key"] == "req_0_1"


@given(st.binary(min_size=1, max_size=40))
@settings(deadline=None)
def test_any_bytes_are_data_or_a_violation(raw: bytes) -> None:
    try:
        decode(packed(raw, t=ROW), "k")
    except errors.ProtocolViolation as error:
        assert error.facts["key"] == "k"
