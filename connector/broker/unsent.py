"""What a dead writer sealed and did not say: the ready word, not the message, makes a payload exist."""

from __future__ import annotations

import logging
from itertools import chain

from connector.arena import blocks
from connector.arena.arena import Arena
from connector.arena.blocks import BlockHeader
from connector.core.directory.events import Member, Sealed
from connector.core.directory.objects import Session
from connector.core.errors import ConnectorError, ProtocolViolation
from connector.core.names import Edge
from connector.wire.manifest import unpack_meta

log = logging.getLogger("connector.broker")


def seals(arena: Arena, session: Session, now: float) -> list[Sealed]:
    """The seals of the session's reserved blocks whose ready word stands, numbered behind its last message.

    A block that fails its check is left out, and named in the log: nobody was told of it. What the writer
    had heard of aborts when it put is not known, so only what it told us counts.
    """
    found: list[Sealed] = []
    for block in sorted(session.reserved.values(), key=lambda block: block.handle.generation):
        offset, generation = block.handle
        if not blocks.is_ready(arena, offset, generation):
            continue
        try:
            header = blocks.read_header(arena, offset, block.length, generation)
            edge, members, begun = _read(header)
        except ConnectorError as error:
            log.error(
                "a dead writer's sealed block fails its check and is dropped",
                extra={"facts": {"session": session.id, "stage": session.stage, "error": str(error)}},
            )
            continue
        strange = begun > session.applied
        if strange:
            # Of a use that it had begun and not said: not of the one that the broker knows.
            facts = {"session": session.id, "stage": session.stage, "rids": [member.rid for member in members[:8]]}
            log.warning("a dead writer's payloads are of a use that it had not said, and go", extra={"facts": facts})
        number = session.applied + len(found) + 1
        where = (edge, block.handle, header.data_offset, members, (), header.stride)
        found.append(Sealed(now, session.id, number, session.seen, *where, unsaid=True, strange=strange))
    return found


def _read(header: BlockHeader) -> tuple[Edge, tuple[Member, ...], int]:
    """Edge and members, and the last number at which their writer began a use of one of them."""
    edges, members, begun = zip(*map(unpack_meta, header.metas), strict=True)
    if header.flags & blocks.GROWS and (len(set(edges)) > 1 or any(len(one) != 1 for one in members)):
        raise ProtocolViolation("a growing block's records are of one payload each, of one edge", edge=str(edges[0]))
    return edges[0], tuple(chain.from_iterable(members)), max(begun)
