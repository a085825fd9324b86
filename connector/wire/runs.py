"""Seals of single payloads that differ in little, as one message: what a stream, or many, put since the last frame.

Only what its writer has told already travels so, and nothing of it is decided here: the broker seals one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from connector.core.directory.events import Sealing
from connector.wire.from_client import Seal, Seals
from connector.wire.message import Message


def joined(messages: Sequence[Message]) -> list[Message]:
    """The same messages, in their order; runs of Seals that are alike as one each."""
    out: list[Message] = []
    run: list[Seal] = []
    for message in messages:
        if type(message) is Seal and _is_single(message):
            if run and not _follows(run[-1], message):
                out.append(_one(run))
                run = []
            run.append(message)
        else:
            if run:
                out.append(_one(run))
                run = []
            out.append(message)
    if run:
        out.append(_one(run))
    return out


def _is_single(seal: Seal) -> bool:
    """One payload, a stream's next, which its reader has been told of."""
    members, told = seal.members, seal.told
    return len(members) == 1 and len(told) == 1 and told[0][0] == 0 and members[0][2] == members[0][3] == 0


def _follows(last: Seal, seal: Seal) -> bool:
    return (
        seal.number == last.number + 1
        and seal.members[0][4:] == last.members[0][4:]
        and seal.told == last.told
        and seal.data_offset == last.data_offset
        and seal.seen == last.seen
        and seal.edge == last.edge
    )


def _one(run: list[Seal]) -> Message:
    if len(run) == 1:
        return run[0]
    first = run[0]
    _, _, _, _, readers, manifest, nbytes = first.members[0]
    chunks = tuple([Sealing(*seal.members[0][:2], seal.handle) for seal in run])
    told = first.told[0].session
    return Seals(first.number, first.seen, first.edge, first.data_offset, readers, manifest, nbytes, told, chunks)
