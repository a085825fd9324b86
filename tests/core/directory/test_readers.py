"""Readers i of n: who gets what, who is refused, and what is owed to one that does not come."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.errors import ReadersMismatch, ReaderTaken, Unclaimed


def kinds(errors: list[Any]) -> list[type]:
    return [type(error) for error in errors]


# -- fan-out --------------------------------------------------------------------------------------


def test_each_reader_gets_each_chunk_once(rig: Any) -> None:
    """B26: readers at different times, one of them asking twice; freed after the last."""
    writer, readers = rig.join(), [rig.reader(reader=i, readers=4) for i in (0, 2)]
    rig.put_all(writer, "a", 3, readers=4)
    got = {0: rig.read(readers[0]), 2: rig.read(readers[1])}
    rig.release(readers[0], *got[0])
    assert rig.used == 3 * 64
    for late in (3, 1):
        readers.append(rig.reader(reader=late, readers=4))
        got[late] = rig.read(readers[-1])
    assert all([d.index for d in one] == [0, 1, 2] for one in got.values())
    assert all({d.reader for d in one} == {i} for i, one in got.items())
    assert rig.is_empty()


def test_finish_by_one_reader_leaves_the_others_their_share(rig: Any) -> None:
    writer, first, second = rig.join(), rig.reader(readers=2), rig.reader(reader=1, readers=2)
    rig.put(writer, "a", 0, readers=2)
    rig.release(first, *rig.arrived(first))
    rig.finish(first, "a")
    rig.put(writer, "a", 1, last=True, readers=2)
    assert rig.arrived(first) == []
    assert [d.index for d in rig.read(second)] == [0, 1] and rig.is_empty()


def test_one_session_may_be_two_readers(rig: Any) -> None:
    writer, both = rig.join(), rig.reader(readers=2)
    assert rig.subscribe(both, reader=1, readers=2) is None
    rig.put(writer, "a", last=True, readers=2)
    assert sorted(d.reader for d in rig.read(both)) == [0, 1] and rig.is_empty()


def test_a_failure_of_one_readers_share_is_told_to_all(rig: Any) -> None:
    writer, first, second = rig.join(), rig.reader(readers=2), rig.reader(reader=1, readers=2)
    rig.put(writer, "a", 0, readers=2)
    rig.read(first), rig.read(second)
    rig.die(first)
    assert [type(e).__name__ for e in rig.failures(second)] == ["ReaderDied"]
    assert [type(e).__name__ for e in rig.failures(writer)] == ["ReaderDied"]


# -- another number of readers --------------------------------------------------------------------


def test_a_reader_of_another_number_is_refused_at_once(rig: Any) -> None:
    writer, reader = rig.join(), rig.join()
    rig.put(writer, "a", readers=2)
    error = rig.subscribe(reader, readers=1)
    assert type(error) is ReadersMismatch and error.facts["opened_for"] == 2 and error.facts["rid"] == "a"


def test_a_reader_that_came_first_hears_of_another_number_at_once(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader(readers=1)
    waiting = rig.wait(reader, "a")
    rig.put(writer, "a", readers=2)
    (error,) = rig.failures(reader)
    assert type(error) is ReadersMismatch and (error.facts["readers"], error.facts["opened_for"]) == (1, 2)
    assert rig.arrived(reader) == [] and waiting not in rig.state.sessions[reader].takes
    later = rig.wait(reader, "a")
    assert type(rig.refusal(reader, later)) is ReadersMismatch


def test_two_readers_must_agree(rig: Any) -> None:
    rig.reader(reader=0, readers=2)
    assert type(rig.subscribe(rig.join(), reader=1, readers=3)) is ReadersMismatch


def test_reader_i_of_n_is_below_n(rig: Any) -> None:
    assert type(rig.subscribe(rig.join(), reader=2, readers=2)) is ReadersMismatch


def test_one_live_session_a_reader(rig: Any) -> None:
    first, second = rig.reader("talker-0"), rig.join()
    error = rig.subscribe(second)
    assert type(error) is ReaderTaken and error.facts["held_by"] == "talker-0"
    assert rig.subscribe(first) is None
    rig.die(first)
    assert rig.subscribe(second) is None


# -- those that do not come -----------------------------------------------------------------------


def test_a_payload_nobody_comes_for_is_an_error_to_its_writer(make_rig: Any) -> None:
    rig = make_rig(unclaimed_after=60.0)
    writer = rig.join()
    rig.put(writer, "a", last=True, nbytes=40)
    rig.tick(59.0)
    assert rig.failures(writer) == [] and rig.used == 64
    rig.tick(1.0)
    (error,) = rig.failures(writer)
    assert type(error) is Unclaimed
    assert (error.facts["rid"], error.facts["size"], error.facts["limit"]) == ("a", 40, 60.0)
    assert rig.used == 0
    rig.finish(writer, "a")
    rig.tick(60.0)
    assert rig.is_empty()


def test_an_edge_may_have_a_time_of_its_own(make_rig: Any) -> None:
    rig = make_rig(unclaimed_after=60.0, unclaimed_edges={make_rig.other: 5.0})
    writer = rig.join()
    rig.put(writer, "a")
    rig.put(writer, "a", edge=rig.other)
    rig.tick(5.0)
    assert kinds(rig.failures(writer)) == [Unclaimed] and rig.used == 64


@pytest.mark.parametrize("sealed", [0.1, 0.7, 1.1, 33.3, 1e6 + 0.3])
@pytest.mark.parametrize("patience", [0.2, 0.1, 7.7])
def test_time_is_up_at_the_due_time_whatever_the_rounding(make_rig: Any, sealed: float, patience: float) -> None:
    """A due time that rounds the wrong way must not be looked at again and again."""
    rig = make_rig(unclaimed_after=patience)
    writer = rig.join()
    rig.tick(sealed)
    rig.put(writer, "a")
    rig.now = sealed + patience
    rig.tick(0.0)
    assert kinds(rig.failures(writer)) == [Unclaimed]


def test_a_reader_that_comes_in_time_gets_all(make_rig: Any) -> None:
    rig = make_rig(unclaimed_after=60.0)
    writer = rig.join()
    rig.put_all(writer, "a", 2)
    rig.tick(50.0)
    reader = rig.reader()
    rig.tick(100.0)
    assert [d.index for d in rig.read(reader)] == [0, 1] and rig.failures(writer) == []


def test_a_slow_reader_is_a_reader(make_rig: Any) -> None:
    """What its window keeps back is not unclaimed."""
    rig = make_rig(unclaimed_after=60.0, window=1)
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 3)
    rig.tick(61.0)
    rig.tick(61.0)
    assert rig.failures(writer) == [] and [d.index for d in rig.read(reader)] == [0, 1, 2]


def test_a_slow_reader_of_a_failed_stream_gets_all_that_came_in_order(make_rig: Any) -> None:
    rig = make_rig(unclaimed_after=60.0, window=1)
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 3, last=False)
    rig.die(writer)
    for _ in range(3):
        rig.tick(61.0)
    assert [d.index for d in rig.read(reader)] == [0, 1, 2]
    assert [type(e).__name__ for e in rig.failures(reader)] == ["WriterDied"] and rig.is_empty()


def test_a_reader_that_died_gives_its_successor_the_whole_time(make_rig: Any) -> None:
    """Patience begins anew: the payload was claimed until then."""
    rig = make_rig(unclaimed_after=60.0)
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    rig.tick(1000.0)
    rig.die(reader)
    rig.tick(59.0)
    assert rig.failures(writer) == []
    assert len(rig.read(rig.reader())) == 1


def test_a_failure_nobody_comes_for_is_forgotten(make_rig: Any) -> None:
    rig = make_rig(unclaimed_after=60.0)
    writer = rig.join()
    rig.put(writer, "a")
    rig.die(writer)
    rig.tick(60.0)
    assert rig.is_empty()


def test_one_reader_of_two_that_never_comes_ends_the_stream(make_rig: Any) -> None:
    rig = make_rig(unclaimed_after=60.0)
    writer, here = rig.join(), rig.reader(readers=2)
    rig.put(writer, "a", 0, readers=2)
    held = rig.arrived(here)
    rig.tick(60.0)
    assert kinds(rig.failures(writer)) == kinds(rig.failures(here)) == [Unclaimed]
    assert [e.holds for e in rig.heard(here, ef.DropHolds)] == [(rig.hold(held[0]),)]
    rig.release(here, *held)
    assert rig.used == 0


# -- claims and credits ---------------------------------------------------------------------------


def test_a_reader_without_push_gets_what_it_claims(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader(push=False)
    rig.put(writer, "a", last=True)
    rig.put(writer, "b", last=True)
    assert rig.arrived(reader) == []
    rig.claim(reader, "b")
    assert [d.rid for d in rig.arrived(reader)] == ["b"]


def test_a_wait_is_a_claim(rig: Any) -> None:
    """Also one that came before its session had subscribed."""
    writer, reader = rig.join(), rig.join()
    early = rig.wait(reader, "a")
    assert rig.subscribe(reader, push=False) is None
    rig.put(writer, "a", last=True)
    assert [d.rid for d in rig.arrived(reader)] == ["a"]
    assert early not in rig.state.sessions[reader].takes
    rig.put(writer, "b", last=True)
    rig.wait(reader, "b")
    assert [d.rid for d in rig.arrived(reader)] == ["b"]


def test_claims_are_not_kept_back_by_pushes_that_nobody_takes(make_rig: Any) -> None:
    rig = make_rig(window=2, claim_window=3)
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "pushed", 5)
    rig.claim(reader, "claimed")
    rig.put_all(writer, "claimed", 5)
    got = rig.arrived(reader)
    assert [(d.rid, d.index) for d in got] == [("pushed", 0), ("pushed", 1)] + [("claimed", i) for i in range(3)]
    rig.take(reader, got[2])
    assert [(d.rid, d.index) for d in rig.arrived(reader)] == [("claimed", 3)]


def test_a_claim_uses_no_credit_of_pushes(make_rig: Any) -> None:
    rig = make_rig(window=1)
    writer, reader = rig.join(), rig.reader()
    rig.claim(reader, "a")
    rig.put_all(writer, "a", 3)
    rig.put(writer, "b", last=True)
    assert [d.rid for d in rig.arrived(reader)] == ["a", "a", "a", "b"]


def test_what_lies_untaken_on_one_edge_keeps_nothing_back_on_another(make_rig: Any) -> None:
    rig = make_rig(window=1)
    writer, reader = rig.join(), rig.reader()
    assert rig.subscribe(reader, edge=rig.third) is None
    rig.put_all(writer, "a", 3)
    rig.put_all(writer, "b", 3, edge=rig.third)
    assert [(d.rid, d.index) for d in rig.arrived(reader)] == [("a", 0), ("b", 0)]


def test_a_release_without_a_take_returns_the_credit(make_rig: Any) -> None:
    rig = make_rig(window=1)
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 3)
    for index in range(3):
        (got,) = rig.arrived(reader)
        assert got.index == index
        rig.release(reader, got)
    assert rig.is_empty()


def test_only_its_reader_can_claim(rig: Any) -> None:
    writer, reader, stranger = rig.join(), rig.reader(push=False), rig.join()
    rig.put(writer, "a", last=True)
    rig.claim(stranger, "a")
    assert rig.arrived(reader) == [] and rig.arrived(stranger) == []


def test_claims_are_forgotten_with_their_stream(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    for number in range(20):
        rig.claim(reader, f"r{number}")
        rig.put(writer, f"r{number}", last=True)
    rig.read(reader)
    (subscription,) = rig.state.sessions[reader].subscriptions.values()
    assert not subscription.claims and not subscription.ready and not subscription.wanted
