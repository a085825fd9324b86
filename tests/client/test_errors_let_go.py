"""An error refers to the frames that it went through, and they to the caller's payloads: when it is dropped they go, at
once, without the collector."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import connector
from connector import errors
from connector.core.names import Edge

#: What fails -> how, with what.
FAILING: dict[str, tuple[Callable[[Any, Any], Any], type[errors.ConnectorError]]] = {
    "a take of nothing": (lambda node, edge: edge.take("none", timeout=0.0), errors.UnknownRequest),
    "a take behind END": (lambda node, edge: edge.take("ended", timeout=0.0), errors.Gone),
    "a take of what was aborted": (lambda node, edge: edge.take("aborted", timeout=0.0), errors.RequestAborted),
    "a put to what was aborted": (lambda node, edge: edge.put("aborted", {}), errors.RequestAborted),
    "a put without room": (lambda node, edge: edge.put("r", {"x": BIG}, timeout=0.0), errors.PoolFull),
    "a put that never fits": (lambda node, edge: edge.put("r", {"x": HUGE}), errors.PayloadTooLarge),
    "a put of what is no tensor": (lambda node, edge: edge.put("r", {"x": 1}), errors.InvalidPayload),
    "a question": (lambda node, edge: node.status("what"), errors.UsageError),
}
BIG, HUGE = torch.zeros(5 << 20, dtype=torch.uint8), torch.zeros(9 << 20, dtype=torch.uint8)


@pytest.fixture
def there(host: connector.Node) -> Iterator[None]:
    """What the failures are of, and nobody collects."""
    with connector.connect(stage="other", endpoint=host.endpoint) as other:
        edge = other.edge("a", "b")
        edge.end("ended")
        edge.put("fills", {"x": BIG})
        other.flush()
        gc.collect()
        gc.disable()
        yield
        gc.enable()
        for rid in ("ended", "fills", "aborted"):
            other.abort(rid)


@pytest.mark.parametrize("what", FAILING)
def test_in_a_thread(host: connector.Node, there: None, what: str) -> None:
    act, error = FAILING[what]

    def caller(node: connector.Node, edge: connector.Edge) -> weakref.ref[object]:
        payload = torch.zeros(4)
        try:
            act(node, edge)
        except errors.ConnectorError as failed:
            assert type(failed) is error
        return weakref.ref(payload)

    with connector.connect(stage="b", endpoint=host.endpoint) as node:
        node.abort("aborted")
        assert caller(node, node.edge("a", "b"))() is None


@pytest.mark.parametrize("what", FAILING)
def test_in_an_event_loop(host: connector.Node, there: None, what: str) -> None:
    act, error = FAILING[what]

    async def caller(node: connector.AsyncNode, edge: connector.AsyncEdge) -> weakref.ref[object]:
        payload = torch.zeros(4)
        try:
            await act(node, edge)
        except errors.ConnectorError as failed:
            assert type(failed) is error
        return weakref.ref(payload)

    async def run() -> bool:
        async with await connector.connect_async(stage="b", endpoint=host.endpoint) as node:
            await node.abort("aborted")
            return (await caller(node, node.edge("a", "b")))() is None

    assert asyncio.run(run())


def test_looking_at_what_is_not_there(host: connector.Node, there: None) -> None:
    def caller() -> weakref.ref[object]:
        payload = torch.zeros(4)
        with pytest.raises(errors.UnknownRequest):
            host.inspect(Edge("a", "b", 0), "none")
        return weakref.ref(payload)

    assert caller()() is None


def test_a_closed_node_goes_with_its_last_reference(host: connector.Node) -> None:
    """Its wakers, and whatever else it has open, do not wait for the collector."""
    node = connector.connect(stage="b", endpoint=host.endpoint)
    edge = node.edge("a", "b")
    edge.put("r", {})
    edge.poll()
    node.abort("r")
    session = weakref.ref(node.session)
    (thread,) = (one for one in threading.enumerate() if one.name == "connector-b")
    gc.collect()
    gc.disable()
    try:
        node.close()
        thread.join()
        del node, edge, thread
        assert session() is None
    finally:
        gc.enable()
