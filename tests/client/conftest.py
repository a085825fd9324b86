"""One broker for all tests of a module, and the clients that the contract is run with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import connector

# Before they are imported, so that their bare asserts tell what they compared.
pytest.register_assert_rewrite("connector.testing.contracts")

from connector.testing.contracts.facade import AwaitedNode, LoopThread, NodeFace  # noqa: E402
from tests.client.told import hosting  # noqa: E402


@pytest.fixture(scope="module")
def host() -> Iterator[connector.Node]:
    """A node whose private broker serves the module."""
    with connector.connect(stage="host", embedded=True, pool="8MiB") as node:
        yield node


@pytest.fixture(scope="module")
def told_host() -> Iterator[connector.Node]:
    """Its broker lets writers tell, whatever the environment says."""
    with hosting(True) as node:
        yield node


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def open_blocking(host: connector.Node) -> Callable[..., NodeFace]:
    def open_node(stage: str, readonly: bool = False) -> NodeFace:
        return connector.connect(stage=stage, endpoint=host.endpoint, readonly=readonly)

    return open_node


@pytest.fixture
def open_asyncio(host: connector.Node, loop: LoopThread) -> Callable[..., NodeFace]:
    def open_node(stage: str, readonly: bool = False) -> NodeFace:
        made = loop.call(connector.connect_async(stage=stage, endpoint=host.endpoint, readonly=readonly))
        return AwaitedNode(made, loop)

    return open_node
