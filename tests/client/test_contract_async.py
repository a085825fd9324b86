"""The asyncio client keeps the contract, with writable and with read-only takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from connector.testing.contracts.client_contract import ClientContract
from connector.testing.contracts.facade import Bench, NodeFace


class TestAsyncio(ClientContract):
    """`connector.connect_async`."""

    @pytest.fixture
    def bench(self, open_asyncio: Callable[..., NodeFace]) -> Iterator[Bench]:
        bench = Bench(open_asyncio)
        yield bench
        bench.close()


class TestAsyncioReadonly(ClientContract):
    """`connector.connect_async(readonly=True)`."""

    @pytest.fixture
    def bench(self, open_asyncio: Callable[..., NodeFace]) -> Iterator[Bench]:
        bench = Bench(lambda stage: open_asyncio(stage, readonly=True))
        yield bench
        bench.close()
