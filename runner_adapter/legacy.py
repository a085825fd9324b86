"""What engines handed over before `model_intermediate_buffer`, decoded into tensors by name, without loss.

Payload objects are known by what they hold, not by their class: an engine's struct and a test's namespace are alike.
A mapping is always taken as plain values; it is never looked at for the shape of a payload object.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from connector import errors
from runner_adapter import phases, values
from runner_adapter.naming import MAX_DEPTH, flatten
from runner_adapter.phases import renamed

#: Dtypes that an old payload may name, by torch's names and other names of the same dtypes. Quantised dtypes are not
#: here: their values need a scale that stands in no payload.
_DTYPE_NAMES = frozenset(
    """
    bool bit float16 half bfloat16 float32 float float64 double
    complex32 chalf complex64 cfloat complex128 cdouble
    int8 int16 short int32 int int64 long uint8 uint16 uint32 uint64
    int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    bits8 bits16 bits1x8 bits2x4 bits4x2
    """.split()
)
#: Those of them that the installed torch has.
DTYPES: Mapping[str, torch.dtype] = {
    name: found for name, found in vars(torch).items() if name in _DTYPE_NAMES and isinstance(found, torch.dtype)
}
_MAX_DIM = 2**63 - 1
_FORMS = ("tensor_data", "list_data", "scalar_data")


def decode(payload: object, *, rid: str, warns: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of an old payload by dotted name; {} for an empty one.

    `payload`: an object with `entries`, name -> (tensor_data, tensor_shape and tensor_dtype, or list_data, or
    scalar_data); or a mapping, nested or with dotted names, of tensors and plain values, in which None and {} say
    that there is nothing. Values that are no tensors become what `values.as_tensor` makes of them: 0, False, "" and
    [] are values; a list that no tensor holds, ragged or of several kinds, stays a list of what its parts become.
    Tensors of a mapping are handed on as they are; those made here own their memory. `warns`: as `tensors` does, of
    values that no old name has warned of.

    InvalidPayload, with rid and entry: an entry with none or two of the three forms (PR: all three must survive),
    bytes that do not fit the shape, a value that no tensor holds, a name that stands twice. UnsupportedTensor: a
    dtype that is not in DTYPES.
    """
    found: dict[Any, Any] = {}
    for name, value in _items(payload, rid):
        known = renamed(name) if isinstance(name, str) else name
        if known in found:
            raise errors.InvalidPayload("a name stands twice", rid=rid, entry=str(name))
        found[known] = _tensors(value, rid, _entry_name(name), warns)
    return flatten(_there(found), rid=rid)


def tensors(update: Mapping[Any, Any], *, rid: str) -> dict[Any, Any]:
    """An update under the names of now, nested or flat as it was given, with a tensor for every plain value: what
    phases 1 and 2 take of hooks and engines, and phase 3 refuses.

    As `decode` has it: None and {} say that there is nothing, tensors are handed on as they are. A plain value is
    warned of, once a name: phase 3 will not take it. InvalidPayload, with rid and entry: a value that no tensor holds.
    """
    found = {name: _tensors(value, rid, _entry_name(name), True) for name, value in _there(update).items()}
    return _there(found)


def prompt_embeds(value: object, *, rid: str) -> torch.Tensor | None:
    """The prompt's embeddings [prompt tokens, width] on the host, owned; None for None.

    `value`: a Tensor, or an object with `data` (bytes), `shape` and `dtype` (a name). Raises as `decode` does, and
    InvalidPayload if there are not two dimensions.
    """
    entry = "prompt_embeds"
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        found = values.owned(value, "cpu", rid=rid, entry=entry)
    else:
        parts = (getattr(value, "data", None), getattr(value, "shape", None), getattr(value, "dtype", None))
        found = _from_bytes(*parts, rid=rid, entry=entry)
    if found.dim() != 2:
        raise errors.InvalidPayload(
            "prompt embeddings are [tokens, width]", rid=rid, entry=entry, shape=list(found.shape)
        )
    return found


def _items(payload: object, rid: str) -> list[tuple[Any, Any]]:
    """Names and values, each a Tensor, plain, or nested."""
    if isinstance(payload, Mapping):
        return list(_there(payload).items())
    entries = getattr(payload, "entries", None)
    if not isinstance(entries, Mapping):
        raise errors.InvalidPayload(
            "an old payload is a mapping, or an object that holds its entries", rid=rid, found=type(payload).__name__
        )
    return [(name, _entry(name, entry, rid)) for name, entry in entries.items()]


