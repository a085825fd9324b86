"""How a node behaves in its process: by argument, else by environment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import connector
from connector import errors
from connector.client.options import Options, options


@pytest.mark.parametrize(
    ("given", "env", "meant"),
    [
        ((None, None, None), {}, Options()),
        ((True, True, 0.5), {}, Options(True, True, 0.5)),
        (
            (None, None, None),
            {"CONNECTOR_READONLY_TAKES": "1", "CONNECTOR_PAGE_LOCK": "1", "CONNECTOR_SPIN": "0.0002"},
            Options(True, True, 0.0002),
        ),
        (
            (False, False, 0),
            {"CONNECTOR_READONLY_TAKES": "1", "CONNECTOR_PAGE_LOCK": "1", "CONNECTOR_SPIN": "0.1"},
            Options(),
        ),
        ((None, None, None), {"CONNECTOR_SPIN": ""}, Options()),
    ],
)
def test_an_argument_comes_before_the_environment(given: Any, env: dict[str, str], meant: Options) -> None:
    assert options(*given, env) == meant


@pytest.mark.parametrize("spin", [-0.1, 1.1, True, "soon", float("nan"), [1]])
def test_what_is_no_spin_is_refused(spin: Any) -> None:
    with pytest.raises(errors.UsageError, match="spin") as caught:
        connector.connect(stage="a", endpoint="/nowhere", spin=spin)
    assert caught.value.facts["limit"] == 1.0
    if isinstance(spin, str):
        with pytest.raises(errors.UsageError, match="CONNECTOR_SPIN"):
            options(None, None, None, {"CONNECTOR_SPIN": spin})


def test_who_spins_gets_what_comes_and_sleeps_when_nothing_does(host: connector.Node) -> None:
    with (
        connector.connect(stage="a", endpoint=host.endpoint) as writer,
        connector.connect(stage="b", endpoint=host.endpoint, spin=0.05) as reader,
    ):
        out, into = writer.edge("a", "b"), reader.edge("a", "b")
        assert not into.wait(0.0)
        # Longer than it spins.
        assert not into.wait(0.1)
        for at in range(20):
            out.put("r", {"x": torch.tensor([at])}, last=at == 19)
        assert [int(payload["x"]) for payload in into.stream("r")] == list(range(20))
        with pytest.raises(errors.Unavailable):
            into.take("s", timeout=0.0)


def test_who_spins_is_told_of_what_another_thread_hears(host: connector.Node) -> None:
    """It looks at all of its descriptors, the one by which it is called among them."""
    with connector.connect(stage="b", endpoint=host.endpoint, spin=1.0) as reader:
        edge = reader.edge("c", "b")
        edge.poll()
        assert not edge.wait(0.01)
        assert reader.status()["sessions"] == 2
