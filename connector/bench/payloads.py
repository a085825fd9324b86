"""Payloads of a workload, numbered, and the check of what arrived. torch stays in this file and the systems."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from connector.bench.workloads import Workload

Tensors = Mapping[str, torch.Tensor]
_WORD = (1 << 64) - 1
#: Numbers of payloads lie below: the rest of their word is known.
MOST = 1 << 24


class WrongBytes(Exception):
    """What arrived is not what was put."""


class Maker:
    """Makes the payloads of a workload, the same in both processes, and checks them."""

    def __init__(self, workload: Workload) -> None:
        chance = torch.Generator().manual_seed(7)
        self._plain: dict[str, torch.Tensor] = {}
        for key, (shape, dtype) in workload.shapes.items():
            made = torch.zeros(shape, dtype=getattr(torch, dtype))
            if made.is_floating_point() and made.numel() < 1 << 24:
                made = torch.randn(shape, generator=chance).to(made.dtype)
            self._plain[key] = made
        words(self._plain)[0] = 0
        self._sum = total(self._plain)
        #: A step's payloads each have memory of their own, which the next step's use again.
        self._kept = [self._plain, *(self._copy() for _ in range(workload.step - 1))]

    def numbered(self, number: int, fresh: bool, place: int = 0) -> dict[str, torch.Tensor]:
        """Payload `number`, of this place in its step. `fresh`: in memory that no other has, for a system that sends it
        later."""
        made = self._copy() if fresh else self._kept[place]
        words(made)[0] = number
        return made

    def _copy(self) -> dict[str, torch.Tensor]:
        return {key: tensor.clone() for key, tensor in self._plain.items()}

    def check(self, payload: Tensors) -> int:
        """The payload's number; WrongBytes if any byte differs. Of another number's payload the reader sees that it
        comes twice."""
        number = number_of(payload)
        if not 0 <= number < MOST:
            raise WrongBytes(f"no payload has the number {number}")
        if total(payload) != (self._sum + number) & _WORD:
            raise WrongBytes(f"payload {number} arrived with other bytes")
        return number


def number_of(payload: Tensors) -> int:
    return int(words(payload)[0])


def words(payload: Tensors) -> torch.Tensor:
    """The 64-bit words that carry the payload's number, in the first of them."""
    return payload["ids" if "ids" in payload else "x"].reshape(-1).view(torch.int64)


def total(payload: Tensors) -> int:
    """Sum of all 64-bit words, modulo 2**64: every byte is read."""
    return sum(int(tensor.reshape(-1).view(torch.int64).sum()) for tensor in payload.values()) & _WORD
