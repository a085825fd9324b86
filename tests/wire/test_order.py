"""Frames that come by two ways are read in the order in which they were sent."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.core.errors import ProtocolViolation
from connector.wire import codec
from connector.wire import messages as msg
from connector.wire.codec import Envelope
from connector.wire.order import MOST_EARLY, InOrder, send_over


def frame(order: int) -> Envelope:
    return Envelope(order, [], order)


def test_an_order_travels_and_is_left_out_where_there_is_none() -> None:
    for order in (0, 1, 2**63 - 1):
        sent = codec.encode(3, [msg.Pong()], order)
        assert codec.decode(sent, from_broker=False) == Envelope(3, [msg.Pong()], order)
    assert codec.encode(3, []) == codec.encode(3, [], 0) != codec.encode(3, [], 1)


@pytest.mark.parametrize("order", [b"\xff", b"\xa1x", b"\xc3", b"\xcf" + b"\xff" * 8, b"\x01\x01"])
def test_an_order_that_is_no_count_is_refused(order: bytes) -> None:
    size = 0x94 + (len(order) == 2 and order != b"\xa1x")
    with pytest.raises(ProtocolViolation):
        codec.decode(bytes([size, 4, 0, 0x90]) + order, from_broker=False)


@given(st.permutations(range(1, 30)))
def test_any_mixture_is_read_in_order_each_once(orders: list[int]) -> None:
    arriving = InOrder()
    read = [envelope.order for order in orders for envelope in arriving.take(frame(order))]
    assert read == list(range(1, 30)) and not arriving.waits


def test_what_comes_early_waits_and_says_so() -> None:
    arriving = InOrder()
    assert arriving.take(frame(2)) == [] and arriving.waits
    assert arriving.take(frame(1)) == [frame(1), frame(2)] and not arriving.waits


def test_a_frame_without_an_order_is_read_as_it_comes() -> None:
    arriving = InOrder()
    assert arriving.take(frame(2)) == []
    assert arriving.take(frame(0)) == [frame(0)] and arriving.waits


@pytest.mark.parametrize("again", [1, 3])
def test_a_frame_that_came_before_is_no_news(again: int) -> None:
    """Its sender was interrupted between the sending and the forgetting."""
    arriving = InOrder()
    arriving.take(frame(1))
    arriving.take(frame(3))
    assert arriving.take(frame(again)) == []
    assert arriving.take(frame(2)) == [frame(2), frame(3)]


def test_not_more_than_a_bound_may_wait() -> None:
    arriving = InOrder()
    for order in range(2, 2 + MOST_EARLY):
        arriving.take(frame(order))
    with pytest.raises(ProtocolViolation):
        arriving.take(frame(2 + MOST_EARLY))


@pytest.mark.parametrize(
    ("code", "told"), [(errno.EAGAIN, False), (errno.ENOBUFS, False), (errno.EPIPE, True), (errno.EMSGSIZE, None)]
)
def test_a_lifeline_that_cannot_take_a_frame_loses_none_in_silence(code: int, told: bool | None) -> None:
    def send(frame: bytes) -> int:
        raise OSError(code, os.strerror(code))

    if told is None:
        with pytest.raises(OSError, match=os.strerror(code)):
            send_over(send, b"x")
    else:
        assert send_over(send, b"x") is told
