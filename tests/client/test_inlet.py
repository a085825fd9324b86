"""Who reads what comes: a caller that polls, or the link's thread once none does."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

import connector
from connector.client import link
from connector.client.inlet import Inlet
from connector.client.pairs import Pair
from connector.client.session import Session
from connector.wire import codec
from connector.wire import messages as msg
from tests.client.grown import HANG, Streams, nothing_left


class Ear:
    """An inlet with one socket, and what its link's thread sleeps in. `ticks`: how often that is to look soon."""

    def __init__(self) -> None:
        self.ticks = 0
        session = Session("b", "nowhere", lambda: None, lambda: None)
        session.up = True
        self.inlet = Inlet(session, lambda: None, self._tick)
        self.listener = select.epoll()
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        session.introduced.append(Pair(7, ours))
        self.inlet.take(codec.encode(0, [msg.Ping()], 1))
        self.inlet.watched_by(self.listener)

    def _tick(self) -> None:
        self.ticks += 1

    def tell(self) -> None:
        """What is no frame: it is read all the same."""
        self.theirs.send(b"\xc1")

    def wakes(self) -> bool:
        """What lies there wakes the link's thread."""
        return bool(self.listener.poll(0))

    def close(self) -> None:
        self.inlet.drop_pairs()
        self.inlet.close()
        self.listener.close()
        self.theirs.close()


@pytest.fixture
def ear() -> Iterator[Ear]:
    made = Ear()
    yield made
    made.close()


def test_a_caller_that_finds_something_will_read_what_comes_next(ear: Ear) -> None:
    ear.inlet.drain()
    ear.tell()
    assert ear.wakes()
    for _ in range(3):
        ear.inlet.drain()
        assert ear.ticks
        ear.ticks = 0
        ear.tell()
        assert not ear.wakes()


def test_a_caller_that_finds_nothing_leaves_it_to_the_link_s_thread(ear: Ear) -> None:
    for _ in range(3):
        ear.inlet.drain()
    assert not ear.ticks
    ear.tell()
    assert ear.wakes()


def test_when_the_caller_has_stopped_the_link_s_thread_listens_again(ear: Ear) -> None:
    """Not at its next look, which may be a moment after the caller's, but at the one behind it."""
    ear.tell()
    ear.inlet.drain()
    ear.tell()
    for wakes in (False, True):
        assert ear.ticks
        ear.ticks = 0
        ear.inlet.read()
        ear.tell()
        ear.inlet.listen()
        assert ear.wakes() is wakes
    assert not ear.ticks


def test_a_caller_that_was_at_it_when_the_link_s_thread_looked_has_it_look_again(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would listen, once the caller has stopped."""
    ear.tell()
    ear.inlet.drain()
    ear.inlet.listen()
    hear = ear.inlet._hear

    def looked(seconds: float) -> bool:
        # The other thread, while this one reads.
        ear.inlet.listen()
        return hear(seconds)

    monkeypatch.setattr(ear.inlet, "_hear", looked)
    ear.ticks = 0
    ear.inlet.drain()
    assert ear.ticks
    ear.inlet.listen()
    ear.tell()
    assert ear.wakes()


def test_what_comes_when_nobody_polls_any_more_is_read(
    told_host: connector.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the link's thread, however long it would sleep."""
    monkeypatch.setattr(link, "LONGEST", 1e6)
    with nothing_left(Streams(told_host.endpoint, 3), told_host) as streams:
        streams.into.poll()
        streams.warm()
        for _ in range(50):
            streams.put("r0")
            found: Any = None
            while not found:
                found = streams.into.poll()
            streams.is_next("r0", found["r0"][0])
            del found
        streams.put("r1")
        until = time.monotonic() + HANG
        while not streams.into.channel.fresh:
            told_host.status()
            assert time.monotonic() < until
        streams.read()


def test_a_caller_that_has_led_while_the_node_ended_listens_to_nothing() -> None:
    """It says who listens behind its lead: by then there may be nothing to listen to."""
    ear = Ear()
    ear.tell()
    ear.inlet.drain()
    assert not ear.wakes()
    ear.close()
    # The first time its own lead is held against it, the next it would listen.
    for _ in range(2):
        ear.inlet.listen()
