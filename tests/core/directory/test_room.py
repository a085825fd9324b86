"""Room: who gets the next block, who waits, who is refused, and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.errors import PayloadTooLarge, PoolFull

KIB = 1024


def test_a_payload_that_can_never_fit_is_refused_at_once(rig: Any) -> None:
    writer = rig.join()
    error = rig.refusal(writer, rig.reserve(writer, 64 * KIB + 1, rid="a"))
    assert type(error) is PayloadTooLarge
    assert error.facts == {"edge": str(rig.edge), "rid": "a", "size": 64 * KIB + 1, "limit": 64 * KIB}
    assert rig.granted(writer, rig.reserve(writer, 64 * KIB)) is not None


def test_waiters_of_an_edge_are_served_in_order(rig: Any) -> None:
    """A small put does not overtake a large one before it."""
    writer = rig.join()
    whole = rig.room(writer, 64 * KIB)
    large, small = rig.reserve(writer, 60 * KIB), rig.reserve(writer, 8 * KIB)
    assert rig.granted(writer, large) is None
    effects = rig.give_back(writer, whole)
    assert [e.request for e in rig.of(effects, ef.Granted)] == [large]
    rig.give_back(writer, rig.granted(writer, large))
    assert rig.granted(writer, small) is not None


def test_a_release_serves_who_waits(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True, size=64 * KIB)
    waiting = rig.reserve(writer, 64 * KIB)
    effects = rig.release(reader, *rig.arrived(reader))
    assert [e.request for e in rig.of(effects, ef.Granted)] == [waiting]


def test_room_is_full_at_the_deadline(rig: Any) -> None:
    """It says who holds what."""
    writer, reader = rig.join(), rig.reader("talker")
    rig.put(writer, "a", last=True, size=64 * KIB, nbytes=100)
    waiting = rig.reserve(writer, 64, timeout=2.0, rid="b")
    rig.tick(1.5)
    assert rig.refusal(writer, waiting) is None
    rig.tick(0.5)
    error = rig.refusal(writer, waiting)
    assert type(error) is PoolFull and isinstance(error, TimeoutError)
    assert error.facts["rid"] == "b" and error.facts["waited"] == 2.0 and error.facts["free"] == 0
    assert error.facts["by_edge"] == [f"{rig.edge} {64 * KIB} B"]
    assert error.facts["held_by"] == [f"talker (pid {1000 + reader}, live) 100 B"]
    assert not rig.state.edge(rig.edge).waiters


def test_the_next_waiter_goes_when_the_first_gives_up(rig: Any) -> None:
    writer = rig.join()
    rig.room(writer, 32 * KIB)
    rig.reserve(writer, 64 * KIB, timeout=1.0)
    small = rig.reserve(writer, 64, timeout=9.0)
    assert rig.granted(writer, small) is None
    rig.tick(1.0)
    assert rig.granted(writer, small) is not None


def test_a_cancelled_waiter_lets_the_next_one_go(rig: Any) -> None:
    writer = rig.join()
    rig.room(writer, 32 * KIB)
    large, small = rig.reserve(writer, 64 * KIB), rig.reserve(writer, 64)
    rig.cancel(writer, large)
    assert rig.granted(writer, small) is not None
    rig.tick(100.0)
    assert rig.refusal(writer, large) is None


# -- between edges --------------------------------------------------------------------------------


def test_an_edge_with_a_slow_reader_fills_up_alone(rig: Any) -> None:
    """It never takes the last part of the pool, so that another edge finds room at once."""
    slow, fast, reader = rig.join(), rig.join(), rig.reader(edge=rig.other)
    rig.reader()
    waiting = []
    for index in range(64):
        request = rig.reserve(slow, KIB)
        handle = rig.granted(slow, request)
        if handle is None:
            waiting.append(request)
            continue
        rig.seal(slow, handle, rig.member("s", index))
    assert len(waiting) == 8 and rig.state.edge(rig.edge).used == 56 * KIB
    for index in range(20):
        rig.put(fast, "f", index, edge=rig.other, size=KIB)
        rig.read(reader)
    assert rig.granted(slow, waiting[0]) is None


def test_blocks_that_are_granted_count_before_they_are_sealed(rig: Any) -> None:
    """A burst of puts that are still being written does not get past the guard."""
    slow, fast = rig.join(), rig.join()
    rig.reader(edge=rig.other)
    requests = [rig.reserve(slow, KIB) for _ in range(64)]
    assert sum(rig.granted(slow, r) is not None for r in requests) == 56
    assert rig.granted(fast, rig.reserve(fast, KIB, rig.other)) is not None


def test_a_freed_block_goes_to_the_edge_below_its_share(rig: Any) -> None:
    greedy, modest = rig.join(), rig.join()
    blocks = [rig.room(greedy, KIB) for _ in range(64)]
    first = rig.reserve(greedy, KIB)
    late = rig.reserve(modest, KIB, rig.other)
    rig.give_back(greedy, blocks[0])
    assert rig.granted(modest, late) is not None and rig.granted(greedy, first) is None


def test_a_large_put_that_waits_for_one_edge_does_not_stop_a_third(rig: Any) -> None:
    """Its room is held by a slow reader's edge; the small put of another edge below its share goes ahead."""
    slow, large, small = rig.join(), rig.join(), rig.join()
    rig.reader(edge=rig.other), rig.reader(edge=rig.third)
    for _ in range(56):
        rig.room(slow, KIB)
    waiting = rig.reserve(large, 20 * KIB, rig.other)
    assert rig.granted(large, waiting) is None
    assert rig.granted(small, rig.reserve(small, KIB, rig.third)) is not None
    assert rig.granted(slow, rig.reserve(slow, KIB)) is None


