"""Blocks whose payloads are put, sent, taken and released alike: what sealing.py, delivery.py and releasing.py do one
by one is done here for all of them at once. Whatever is not plain goes there.

A block is plain if each of its payloads is the next chunk of its stream, for one reader, who has all before it, or the
first chunk of a rid that nobody knows; and if that reader listens for all, or nobody listens on the edge.
"""

from __future__ import annotations

from collections.abc import Container

from connector.core.directory import delivery, direct, holding, lives, lots, releasing, unclaimed
from connector.core.directory.effects import Deliver, Descriptor
from connector.core.directory.events import Flags, Sealed
from connector.core.directory.objects import Block, EdgeState, Lot, Presence, Session, Stream, Subscription
from connector.core.directory.state import State
from connector.core.directory.transitions import ShareState, next_share


def seal(state: State, session: Session, edge: EdgeState, block: Block, event: Sealed) -> bool:
    """Seal a plain block as one lot, and send it; False, and nothing is changed, if it is not plain."""
    subscription = edge.subscriptions.get(0)
    if not event.members or (subscription is None) is bool(edge.subscriptions):
        return False
    reader = None
    if subscription is not None:
        reader = state.sessions[subscription.session]
        if not _may_be_sent(state, subscription, reader, event):
            return False
    if (event.told or block.early) and not _all_told(event, reader):
        return False
    found = _plain(state, session, edge, event, subscription, reader)
    if found is None:
        return False
    lot = _store(state, session, edge, block, event, found, reader)
    if reader is not None:
        if not event.told:
            state.emit(Deliver(reader.id, _descriptors(edge, lot), event.ahead))
        if reader.direct:
            full = reader.pushed[(edge.edge, 0)] > state.settings.window
            for stream in lot.streams:
                if full:
                    direct.withdraw(state, stream)
                elif stream.direct != reader.id:
                    direct.offer(state, stream, reader)
    return True


def _may_be_sent(state: State, subscription: Subscription, reader: Session, event: Sealed) -> bool:
    if not subscription.push or subscription.readers != 1 or reader.presence is Presence.CLOSING or reader.taking:
        return False
    if event.told:
        return True
    return reader.pushed.get(subscription.place, 0) + len(event.members) <= state.settings.window


def _all_told(event: Sealed, reader: Session | None) -> bool:
    """Whether the writer told all of it to the reader."""
    told = event.told
    return reader is not None and len(told) == 1 and told[0] == (0, len(event.members), reader.id)


def _plain(
    state: State,
    session: Session,
    edge: EdgeState,
    event: Sealed,
    subscription: Subscription | None,
    reader: Session | None,
) -> list[Stream | None] | None:
    """The payloads' streams, None for one that is to be opened; or None if they are not plain."""
    members, name, number = event.members, edge.edge, session.id
    if len(members) > 1 and len({member[0] for member in members}) < len(members):
        return None
    behind = session.is_behind_in_any()
    waiting = _waiting(subscription, reader) if subscription is not None and reader is not None else []
    found: list[Stream | None] = []
    for rid, index, attempt, flags, readers, _, _ in members:
        if attempt or readers != 1 or flags & Flags.END_ONLY or (behind and session.is_behind(rid)):
            return None
        if waiting and any(rid in one for one in waiting):
            return None
        life = session.bound.get(rid)
        if life is None:
            if index or not _is_unknown(state, session, edge, event, rid, reader):
                return None
            found.append(None)
            continue
        stream = life.streams.get(name)
        if (
            stream is None
            or stream.low != index
            or stream.high != index
            or stream.end is not None
            or stream.failure is not None
            or stream.readers != 1
            or number not in stream.writers
        ):
            return None
        share = stream.shares[0]
        if share.closed or (reader is not None and (share.cursor != index or reader.bound.get(rid) is not life)):
            return None
        if share.redo or share.ahead or share.redelivered_below > index:
            return None
        found.append(stream)
    return found


def _waiting(subscription: Subscription, reader: Session) -> list[Container[str]]:
    """Rids that the reader is not to be sent at once."""
    known = (subscription.claims, subscription.ready, subscription.wanted, reader.notices, reader.past)
    return [one for one in known if one]


def _is_unknown(
    state: State, session: Session, edge: EdgeState, event: Sealed, rid: str, reader: Session | None
) -> bool:
    """Whether nothing is known of the rid: its first chunk opens a life."""
    return (
        rid not in state.lives
        and rid not in state.tombstones
        and rid not in edge.gone
        and event.seen >= state.forgotten
        and (reader is None or not (reader.is_behind(rid) or rid in reader.bound))
        and lives.unfinished(state, session, edge.edge, rid) is None
    )


