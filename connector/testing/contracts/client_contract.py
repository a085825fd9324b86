"""The contract of every client, written once. Subclass `ClientContract` and give it a fixture `bench`:

    class TestMyClient(ClientContract):
        @pytest.fixture
        def bench(self) -> Iterator[Bench]:
            bench = Bench(lambda stage: my_connect(stage, endpoint))
            yield bench
            bench.close()

The broker's pool should be small (8 MiB): some tests fill it.
"""

from __future__ import annotations

from connector.testing.contracts.client_aborts import AbortContract
from connector.testing.contracts.client_lives import LifeContract
from connector.testing.contracts.client_puts import PutContract
from connector.testing.contracts.client_reads import ReadContract


class ClientContract(PutContract, ReadContract, LifeContract, AbortContract):
    """All of it."""
