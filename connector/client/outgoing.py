"""What this session writes: streams and their next index, tickets, and numbered messages not yet acknowledged."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from connector.client.pairs import Way
from connector.core.directory.events import Flags
from connector.core.errors import AlreadyPut, ConnectorError, NotYet, RequestAborted, StreamEnded
from connector.core.names import Edge
from connector.wire import messages as msg

if TYPE_CHECKING:
    from connector.client.again import Again
    from connector.client.layouts import Laid

#: Ended streams remembered, so that a second use of a rid without finish is refused here.
MOST_ENDED = 65_536
#: Rids whose last finish or begin is remembered: the broker may still have a word of what was before.
MOST_OPENED = 4096
#: Aborted rids remembered until finish or begin.
MOST_ABORTED = 65_536

Numbered = msg.Return | msg.Seal | msg.Release | msg.Begin | msg.Enter | msg.Finish | msg.Abort


class Ticket:
    """The fate of one put. `outcome`: None while open, then 'stored', 'replaced' or 'ignored'."""

    __slots__ = ("edge", "error", "index", "outcome", "raised", "rid", "stream")

    def __init__(self, edge: Edge, rid: str, index: int) -> None:
        self.edge, self.rid, self.index = edge, rid, index
        #: What it was put to; a later use of the rid has another.
        self.stream: OutStream | None = None
        self.outcome: str | None = None
        self.error: ConnectorError | None = None
        self.raised = False

    def __repr__(self) -> str:
        state = type(self.error).__name__ if self.error else self.outcome or "open"
        return f"<Ticket {self.rid}[{self.index}] on {self.edge}: {state}>"

    def done(self) -> bool:
        return self.outcome is not None or self.error is not None

    def resolve(self, outcome: str | None, error: ConnectorError | None = None) -> None:
        if not self.done():
            self.outcome, self.error = outcome, error

    def result(self) -> str:
        """The outcome; raises the error, or NotYet while the broker has not answered."""
        if self.error is not None:
            self.raised = True
            raise self.error.anew()
        if self.outcome is None:
            raise NotYet("the broker has not answered yet", rid=self.rid, edge=str(self.edge), index=self.index)
        return self.outcome


@dataclass(slots=True)
class OutStream:
    """One (edge, rid) that this session puts to."""

    next_index: int = 0
    ended: bool = False
    #: All indexes below `low` were put, and those in `above`.
    low: int = 0
    above: set[int] = field(default_factory=set)
    #: The stream is poisoned: every put raises this until finish or begin.
    error: ConnectorError | None = None
    #: Put refusals that nobody has been told of: the next put, or flush, raises the first.
    refused: list[Ticket] | None = None
    #: Notices may have been lost since: the broker decides by what was seen when the stream was opened.
    unsure: bool = False
    seen: int = 0
    #: The rid was finished or begun since.
    former: bool = False
    #: Its reader may be told directly.
    way: Way | None = None
    #: The layout of its last chunk, if that was told directly; and what its next has in common with it.
    laid: Laid | None = None
    again: Again | None = None

    def goes_on(self) -> bool:
        """Nothing is held against the next put, and nothing is missing before it."""
        return (
            self.low == self.next_index
            and self.error is None
            and not self.refused
            and not self.ended
            and not self.unsure
        )

    def was_put(self, index: int) -> bool:
        return index < self.low or index in self.above

    def note(self, index: int) -> None:
        if index < self.low:
            return
        if index == self.low and not self.above:
            self.low += 1
            return
        self.above.add(index)
        while self.low in self.above:
            self.above.discard(self.low)
            self.low += 1


class Abort(NamedTuple):
    """An abort that the session has heard of. `life`: the last that was meant; None before the broker has said so.
    `edges`: where something of it was put, or was to be."""

    reason: str
    life: int | None
    edges: tuple[Edge, ...] = ()


class Outgoing:
    """The session's lock guards it."""

    def __init__(self) -> None:
        self.streams: OrderedDict[tuple[Edge, str], OutStream] = OrderedDict()
        self.aborted: OrderedDict[str, Abort] = OrderedDict()
        #: rid -> number of its last finish, begin or enter. Bounded; the oldest are forgotten.
        self.opened: OrderedDict[str, int] = OrderedDict()
        self.unacked: OrderedDict[int, Numbered] = OrderedDict()
        self.tickets: dict[int, list[Ticket]] = {}
        self.number = 0
        self.acked = 0
        self._flushes: deque[tuple[int, Callable[[ConnectorError | None], None]]] = deque()
        self._by_rid: dict[str, set[Edge]] = {}
        self._ended = 0
        #: Some stream is, or was.
        self.unsure = False
        #: Refusals that nobody was told of and whose stream is not known any more: flush raises them.
        self._strays: OrderedDict[str, list[Ticket]] = OrderedDict()

    # -- streams ----------------------------------------------------------------------------------

    def admit(self, edge: Edge, rid: str, index: int | None, attempt: int) -> int:
        """The index of a put that is about to be sealed; raises what the client knows already: an abort, a poisoned
        stream, a refused earlier put, AlreadyPut or StreamEnded."""
        if rid in self.aborted:
            raise self._of_aborted(edge, rid)
        stream = self.streams.get((edge, rid))
        if stream is None:
            return 0 if index is None else index
        if index is None and stream.goes_on():
            return stream.next_index
        if stream.error is not None or stream.refused:
            self._raise_earlier(stream)
        if index is None:
            index = stream.next_index
        if stream.ended and not attempt:
            if stream.was_put(index):
                raise AlreadyPut("this index was put already", rid=rid, edge=str(edge), index=index)
            if index >= stream.next_index:
                raise StreamEnded(
                    "the stream has ended; finish or begin the rid to use it anew", rid=rid, edge=str(edge), index=index
                )
        return index

    def _of_aborted(self, edge: Edge, rid: str) -> ConnectorError:
        self._strays.pop(rid, None)
        return RequestAborted(
            "the request was aborted; finish or begin it before the next put",
            rid=rid,
            edge=str(edge),
            reason=self.aborted[rid].reason,
        )

    @staticmethod
    def _raise_earlier(stream: OutStream) -> None:
        if stream.error is not None:
            stream.refused = None
            raise stream.error.anew()
        while stream.refused:
            ticket = stream.refused.pop(0)
            if not ticket.raised:
                assert ticket.error is not None
                ticket.raised = True
                raise ticket.error.anew()

    def note_put(self, edge: Edge, rid: str, index: int, flags: int, seen: int) -> OutStream:
        """A chunk was put, or END alone behind `index` chunks. The stream it belongs to."""
        stream = self.streams.get((edge, rid))
        if stream is None:
            stream = self.streams[(edge, rid)] = OutStream(seen=seen)
            self._by_rid.setdefault(rid, set()).add(edge)
        count = index
        if not flags & Flags.END_ONLY:
            count += 1
            if index == stream.low and not stream.above:
                stream.low = count
            else:
                stream.note(index)
        if count > stream.next_index:
            stream.next_index = count
        if flags and not stream.ended:
            stream.ended = True
            stream.laid = stream.again = None
            self._ended += 1
            self._forget_ended()
        return stream

    def _forget_ended(self) -> None:
        while self._ended > MOST_ENDED:
            key = next(key for key, stream in self.streams.items() if stream.ended)
            self._drop(key)

    def _drop(self, key: tuple[Edge, str]) -> None:
        stream = self.streams.pop(key)
        self._ended -= stream.ended
        edges = self._by_rid[key[1]]
        edges.discard(key[0])
        if not edges:
            del self._by_rid[key[1]]

    def forget(self, rid: str) -> None:
        """The session has finished or begun the rid: nothing of its former use is held against it."""
        for edge in list(self._by_rid.get(rid, ())):
            self.streams[(edge, rid)].former = True
            self._drop((edge, rid))
        self.aborted.pop(rid, None)
        self._strays.pop(rid, None)

    def abort(self, rid: str, reason: str, life: int | None = None, edges: tuple[Edge, ...] = ()) -> None:
        """The rid was aborted, lives up to `life` of it: puts raise until finish or begin."""
        for edge in list(self._by_rid.get(rid, ())):
            for ticket in self.streams[(edge, rid)].refused or ():
                self._stray(ticket)
            self._drop((edge, rid))
        known = self.aborted.get(rid)
        # One that this session said itself is of no use that it begins later.
        own = known is not None and known.life is None
        self.aborted[rid] = Abort(reason, life, () if own else edges)
        self.aborted.move_to_end(rid)
        while len(self.aborted) > MOST_ABORTED:
            self.aborted.popitem(last=False)

    def begun(self, rids: Iterable[str]) -> int:
        """The number of the last finish, begin or enter of any of these; 0 for none."""
        return max([self.opened.get(rid, 0) for rid in rids]) if self.opened else 0

    def lose_ways(self) -> None:
        """Nobody is told directly any more."""
        for stream in self.streams.values():
            stream.way = None

    def poison(self, edge: Edge, rid: str, error: ConnectorError) -> None:
        stream = self.streams.get((edge, rid))
        if stream is not None:
            stream.error = error

    # -- numbered messages ------------------------------------------------------------------------

    def number_it(self, message: Numbered, tickets: list[Ticket] | None = None) -> None:
        """Give a message its place in the session's order and keep it until it is acknowledged.

        The count comes last: a caller that is interrupted before leaves the number to the next message.
        """
        number = message.number = self.number + 1
        self.unacked[number] = message
        if tickets:
            self.tickets[number] = tickets
        if isinstance(message, (msg.Begin, msg.Enter, msg.Finish)):
            self.opened[message.rid] = number
            self.opened.move_to_end(message.rid)
            while len(self.opened) > MOST_OPENED:
                self.opened.popitem(last=False)
        self.number = number

    def has_numbered(self, message: Numbered) -> bool:
        """It is on its way, or was acknowledged."""
        number = message.number
        return 0 < number <= self.number and (number <= self.acked or self.unacked.get(number) is message)

    def acknowledge(self, count: int) -> None:
        """Everything up to `count` was applied: tickets that were not refused are stored."""
        if count <= self.acked and not self._flushes:
            return
        self.acked = max(self.acked, count)
        while self.unacked and (number := next(iter(self.unacked))) <= count:
            for ticket in self.tickets.get(number, ()):
                ticket.resolve("stored")
            self.tickets.pop(number, None)
            del self.unacked[number]
        while self._flushes and self._flushes[0][0] <= self.acked:
            self._flushes[0][1](None)
            self._flushes.popleft()

    def put_failed(self, number: int, member: int, error: ConnectorError) -> None:
        tickets = self.tickets.get(number, [])
        if member >= len(tickets):
            return
        self.refuse(tickets[member], error)

    def refuse(self, ticket: Ticket, error: ConnectorError) -> None:
        """The put came to nothing. Its stream's next put, or flush, says so, unless the ticket has."""
        ticket.resolve(None, error)
        stream = self.streams.get((ticket.edge, ticket.rid))
        if stream is not None and stream is ticket.stream:
            stream.refused = [*(stream.refused or []), ticket]
        elif not (isinstance(error, RequestAborted) and ticket.stream is not None and ticket.stream.former):
            # Of a use that is over anyway nobody need be told that it was aborted, too.
            self._stray(ticket)

    def _stray(self, ticket: Ticket) -> None:
        self._strays.setdefault(ticket.rid, []).append(ticket)
        while len(self._strays) > MOST_ABORTED:
            self._strays.popitem(last=False)

    def put_noted(self, number: int, member: int, outcome: str) -> None:
        tickets = self.tickets.get(number, [])
        if member < len(tickets):
            tickets[member].resolve(outcome)

    def when_acked(self, tell: Callable[[ConnectorError | None], None]) -> None:
        """Call `tell(None)` once all that was numbered until now is acknowledged, `tell(error)` if that is lost."""
        if self.acked >= self.number:
            tell(None)
        else:
            self._flushes.append((self.number, tell))

    def first_refusal(self) -> ConnectorError | None:
        """A refusal that nobody was told of, for flush to raise."""
        untold = [stream.refused for stream in self.streams.values() if stream.refused]
        for tickets in [*untold, *self._strays.values()]:
            while tickets:
                ticket = tickets.pop(0)
                if not ticket.raised and ticket.error is not None:
                    ticket.raised = True
                    return ticket.error.anew()
        self._strays.clear()
        return None

    def give_up(self, error: ConnectorError) -> None:
        """Nobody waits for what is open. The numbers go on: releases of views that are alive are still to come."""
        for tickets in self.tickets.values():
            for ticket in tickets:
                ticket.resolve(None, error)
        self.tickets.clear()
        self._tell_flushes(error)

    def _tell_flushes(self, error: ConnectorError) -> None:
        flushes, self._flushes = self._flushes, deque()
        for _, tell in flushes:
            tell(error)

    def lose_all(self, error: ConnectorError) -> list[Numbered]:
        """The broker of these numbers is gone: open puts are lost; the rest is numbered anew, to be sent again."""
        again: list[Numbered] = []
        words = (msg.Begin, msg.Enter, msg.Finish, msg.Abort)
        for number, message in self.unacked.items():
            for ticket in self.tickets.get(number, ()):
                self.refuse(ticket, error)
                # Who waits in a flush is told below.
                ticket.raised = ticket.raised or bool(self._flushes)
            if isinstance(message, words):
                again.append(message)
        self.tickets.clear()
        self.unacked.clear()
        self.opened.clear()
        self.number = self.acked = 0
        for stream in self.streams.values():
            stream.error = stream.error or error
        # The next broker numbers lives from the start.
        self.aborted = OrderedDict((rid, abort._replace(life=None)) for rid, abort in self.aborted.items())
        self._tell_flushes(error)
        for message in again:
            self.number_it(message)
        return again
