"""Manifests and block meta as bytes. They travel in messages and lie in the block itself.

manifest: `[begin, end, [[key, dtype, [dim, …], offset, nbytes], …]]`, offsets from the block's data.
meta:     `[[from_stage, to_stage, replica], [[rid, index, attempt, flags, readers, manifest, nbytes], …], begun]`;
          `begun`: the number of its session's last word that began a use of one of these rids, 0 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from connector.core.directory.events import Member
from connector.core.errors import ProtocolViolation
from connector.core.layout import Manifest
from connector.core.names import MAX_KEYS, Edge
from connector.wire import fields as f
from connector.wire import hot

_MANIFEST = f.struct(lambda begin, end, slots: Manifest(slots, begin, end), f.WORD, f.WORD, f.many(hot.slot, MAX_KEYS))
#: One packer for all: it calls nothing back, so no other thread comes in between.
_pack = msgpack.Packer(use_bin_type=True).pack
#: Of an edge and of a member all but their texts and manifests: lists, heads and numbers at their longest.
_EDGE_MOST, _MEMBER_MOST = 5 + 5 + 5 + 5 + 9 + 5 + 9, 5 + 5 + 9 + 9 + 9 + 9 + 5 + 9
_META = f.struct(lambda *parts: parts, hot.edge, f.many(hot.member, 100_000), f.WORD)


def pack_manifest(manifest: Manifest) -> bytes:
    slots = [[slot.key, slot.dtype, slot.shape, slot.offset, slot.nbytes] for slot in manifest.slots]
    packed = msgpack.packb([manifest.begin, manifest.end, slots], use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def unpack_manifest(data: bytes) -> Manifest:
    """A manifest of well-formed fields; whether they fit a block is layout.check's to say."""
    manifest: Manifest = _read(data, _MANIFEST, "manifest")
    return manifest


def pack_meta(edge: Edge, members: Sequence[Member], begun: int) -> bytes:
    packed: bytes = _pack((edge, members, begun))
    return packed


def most_meta(edge: Edge, rid_chars: int, manifests: Sequence[bytes]) -> int:
    """Bytes that the meta of such members has at most, whatever their numbers are. `rid_chars`: characters of all rids
    together."""
    texts = len(edge.from_stage) + len(edge.to_stage) + rid_chars
    # Four bytes a character in UTF-8; 5 before a text, bytes or list, 9 for a number.
    return 4 * texts + sum(map(len, manifests)) + _EDGE_MOST + _MEMBER_MOST * len(manifests)


def unpack_meta(data: bytes) -> tuple[Edge, tuple[Member, ...], int]:
    meta: tuple[Edge, tuple[Member, ...], int] = _read(data, _META, "meta")
    return meta


def _read(data: bytes, check: f.Check, what: str) -> Any:
    try:
        return check(msgpack.unpackb(data, raw=False, strict_map_key=True))
    except (f.BadField, ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolViolation(f"the {what} is damaged: {error}", size=len(data)) from None
