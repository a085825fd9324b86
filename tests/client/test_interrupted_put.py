"""A signal's handler raises anywhere in a put: the chunk is put, or it never was; its stream goes on either way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import connector
from connector.arena import blocks as arena_blocks
from connector.client import again, blocks, outgoing, sealing, telling, writing
from connector.wire import alike
from tests.client.interrupting import LOOKS, interrupted
from tests.client.told import hosting

PUTTING = {module.__file__ for module in (again, alike, arena_blocks, blocks, outgoing, sealing, telling, writing)}


def chunk(value: int, length: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.full((length,), value), "y": torch.zeros(1, 4)}


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "broker"])
def putting_host(request: Any) -> Iterator[connector.Node]:
    with hosting(request.param) as node:
        yield node


@pytest.mark.parametrize(
    "length", [lambda value: 8, lambda value: 8 + value % 2, lambda value: 1 << 14], ids=["alike", "other", "large"]
)
def test_a_put_that_is_interrupted_anywhere(putting_host: connector.Node, length: Callable[[int], int]) -> None:
    """What is read is what was put, each once and in order; of those interrupted, some."""
    with (
        connector.connect(stage="a", endpoint=putting_host.endpoint) as writer,
        connector.connect(stage="b", endpoint=putting_host.endpoint) as reader,
    ):
        out, into = writer.edge("a", "b"), reader.edge("a", "b")
        into.poll()
        value, index = 0, 0

        def put() -> None:
            out.put("r", chunk(value, length(value)), last=False)

        def read() -> list[int]:
            """What has come, up to the last that was put."""
            nonlocal index
            came: list[int] = []
            while value not in came:
                assert into.wait(10.0)
                found = into.poll()
                assert not found.failed
                for payload in found.get("r", ()):
                    assert payload.index == index
                    came.append(int(payload["x"][0]))
                    assert bool((payload["x"] == came[-1]).all())
                    index += 1
            return came

        for _ in range(40):
            put()
            assert read() == [value]
            value += 1
        at, on_its_way = 0, True
        while on_its_way:
            on_its_way = interrupted(put, at, PUTTING, behind=LOOKS)
            whole = [value]
            if on_its_way:
                value += 1
                put()
            assert read() in ([value], [*whole, value])
            value += 1
            at += 1
        assert at > 30
        out.end("r")
        assert into.wait(30.0)
        assert into.poll().ended == {"r"}
        writer.flush()
    left = putting_host.status()
    assert [left[name] for name in ("payloads", "reserved_bytes", "puts_refused", "violations")] == [0, 0, 0, 0]
