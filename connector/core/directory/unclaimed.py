"""Payloads, and failures, that no reader comes for: after the edge's time the writer is told and the room freed."""

from __future__ import annotations

from connector.core.directory import lives, lots, releasing
from connector.core.directory.objects import Chunk, Stream, Subscription
from connector.core.directory.state import State
from connector.core.directory.transitions import ShareState
from connector.core.errors import Unclaimed


def watch(state: State, stream: Stream) -> None:
    """Start the clock for payloads that nobody claims, unless it runs."""
    if not stream.watched:
        stream.watched = True
        state.arm(state.now + _patience(state, stream), "unclaimed", stream)


def look(state: State, stream: Stream) -> None:
    """The clock fired: fail the stream if a payload, or its failure, has waited too long for a reader."""
    stream.watched = False
    if stream.life.over or stream.life.streams.get(stream.edge) is not stream:
        return
    patience = _patience(state, stream)
    if stream.failure is not None:
        _give_up(state, stream, patience)
        return
    waiting = [chunk for chunk in lots.chunks(stream) if _since(state, chunk) is not None]
    oldest = min((_since(state, chunk) or 0.0 for chunk in waiting), default=state.now)
    # The due time is computed as the timer's was: a difference could round to just below, for ever.
    if not waiting or state.now < oldest + patience:
        if stream.live:
            stream.watched = True
            state.arm(oldest + patience, "unclaimed", stream)
        return
    error = Unclaimed(
        "no reader came for the payload",
        rid=stream.rid,
        edge=str(stream.edge),
        age=round(state.now - oldest, 3),
        limit=patience,
        size=sum(chunk.nbytes for chunk in waiting),
    )
    lives.fail_stream(state, stream, error)
    releasing.void_stream(state, stream)


def _give_up(state: State, stream: Stream, patience: float) -> None:
    """Nobody came to hear of a failure: forget it."""
    due = stream.failed_at + patience
    if state.now < due:
        stream.watched = True
        state.arm(due, "unclaimed", stream)
        return
    subscriptions = state.edge(stream.edge).subscriptions
    for reader, share in enumerate(stream.shares):
        if not share.closed and not _comes_for(subscriptions.get(reader), stream):
            lives.close_share(state, stream, reader)
    if not all(share.closed for share in stream.shares):
        watch(state, stream)


def _since(state: State, chunk: Chunk) -> float | None:
    """Since when the payload is owed to a reader that is not there; None if to nobody such."""
    subscriptions = state.edge(chunk.stream.edge).subscriptions
    since = [
        max(chunk.sealed_at, chunk.stream.shares[reader].left_at)
        for reader, share in enumerate(chunk.shares)
        if share is ShareState.PENDING and not _comes_for(subscriptions.get(reader), chunk.stream)
    ]
    return min(since, default=None)


def _comes_for(subscription: Subscription | None, stream: Stream) -> bool:
    if subscription is None or subscription.readers != stream.readers:
        return False
    return subscription.push or stream.rid in subscription.claims


def _patience(state: State, stream: Stream) -> float:
    return state.settings.unclaimed_edges.get(stream.edge, state.settings.unclaimed_after)
