"""Tensor specs without torch: a key, a dtype's name, a shape, and what they weigh.

Dtypes are looked up by name in a table, never by getattr on a module: a name from another
process chooses nothing but a row of this table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from connector.core.errors import InvalidPayload, PayloadTooLarge, UnsupportedTensor
from connector.core.names import MAX_DIMS, MAX_KEY_BYTES, MAX_KEYS, check_text

#: Longest dimension, and most elements that the non-empty dimensions may span: torch keeps
#: sizes and strides in signed 64 bits, also those of an empty tensor.
MAX_DIM = 2**63 - 1
#: Most bytes of one tensor and of one payload; far above any pool, far below an overflow.
MAX_NBYTES = 2**62


def _dtype_bits() -> dict[str, int]:
    """Bits that one element takes as torch stores it: sub-byte integers fill a byte each, packed dtypes
    (`bits1x8`, `float4_e2m1fn_x2`) count the byte that holds the pack."""
    bits = {"bool": 8, "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
    bits |= {"complex32": 32, "complex64": 64, "complex128": 128}
    for width in (8, 16, 32, 64):
        bits |= {f"int{width}": width, f"uint{width}": width}
    for width in range(1, 8):
        bits |= {f"int{width}": 8, f"uint{width}": 8}
    for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"):
        bits[f"float8_{name}"] = 8
    bits |= {"float4_e2m1fn_x2": 8, "bits1x8": 8, "bits2x4": 8, "bits4x2": 8, "bits8": 8, "bits16": 16}
    return bits


#: Dtype name -> bits an element takes in memory: every dtype that torch.empty makes (2.4 to 2.13)
#: and whose bytes say everything about its values.
DTYPE_BITS: Mapping[str, int] = MappingProxyType(_dtype_bits())
#: Refused: the values of a quantised tensor need its scale and zero point, which stand beside the
#: bytes, and torch can neither stride nor copy one without them.
REFUSED_DTYPES = frozenset({"qint8", "qint32", "quint8", "quint4x2", "quint2x4"})


class TensorSpec(NamedTuple):
    """A tensor's key, dtype by name, and shape. `()` is a scalar; a dimension may be 0."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements: 1 for the shape `()`."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the contiguous tensor; UnsupportedTensor if the dtype is not carried."""
        return _bytes(self.numel, dtype_bits(self.key, self.dtype))


def dtype_bits(key: str, dtype: str) -> int:
    """Bits of one element; UnsupportedTensor naming key and dtype if the dtype is not carried."""
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is not None:
        return bits
    told = dtype[:80].encode("ascii", "backslashreplace").decode() if isinstance(dtype, str) else type(dtype).__name__
    raise UnsupportedTensor("this dtype is not carried", key=key, dtype=told)


def measure(key: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of which nothing is trusted, not even the types.

    InvalidPayload: the key is no text of at most MAX_KEY_BYTES. UnsupportedTensor, with key and
    dtype: unknown dtype, more than MAX_DIMS dimensions, a dimension that is no int from 0 to
    MAX_DIM, an empty tensor whose strides overflow. PayloadTooLarge: above MAX_NBYTES.
    """
    check_text(key, "key", MAX_KEY_BYTES)
    bits = dtype_bits(key, dtype)
    if not isinstance(shape, tuple):
        raise UnsupportedTensor("a shape must be a tuple", key=key, dtype=dtype, found=type(shape).__name__)
    if len(shape) > MAX_DIMS:
        raise UnsupportedTensor("too many dimensions", key=key, dtype=dtype, size=len(shape), limit=MAX_DIMS)
    span, empty = 1, False
    for at, dim in enumerate(shape):
        if type(dim) is not int or not 0 <= dim <= MAX_DIM:
            raise UnsupportedTensor("a dimension must be an int from 0 to 2**63 - 1", key=key, dtype=dtype, dim=at)
        if dim:
            span *= dim
        else:
            empty = True
    if empty:
        if span > MAX_DIM:
            raise UnsupportedTensor("the strides of this empty tensor overflow", key=key, dtype=dtype, limit=MAX_DIM)
        return 0
    size = _bytes(span, bits)
    if size > MAX_NBYTES:
        raise PayloadTooLarge("the tensor is too large", key=key, dtype=dtype, size=_shown(size), limit=MAX_NBYTES)
    return size


def check_spec(spec: TensorSpec) -> TensorSpec:
    """An untrusted spec, if all of it holds; raises as `measure` does."""
    measure(spec.key, spec.dtype, spec.shape)
    return spec


def check_specs(specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
    """The specs of one payload, if each holds and together they may be one.

    Raises as `measure` does; InvalidPayload: a key twice, more than MAX_KEYS of them;
    PayloadTooLarge: above MAX_NBYTES together.
    """
    if len(specs) > MAX_KEYS:
        raise InvalidPayload("too many tensors in one payload", size=len(specs), limit=MAX_KEYS)
    total = 0
    keys: set[str] = set()
    for spec in specs:
        total += measure(spec.key, spec.dtype, spec.shape)
        if spec.key in keys:
            raise InvalidPayload("a key stands twice in one payload", key=spec.key)
        keys.add(spec.key)
    if total > MAX_NBYTES:
        raise PayloadTooLarge("the payload is too large", size=_shown(total), limit=MAX_NBYTES)
    return specs


def _bytes(numel: int, bits: int) -> int:
    return (numel * bits + 7) // 8


def _shown(size: int) -> int:
    # A fact crosses the wire, where a number has 64 bits; 64 dimensions can multiply to 4032.
    return min(size, MAX_DIM)
