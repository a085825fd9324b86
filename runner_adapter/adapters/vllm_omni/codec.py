"""What vLLM-Omni hands over, as `dict[str, Tensor]`, and back.

Each tensor, byte string and array is a tensor of the payload: the connector copies it straight into shared memory.
The rest (texts, numbers, lists, who stands where) is one uint8 tensor of msgpack under RESERVED: [version, data].
In it an extension type stands where a tensor belongs, so that nothing a user sends can be taken for one.

What comes back equals what vLLM-Omni 0.30's own serializer gives for the same data (structs and dataclasses as
dicts, tuples as lists, a struct's None fields dropped), but for what that one guesses: a dict stays a dict, whatever
its keys are. All of it is owned.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
import numpy as np
import torch

from connector import errors

RESERVED = "__omni__"
VERSION = 1
#: Deepest nesting of dicts and lists.
MAX_DEPTH = 64
#: Longest name of a tensor; names are for people (`connector ls`), places are found by number.
MAX_NAME = 120

#: Extension types; each holds the number of a tensor of the payload.
_TENSOR, _BYTES, _ARRAY = 1, 2, 3


def encode(data: object, key: str) -> dict[str, torch.Tensor]:
    """Data as a payload: its tensors (not copied, detached) in order, then the rest under RESERVED.

    Takes dicts with str or int keys, lists, tuples, sets, texts, numbers, None, enums, slices, dataclasses, msgspec
    structs, bytes, tensors and numpy arrays of plain dtypes. InvalidPayload names the place of anything else.
    """
    packer = _Packer(key)
    skeleton = packer.plain(data, "", 0)
    try:
        packed = msgpack.packb([VERSION, skeleton])
    except (OverflowError, UnicodeEncodeError, ValueError) as error:
        raise errors.InvalidPayload(f"the payload has no msgpack form: {error}", key=key) from error
    return {**packer.tensors, RESERVED: torch.frombuffer(bytearray(packed), dtype=torch.uint8)}


def decode(payload: Mapping[str, torch.Tensor], key: str) -> Any:
    """The data of a payload that `encode` made. ProtocolViolation: it is not one, or not whole."""
    head = payload.get(RESERVED)
    if head is None or head.dtype != torch.uint8 or head.dim() != 1:
        there = sorted(payload)[:8]
        raise errors.ProtocolViolation("the payload is not one of vLLM-Omni's", key=key, needs=RESERVED, there=there)
    unpacker = _Unpacker([tensor for name, tensor in payload.items() if name != RESERVED])
    try:
        found = msgpack.unpackb(
            head.numpy().tobytes(),
            ext_hook=unpacker.placed,
            object_pairs_hook=_pairs,
            strict_map_key=False,
        )
        if type(found) is not list or len(found) != 2 or found[0] != VERSION:
            raise ValueError(f"it is not [{VERSION}, data]")
        unpacker.must_be_whole()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise errors.ProtocolViolation(f"the payload cannot be read: {error}", key=key) from error
    return found[1]


def size_of(payload: Mapping[str, torch.Tensor]) -> int:
    """Bytes of a payload's tensors."""
    return sum(tensor.nbytes for tensor in payload.values())


