"""A sealed block's payloads, told to their reader directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from connector.client.blocks import ReservedBlock
from connector.client.outgoing import OutStream
from connector.client.pairs import Pair
from connector.core.directory.effects import Descriptor
from connector.core.directory.events import Member, Told
from connector.core.names import Edge
from connector.wire import codec
from connector.wire import messages as msg

if TYPE_CHECKING:
    from connector.client.session import Session


def tell(
    session: Session,
    edge: Edge,
    block: ReservedBlock,
    data_offset: int,
    stride: int,
    members: Sequence[Member],
    streams: Sequence[OutStream],
) -> tuple[Told, ...]:
    """Tell the reader of what may be told directly; what was told. The ready word stands, and the lock is held: what
    is told is in the order of the indexes.

    Told before the Seal is queued: interrupted in between, the broker tells it, too, and the reader knows the block.
    """
    pair: Pair | None = None
    places: list[int] = []
    told: list[Descriptor] = []
    for place, (member, stream) in enumerate(zip(members, streams, strict=True)):
        rid, index, attempt, flags, _, manifest, _ = member
        way = stream.way
        # All before it was put here, in order. END goes by the broker: a reader that has it may go at once, and must
        # not be found to have gone in the middle.
        if way is None or attempt or flags or stream.low != index + 1:
            continue
        if pair is None:
            pair = way.pair
        elif way.pair is not pair:
            continue
        places.append(place)
        fields = (
            edge, 0, rid, way.life, index, 0, 0, block.handle, block.length, data_offset + place * stride, place,
            manifest, index - 1,
        )  # fmt: skip
        told.append(tuple.__new__(Descriptor, fields))
    if pair is None:
        return ()
    frame = codec.encode_told(told)
    if len(frame) > pair.most:
        return ()
    if not pair.send(frame):
        fall_back(session, edge, pair, [members[place].rid for place in places], [streams[place] for place in places])
        return ()
    return _spans(places, pair.session)


def fall_back(session: Session, edge: Edge, pair: Pair, rids: Sequence[str], streams: Sequence[OutStream]) -> None:
    """A frame did not go: what follows of these streams goes through the broker. Lock held."""
    for stream in streams:
        stream.way = None
    if not pair.deaf:
        # Its socket is full: through the broker they wait there, within the reader's window.
        session.post(msg.FellBack(edge, tuple(rids)))


def _spans(places: list[int], number: int) -> tuple[Told, ...]:
    if places[-1] - places[0] + 1 == len(places):
        return (Told(places[0], len(places), number),)
    return tuple([Told(place, 1, number) for place in places])
