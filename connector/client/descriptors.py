"""Are there file descriptors to connect with? Asked first: ZeroMQ ends the whole process when it gets none."""

from __future__ import annotations

import errno
import os
import resource

from connector.core.errors import BrokerLost

#: A link's own: wake-up, lifeline, lock, segments while they are mapped, and those of ZeroMQ's threads.
NEED = 24


def check_descriptors(path: str) -> None:
    """BrokerLost with the limit unless NEED descriptors can be opened. `path`: where a broker is looked for."""
    taken: list[int] = []
    try:
        taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        taken += [os.dup(taken[0]) for _ in range(NEED - 1)]
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise BrokerLost(
            "no file descriptors are left to connect with: raise `ulimit -n`",
            path=path,
            need=NEED,
            limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ) from error
    finally:
        for fd in taken:
            os.close(fd)
