"""Room for a put: from the shelf of blocks reserved ahead, or asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from connector.client.blocks import ReservedBlock
from connector.client.requests import Request
from connector.core.names import Edge
from connector.wire import messages as msg

if TYPE_CHECKING:
    from connector.client.session import Session


def at_hand(session: Session, edge: Edge, length: int) -> ReservedBlock | None:
    """A block from the shelf, if there is one. What is asked ahead goes with the next message. Lock held."""
    block = session.blocks.pop(length)
    if session.blocks.low:
        ask_ahead(session, edge, length)
    return block


def give_up(session: Session, request: Request) -> None:
    """The wait ended without room for the caller; what is granted all the same goes back."""
    with session.lock:
        session.cancel(request)
        if request.answer.done and not request.answer.failed():
            session.give_back(request.answer.result())
    session.push()


def ask_ahead(session: Session, edge: Edge, length: int) -> None:
    """Have the shelf filled, with the next message. Lock held."""
    session.give_back(session.blocks.make_room(length))
    count = session.blocks.to_ask(length)
    if not count or not session.up:
        return
    answer = session.ask(lambda n: msg.Reserve(n, edge, (length,) * count, 0.0, (), True), 30.0).answer
    session.urgent = True

    def keep() -> None:
        # Runs in the link's thread, under the session's lock. The two refer to each other no longer.
        answer.tell = None
        granted = answer.result() if not answer.failed() else []
        if session.closed:
            session.give_back(granted)
        else:
            session.blocks.add(length, count, granted)

    answer.tell = keep