class _Packer:
    """Walks data once: tensors are set aside, what is left is plain."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.tensors: dict[str, torch.Tensor] = {}

    def plain(self, value: object, path: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise self._refused("the payload is nested too deeply", path, limit=MAX_DEPTH)
        if value is None or isinstance(value, str | bool | int | float) and not isinstance(value, enum.Enum):
            return value
        if isinstance(value, torch.Tensor):
            return self._aside(_TENSOR, value.detach(), path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, bytes | bytearray | memoryview):
            return self._aside(_BYTES, _as_bytes(bytearray(value)), path)
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if isinstance(value, list | tuple | set | frozenset):
            return [self.plain(item, f"{path}[{place}]", depth + 1) for place, item in enumerate(value)]
        if isinstance(value, slice):
            return [value.start, value.stop, value.step]
        if isinstance(value, enum.Enum):
            return self.plain(value.value, path, depth + 1)
        return self._fields(value, path, depth)

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str | int, object]:
        plain: dict[str | int, object] = {}
        for name, item in value.items():
            if isinstance(name, bool) or not isinstance(name, str | int):
                raise self._refused("a dict's key must be a str or an int", path, given=repr(name)[:80])
            below = f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}" if path else name
            plain[name] = self.plain(item, below, depth + 1)
        return plain

    def _fields(self, value: object, path: str, depth: int) -> object:
        """A struct (what a field lacks is None, and left out) or a dataclass, as a dict."""
        # Read from the type: msgspec comes with vLLM-Omni and is no package of this project.
        names: Iterable[str] | None = getattr(type(value), "__struct_fields__", None)
        if names is not None:
            given = {name: getattr(value, name) for name in names}
            return self._mapping({name: item for name, item in given.items() if item is not None}, path, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return self._mapping(fields, path, depth)
        raise self._refused("a value of this type is not carried", path, given=type(value).__name__)

    def _array(self, value: np.ndarray[Any, Any], path: str) -> msgpack.ExtType:
        """An array travels as its bytes: torch need not have its dtype."""
        if value.dtype.kind in "OV":
            raise self._refused("an array of objects or records is not carried", path, dtype=str(value.dtype))
        raw = _as_bytes(bytearray(value.tobytes()))
        return self._aside(_ARRAY, raw, path, value.dtype.str, list(value.shape))

    def _aside(self, kind: int, tensor: torch.Tensor, path: str, *more: object) -> msgpack.ExtType:
        number = len(self.tensors)
        self.tensors[f"{number}:{path}"[:MAX_NAME]] = tensor
        return msgpack.ExtType(kind, msgpack.packb([number, *more]))

    def _refused(self, what: str, path: str, **facts: Any) -> errors.InvalidPayload:
        return errors.InvalidPayload(what, key=self.key, place=path or "the payload itself", **facts)


class _Unpacker:
    """Puts the payload's tensors, copied, where the extension types stand; each exactly once."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor | None] = [*tensors]

    def placed(self, kind: int, packed: bytes) -> object:
        number, *more = msgpack.unpackb(packed)
        if type(number) is not int or not 0 <= number < len(self.tensors):
            raise ValueError(f"it names tensor {number!r} of {len(self.tensors)}")
        tensor, self.tensors[number] = self.tensors[number], None
        if tensor is None:
            raise ValueError(f"it names tensor {number} twice")
        if kind == _TENSOR and not more:
            return tensor.clone()
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise ValueError(f"tensor {number} is no row of bytes")
        raw = tensor.numpy().tobytes()
        if kind == _BYTES and not more:
            return raw
        if kind == _ARRAY and len(more) == 2:
            return _array(raw, *more)
        raise ValueError(f"extension type {kind} is not known")

    def must_be_whole(self) -> None:
        left = [number for number, tensor in enumerate(self.tensors) if tensor is not None]
        if left:
            raise ValueError(f"tensors have no place in it: {left[:8]}")


def _array(raw: bytes, dtype: object, shape: object) -> np.ndarray[Any, Any]:
    if type(dtype) is not str or type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"an array of dtype {dtype!r} and shape {shape!r}")
    kind = np.dtype(dtype)
    if kind.kind in "OV" or math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes are no array of dtype {dtype} and shape {shape}")
    return np.frombuffer(bytearray(raw), dtype=kind).reshape(shape)


def _as_bytes(raw: bytearray) -> torch.Tensor:
    # torch.frombuffer refuses an empty buffer.
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _pairs(pairs: list[tuple[object, object]]) -> dict[object, object]:
    found = dict(pairs)
    if len(found) != len(pairs) or any(type(name) not in (str, int) for name in found):
        raise ValueError("a dict's keys must be texts or ints, each once")
    return found
