"""Typical frames of both directions, and a door that every bytes must come through."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connector.core.directory.effects import Descriptor, Notice
from connector.core.directory.events import Member, Span
from connector.core.errors import PoolFull, ProtocolViolation
from connector.core.layout import plan
from connector.core.names import Edge, Handle
from connector.core.specs import TensorSpec
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.manifest import pack_manifest

EDGE, HANDLE = Edge("thinker", "talker", 1), Handle(4096, 77)
MANIFEST = pack_manifest(plan([[TensorSpec("r-24", "bfloat16", (2, 8)), TensorSpec("r-ids", "int64", (2,))]])[0])

CLIENT = [
    msg.Hello(b"t" * 16, "thinker", "0.1.0", True, (HANDLE,)),
    msg.Reserve(1, EDGE, (4096, 64), 30.0, ("r",), False),
    msg.Seal(2, 3, EDGE, HANDLE, 256, (Member("r", 1, 0, 1, 1, MANIFEST, 80), Member("é", 0, 0, 2, 1, b"", 0))),
    msg.Release(3, (Span(HANDLE, 0, 64, 0), Span(HANDLE, 1, 1, -1))),
    msg.ListPage(4, 0, 9, 100, {"rid": "r", "edge": "a:b:0"}),
    msg.Abort(5, 6, "r", "no more"),
]
BROKER = [
    msg.Welcome(1, 1, b"u" * 16, 1 << 20, False, {"pool": 1 << 20, "heartbeat": 5.0}),
    msg.Grant(1, ((HANDLE, 4096),)),
    msg.Failure(2, PoolFull("no room came", rid="r", edge="a:b:0", holders=["x"])),
    msg.Deliver((Descriptor(EDGE, 0, "r", 5, 1, 0, 1, HANDLE, 4096, 256, 0, MANIFEST),)),
    msg.Notices((Notice(4, "r", "aborted", 5, 6),), False),
    msg.Rows(7, [{"serial": 1, "tensors": [["k", "int64", [2], 16]]}], 0),
]


@pytest.fixture(scope="session")
def frames() -> list[tuple[bytes, bool]]:
    """(frame, from_broker): each typical message alone, all of a direction in one, and an empty one."""
    found = [(codec.encode(9, [message]), message.code >= 64) for message in [*CLIENT, *BROKER]]
    return [*found, (codec.encode(1, CLIENT), False), (codec.encode(2, BROKER), True), (codec.encode(3, []), False)]


@pytest.fixture(scope="session")
def opens() -> Callable[..., codec.Envelope | None]:
    """decode, with None for a refusal: anything else that escapes fails the test."""

    def open_frame(frame: bytes, from_broker: bool = False) -> codec.Envelope | None:
        try:
            envelope = codec.decode(frame, from_broker)
        except ProtocolViolation as error:
            # Whoever logs the refusal must not fail on it.
            str(error)
            return None
        assert type(envelope) is codec.Envelope
        assert all(isinstance(message, msg.Message) for message in envelope.messages)
        return envelope

    return open_frame
