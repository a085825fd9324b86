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
#: A verb on its way: yields futures, gets their results sent in, returns T.
Verb = Generator["Future[Any]", Any, T]


def run(verb: Verb[T]) -> T:
    """Drive a verb, blocking this thread at each future."""
    try:
        future = next(verb)
        while True:
            try:
                value = future.result()
            except BaseException as error:
                future = verb.throw(error)
            else:
                future = verb.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result


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
