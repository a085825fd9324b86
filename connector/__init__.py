"""Hand tensors from one stage of a multi-stage model to the next, through shared memory.

    import connector

    node = connector.connect(stage="thinker")
    node.edge("thinker", "talker").put("request-1", {"hidden": hidden})

Names are loaded on first use: importing a part of the package pulls in neither torch nor zmq.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connector.client.aio import AsyncEdge, AsyncNode
    from connector.client.connecting import connect, connect_async
    from connector.client.edge import Edge
    from connector.client.node import Node
    from connector.client.outgoing import Ticket
    from connector.client.payload import Payload
    from connector.client.reading import Polled
    from connector.core.errors import ConnectorError

_HOMES = {
    "AsyncEdge": "connector.client.aio",
    "AsyncNode": "connector.client.aio",
    "ConnectorError": "connector.core.errors",
    "Edge": "connector.client.edge",
    "Node": "connector.client.node",
    "Payload": "connector.client.payload",
    "Polled": "connector.client.reading",
    "Ticket": "connector.client.outgoing",
    "connect": "connector.client.connecting",
    "connect_async": "connector.client.connecting",
}

__all__ = [
    "AsyncEdge",
    "AsyncNode",
    "ConnectorError",
    "Edge",
    "Node",
    "Payload",
    "Polled",
    "Ticket",
    "connect",
    "connect_async",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("connector.core.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'connector' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
