"""A node that hears nothing, or says nothing, for a while: what is on its way then comes later, in its order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from connector import Node


@contextmanager
def deaf(node: Node) -> Iterator[None]:
    """What the broker says to the node meanwhile is heard afterwards."""
    session: Any = node.session
    hear, gate = session.receive, threading.Lock()
    held: list[Any] = []

    def hold(envelope: Any) -> None:
        with gate:
            held.append(envelope) if session.receive is hold else hear(envelope)

    session.receive = hold
    yield
    with gate:
        for envelope in held:
            hear(envelope)
        session.receive = hear


@contextmanager
def mute(node: Node) -> Iterator[None]:
    """What the node says meanwhile is sent afterwards."""
    session: Any = node.session
    collect = session.collect
    session.collect = list
    yield
    session.collect = collect
    session.wake()
