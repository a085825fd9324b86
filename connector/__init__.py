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
    from connector.config.reader import parse as parse_yaml
    from connector.config.source import Source as ConfigSource
    from connector.config.source import conflicts as config_conflicts
    from connector.config.source import read as read_config
    from connector.config.source import validate as check_config
    from connector.core.errors import ConnectorError
    from connector.core.keys import KeyTemplate, TemplateSet
    from connector.core.names import check_rid

#: Name -> its module, and its name there where it is another.
_HOMES = {
    "AsyncEdge": "connector.client.aio",
    "AsyncNode": "connector.client.aio",
    "ConfigSource": "connector.config.source:Source",
    "ConnectorError": "connector.core.errors",
    "Edge": "connector.client.edge",
    "KeyTemplate": "connector.core.keys",
    "Node": "connector.client.node",
    "Payload": "connector.client.payload",
    "Polled": "connector.client.reading",
    "TemplateSet": "connector.core.keys",
    "Ticket": "connector.client.outgoing",
    "check_config": "connector.config.source:validate",
    "check_rid": "connector.core.names",
    "config_conflicts": "connector.config.source:conflicts",
    "connect": "connector.client.connecting",
    "connect_async": "connector.client.connecting",
    "parse_yaml": "connector.config.reader:parse",
    "read_config": "connector.config.source:read",
}

__all__ = [
    "AsyncEdge",
    "AsyncNode",
    "ConfigSource",
    "ConnectorError",
    "Edge",
    "KeyTemplate",
    "Node",
    "Payload",
    "Polled",
    "TemplateSet",
    "Ticket",
    "check_config",
    "check_rid",
    "config_conflicts",
    "connect",
    "connect_async",
    "errors",
    "parse_yaml",
    "read_config",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("connector.core.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'connector' has no attribute {name!r}")
    module, _, there = home.partition(":")
    return getattr(importlib.import_module(module), there or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
