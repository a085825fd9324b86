"""Payloads for contracts, and how two of them are compared: to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from connector.arena import tensors

torch = tensors.torch


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's logical values, row-major, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 0:
        return b""
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def same(found: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> None:
    """Fails unless keys, their order, dtypes, shapes and bits agree."""
    assert list(found) == list(sent)
    for key, tensor in sent.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert bits(found[key]) == bits(tensor), key


def number(value: int, length: int = 4) -> dict[str, torch.Tensor]:
    """A small payload that says which it is."""
    return {"n": torch.full((length,), value, dtype=torch.int64)}


def values(payloads: Iterable[Mapping[str, torch.Tensor]]) -> list[int]:
    """What `number` was given, for each."""
    return [int(payload["n"][0]) for payload in payloads]
