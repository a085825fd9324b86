"""Start a broker and serve: the body of `connector serve` and of an embedded broker."""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType

from connector.broker import logs
from connector.broker.config_schema import BrokerConfig
from connector.broker.loop import Broker


def run(config: BrokerConfig, *, owner: int = 0, ready: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, or until the process `owner` has ended (0: nobody's).

    Raises BrokerRunning, NoSpace, BrokerLost or ConfigError if it cannot start; nothing is left then.
    """
    logs.set_up(config.log_level, config.log_format)
    _raise_descriptor_limit(config.max_sessions)
    # Until the loop has its own handlers: what was made of the pool so far is removed.
    signal.signal(signal.SIGTERM, _give_up)
    signal.signal(signal.SIGINT, _give_up)
    broker = Broker(config)
    broker.install_signals()
    if owner:
        _end_with(owner, broker)
    broker.serve(ready)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _raise_descriptor_limit(sessions: int) -> None:
    """As many descriptors as the sessions may need, if the hard limit allows (lifeline, pidfd, pipe)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = 4 * sessions + 256
    if hard != resource.RLIM_INFINITY:
        want = min(want, hard)
    if soft != resource.RLIM_INFINITY and soft < want:
        resource.setrlimit(resource.RLIMIT_NOFILE, (want, hard))


def _end_with(owner: int, broker: Broker) -> None:
    """Stop the broker when its owner's process ends, by whatever death."""
    try:
        pidfd = os.pidfd_open(owner)
    except ProcessLookupError:
        broker.stop()
        return
    if os.getppid() != owner:
        # The owner died before its pidfd was opened: the pid may be someone else's by now.
        os.close(pidfd)
        broker.stop()
        return

    def wait() -> None:
        select.select([pidfd], [], [])
        broker.stop()
        broker.wake()

    threading.Thread(target=wait, name="connector-owner", daemon=True).start()
