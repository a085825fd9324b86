"""A stream that its writer tells its reader of directly, for tests of what goes a shorter way then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import connector


def hosting(direct: bool) -> connector.Node:
    """A node whose private broker lets writers tell, or does not, whatever the environment says."""
    return connector.connect(stage="host", embedded=True, pool="8MiB", log_level="error", direct=direct)


def chunk(value: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(value, value + 8), "y": torch.full((1, 4), float(value))}


class Stream:
    """Its two ends, and how many chunks were sent."""

    def __init__(self, host: connector.Node, **options: Any) -> None:
        """`options`: the reader's."""
        self.writer = connector.connect(stage="a", endpoint=host.endpoint)
        self.reader = connector.connect(stage="b", endpoint=host.endpoint, **options)
        self.out, self.into = self.writer.edge("a", "b"), self.reader.edge("a", "b")
        self.sent = 0

    def next(self, **how: Any) -> connector.Payload:
        """The one payload that comes next."""
        while not (found := self.into.poll(**how)):
            assert self.into.wait(30.0)
        if found.failed:
            raise found.failed["r"]
        ((payload,),) = found.values()
        return payload

    def is_next(self, found: connector.Payload, payload: dict[str, torch.Tensor]) -> None:
        """It is the chunk that was sent just now."""
        assert found.index == self.sent
        assert not found.last
        assert list(found) == list(payload)
        for key, tensor in payload.items():
            assert found[key].dtype == tensor.dtype
            assert torch.equal(found[key], tensor.detach())
        self.sent += 1


@contextmanager
def both_ends(stream: Stream, host: connector.Node) -> Iterator[None]:
    """Close them; nothing is left at the broker, which has seen nothing wrong."""
    with stream.writer, stream.reader:
        yield
    left = host.status()
    assert [left[name] for name in ("payloads", "reserved_bytes", "violations")] == [0, 0, 0]
