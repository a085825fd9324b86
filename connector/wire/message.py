"""What every message is, and what both ends must agree on."""

from __future__ import annotations

from typing import ClassVar

from connector.wire import fields as f

#: Raised when a message changes its form; both ends must agree.
VERSION = 7
#: Bytes of a session's token, and of an arena's uuid.
TOKEN_BYTES = 16
#: Behind the token on the lifeline: the client sends and reads small frames there, and numbers all of them.
SPEAKS = b"\x01"
#: Most items of any list in a message.
MANY = 100_000


class Message:
    """Base of all messages. `checks` has one entry a field, in the fields' order."""

    code: ClassVar[int]
    checks: ClassVar[tuple[f.Check, ...]]
    __slots__: tuple[str, ...] = ()
