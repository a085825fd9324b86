"""The only error tree of the project. Standard library only.

Every error says whose fault it is by its branch, and carries the facts that name the
thing: rid, edge, key, sizes, limits. A facts mapping crosses the wire beside the
error's code, so that the reader of a message sees what the broker saw.

    ConnectorError
    ├── UsageError          you: the call or the configuration is wrong
    ├── Refused             the broker (or the client on its behalf) said no
    ├── Unavailable         nothing to take; a deadline passed
    ├── PeerFailed          the other end of the hand-over failed
    ├── BrokerLost          the world: broker away, stopping, no room on the node
    ├── ProtocolViolation   the peer sent what no correct peer sends
    └── InvariantBroken     us: a bug in this project; nothing was done
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fact = str | int | float | bool | None | list[str]


class ConnectorError(Exception):
    """Base of all. `facts` holds rid, edge, key, size, limit and the like, by name."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        #: What was said, without the facts.
        self.message = message
        #: Facts by name; None values are dropped.
        self.facts: dict[str, Any] = {k: v for k, v in facts.items() if v is not None}

    def __str__(self) -> str:
        if not self.facts:
            return self.message
        told = " ".join(f"{k}={v!r}" if isinstance(v, str) else f"{k}={v}" for k, v in self.facts.items())
        return f"{self.message} [{told}]"

    def anew(self, **more: Any) -> ConnectorError:
        """The same error as a fresh object, with further facts: one that is kept must not collect tracebacks."""
        return type(self)(self.message, **{**self.facts, **more})

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.facts))


class UsageError(ConnectorError):
    """You: the call cannot be right, whatever the broker's state."""


class InvalidPayload(UsageError):
    """A payload is not `dict[str, Tensor]`, or a key, rid or index is out of its range."""


class UnsupportedTensor(UsageError):
    """A tensor of a dtype, layout or device that is not carried; names key and dtype."""


class ConfigError(UsageError):
    """A configuration is refused; the message holds file, line and the nearest valid name."""


class ForkedClient(UsageError):
    """A client object is used in a child made by fork; connect again there."""


class ClientClosed(UsageError):
    """The node was closed; connect again."""


class Refused(ConnectorError):
    """The broker's answer to a request that was well formed."""


class PayloadTooLarge(Refused):
    """The payload can never fit: size and limit are given."""


class PoolFull(Refused, TimeoutError):
    """No room came before the deadline; says who holds what."""


class PoolDeadlock(Refused):
    """Those who could make room wait for room themselves; this, the youngest, was refused."""


class AlreadyPut(Refused):
    """This index of the stream holds another payload already."""


class ReadersMismatch(Refused):
    """The stream was opened for another number of readers."""


class ReaderTaken(Refused):
    """Another live session is this reader of the edge."""


class StreamEnded(Refused):
    """A chunk at or behind the stream's END."""


class RequestAborted(Refused):
    """The rid was aborted; `reason` says why. finish(rid) or begin(rid) opens it again."""


class Unavailable(ConnectorError, TimeoutError):
    """Nothing to take."""


class NotYet(Unavailable):
    """The life is open, but the next chunk did not come before the deadline."""


class UnknownRequest(Unavailable):
    """No life of this rid is known; `near` names rids that are."""


class Gone(Unavailable):
    """The stream ended, or all of it was taken."""


class PeerFailed(ConnectorError):
    """The other end failed; what it had not handed over will not come."""


class WriterDied(PeerFailed):
    """The writer's process died, or left, before its stream's END."""


class ReaderDied(PeerFailed):
    """A reader that had released a part of the stream died."""


class StreamGap(PeerFailed):
    """The writer ended the stream, but a chunk in the middle never came."""


class StreamPoisoned(PeerFailed):
    """An earlier put on this stream failed; `cause` holds that error's code and message."""


class Unclaimed(PeerFailed):
    """No reader came for the payload before the edge's `unclaimed_after`."""


class Broken(PeerFailed):
    """The payload's header or manifest failed its check."""


class BrokerLost(ConnectorError):
    """The broker is away, or does not answer; names the path tried."""


class BrokerStopping(BrokerLost):
    """The broker is stopping; what waited was ended."""


class BrokerRunning(BrokerLost):
    """Another broker serves this run directory."""


class NoSpace(BrokerLost):
    """The node has not the memory: free tmpfs, cgroup limit and need are given."""


class ProtocolViolation(ConnectorError):
    """Bytes or a message that no correct peer sends."""


class InvariantBroken(ConnectorError):
    """A bug in this project: a core object contradicts itself."""


def _leaves(cls: type[ConnectorError]) -> list[type[ConnectorError]]:
    found = [cls]
    for sub in cls.__subclasses__():
        found += _leaves(sub)
    return found


#: Error code on the wire (the class's name) -> class.
BY_CODE: Mapping[str, type[ConnectorError]] = {cls.__name__: cls for cls in _leaves(ConnectorError)}


def _rebuild(cls: type[ConnectorError], message: str, facts: dict[str, Any]) -> ConnectorError:
    return cls(message, **facts)


def from_code(code: str, message: str, facts: Mapping[str, Any]) -> ConnectorError:
    """The error that a peer named. An unknown code (a newer peer) gives the base class."""
    cls = BY_CODE.get(code, ConnectorError)
    # These names are arguments of the constructor; a peer's fact may not stand for them.
    named = {str(k): v for k, v in facts.items() if k not in ("self", "message")}
    if cls is ConnectorError and code != "ConnectorError":
        named["code"] = code
    return cls(message, **named)
