"""The table of dtypes against the torch that is installed."""

from __future__ import annotations

import pytest
import torch

from connector.core.specs import DTYPE_BITS, REFUSED_DTYPES, TensorSpec

# Names of one dtype (float, float32) give one entry; torch's own name is in its text.
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
CARRIED = sorted(DTYPES.keys() & DTYPE_BITS.keys())


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_of_torch_is_carried_with_its_size_or_refused(name: str) -> None:
    assert (name in DTYPE_BITS) != (name in REFUSED_DTYPES)
    if name in DTYPE_BITS:
        assert DTYPE_BITS[name] == 8 * DTYPES[name].itemsize


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", CARRIED)
def test_a_carried_dtype_is_made_by_empty_and_moved_as_bytes(name: str) -> None:
    nbytes = TensorSpec("h", name, (2, 3)).nbytes
    made = torch.empty(2, 3, dtype=DTYPES[name])
    assert made.view(torch.uint8).numel() == made.untyped_storage().nbytes() == nbytes
    pattern = (torch.arange(nbytes) * 37 % 256).to(torch.uint8)
    made.view(torch.uint8).view(-1).copy_(pattern)
    again = pattern.clone().view(DTYPES[name]).view(2, 3)
    assert again.dtype == made.dtype
    assert torch.equal(again.view(torch.uint8), made.view(torch.uint8))
