"""One host and one broker for all kills, and a bystander stream that no kill may disturb."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

import connector
from connector import Node
from tests.kill.brokers import assert_settled
from tests.kill.host import Host, Worker


class Bystander:
    """A writer and a reader that stream on while others die."""

    EDGE = ("calm", "sea")

    def __init__(self, host: Host, endpoint: str) -> None:
        self.writer = host.start("paced_writer", endpoint=endpoint, edge=self.EDGE, rid="bystander")
        self.reader = host.start("paced_reader", endpoint=endpoint, edge=self.EDGE, rid="bystander")
        self.count = 0

    @property
    def workers(self) -> tuple[Worker, Worker]:
        return self.writer, self.reader

    def go(self, count: int = 40) -> None:
        """Stream so many more chunks, from now."""
        self.count += count
        for worker in self.workers:
            worker.tell("go", count=count)

    def check(self) -> None:
        """All of them went, in order, every bit right (the reader looks)."""
        assert self.writer.expect("put")["count"] == self.count
        assert self.reader.expect("took")["count"] == self.count


class Scene(NamedTuple):
    node: Node
    host: Host
    bystander: Bystander

    @property
    def sessions(self) -> int:
        """Those of a quiet moment: the test's own and the bystanders'."""
        return 3


@pytest.fixture(scope="module")
def house() -> Iterator[Scene]:
    with connector.connect(stage="test", embedded=True, pool="8MiB", log_level="error") as node, Host() as host:
        yield Scene(node, host, Bystander(host, node.endpoint))


@pytest.fixture
def scene(house: Scene) -> Iterator[Scene]:
    """The house with a bystander under way; afterwards nothing of the test's workers may be left."""
    house.bystander.go()
    yield house
    house.host.end_workers(but=house.bystander.workers)
    house.bystander.check()
    assert_settled(house.node, house.sessions)
