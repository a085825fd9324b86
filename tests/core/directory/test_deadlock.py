"""Puts that wait for room which only the waiting could make."""

from __future__ import annotations

from typing import Any

from connector.core.errors import PoolDeadlock, PoolFull


def half_each(rig: Any) -> tuple[int, int, int, int, int]:
    """Two requests hold half of the pool each; their readers need one more chunk of each before they release."""
    one, two = rig.join("writer-1"), rig.join("writer-2")
    reader = rig.reader(push=False)
    for writer, rid in ((one, "a"), (two, "b")):
        rig.claim(reader, rid)
        rig.put(writer, rid, 0, size=512)
        rig.take(reader, *rig.arrived(reader))
        rig.wait(reader, rid, timeout=60.0)
    return one, two, reader, rig.reserve(one, 512, rid="a"), rig.reserve(two, 512, rid="b")


def test_the_youngest_of_two_that_block_each_other_is_refused(make_rig: Any) -> None:
    rig = make_rig(pool=1024, deadlock_after=1.0)
    one, two, _, first, second = half_each(rig)
    rig.tick(0.9)
    assert rig.refusal(two, second) is None
    rig.tick(0.1)
    error = rig.refusal(two, second)
    assert type(error) is PoolDeadlock and error.facts["rid"] == "b" and error.facts["size"] == 512
    assert error.facts["waiting_too"] == [f"a on {rig.edge} by writer-1 (pid {1000 + one}), 512 B"]
    assert rig.refusal(one, first) is None and rig.state.counters["deadlocks"] == 1


def test_what_the_refused_one_frees_lets_the_other_go(make_rig: Any) -> None:
    rig = make_rig(pool=1024)
    one, two, reader, first, _ = half_each(rig)
    rig.tick(1.0)
    rig.abort(two, "b")
    rig.release(reader, *rig.held(reader, "b"))
    assert rig.granted(one, first) is not None


def test_nobody_is_refused_while_a_reader_can_make_room(make_rig: Any) -> None:
    """The reader waits for one of the two only: it may release the other."""
    rig = make_rig(pool=1024)
    one, two = rig.join(), rig.join()
    reader, free = rig.reader(push=False), rig.reader(edge=rig.other)
    rig.claim(reader, "a")
    rig.put(one, "a", 0, size=512)
    rig.wait(reader, "a", timeout=60.0)
    rig.put(two, "b", 0, size=512, edge=rig.other)
    requests = [(one, rig.reserve(one, 512, rid="a")), (two, rig.reserve(two, 512, rig.other, rid="b"))]
    for _ in range(20):
        rig.tick(1.0)
    assert all(rig.refusal(*request) is None for request in requests)
    rig.read(free)
    assert rig.granted(*requests[0]) is not None or rig.granted(*requests[1]) is not None


def test_a_look_can_be_ended_so_it_is_no_deadlock(make_rig: Any) -> None:
    rig = make_rig(pool=1024)
    one, two, _, first, second = half_each(rig)
    rig.inspect(rig.join(), "a")
    for _ in range(5):
        rig.tick(1.0)
    assert rig.refusal(one, first) is None and rig.refusal(two, second) is None


def test_a_void_payload_may_be_dropped_so_it_is_no_deadlock(make_rig: Any) -> None:
    """Its reader was told to drop it, and may at any time."""
    rig = make_rig(pool=1024)
    one, two, reader, first, _ = half_each(rig)
    rig.remove(one, "b")
    third = rig.reserve(two, 512, rid="c")
    for _ in range(5):
        rig.tick(1.0)
    assert rig.refusal(one, first) is None and rig.refusal(two, third) is None
    rig.release(reader, *rig.held(reader, "b"))
    assert rig.granted(one, first) is not None


def test_a_single_waiter_is_never_refused_before_its_deadline(make_rig: Any) -> None:
    rig = make_rig(pool=1024)
    writer, reader = rig.join(), rig.reader(push=False)
    rig.claim(reader, "a")
    rig.put(writer, "a", 0, size=1024)
    rig.wait(reader, "a", timeout=60.0)
    waiting = rig.reserve(writer, 512, rid="a", timeout=30.0)
    for _ in range(29):
        rig.tick(1.0)
    assert rig.refusal(writer, waiting) is None
    rig.tick(1.0)
    assert type(rig.refusal(writer, waiting)) is PoolFull


def test_reservations_of_those_who_wait_are_stuck(make_rig: Any) -> None:
    """Each holds half and asks for the other half: neither can seal."""
    rig = make_rig(pool=1024)
    one, two = rig.join(), rig.join()
    rig.room(one, 512), rig.room(two, 512)
    first, second = rig.reserve(one, 512), rig.reserve(two, 512)
    rig.tick(1.0)
    assert rig.refusal(one, first) is None and type(rig.refusal(two, second)) is PoolDeadlock


def test_a_reservation_of_one_who_does_not_wait_is_not_stuck(make_rig: Any) -> None:
    rig = make_rig(pool=1024)
    one, two, three = rig.join(), rig.join(), rig.join()
    rig.room(one, 512), rig.room(two, 256), rig.room(three, 256)
    first, second = rig.reserve(one, 512), rig.reserve(two, 512)
    for _ in range(5):
        rig.tick(1.0)
    assert rig.refusal(one, first) is None and rig.refusal(two, second) is None


def test_movement_puts_the_verdict_off(make_rig: Any) -> None:
    rig = make_rig(pool=2048, deadlock_after=1.0)
    one, two, _, first, second = half_each(rig)
    spare = rig.join()
    for _ in range(10):
        rig.tick(0.6)
        rig.give_back(spare, *[block[0] for block in rig.ahead(spare, [64])])
    assert rig.granted(one, first) is not None or rig.refusal(two, second) is None


def test_a_due_time_that_rounds_down_does_not_hang_the_loop(make_rig: Any) -> None:
    """0.7 + 0.1 - 0.7 is below 0.1: the look is due, and must not find that it is not."""
    rig = make_rig(pool=1024, deadlock_after=0.1)
    rig.tick(0.7)
    _, two, _, _, second = half_each(rig)
    rig.now = 0.7 + 0.1
    rig.tick(0.0)
    assert type(rig.refusal(two, second)) is PoolDeadlock
