"""Layouts of payloads, remembered both ways: a stream's chunks are alike, and so are a step's."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from connector.core import layout
from connector.core.layout import Manifest
from connector.core.specs import TensorSpec, check_specs
from connector.wire.manifest import pack_manifest, unpack_manifest

#: Layouts remembered each way; those of more keys, or longer, are made anew each time.
MOST, MOST_KEYS, MOST_BYTES = 2048, 64, 8192


class Laid(NamedTuple):
    """A payload's place in its block: its manifest, that as bytes, and its tensors' bytes without padding."""

    manifest: Manifest
    packed: bytes
    nbytes: int


def lay(specs: tuple[TensorSpec, ...], begin: int) -> Laid:
    """The layout of a payload from `begin` of its block's data. Raises as check_specs does."""
    try:
        return _lay_remembered(specs, begin) if len(specs) <= MOST_KEYS else _lay(specs, begin)
    except TypeError:
        # A key, or a dimension, that has no hash: check_specs says what is wrong with it.
        return _lay(specs, begin)


def _lay(specs: tuple[TensorSpec, ...], begin: int) -> Laid:
    specs = tuple([TensorSpec(key, dtype, tuple(shape)) for key, dtype, shape in specs])
    check_specs(specs)
    manifest = layout.place(specs, begin)
    return Laid(manifest, pack_manifest(manifest), sum(slot.nbytes for slot in manifest.slots))


def read(packed: bytes, data_bytes: int) -> Manifest:
    """The manifest in bytes from another process, checked against its block's data. ProtocolViolation or Broken."""
    return _read_remembered(packed, data_bytes) if len(packed) <= MOST_BYTES else _read(packed, data_bytes)


def _read(packed: bytes, data_bytes: int) -> Manifest:
    return layout.check(unpack_manifest(packed), data_bytes)


_lay_remembered = lru_cache(MOST)(_lay)
_read_remembered = lru_cache(MOST)(_read)
