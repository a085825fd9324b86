"""vLLM-Omni's keys, `{request}_{stage}_{chunk}` as a rule, and the rids that they become.

A rid is one life over all edges, a key is used on each edge for itself: so the rid names the edge, too, in the form of
vLLM-Omni's own `_make_key`. Else an abort of a key on one edge would end it on the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_CHUNK = re.compile(r"(.+)_(0|[1-9][0-9]{0,8})", re.ASCII | re.DOTALL)

#: Reasons of aborts that this adapter makes itself: nobody failed.
CLEANED = "vLLM-Omni cleaned it up"
TAKEN = "taken by name"
LEFT = "left over from a former use of the request"
OURS = frozenset({CLEANED, TAKEN, LEFT})


class Place(NamedTuple):
    """Where a payload is handed over: the edge, and the key on it."""

    from_stage: str
    to_stage: str
    key: str

    @property
    def rid(self) -> str:
        return f"{self.key}@{self.from_stage}_{self.to_stage}"

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Place | None:
        """The place of a live payload as `payloads()` tells it; None for one that is not vLLM-Omni's."""
        from_stage, to_stage, _ = row["edge"].split(":")
        key, _, _ = row["rid"].rpartition("@")
        place = cls(from_stage, to_stage, key)
        return place if place.rid == row["rid"] else None


class Key(NamedTuple):
    """A key apart: `stream` is the request at its stage. A key that names no chunk is a stream of its own."""

    text: str
    stream: str
    number: int
    chunked: bool

    @classmethod
    def parse(cls, text: str) -> Key:
        found = _CHUNK.fullmatch(text)
        return cls(text, found[1], int(found[2]), True) if found else cls(text, text, 0, False)
