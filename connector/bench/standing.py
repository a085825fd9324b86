"""What standing still costs."""

from __future__ import annotations

import time

import connector
from connector.bench.clocks import cpu_of


def idle(seconds: float) -> tuple[float, float]:
    """Percent of a core that a broker, and each of two joined clients in this process, use while nothing happens."""
    with connector.connect(stage="bench-idle", embedded=True, pool="16MiB") as node:
        with connector.connect(stage="bench-idle", endpoint=node.endpoint) as other:
            node.edge("bench-idle", "bench-other").put("warm", {})
            other.edge("bench-idle", "bench-other").take("warm")
            node.flush()
            time.sleep(0.2)
            pid = int(node.status()["pid"])
            broker, own = cpu_of(pid), time.process_time()
            time.sleep(seconds)
            return (cpu_of(pid) - broker) / seconds * 100, (time.process_time() - own) / seconds * 50
