"""Strategies that several tests of the core share."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from connector.core.specs import DTYPE_BITS, TensorSpec

Members = list[list[TensorSpec]]


@pytest.fixture(scope="session")
def members() -> st.SearchStrategy[Members]:
    """Payloads of one block: empty ones, empty tensors, scalars, every dtype, keys unique in a payload."""
    spec = st.builds(
        TensorSpec,
        key=st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        dtype=st.sampled_from(sorted(DTYPE_BITS)),
        shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    )
    return st.lists(st.lists(spec, max_size=5, unique_by=lambda s: s.key), max_size=4)
