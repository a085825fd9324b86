"""One implementation of every verb for threads and for asyncio.

A verb that may wait is a generator: it yields the answers that it waits for and returns its result.
`run` drives it in the calling thread, `arun` in an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

from connector.client.requests import Answer
from connector.client.wakers import Gate

if TYPE_CHECKING:
    from connector.client.session import Session

T = TypeVar("T")
#: Seconds after which a waiting thread looks up.
SLICE = 0.5
#: A verb on its way: yields answers, gets their values sent in, returns T.
Verb = Generator[Answer, Any, T]


def run(verb: Verb[T], session: Session) -> T:
    """Drive a verb, blocking this thread at each answer."""
    try:
        answer = next(verb)
        while True:
            try:
                _wait(answer, session)
                value = answer.result()
            except BaseException as error:
                answer = verb.throw(error)
            else:
                answer = verb.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _wait(answer: Answer, session: Session) -> None:
    """Read what the broker says in this very thread, or wait until another one has. In slices: a Ctrl-C that comes just
    before the wait begins does not interrupt it."""
    while not answer.done:
        answer.tell = session.nudge
        if session.lead(answer.is_done, SLICE):
            return
        given = Gate()
        answer.tell = given.open
        if not answer.done:
            given.wait(SLICE)


async def arun(verb: Verb[T]) -> T:
    """Drive a verb in an event loop; cancelling the task is thrown into the verb."""
    loop = asyncio.get_running_loop()
    try:
        answer = next(verb)
        while True:
            try:
                await _given(answer, loop)
                value = answer.result()
            except BaseException as error:
                answer = verb.throw(error)
            else:
                answer = verb.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def _given(answer: Answer, loop: asyncio.AbstractEventLoop) -> None:
    future = loop.create_future()

    def settle() -> None:
        if not future.done():
            future.set_result(None)

    def tell() -> None:
        # A loop that is closed has nobody waiting in it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle)

    answer.tell = tell
    if not answer.done:
        await future
