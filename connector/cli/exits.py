"""What the command's exit code says. The same table stands in `connector --help` and in docs/cli.md."""

from __future__ import annotations

from connector.core.errors import (
    BrokerLost,
    ConfigError,
    ConnectorError,
    InvariantBroken,
    ProtocolViolation,
    UsageError,
)

OK, NO, USAGE, AWAY, BUG, INTERRUPTED, CLOSED = 0, 1, 2, 3, 70, 130, 141

MEANINGS = {
    OK: "done; for `serve`: stopped cleanly by SIGTERM or SIGINT",
    NO: "the answer is no: nothing found, refused, not confirmed, configuration invalid, benchmark void",
    USAGE: "the command line is wrong",
    AWAY: "the broker is away, does not answer in time, or cannot start",
    BUG: "a bug of this project",
    INTERRUPTED: "ended by Ctrl-C",
    CLOSED: "whoever read the output closed it",
}


def code_of(error: ConnectorError) -> int:
    """The exit code that an error ends the command with."""
    if isinstance(error, ConfigError):
        return NO
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, (BrokerLost, ProtocolViolation)):
        return AWAY
    return BUG if isinstance(error, InvariantBroken) else NO
