"""Messages to events, effects to messages. No decision is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from connector.core.directory import effects as ef
from connector.core.directory import events as ev
from connector.wire import messages as msg

#: Manifest bytes of one Deliver; a longer batch is cut, so that no frame outgrows its limit.
DELIVER_BYTES = 2 << 20

#: Message type -> (now, session, message) -> event.
TO_EVENT: dict[type[msg.Message], Callable[[float, int, Any], ev.Event]] = {
    msg.Reserve: lambda now, s, m: ev.Reserve(now, s, m.request, m.edge, m.sizes, now + m.timeout, m.rids, m.ahead),
    msg.Return: lambda now, s, m: ev.Returned(now, s, m.number, m.handles),
    msg.Seal: lambda now, s, m: ev.Sealed(
        now, s, m.number, m.seen, m.edge, m.handle, m.data_offset, m.members, m.told, m.stride, m.ahead
    ),
    msg.Seals: lambda now, s, m: ev.SealedRun(
        now, s, m.number, m.seen, m.edge, m.data_offset, m.readers, m.manifest, m.nbytes, m.told, m.chunks
    ),
    msg.Release: lambda now, s, m: ev.Released(now, s, m.number, m.spans),
    msg.Took: lambda now, s, m: ev.Taken(now, s, m.spans),
    msg.Subscribe: lambda now, s, m: ev.Subscribed(now, s, m.request, m.edge, m.reader, m.readers, m.push, m.resume),
    msg.Claim: lambda now, s, m: ev.Claimed(now, s, m.edge, m.reader, m.rid),
    msg.Await: lambda now, s, m: ev.Awaited(now, s, m.request, m.edge, m.reader, m.rid, now + m.timeout),
    msg.Cancel: lambda now, s, m: ev.Cancelled(now, s, m.request),
    msg.FellBack: lambda now, s, m: ev.FellBack(now, s, m.edge, m.rids),
    msg.Begin: lambda now, s, m: ev.Began(now, s, m.number, m.rid),
    msg.Enter: lambda now, s, m: ev.Entered(now, s, m.number, m.edge, m.rid, m.sends, m.heard, m.reason),
    msg.Finish: lambda now, s, m: ev.Finished(now, s, m.number, m.rid, m.aborted),
    msg.Abort: lambda now, s, m: ev.Aborted(now, s, m.number, m.request, m.rid, m.reason, m.mine),
    msg.Bye: lambda now, s, m: ev.Left(now, s, m.held),
    msg.Inspect: lambda now, s, m: ev.Inspected(now, s, m.request, m.edge, m.rid, m.index),
    msg.Remove: lambda now, s, m: ev.Removed(now, s, m.request, m.edge, m.rid, m.index, m.force),
}

#: Effect type -> message; Deliver and Acked are apart.
TO_MESSAGE: dict[type[ef.Effect], Callable[[Any], msg.Message]] = {
    ef.AskResend: lambda e: msg.Resend(e.number),
    ef.Granted: lambda e: msg.Grant(e.request, e.blocks),
    ef.Refused: lambda e: msg.Failure(e.request, e.error),
    ef.Done: lambda e: msg.Answer(e.request, e.facts),
    ef.Shown: lambda e: msg.Shown(e.request, e.descriptor),
    ef.Ended: lambda e: msg.Ended(e.edge, e.reader, e.rid, e.life, e.count, e.behind),
    ef.StreamFailed: lambda e: msg.StreamFailed(e.edge, e.reader, e.rid, e.life, e.error, e.behind, e.applied),
    ef.PutFailed: lambda e: msg.PutFailed(e.number, e.member, e.error),
    ef.PutNoted: lambda e: msg.PutNoted(e.number, e.member, e.outcome),
    ef.Notices: lambda e: msg.Notices(e.notices, e.lost),
    ef.DropHolds: lambda e: msg.Drop(e.holds, e.writer),
    ef.Direct: lambda e: msg.Direct(e.ways),
    ef.Recall: lambda e: msg.Recall(),
    ef.Ping: lambda e: msg.Ping(),
    ef.StopSession: lambda e: msg.Stopping(),
}


def deliveries(effect: ef.Deliver) -> Iterator[msg.Deliver]:
    """A batch of descriptors as messages of bounded size."""
    batch: list[ef.Descriptor] = []
    size = 0
    for descriptor in effect.descriptors:
        if batch and size + len(descriptor.manifest) > DELIVER_BYTES:
            yield msg.Deliver(tuple(batch))
            batch, size = [], 0
        batch.append(descriptor)
        size += len(descriptor.manifest)
    yield msg.Deliver(tuple(batch))
