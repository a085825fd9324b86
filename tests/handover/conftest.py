"""A broker for a module's tests, and two stages at it. A module says its `BROKER` settings, and its `RIDS`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.handover.links import Link, broker, link
from tests.handover.middle import Middle


@pytest.fixture(scope="module")
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    with broker(**getattr(request.module, "BROKER", {})) as found:
        yield found


@pytest.fixture
def pair(request: pytest.FixtureRequest, endpoint: str) -> Iterator[Link]:
    with link(endpoint, getattr(request.module, "RIDS", ())) as made:
        yield made


@pytest.fixture
def middle(pair: Link) -> Middle:
    return Middle(pair)
