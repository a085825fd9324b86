"""Python values <-> tensors without loss, and copies of tensors that own their memory.

| value | tensor | back |
|---|---|---|
| bool, int, float | 0-dim bool, int64, float64 | the value |
| bytes | uint8, an element a byte | bytes |
| str | int32, an element a code point | str |
| lists and tuples of one of them, rectangular | a dimension more each | lists |
| lists and tuples of str | as above, shorter ones filled up with -1 | lists |
| an empty list | int64 without elements | the list |

The dtype says which it was: text and bytes stay apart, and "" is not []. Nothing is guessed or rounded: what is
not in the table, an int beyond 64 bits and a list of several kinds are InvalidPayload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from connector import errors

Device = torch.device | str
#: Lists in lists, at most; torch's own limit on dimensions.
MAX_DEPTH = 64

_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
#: Code point that fills up the shorter ones of several texts; no character has it.
_FILL = -1
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: By size, the dtype as which elements are copied: its kernel exists, and takes the bits as they are.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(tensor: object, **facts: Any) -> torch.Tensor:
    """The tensor, detached and without its class; not a copy.

    Raises InvalidPayload if it is no Tensor; UnsupportedTensor, with dtype, layout and device, if its bytes are not
    all it is: sparse, nested, quantised, meta, lazy, or a subclass that dispatches itself. `facts` are told in both.
    """
    if not isinstance(tensor, torch.Tensor):
        raise errors.InvalidPayload(f"a value must be a Tensor, not {type(tensor).__name__}", **facts)
    kind = type(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        if kind not in _PLAIN:
            if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                raise _unsupported(tensor, f"a {kind.__name__} dispatches itself: give its plain tensors", facts)
            if torch.nn.parameter.is_lazy(tensor):
                raise _unsupported(tensor, f"a {kind.__name__} has no values yet", facts)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            raise _unsupported(tensor, "a tensor of this dtype, layout or device cannot be kept", facts)
        return tensor.detach()


def owned(tensor: object, device: Device | None = None, **facts: Any) -> torch.Tensor:
    """A contiguous copy on `device` (None: the tensor's own) that shares no memory with it; dtype, shape, bits stay.

    Conj and neg views become the values they show. The copy is done when this returns, so the source may be
    overwritten, or its block released, at once. Raises as `plain` does.
    """
    found = plain(tensor, **facts)
    return joined([found], found.device if device is None else device)


def joined(pieces: Sequence[torch.Tensor], device: Device, **facts: Any) -> torch.Tensor:
    """A contiguous tensor that owns its memory, with the rows of all pieces in order; each is copied once.

    `pieces`: plain tensors, on any devices, and one at least; several are [n, ...] of one dtype and row shape. Raises
    InvalidPayload, with both dtypes and shapes, if they differ, or one has no rows (0-dim).
    """
    first = pieces[0]
    shape = first.shape
    if len(pieces) > 1:
        _check_rows(pieces, facts)
        shape = torch.Size((sum(map(len, pieces)), *first.shape[1:]))
    made = torch.empty(shape, dtype=_bits(first), device=device)
    if len(pieces) == 1:
        _fill(made, first)
    else:
        _lay(made, 0, pieces)
    return made.view(first.dtype)


class Growing:
    """Rows that grow at their end, in a block with room behind them: an append copies what is new, and all rows only
    when the room is used up, so that n appends copy less than four times the rows that there are in the end.

    What was shown is never written again: a tensor that was handed out keeps its values and its shape. It is a view of
    the block's first rows, contiguous; the block has twice as many rows at most as the newest view.
    """

    __slots__ = ("_block", "_shown")

    def __init__(self) -> None:
        #: As bits, [room, ...]; only rows behind `_shown`, the newest view, are free.
        self._block = self._shown = torch.empty(0)

    def append(self, there: torch.Tensor, pieces: Sequence[torch.Tensor], device: Device, **facts: Any) -> torch.Tensor:
        """The rows of `there`, and behind them those of the pieces. Raises as `joined` does, and has then done nothing.

        If `there` is any other tensor than what the last call gave, its rows begin a block of their own: those behind
        it may be another's.
        """
        _check_rows([there, *pieces], facts)
        start, count = len(there), len(there) + sum(map(len, pieces))
        # Written in inference mode or not, and unseen by autograd, which may have kept what was shown for a backward
        # pass: it has not changed.
        with torch.inference_mode(False), torch.no_grad():
            if there is not self._shown or count > len(self._block):
                room = max(count, 2 * start)
                self._block = torch.empty((room, *there.shape[1:]), dtype=_bits(there), device=device)
                start, pieces = 0, [there, *pieces]
            _lay(self._block.data, start, pieces)
            self._shown = self._block[:count].view(there.dtype)
        return self._shown


def as_tensor(value: object, **facts: Any) -> torch.Tensor:
    """A host tensor that holds the value, as the table above says. InvalidPayload, with `facts`, for any other."""
    shape, leaves = _leaves(value, facts)
    kinds = {type(leaf) for leaf in leaves}
    if len(kinds) > 1:
        told = sorted(kind.__name__ for kind in kinds)
        raise errors.InvalidPayload("a list of several kinds has no dtype that keeps them", kinds=told, **facts)
    kind = kinds.pop() if kinds else int
    if kind is str:
        return _texts(shape, leaves)
    if kind is bytes:
        return _byte_strings(shape, leaves, facts)
    dtype = _NUMBERS.get(kind)
    if dtype is None:
        raise errors.InvalidPayload(f"a {kind.__name__} has no form as a tensor that gives it back", **facts)
    if kind is int and leaves and not -(2**63) <= min(leaves) <= max(leaves) < 2**63:
        raise errors.InvalidPayload("an int is beyond 64 bits", limit=2**63 - 1, **facts)
    return torch.tensor(leaves, dtype=dtype, device="cpu").reshape(shape)


def as_value(tensor: torch.Tensor, **facts: Any) -> Any:
    """The value of which `as_tensor` made the tensor; tuples come back as lists.

    Raises InvalidPayload, with dtype and shape, if it makes no such tensor.
    """
    found = plain(tensor, **facts)
    if found.dtype in _NUMBERS.values():
        return found.tolist()
    if found.dim() and found.dtype is torch.uint8:
        return _strings(found.tolist(), found.dim(), bytes)
    if found.dim() and found.dtype is torch.int32:
        try:
            return _strings(found.tolist(), found.dim(), _text)
        except ValueError:
            raise errors.InvalidPayload("an int32 tensor is text, and this one holds no code points", **facts) from None
    raise errors.InvalidPayload(
        "a tensor of this dtype and shape stands for no value", dtype=str(found.dtype), shape=list(found.shape), **facts
    )


def _leaves(value: object, facts: dict[str, Any]) -> tuple[tuple[int, ...], list[Any]]:
    """The sizes of lists in lists, and what they hold, row-major."""
    shape: list[int] = []
    level: list[Any] = [value]
    while level and isinstance(level[0], (list, tuple)):
        sizes = {len(part) if isinstance(part, (list, tuple)) else -1 for part in level}
        if len(sizes) > 1:
            raise errors.InvalidPayload("lists in a list differ in length, or are mixed with what is no list", **facts)
        if len(shape) == MAX_DEPTH:
            raise errors.InvalidPayload("lists are nested too deeply", limit=MAX_DEPTH, **facts)
        shape.append(sizes.pop())
        level = [leaf for part in level for leaf in part]
    return tuple(shape), level


def _texts(shape: tuple[int, ...], texts: list[str]) -> torch.Tensor:
    width = max(map(len, texts))
    points = [[*map(ord, text), *[_FILL] * (width - len(text))] for text in texts]
    return torch.tensor(points, dtype=torch.int32, device="cpu").reshape(*shape, width)


def _byte_strings(shape: tuple[int, ...], strings: list[bytes], facts: dict[str, Any]) -> torch.Tensor:
    width = len(strings[0])
    if any(len(string) != width for string in strings):
        raise errors.InvalidPayload("byte strings in a list differ in length", **facts)
    return torch.tensor([list(string) for string in strings], dtype=torch.uint8, device="cpu").reshape(*shape, width)


def _strings(numbers: list[Any], dims: int, make: Callable[[list[int]], Any]) -> Any:
    return make(numbers) if dims == 1 else [_strings(row, dims - 1, make) for row in numbers]


def _text(points: Iterable[int]) -> str:
    """ValueError for what is no code point; fill is one at the end only."""
    found = list(points)
    while found and found[-1] == _FILL:
        found.pop()
    return "".join(map(chr, found))


def _bits(tensor: torch.Tensor) -> torch.dtype:
    return _BITS.get(tensor.dtype.itemsize, tensor.dtype)


def _check_rows(pieces: Sequence[torch.Tensor], facts: dict[str, Any]) -> None:
    first = pieces[0]
    for piece in pieces:
        if piece.dim() == 0 or piece.dtype != first.dtype or piece.shape[1:] != first.shape[1:]:
            raise errors.InvalidPayload(
                "rows of another dtype or shape cannot be put behind those that are there",
                found=f"{piece.dtype}{list(piece.shape)}",
                there=f"{first.dtype}{list(first.shape)}",
                **facts,
            )


def _lay(made: torch.Tensor, at: int, pieces: Sequence[torch.Tensor]) -> None:
    """The rows of all pieces, in order, from row `at` on."""
    for piece in pieces:
        _fill(made[at : at + len(piece)], piece)
        at += len(piece)


def _fill(made: torch.Tensor, source: torch.Tensor) -> None:
    """Copies bits, or with the dtype's own kernel, which alone makes the values of a conj or neg view."""
    if source.is_conj() or source.is_neg():
        made.view(source.dtype).copy_(source)
    else:
        made.copy_(source.view(made.dtype))


def _unsupported(tensor: torch.Tensor, message: str, facts: dict[str, Any]) -> errors.UnsupportedTensor:
    layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return errors.UnsupportedTensor(message, dtype=dtype, layout=layout, device=str(tensor.device), **facts)