def test_a_put_above_its_edges_share_gets_through_an_empty_pool(rig: Any) -> None:
    writer = rig.join()
    rig.reader(), rig.reader(edge=rig.other)
    assert rig.granted(writer, rig.reserve(writer, 63 * KIB)) is not None


def test_a_block_may_be_sealed_on_another_edge_than_it_was_asked_for(rig: Any) -> None:
    writer = rig.join()
    handle = rig.room(writer, KIB)
    assert rig.state.edge(rig.edge).reserved == KIB
    rig.seal(writer, handle, rig.member("a", last=True), edge=rig.other)
    assert rig.state.edge(rig.edge).reserved == 0 and rig.state.edge(rig.other).used == KIB


# -- ahead ----------------------------------------------------------------------------------------


def test_blocks_ahead_are_capped_for_a_session(make_rig: Any) -> None:
    rig = make_rig(ahead_session=4 * KIB)
    writer = rig.join()
    assert len(rig.ahead(writer, [KIB] * 10)) == 4
    assert rig.ahead(writer, [KIB]) == []
    assert len(rig.ahead(rig.join(), [KIB])) == 1


def test_blocks_ahead_are_capped_in_all(make_rig: Any) -> None:
    rig = make_rig(ahead_total=0.25)
    blocks = [rig.ahead(rig.join(), [KIB] * 6) for _ in range(4)]
    assert [len(got) for got in blocks] == [6, 6, 4, 0]
    assert rig.state.reserved_bytes == 16 * KIB


def test_the_cap_holds_for_sizes_that_are_rounded_up(make_rig: Any) -> None:
    rig = make_rig(ahead_session=128)
    assert [length for _, length in rig.ahead(rig.join(), [1, 63, 1])] == [64, 64]


def test_nothing_is_given_ahead_while_someone_waits(rig: Any) -> None:
    writer, other = rig.join(), rig.join()
    rig.room(writer, 32 * KIB)
    rig.reserve(writer, 64 * KIB)
    assert rig.ahead(other, [64]) == []


def test_nothing_is_given_ahead_of_the_last_part_of_the_pool(rig: Any) -> None:
    writer = rig.join()
    rig.room(writer, 56 * KIB)
    assert rig.ahead(rig.join(), [64]) == []


def test_blocks_ahead_are_recalled_when_someone_waits(rig: Any) -> None:
    hoarder, writer = rig.join(), rig.join()
    (ahead,) = rig.ahead(hoarder, [8 * KIB])
    waiting = rig.reserve(writer, 64 * KIB)
    rig.reserve(writer, 64 * KIB)
    assert len(rig.heard(hoarder, ef.Recall)) == 1 and not rig.heard(writer, ef.Recall)
    rig.give_back(hoarder, ahead[0])
    assert rig.granted(writer, waiting) is not None


