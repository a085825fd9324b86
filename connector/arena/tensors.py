"""Tensors in and out of blocks: one copy in, none out. The only torch file for the host.

A copy in goes from the source straight into the slot. Views out are built from the mapping's
address over one window per payload; torch keeps the window, the window keeps the mapping, and
the window's end is the payload's release.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from connector.arena import cuda
from connector.arena.arena import Arena
from connector.arena.mapping import Window
from connector.core.errors import ConnectorError, InvalidPayload, InvariantBroken, UnsupportedTensor
from connector.core.layout import Manifest, Slot
from connector.core.specs import DTYPE_BITS, TensorSpec, check_specs, measure

#: From here on a copy gives the GIL back; below, taking it again costs more than the copy.
HELD_BELOW = 64 << 10

_memmove_held = ctypes.PyDLL(None).memmove
_memmove_held.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_held.restype = ctypes.c_void_p

#: Dtypes that this torch has and the connector carries, both ways.
_NAMES: dict[torch.dtype, str] = {
    found: name
    for found in vars(torch).values()
    if isinstance(found, torch.dtype) and (name := str(found).removeprefix("torch.")) in DTYPE_BITS
}
_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}

_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
#: An integer dtype of the same size: its copy kernel exists, and takes the bits as they are. complex128 has none.
_AS_BITS: dict[torch.dtype, torch.dtype] = {
    dtype: _INTEGERS.get(DTYPE_BITS[name], dtype) for dtype, name in _NAMES.items()
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOT_CARRIED = "this dtype, layout or device is not carried"
_COMPLEX = frozenset(dtype for dtype in _NAMES if dtype.is_complex)


def dtype_named(name: str, key: str = "") -> torch.dtype:
    """torch's dtype for a spec's dtype. UnsupportedTensor: this torch has none of the name."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise _no_dtype(name, key)
    return dtype


def _no_dtype(name: str, key: str) -> UnsupportedTensor:
    return UnsupportedTensor(f"torch {torch.__version__} has no such dtype", key=key, dtype=name)


def spec_of(key: str, tensor: object) -> TensorSpec:
    """Key, dtype and shape of a tensor that can be carried; nothing is read but its description.

    InvalidPayload: no Tensor, or no valid key. UnsupportedTensor, with key, dtype and layout: sparse,
    mkldnn, nested, quantised, meta, fake, lazy, functorch-wrapped, or a subclass that dispatches
    itself. Parameters, plain subclasses, conj and neg views, scalars and empty tensors pass.
    """
    ((_, dtype, shape),) = described({key: tensor})
    spec = TensorSpec(key, dtype, tuple(shape))
    measure(*spec)
    _must_have_bytes(key, _plain(key, tensor))
    return spec


def specs_of(payload: object) -> tuple[TensorSpec, ...]:
    """Specs of a whole payload, in its order. InvalidPayload: no mapping of str to Tensor; otherwise as spec_of,
    and PayloadTooLarge above what any pool could hold."""
    specs = tuple([spec_of(spec.key, payload[spec.key]) for spec in described(payload)])  # type: ignore[index]
    check_specs(specs)
    return specs


def described(payload: object) -> tuple[TensorSpec, ...]:
    """specs_of without check_specs, for those who know these specs already, and without what copy_payload looks for.
    Keys may be of any type; a shape is a tuple of torch's own kind."""
    if type(payload) is not dict and not isinstance(payload, Mapping):
        raise InvalidPayload(f"a payload is a dict[str, Tensor], not {type(payload).__name__}")
    specs = []
    for key, tensor in payload.items():
        if type(tensor) is not torch.Tensor:
            tensor = _plain(key, tensor)
        dtype = _NAMES.get(tensor.dtype)
        if dtype is None:
            raise _unsupported(key, tensor, _NOT_CARRIED)
        try:
            # As TensorSpec(...) makes it, without the call: this is done for every tensor of every chunk.
            specs.append(tuple.__new__(TensorSpec, (key, dtype, tensor.shape)))
        except RuntimeError:
            raise _unsupported(key, tensor, _NOT_CARRIED) from None
    return tuple(specs)


def copy_payload(
    arena: Arena,
    base: int,
    slots: Sequence[Slot],
    tensors: Iterable[torch.Tensor],
    later: list[cuda.Job] | None = None,
) -> None:
    """copy_in for each tensor of a payload, to its slot behind `base`; errors name the key, too."""
    for (key, _, _, offset, nbytes), tensor in zip(slots, tensors, strict=True):
        try:
            copy_in(arena, base + offset, tensor, nbytes, later)
        except ConnectorError as error:
            raise type(error)(error.message, **{"key": key, **error.facts}) from error


