"""The payload's life as data. The diagram in docs/architecture.md is printed from these tables.

A block has one state; a payload in it has one state for each of its readers. Everything that
the tables do not list is refused and changes nothing.
"""

from __future__ import annotations

from enum import Enum

from connector.core.errors import InvariantBroken


class BlockState(Enum):
    """A block of the arena, from its reservation to its reuse."""

    RESERVED = "reserved"
    SEALED = "sealed"
    FREE = "free"

    __hash__ = object.__hash__


class ShareState(Enum):
    """One payload as one of its readers stands to it."""

    #: Sealed; this reader was not told.
    PENDING = "pending"
    #: A descriptor was, or may have been, sent: the reader may hold it.
    DELIVERED = "delivered"
    #: The reader reported that its caller has it. Shown only; safety never rests on it.
    TAKEN = "taken"
    RELEASED = "released"

    # Enum's own hashes the name, in Python, at each look into the table.
    __hash__ = object.__hash__


BLOCK_TABLE: dict[tuple[BlockState, str], BlockState] = {
    (BlockState.RESERVED, "seal"): BlockState.SEALED,
    (BlockState.RESERVED, "return"): BlockState.FREE,
    (BlockState.RESERVED, "writer died"): BlockState.FREE,
    (BlockState.SEALED, "last release"): BlockState.FREE,
}

SHARE_TABLE: dict[tuple[ShareState, str], ShareState] = {
    (ShareState.PENDING, "deliver"): ShareState.DELIVERED,
    (ShareState.PENDING, "drop"): ShareState.RELEASED,
    (ShareState.DELIVERED, "take"): ShareState.TAKEN,
    (ShareState.DELIVERED, "release"): ShareState.RELEASED,
    (ShareState.TAKEN, "release"): ShareState.RELEASED,
    (ShareState.DELIVERED, "reader died"): ShareState.PENDING,
    (ShareState.TAKEN, "reader died"): ShareState.PENDING,
}


def next_block(state: BlockState, verb: str) -> BlockState:
    """The state after `verb`; InvariantBroken if the table does not know it."""
    after = BLOCK_TABLE.get((state, verb))
    if after is None:
        raise InvariantBroken("no such transition of a block", state=state.value, verb=verb)
    return after


def next_share(state: ShareState, verb: str) -> ShareState:
    """The state after `verb`; InvariantBroken if the table does not know it."""
    after = SHARE_TABLE.get((state, verb))
    if after is None:
        raise InvariantBroken("no such transition of a payload", state=state.value, verb=verb)
    return after


def diagram() -> str:
    """Both tables as one Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    state block {"]
    lines += [f"        {a.value} --> {b.value}: {verb}" for (a, verb), b in BLOCK_TABLE.items()]
    lines += ["    }", "    state reader_i {"]
    lines += [f"        {a.value} --> {b.value}: {verb}" for (a, verb), b in SHARE_TABLE.items()]
    lines += ["    }"]
    return "\n".join(lines)
