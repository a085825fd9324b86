"""Bytes to messages and back. Any bytes give an envelope or ProtocolViolation, nothing else.

A frame is one msgpack array `[version, counter, [[code, field, …], …]]`, or with an `order` behind it. The counter
is, from a client, the last notice that it has processed; from the broker, the count of numbered messages applied. The
order numbers the frames of one direction where they come by two ways (order.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack

from connector.core.directory.effects import Descriptor
from connector.core.errors import ConnectorError, ProtocolViolation
from connector.core.names import NOWHERE, Handle
from connector.wire import columns, hot
from connector.wire.fields import MAX_WORD, BadField, error_fields
from connector.wire.messages import BY_CODE, FIRST_BROKER_CODE, MESSAGES, VERSION, Deliver, Message, Seal, Seals

#: Largest frame, unless the configuration says otherwise.
MAX_FRAME = 8 << 20
#: Most messages in one frame.
MAX_MESSAGES = 10_000


class Envelope(NamedTuple):
    counter: int
    messages: list[Message]
    #: Place among the frames of its direction, from 1; 0: it comes by the only way there is.
    order: int = 0


def encode(counter: int, messages: Iterable[Message], order: int = 0) -> bytes:
    """One frame. The messages are ours: a field that does not pack is a bug and raises TypeError."""
    value: tuple[Any, ...] = (VERSION, counter, [(m.code, *_VALUES[type(m)](m)) for m in messages])
    if order:
        value += (order,)
    try:
        packed: bytes = _pack(value)
    except TypeError:
        # An error is in it.
        packed = msgpack.packb(value, use_bin_type=True, default=_default)
    return packed


def _values(cls: type[Message]) -> Callable[[Message], tuple[Any, ...]]:
    """What reads a message's fields, in order, in one call."""
    names = cls.__slots__
    if len(names) > 1:
        return attrgetter(*names)
    if names:
        get = attrgetter(*names)
        return lambda message: (get(message),)
    return lambda message: ()


def _packed(cls: type[Message], name: str, pack: Callable[[Any], Any]) -> Callable[[Message], tuple[Any, ...]]:
    """The same, with one field as it travels."""
    values, place = _values(cls), cls.__slots__.index(name)

    def read(message: Message) -> tuple[Any, ...]:
        found = values(message)
        return (*found[:place], pack(found[place]), *found[place + 1 :])

    return read


_VALUES = {cls: _values(cls) for cls in MESSAGES} | {
    Seal: _packed(Seal, "members", columns.pack_members),
    Seals: _packed(Seals, "chunks", hot.pack_sealings),
    Deliver: _packed(Deliver, "descriptors", columns.pack_descriptors),
}
#: One packer for all: it calls nothing back, so no other thread comes in between.
_pack = msgpack.Packer(use_bin_type=True).pack


def _default(value: Any) -> Any:
    if isinstance(value, ConnectorError):
        return error_fields(value)
    raise TypeError(f"{type(value).__name__} does not travel")


def encode_told(descriptors: Sequence[Descriptor]) -> bytes:
    """What a writer tells a reader directly: `[version, descriptors, ahead]` (columns.py). `ahead` is the block that a
    stream's next chunk will probably be in; here none is named (alike.py does)."""
    packed: bytes = _pack((VERSION, columns.pack_descriptors(descriptors), NOWHERE))
    return packed


def decode_told(frame: bytes) -> tuple[list[Descriptor], Handle]:
    """The descriptors in it, and the block ahead; ProtocolViolation says what is wrong with it."""
    value = _unpack(frame)
    if type(value) is not list or len(value) != 3 or value[0] != VERSION or type(value[1]) is not list:
        raise ProtocolViolation("what was told is no list of payloads", size=len(frame))
    try:
        return list(columns.descriptors(value[1])), hot.handle(value[2])
    except (BadField, UnicodeEncodeError) as error:
        raise ProtocolViolation(f"a field of what was told is wrong: {error}", size=len(frame)) from None


def decode(frame: bytes, from_broker: bool, max_frame: int = MAX_FRAME) -> Envelope:
    """The envelope in a frame of the given direction; ProtocolViolation says what is wrong with it."""
    if len(frame) > max_frame:
        raise ProtocolViolation("the frame is too large", size=len(frame), limit=max_frame)
    value = _unpack(frame)
    if type(value) is not list or len(value) not in (3, 4) or type(value[0]) is not int:
        raise ProtocolViolation("the frame is not an envelope", size=len(frame))
    version, counter, raw, *place = value
    if version != VERSION:
        raise ProtocolViolation("another version of the protocol", version=version, expected=VERSION)
    if type(counter) is not int or not 0 <= counter <= MAX_WORD:
        raise ProtocolViolation("the envelope's counter is no count", counter=_told(counter), limit=MAX_WORD)
    if type(raw) is not list or len(raw) > MAX_MESSAGES:
        raise ProtocolViolation("the envelope's messages are not a list", limit=MAX_MESSAGES)
    order = place[0] if place else 0
    if type(order) is not int or not 0 <= order <= MAX_WORD:
        raise ProtocolViolation("the envelope's order is no count", order=_told(order), limit=MAX_WORD)
    return Envelope(counter, [_message(item, from_broker) for item in raw], order)


def _unpack(frame: bytes) -> Any:
    try:
        return msgpack.unpackb(frame, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolViolation(f"the frame is not msgpack: {error}", size=len(frame)) from None


def _message(item: Any, from_broker: bool) -> Message:
    if type(item) is not list or not item or type(item[0]) is not int:
        raise ProtocolViolation("a message is not a list that begins with its code")
    cls = BY_CODE.get(item[0])
    if cls is None or (cls.code >= FIRST_BROKER_CODE) is not from_broker:
        raise ProtocolViolation("no such message in this direction", code=item[0])
    checks = cls.checks
    if len(item) != len(checks) + 1:
        raise ProtocolViolation("a message has another number of fields", kind=cls.__name__, fields=len(item) - 1)
    values: list[Any] = []
    add = values.append
    place = 0
    try:
        for check in checks:
            place += 1
            add(check(item[place]))
    except (BadField, UnicodeEncodeError) as error:
        name = cls.__slots__[len(values)]
        raise ProtocolViolation(f"a field is wrong: {error}", kind=cls.__name__, field=name) from None
    return cls(*values)


def _told(value: Any) -> int | str:
    """An untrusted value as a fact: a number, or else its type (its text may nest too deep to be made)."""
    return value if type(value) is int else type(value).__name__