def copy_in(
    arena: Arena, position: int, tensor: torch.Tensor, nbytes: int, later: list[cuda.Job] | None = None
) -> None:
    """Copies a tensor's logical values, row-major, to `position` (bytes from the segment's start).

    `nbytes` is its spec's; the tensor passed `described`. Above 64 KiB the GIL is free meanwhile. A CUDA tensor is
    appended to `later`, if that is given; without it, it has arrived when this returns. InvalidPayload: it has another
    size now, or no storage. UnsupportedTensor: sparse, mkldnn, nested, meta or functorch-wrapped.
    InvariantBroken: the slot lies outside of the arena's data.
    """
    if position < arena.data_begin or position + nbytes > arena.end or arena.readonly:
        raise InvariantBroken(
            "a slot lies outside of the arena, or the mapping is read-only", offset=position, size=nbytes
        )
    if type(tensor) is not torch.Tensor:
        tensor = _plain(None, tensor)
    if later is not None and cuda.CALLS.is_there(tensor):
        if _has_bytes(tensor, nbytes):
            plain = tensor.is_contiguous() and not _is_bent(tensor)
            later.append(cuda.Job(position, tensor.detach(), nbytes, plain))
        return
    pointer = _pointer(tensor, nbytes)
    if pointer and nbytes:
        move = _memmove_held if nbytes < HELD_BELOW else ctypes.memmove
        move(arena.address + position, pointer, nbytes)
    else:
        _copy_other(arena, position, tensor, nbytes)


def _pointer(tensor: torch.Tensor, nbytes: int) -> int:
    """Where its bytes lie as they are to be written; 0: they do not."""
    try:
        if tensor.nbytes == nbytes and tensor.is_cpu and tensor.is_contiguous() and not _is_bent(tensor):
            return tensor.data_ptr()
    except RuntimeError:
        # It has no such thing: _copy_other says why.
        return 0
    return 0


class Places:
    """Where the tensors of payloads that are alike go in their blocks, and how they are copied there: all at one go.
    `short`: the GIL is held meanwhile."""

    __slots__ = ("_begins", "_move", "_specs", "short")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._specs = [(key, _DTYPES[dtype], shape, nbytes) for key, dtype, shape, _, nbytes in slots]
        self._begins = [(offset, nbytes) for *_, offset, nbytes in slots]
        self.short: bool = sum(nbytes for *_, nbytes in slots) < HELD_BELOW
        self._move = _memmove_held if self.short else ctypes.memmove

    def find(self, payload: object) -> list[int] | None:
        """Where its tensors' bytes lie; None if it is not like the others, or they do not lie as they are written."""
        if type(payload) is not dict or len(payload) != len(self._specs):
            return None
        found = []
        for (key, dtype, shape, nbytes), (name, tensor) in zip(self._specs, payload.items(), strict=True):
            if name != key or type(tensor) is not torch.Tensor or tensor.dtype is not dtype or tensor.shape != shape:
                return None
            pointer = _pointer(tensor, nbytes)
            if not pointer:
                return None
            found.append(pointer)
        return found

    def copy(self, address: int, found: Sequence[int]) -> None:
        """To the payload's data at this address, from where `find` has found them."""
        for (begin, nbytes), pointer in zip(self._begins, found, strict=True):
            self._move(address + begin, pointer, nbytes)


def _is_bent(tensor: torch.Tensor) -> bool:
    """A conj or neg view: what lies in memory are not its values."""
    return tensor.is_neg() or (tensor.dtype in _COMPLEX and tensor.is_conj())


def _has_bytes(tensor: torch.Tensor, nbytes: int) -> bool:
    """False if there are none to copy; raises if there is nothing to copy them from."""
    _must_have_bytes(None, tensor)
    if tensor.nbytes != nbytes:
        raise InvalidPayload("a tensor changed its size while it was put", size=tensor.nbytes, expected=nbytes)
    if nbytes and not tensor.data_ptr():
        raise InvalidPayload("a tensor's storage was freed", size=nbytes)
    return nbytes > 0


def _copy_other(arena: Arena, position: int, tensor: torch.Tensor, nbytes: int) -> None:
    """Values that do not lie on the host as they are to be written; or why there are none."""
    if not _has_bytes(tensor, nbytes):
        return
    source = tensor.detach()
    # Through integers no kernel is missing and no bit is touched; a conj or neg view is values that only its
    # own dtype's kernel can make.
    as_bits = source.dtype if _is_bent(tensor) else _AS_BITS[source.dtype]
    if as_bits is not source.dtype:
        source = source.view(as_bits)
    window = arena.segment.mapping.window()
    flat = torch.frombuffer(window, dtype=as_bits, count=source.numel(), offset=position)
    flat.view(source.shape).copy_(source)


