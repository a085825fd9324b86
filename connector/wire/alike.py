"""Messages about one payload of a stream of which only the numbers differ from payload to payload, made by joining.

What they give is what codec.py and manifest.py give, but that their numbers have one width: msgpack reads both.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgpack

from connector.core.directory.effects import Descriptor
from connector.core.names import MAX_INDEX, Edge, Handle
from connector.wire.codec import decode_told
from connector.wire.fields import MAX_MEMBER
from connector.wire.message import VERSION


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


#: An array's first byte, for up to 15 parts.
_ARRAY = 0x90
_U32, _U64 = 0xCE, 0xCF
#: A number's code and itself. What is no index, or no word, comes out negative.
_INDEX = struct.Struct(">Bi")
#: A block, its length, where the payload's data begins in it, the payload's place.
_WHERE = struct.Struct(">BBqBqBqBiBi")
_TAIL = struct.Struct(">BBqBq")
_CODES = (_ARRAY + 2, _U64, _U64, _U64, _U32, _U32)
#: Bytes of `tail`.
TAIL = _TAIL.size
#: Bytes of a manifest that goes in this form; with texts and numbers at their longest the frame is one small packet.
MOST_MANIFEST = 8192
#: Streams that are known of one socket, and lengths of their beginnings.
MOST_KNOWN, MOST_WIDTHS = 256, 4


def _parts(*values: Any) -> bytes:
    return b"".join(map(_pack, values))


class Where(NamedTuple):
    """Where a chunk lies: its block, that's length and where the chunk's data begins in it, in bytes, and the chunk's
    place among the block's."""

    handle: Handle
    length: int
    data_offset: int
    member: int


class ToldAlike:
    """What a writer tells a reader of one chunk, as codec.encode_told: no attempt, no flags, behind the last one."""

    __slots__ = ("_edge", "_life", "_manifest", "_middle", "_packed", "_rid", "_size", "begin")

    def __init__(self, edge: Edge, rid: str, life: int, manifest: bytes) -> None:
        head = bytes((_ARRAY + 3,)) + _pack(VERSION) + bytes((_ARRAY + 1, _ARRAY + 13))
        #: No frame of another stream begins so.
        self.begin: bytes = head + _parts(edge, 0, rid, life)
        self._middle = _parts(0, 0)
        self._packed = _pack(manifest)
        self._size = len(self.begin) + 5 + len(self._middle) + _WHERE.size + len(self._packed) + 5 + TAIL
        self._edge, self._rid, self._life, self._manifest = edge, rid, life, manifest

    def head(self, index: int, where: Where) -> bytes:
        """All of its frame but what is told ahead (`tail`). `index`: 1 ... MAX_INDEX."""
        (offset, generation), length, data_offset, member = where
        return (
            self.begin
            + _INDEX.pack(_U32, index)
            + self._middle
            + _WHERE.pack(
                _ARRAY + 2, _U64, offset, _U64, generation, _U64, length, _U32, data_offset, _U32, member
            )
            + self._packed
            + _INDEX.pack(_U32, index - 1)
        )  # fmt: skip

    def descriptor(self, index: int, where: Where) -> Descriptor:
        """What such a frame says."""
        fields = (self._edge, 0, self._rid, self._life, index, 0, 0, *where, self._manifest, index - 1)
        return tuple.__new__(Descriptor, fields)

    def read(self, frame: bytes) -> Descriptor | None:
        """What is told in a frame that begins as these do; None if it is not like them. Its end is not looked at."""
        if len(frame) != self._size:
            return None
        at = len(self.begin)
        place = at + 5 + len(self._middle)
        end, rest = place + _WHERE.size, self._size - TAIL
        first, index = _INDEX.unpack_from(frame, at)
        array, *found = _WHERE.unpack_from(frame, place)
        if frame[at + 5 : place] != self._middle or frame[end : rest - 5] != self._packed:
            return None
        offset, generation, length, data_offset, member = numbers = found[1::2]
        codes = (array, *found[::2])
        if first != _U32 or codes != _CODES or index <= 0 or min(numbers) < 0 or member > MAX_MEMBER:
            return None
        if frame[rest - 5 : rest] != _INDEX.pack(_U32, index - 1):
            return None
        handle = tuple.__new__(Handle, (offset, generation))
        return self.descriptor(index, tuple.__new__(Where, (handle, length, data_offset, member)))


def tail(handle: Handle) -> bytes:
    """What is told of the block ahead, the last part of a frame."""
    return _TAIL.pack(_ARRAY + 2, _U64, handle[0], _U64, handle[1])


def ahead(frame: bytes) -> Handle | None:
    """The block ahead, from the end of a frame that is made here; None: it ends otherwise."""
    array, first, offset, second, generation = _TAIL.unpack_from(frame, len(frame) - TAIL)
    if array != _ARRAY + 2 or first != _U64 or second != _U64 or offset < 0 or generation < 0:
        return None
    return tuple.__new__(Handle, (offset, generation))


class Told:
    """What comes over one socket, read; frames that are like one before by comparing them."""

    __slots__ = ("_known", "_widths", "announced")

    def __init__(self) -> None:
        #: By what their frames begin with, and how long those beginnings are.
        self._known: dict[bytes, ToldAlike] = {}
        self._widths: tuple[int, ...] = ()
        #: The next chunk's index and place, by what is known of its stream. Nobody need make use of it.
        self.announced: dict[ToldAlike, tuple[int, Where]] = {}

    def read(self, frame: bytes) -> list[Descriptor]:
        """As codec.decode_told."""
        for width in self._widths:
            known = self._known.get(frame[:width])
            descriptor = known.read(frame) if known is not None else None
            if known is not None and descriptor is not None and self.announce(known, descriptor, frame):
                return [descriptor]
        found, _ = decode_told(frame)
        if len(found) == 1 and len(frame) > TAIL:
            self._keep(found[0], frame)
        return found

    def announce(self, alike: ToldAlike, told: Descriptor, frame: bytes) -> bool:
        """This chunk was told in a frame like these; False if that does not end as they do. The block ahead is of the
        same length, and has its data in the same place."""
        block = ahead(frame)
        if block is None:
            return False
        if block.generation and told.index < MAX_INDEX:
            where = tuple.__new__(Where, (block, *told[8:11]))
            self.announced[alike] = (told.index + 1, where)
        return True

    def _keep(self, told: Descriptor, frame: bytes) -> None:
        alike = ToldAlike(told.edge, told.rid, told.life, told.manifest)
        if alike.read(frame) is None:
            return
        width = len(alike.begin)
        if width not in self._widths:
            if len(self._widths) >= MOST_WIDTHS:
                return
            self._widths += (width,)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
            self.announced.clear()
        self._known[alike.begin] = alike
        self.announce(alike, told, frame)


class MetaAlike:
    """A block's meta, as manifest.pack_meta: of one payload without attempt and flags."""

    __slots__ = ("_begin", "_end")

    def __init__(self, edge: Edge, rid: str, readers: int, manifest: bytes, nbytes: int, begun: int) -> None:
        self._begin: bytes = bytes((_ARRAY + 3,)) + _pack(edge) + bytes((_ARRAY + 1, _ARRAY + 7)) + _pack(rid)
        self._end = _parts(0, 0, readers, manifest, nbytes, begun)

    def meta(self, index: int) -> bytes:
        return self._begin + _INDEX.pack(_U32, index) + self._end
