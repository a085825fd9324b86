"""Two stages over a real broker: one node that puts, one that reads, and words about what is on its way."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import connector
from connector import Edge, Node, errors
from runner_adapter.config import TransferConfig
from runner_adapter.inbox import Inbox
from runner_adapter.outbox import Outbox

FROM, TO = "thinker", "talker"
IDS, AUDIO, LAYER_0, LAYER_24 = (
    "ids.thinker_input_ids",
    "codes.audio",
    "hidden_states.layers[0]",
    "hidden_states.layers[24]",
)
#: The RFC's config, and an id type with a dot.
CONFIG = TransferConfig.from_mapping(
    {
        "enabled": True,
        "items": ["hidden_states", "ids"],
        "key_templates": {"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"},
        "hidden_state_layers": [0, 24],
        "id_types": ["thinker_input_ids", "codes.audio"],
    }
)


def ids(*numbers: int) -> dict[str, torch.Tensor]:
    """A payload as a stage has it: by name."""
    return {IDS: torch.tensor(numbers)}


def keyed(rid: str, *numbers: int) -> dict[str, torch.Tensor]:
    """The same as it is put: by key."""
    return {f"{rid}-thinker_input_ids": torch.tensor(numbers)}


def read(payloads: Mapping[str, Iterable[Mapping[str, torch.Tensor]]]) -> dict[str, list[list[int]]]:
    """By rid, the numbers of each payload of `ids` or `keyed`. What is of another rid, or holds more, is no such."""
    found: dict[str, list[list[int]]] = {}
    for rid, several in payloads.items():
        assert all(list(payload) in ([f"{rid}-thinker_input_ids"], []) for payload in several), (rid, several)
        found[rid] = [next((t.tolist() for t in payload.values()), []) for payload in several]
    return found


class Link:
    """Nodes of two stages at one broker, and edges between them."""

    def __init__(self, endpoint: str) -> None:
        self._stack = ExitStack()
        self.endpoint = endpoint
        self.sender = self.node(FROM)
        self.reader = self.node(TO)

    def node(self, stage: str) -> Node:
        return self._stack.enter_context(connector.connect(stage=stage, endpoint=self.endpoint))

    def out(self, **options: Any) -> Edge:
        """The edge as the sender's node has it."""
        return self.sender.edge(FROM, TO, **options)

    def outbox(self, config: TransferConfig = CONFIG, edge: Any = None, **options: Any) -> Outbox:
        made = Outbox(self.sender, edge or self.out(), config, **options)
        self._stack.callback(made.close)
        return made

    def inbox(self, **options: Any) -> Inbox:
        return Inbox(self.reader, self.reader.edge(FROM, TO), **options)

    def settle(self) -> None:
        """What was put or said until now has come to both: a node's messages, and the broker's to it, keep order."""
        for node in (self.sender, self.reader, self.sender, self.reader):
            node.status()

    def close(self) -> None:
        self._stack.close()


@contextmanager
def broker(**settings: Any) -> Iterator[str]:
    """The endpoint of a broker of its own."""
    with connector.connect(stage="host", embedded=True, pool="8MiB", log_level="error", **settings) as node:
        yield node.endpoint


@contextmanager
def link(endpoint: str, rids: Iterable[str] = ()) -> Iterator[Link]:
    """`rids` are aborted afterwards: the next test's requests are called the same."""
    made = Link(endpoint)
    try:
        yield made
        gc.collect()
        for rid in rids:
            made.reader.abort(rid)
    finally:
        made.close()


class Calls:
    """An edge that notes its verbs, and does what `instead` says for a rid."""

    def __init__(self, edge: Edge, **instead: Any) -> None:
        self.edge = edge
        self.instead = instead
        self.puts: list[list[str]] = []

    def put_many(self, payloads: Any, **options: Any) -> Any:
        self.puts.append(sorted(payloads))
        for rid in payloads:
            if rid in self.instead:
                self.instead[rid]()
        return self.edge.put_many(payloads, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.edge, name)


def with_calls(
    pair: Link, config: TransferConfig = CONFIG, instead: dict[str, Any] | None = None, **options: Any
) -> tuple[Outbox, Calls]:
    """An outbox, and what it does with its edge."""
    calls = Calls(pair.out(), **(instead or {}))
    return pair.outbox(config, edge=calls, **options), calls


def received(pair: Link, rid: str) -> list[dict[str, Any]]:
    """The rid's whole stream, as lists."""
    found = list(pair.reader.edge(FROM, TO).stream(rid, timeout=10.0))
    return [{key: tensor.tolist() for key, tensor in payload.items()} for payload in found]


def raising(error: errors.ConnectorError) -> Any:
    def do() -> None:
        raise error.anew()

    return do


class Poison:
    """Whoever looks at it fails."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"touched: {name}")


class Gate:
    """The puts of a rid stop here until it opens."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(60.0)