def _entry(name: object, entry: object, rid: str) -> Any:
    """The one value of an entry. Whether a form is there is asked with `is not None`: falsy values are values."""
    given = {form: value for form in _FORMS if (value := getattr(entry, form, None)) is not None}
    if len(given) != 1:
        raise errors.InvalidPayload(
            "an entry holds exactly one of tensor_data, list_data and scalar_data",
            rid=rid,
            entry=str(name),
            found=list(given),
        )
    if "tensor_data" not in given:
        return next(iter(given.values()))
    shape, dtype = getattr(entry, "tensor_shape", None), getattr(entry, "tensor_dtype", None)
    return _from_bytes(given["tensor_data"], shape, dtype, rid=rid, entry=str(name))


def _from_bytes(data: object, shape: object, dtype: object, *, rid: str, entry: str) -> torch.Tensor:
    """A tensor of its own memory with these bits. All is checked before it is made."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise errors.InvalidPayload("a tensor's data is bytes", rid=rid, entry=entry, found=type(data).__name__)
    found = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if found is None:
        raise errors.UnsupportedTensor("no dtype of this name is taken", rid=rid, entry=entry, dtype=str(dtype)[:80])
    if not isinstance(shape, list | tuple) or not all(type(dim) is int and 0 <= dim <= _MAX_DIM for dim in shape):
        raise errors.InvalidPayload(
            "a tensor's shape is a list of ints from 0 to 2**63 - 1", rid=rid, entry=entry, shape=str(shape)[:80]
        )
    # A memoryview's own length counts its items, not its bytes.
    size, needed = memoryview(data).nbytes, math.prod(shape) * found.itemsize
    if size != needed:
        raise errors.InvalidPayload(
            "the bytes do not fit the shape",
            rid=rid,
            entry=entry,
            shape=list(shape),
            dtype=dtype,
            size=size,
            limit=needed,
        )
    if not size:
        return _empty(shape, found, rid, entry)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(found).reshape(shape)


def _empty(shape: list[int] | tuple[int, ...], dtype: torch.dtype, rid: str, entry: str) -> torch.Tensor:
    """Of no bytes, whatever the other dimensions are, unless torch cannot hold their strides."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        why = "no tensor has this shape"
        raise errors.InvalidPayload(why, rid=rid, entry=entry, shape=str(shape)[:80]) from error


def _tensors(value: Any, rid: str, entry: str, warns: bool, depth: int = 1) -> Any:
    """The value with every leaf a tensor. A list stays a list only around tensors and mappings."""
    if isinstance(value, torch.Tensor):
        return value
    if depth > MAX_DEPTH:
        raise errors.InvalidPayload(
            "mappings or lists are nested too deeply", rid=rid, entry=entry[:80], limit=MAX_DEPTH
        )
    if isinstance(value, Mapping):
        parts = _there(value).items()
        return _there({name: _tensors(part, rid, f"{entry}.{name}", warns, depth + 1) for name, part in parts})
    if isinstance(value, list | tuple) and any(isinstance(leaf, torch.Tensor | Mapping) for leaf in _leaves(value)):
        return [_tensors(part, rid, entry, warns, depth + 1) for part in value]
    found = _one(value, rid, entry)
    if found is None:
        return [_tensors(part, rid, entry, warns, depth + 1) for part in value]
    if warns:
        phases.warn_once(f"a value that is no tensor, under {entry[:80]},", "a tensor")
    return found


def _one(value: Any, rid: str, entry: str) -> torch.Tensor | None:
    """One tensor of a plain value, or of numpy's; None for a list that none holds: each part has its own then."""
    if getattr(value, "__array_interface__", None) is not None:
        try:
            return torch.as_tensor(value).clone()
        except (TypeError, ValueError) as error:
            raise errors.InvalidPayload(f"no tensor holds this array: {error}", rid=rid, entry=entry) from None
    try:
        return values.as_tensor(value, rid=rid, entry=entry)
    except errors.InvalidPayload:
        if isinstance(value, list | tuple) and value:
            return None
        raise


def _entry_name(name: object) -> str:
    """As it is told. A pair is a dotted name."""
    return ".".join(map(str, name)) if isinstance(name, tuple) else str(name)


def _there(names: Mapping[Any, Any]) -> dict[Any, Any]:
    """Without what says that there is nothing."""
    return {name: value for name, value in names.items() if value is not None and not _is_empty(value)}


def _is_empty(value: object) -> bool:
    return isinstance(value, Mapping) and not value


def _leaves(value: Any, depth: int = 1) -> Iterator[Any]:
    """What lists in lists hold, as far as they may be nested."""
    if isinstance(value, list | tuple) and depth <= MAX_DEPTH:
        for part in value:
            yield from _leaves(part, depth + 1)
    else:
        yield value