def test_the_next_wait_recalls_again(rig: Any) -> None:
    hoarder, writer = rig.join(), rig.join()
    for round_ in (1, 2):
        (ahead,) = rig.ahead(hoarder, [8 * KIB])
        waiting = rig.reserve(writer, 64 * KIB)
        assert len(rig.heard(hoarder, ef.Recall)) == round_
        rig.give_back(hoarder, ahead[0])
        rig.give_back(writer, rig.granted(writer, waiting))


def test_a_block_that_is_given_back_twice_is_given_back_once(rig: Any) -> None:
    writer, other = rig.join(), rig.join()
    handle = rig.room(writer)
    assert rig.of(rig.give_back(other, handle), ef.FreeEntry) == []
    assert len(rig.of(rig.give_back(writer, handle), ef.FreeEntry)) == 1
    assert rig.of(rig.give_back(writer, handle), ef.FreeEntry) == []


def test_after_a_lost_link_unnamed_blocks_are_freed(rig: Any) -> None:
    writer = rig.join()
    kept, lost = rig.room(writer), rig.room(writer)
    effects = rig.resync(writer, kept)
    assert [e.handle for e in rig.of(effects, ef.FreeEntry)] == [lost]
    rig.seal(writer, kept, rig.member("a", last=True))
    assert rig.put_failures(writer) == []


# -- blocks and generations -----------------------------------------------------------------------


def test_entries_may_run_out_before_bytes_do(make_rig: Any) -> None:
    rig = make_rig(max_blocks=2)
    writer = rig.join()
    first, _ = rig.room(writer), rig.room(writer)
    waiting = rig.reserve(writer, 64, timeout=1.0)
    assert rig.granted(writer, waiting) is None
    rig.give_back(writer, first)
    assert rig.granted(writer, waiting) is not None
    late = rig.reserve(writer, 64, timeout=1.0)
    rig.tick(1.0)
    assert rig.refusal(writer, late).facts["blocks_left"] == 0


def test_the_ceiling_is_raised_before_a_generation_is_used(make_rig: Any) -> None:
    rig = make_rig(generation_step=4)
    writer = rig.join()
    ceiling = 0
    for _ in range(10):
        rig.give_back(writer, rig.room(writer))
    for effect in rig.effects:
        if isinstance(effect, ef.RaiseCeiling):
            ceiling += 4
        if isinstance(effect, ef.WriteEntry):
            assert effect.handle.generation <= ceiling
    assert ceiling == 12


def test_the_entry_is_written_before_the_answer(rig: Any) -> None:
    writer = rig.join()
    rig.room(writer)
    kinds = [type(e) for e in rig.effects if isinstance(e, (ef.RaiseCeiling, ef.WriteEntry, ef.Granted))]
    assert kinds == [ef.RaiseCeiling, ef.WriteEntry, ef.Granted]


def test_no_generation_is_handed_out_twice(rig: Any) -> None:
    writer = rig.join()
    seen = set()
    for _ in range(50):
        handle = rig.room(writer)
        assert handle.generation not in seen
        seen.add(handle.generation)
        rig.give_back(writer, handle)


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [1, 2])
def test_a_batch_is_freed_with_its_last_pair(rig: Any, readers: int) -> None:
    writer = rig.join()
    sessions = [rig.reader(reader=i, readers=readers) for i in range(readers)]
    members = [rig.member(f"r{i}", last=True, readers=readers) for i in range(8)]
    rig.seal(writer, rig.room(writer, KIB), *members)
    arrived = [(s, d) for s in sessions for d in rig.arrived(s)]
    assert len(arrived) == 8 * readers
    for session, descriptor in arrived:
        assert rig.used == KIB
        rig.release(session, descriptor)
    assert rig.is_empty()


def test_a_block_without_members_is_freed_at_once(rig: Any) -> None:
    writer = rig.join()
    rig.seal(writer, rig.room(writer))
    assert rig.used == 0


def test_timers_of_what_is_gone_do_not_pile_up(rig: Any) -> None:
    """Each request leaves a timer of many minutes behind; they are thrown out in between."""
    writer, reader = rig.join(), rig.reader()
    for number in range(4000):
        rig.directory.handle(rig.awaiting(reader, f"r{number}"))
        rig.quick_put(writer, f"r{number}")
        rig.quick_release(reader)
    assert len(rig.state.timers) <= 2 * rig.state.TIMERS and rig.is_empty()
    rig.tick(0.0)
