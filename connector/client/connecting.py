"""`connect`: from an endpoint, or an embedded broker, to a node."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from connector.client.embedded import EmbeddedBroker
from connector.client.link import Link
from connector.client.node import Node, open_link
from connector.client.options import Options, options
from connector.client.resolve import resolve
from connector.core.errors import ConnectorError, UsageError

if TYPE_CHECKING:
    from connector.client.aio import AsyncNode

#: Seconds to wait for a broker that is not there yet.
CONNECT_TIMEOUT = 5.0


def _link(
    stage: str, endpoint: str | None, embedded: bool, timeout: float, wanted: Options, broker: dict[str, Any]
) -> tuple[Link, EmbeddedBroker | None]:
    if broker and not embedded:
        raise TypeError(f"broker settings need embedded=True: {', '.join(sorted(broker))}")
    if wanted.page_lock:
        _check_cuda(stage)
    if not embedded:
        run_dir, source = resolve(endpoint)
        return open_link(stage, run_dir, source, timeout, wanted), None
    private = EmbeddedBroker(broker)
    try:
        return open_link(stage, private.run_dir, "embedded", timeout, wanted, private.ended), private
    except ConnectorError:
        private.end(0.0)
        raise


def _check_cuda(stage: str) -> None:
    from connector.arena import cuda

    if not cuda.CALLS.is_available():
        raise UsageError("page_lock needs a CUDA device, and torch finds none", stage=stage)


def connect(
    *,
    stage: str,
    endpoint: str | None = None,
    embedded: bool = False,
    timeout: float = CONNECT_TIMEOUT,
    readonly: bool | None = None,
    page_lock: bool | None = None,
    spin: float | None = None,
    **broker: Any,
) -> Node:
    """Join the broker of this node as `stage`.

    The broker is found by `endpoint` (its run directory), else $CONNECTOR_ENDPOINT, else the configuration
    file, else the default. `embedded`: start a private broker that ends with this process; further keywords
    are then its settings (`pool="256MiB"`). `readonly`: map takes without write access (a debugging aid; default
    from $CONNECTOR_READONLY_TAKES). `page_lock`: page-lock the pool's pages in this process, for copies from and to a
    GPU (docs/gpu.md; default from $CONNECTOR_PAGE_LOCK). `spin`: seconds, 1 at most, that a wait keeps its processor
    before it sleeps (docs/tuning.md; default from $CONNECTOR_SPIN, else 0). Raises BrokerLost with the path tried,
    ConfigError, NoSpace (embedded), UsageError (page_lock without CUDA, no such spin).
    """
    link, private = _link(stage, endpoint, embedded, timeout, options(readonly, page_lock, spin), broker)
    return Node(link, private)


async def connect_async(
    *,
    stage: str,
    endpoint: str | None = None,
    embedded: bool = False,
    timeout: float = CONNECT_TIMEOUT,
    readonly: bool | None = None,
    page_lock: bool | None = None,
    spin: float | None = None,
    **broker: Any,
) -> AsyncNode:
    """As connect, for asyncio."""
    from connector.client.aio import AsyncNode

    loop = asyncio.get_running_loop()
    join = partial(_link, stage, endpoint, embedded, timeout, options(readonly, page_lock, spin), broker)
    link, private = await loop.run_in_executor(None, join)
    return AsyncNode(link, private)