def _store(
    state: State,
    session: Session,
    edge: EdgeState,
    block: Block,
    event: Sealed,
    found: list[Stream | None],
    reader: Session | None,
) -> Lot:
    members, count = event.members, len(event.members)
    streams: list[Stream] = []
    nbytes = sum([member[6] for member in members])
    now = ShareState.PENDING if reader is None else next_share(ShareState.PENDING, "deliver")
    holder = reader.id if reader else 0
    lot = Lot(block, 0, members, streams, session.id, session.label, state.now, now, holder, nbytes)
    block.lots = [lot]
    for member, known in zip(members, found, strict=True):
        stream = known or _open(state, session, edge, member[0], reader)
        streams.append(stream)
        index = member[1]
        stream.live[index] = lot
        stream.low = stream.high = index + 1
        if member[3]:
            stream.end = index + 1
        if reader is not None:
            share = stream.shares[0]
            share.told = index
            share.cursor = index + 1
            share.held += 1
            if member[3]:
                share.told_end = True
        if not stream.watched:
            unclaimed.watch(state, stream)
    block.outstanding += count
    state.shelf.payloads += count
    state.count_sealed(edge, count, nbytes)
    state.tell_all("sealed", edge.edge, members, session.id)
    if reader is not None:
        holding.begin(reader, block, count, nbytes)
        place = (edge.edge, 0)
        reader.pushed[place] = reader.pushed.get(place, 0) + count
        state.tell_all("delivered", edge.edge, members, reader.id)
    return lot


def _open(state: State, session: Session, edge: EdgeState, rid: str, reader: Session | None) -> Stream:
    life = lives.open_life(state, rid)
    lives.join(state, session, life)
    stream = lives.stream_of(state, life, edge.edge)
    delivery.open_shares(state, stream, 1)
    stream.writers = life.senders
    if reader is not None:
        lives.bind(state, reader, life)
    return stream


def _descriptors(edge: EdgeState, lot: Lot) -> tuple[Descriptor, ...]:
    block, new, kind = lot.block, tuple.__new__, Descriptor
    name, handle, length, offset, stride = edge.edge, block.handle, block.length, block.data_offset, block.stride
    # As Descriptor(...) makes them, without the calls.
    return tuple([
        new(kind, (
            name, 0, m[0], stream.life.number, m[1], 0, m[3], handle, length, offset + place * stride, place, m[5],
            m[1] - 1,
        ))
        for place, (m, stream) in enumerate(zip(lot.members, lot.streams, strict=True))
    ])  # fmt: skip


def take(state: State, session: Session, lot: Lot) -> None:
    """The caller has all of it: the credits return."""
    if lot.state is not ShareState.DELIVERED:
        return
    lot.state = next_share(lot.state, "take")
    _touched(session, lot)
    state.tell_all("taken", lot.streams[0].edge, lot.members, session.id)
    _return_credits(state, session, lot)


def release(state: State, session: Session, lot: Lot) -> None:
    """The session lets go of all of it."""
    block, edge, count = lot.block, lot.streams[0].at, len(lot.members)
    _touched(session, lot)
    holding.end(session, block, count, lot.nbytes)
    if lot.state is ShareState.DELIVERED:
        _return_credits(state, session, lot)
    state.tell_all("released", edge.edge, lot.members, session.id)
    lot.state = next_share(lot.state, "release")
    ended = []
    for member, stream in zip(lot.members, lot.streams, strict=True):
        del stream.live[member[1]]
        share = stream.shares[0]
        share.held -= 1
        share.released_any = True
        if share.told_end or share.closed:
            ended.append(stream)
    lots.remove(lot)
    block.outstanding -= count
    state.shelf.payloads -= count
    state.last_progress = state.now
    state.count_released(edge, count)
    releasing.free_if_done(state, block)
    for stream in ended:
        lives.settle(state, stream)


def _touched(session: Session, lot: Lot) -> None:
    if session.is_behind_in_any():
        for stream in lot.streams:
            lives.touched(session, stream.life)


def _return_credits(state: State, session: Session, lot: Lot) -> None:
    place = (lot.streams[0].edge, 0)
    delivery.less(session.pushed, place, len(lot.members))
    state.touched[place] = None