def views(
    arena: Arena,
    base: int,
    manifest: Manifest,
    on_release: Callable[[], object],
    readonly: bool = False,
    into: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """A payload's tensors on the mapping itself, without a copy; `base`: where its block's data begins in the segment.
    They are put `into` a dict, if one is given.

    `on_release` is called exactly once, by whichever thread drops the last tensor (or view of one) that
    has bytes; at once, before this returns, if the payload has no bytes. It runs inside the collector:
    it must take no lock, log nothing, send nothing. On an error it is not called. The rest is as open_views has it.
    """
    tensors: dict[str, torch.Tensor] = {} if into is None else into
    window = open_views(arena, base, manifest, tensors, readonly)
    if window is None:
        on_release()
    else:
        # Last, so that a failure above leaves the release with the caller.
        window.on_release = on_release
    return tensors


def open_views(
    arena: Arena, base: int, manifest: Manifest, into: dict[str, torch.Tensor], readonly: bool = False
) -> Window | None:
    """As views; what is called when the last tensor dies, the caller sets at the window. None: there are no bytes.

    The tensors keep the mapping through close(). `manifest` passed layout.check; `readonly` insists on a mapping that
    faults on writes. InvariantBroken: a slot outside of the arena. UnsupportedTensor: this torch has no such dtype.
    """
    begin, end = base + manifest.begin, base + manifest.end
    if begin < arena.data_begin or end > arena.end or readonly and not arena.readonly:
        raise InvariantBroken("a payload lies outside of the arena, or the mapping is writable", offset=begin, size=end)
    window = None
    for key, name, shape, offset, nbytes in manifest.slots:
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise _no_dtype(name, key)
        if nbytes == 0:
            # As integers: torch warns where it makes a complex32. The device, for those who set another default.
            into[key] = torch.empty(shape, dtype=_AS_BITS[dtype], device="cpu").view(dtype)
            continue
        if not manifest.begin <= offset <= manifest.end - nbytes:
            raise InvariantBroken("a slot lies outside of its payload", key=key, offset=offset, size=nbytes)
        if window is None:
            window = arena.segment.mapping.window()
        flat = torch.frombuffer(window, dtype=dtype, count=nbytes // dtype.itemsize, offset=base + offset)
        into[key] = flat if len(shape) == 1 else flat.view(*shape) if shape else flat.view(())
    return window


def owned(payload: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that belong to the caller and pin no block; bits, dtypes and shapes stay."""
    return {key: _clone(tensor) for key, tensor in payload.items()}


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    as_bits = _AS_BITS.get(tensor.dtype, tensor.dtype)
    if as_bits is tensor.dtype or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    return tensor.view(as_bits).clone().view(tensor.dtype)


def _plain(key: str | None, tensor: object) -> torch.Tensor:
    """A value of a payload as a plain tensor; key None: its caller knows it. InvalidPayload: it is no tensor.
    UnsupportedTensor: as `_stripped`."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidPayload(f"a payload's values are Tensors, not {type(tensor).__name__}", key=_told(key))
    return tensor if type(tensor) in _PLAIN else _stripped(key, tensor)


def _must_have_bytes(key: str | None, tensor: torch.Tensor) -> None:
    """UnsupportedTensor if its values do not lie in memory of its own, one behind the other."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise _unsupported(key, tensor, _NOT_CARRIED)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise _unsupported(key, tensor, "a tensor inside a functorch transform has no bytes of its own")


def _stripped(key: str | None, tensor: torch.Tensor) -> torch.Tensor:
    """A subclass's tensor as a plain one, so that no __torch_function__ of its runs here.

    UnsupportedTensor if the subclass dispatches itself (its bytes are not what it shows) or is lazy.
    """
    kind = type(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise _unsupported(key, tensor, f"a {kind.__name__} dispatches itself: hand over its plain tensors")
        if torch.nn.parameter.is_lazy(tensor):
            raise _unsupported(key, tensor, f"a {kind.__name__} has no values yet")
        return tensor.as_subclass(torch.Tensor)


def _unsupported(key: str | None, tensor: torch.Tensor, message: str) -> UnsupportedTensor:
    layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return UnsupportedTensor(
        message,
        key=None if key is None else _told(key),
        dtype=str(tensor.dtype).removeprefix("torch."),
        layout=layout,
        device=str(tensor.device),
    )


def _told(key: object) -> str:
    return key if isinstance(key, str) else repr(key)[:80]
