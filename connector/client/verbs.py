"""One implementation of every verb for threads and for asyncio.

A verb that may wait is a generator: it yields the futures that it waits for and returns its result.
`run` drives it in the calling thread, `arun` in an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
#: Seconds after which a waiting thread looks up.
SLICE = 0.5
#: A verb on its way: yields futures, gets their results sent in, returns T.
Verb = Generator["Future[Any]", Any, T]


def run(verb: Verb[T]) -> T:
    """Drive a verb, blocking this thread at each future."""
    try:
        future = next(verb)
        while True:
            try:
                _wait(future)
                value = future.result()
            except BaseException as error:
                future = verb.throw(error)
            else:
                future = verb.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _wait(future: Future[Any]) -> None:
    """Wait in slices: a Ctrl-C that comes just before the wait begins does not interrupt it."""
    while not future.done():
        try:
            # Returns the verb's own error, if it has one; what it raises is only its own time-out.
            future.exception(timeout=SLICE)
        except TimeoutError:
            continue


async def arun(verb: Verb[T]) -> T:
    """Drive a verb in an event loop; cancelling the task is thrown into the verb."""
    try:
        future = next(verb)
        while True:
            try:
                value = await asyncio.wrap_future(future)
            except BaseException as error:
                future = verb.throw(error)
            else:
                future = verb.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result
