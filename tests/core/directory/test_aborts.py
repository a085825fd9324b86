"""Abort ends a rid everywhere, and no late put brings it back."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.errors import RequestAborted


def kinds(errors: list[Any]) -> list[type]:
    return [type(error) for error in errors]


def tags(descriptors: list[ef.Descriptor]) -> list[str]:
    return [d.manifest.decode() for d in descriptors]


def test_abort_ends_a_rid_on_every_edge_and_in_every_life(rig: Any) -> None:
    writer, operator = rig.join(), rig.join()
    rig.put(writer, "a", 0, last=True, nbytes=10)
    rig.finish(writer, "a")
    rig.put(writer, "a", 0, nbytes=20)
    rig.put(writer, "a", 0, edge=rig.other, nbytes=30)
    rig.put(writer, "b", last=True)
    report = rig.abort(operator, "a")
    assert (report["payloads"], report["bytes"], report["held"]) == (3, 60, 0)
    assert [d.rid for d in rig.read(rig.reader())] == ["b"] and rig.is_empty()


def test_a_held_payload_stays_until_its_reader_answers(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 2)
    (told,) = rig.arrived(reader)
    report = rig.abort(writer, "a")
    assert (report["payloads"], report["held"]) == (1, 1)
    assert [e.holds for e in rig.heard(reader, ef.DropHolds)] == [(rig.hold(told),)]
    assert rig.used == 64
    rig.release(reader, told)
    assert rig.is_empty()


def test_every_session_hears_of_an_abort(rig: Any) -> None:
    sessions = [rig.join() for _ in range(3)]
    report = rig.abort(sessions[0], "a", "client went away")
    for session in sessions:
        ((notice,),) = [e.notices for e in rig.heard(session, ef.Notices)]
        assert (notice.number, notice.rid, notice.reason) == (report["number"], "a", "client went away")


def test_one_batch_of_notices_is_under_way_at_a_time(rig: Any) -> None:
    writer, other = rig.join(), rig.join()
    for rid in "abc":
        rig.abort(writer, rid)
    assert [[n.rid for n in e.notices] for e in rig.heard(other, ef.Notices)] == [["a"]]
    rig.hear(other)
    assert [[n.rid for n in e.notices] for e in rig.heard(other, ef.Notices)] == [["a"], ["b", "c"]]


def test_what_was_heard_long_ago_is_forgotten(rig: Any) -> None:
    """Not before the next heartbeat: a put that was made before may still be on its way."""
    writer, other = rig.join(), rig.join()
    rig.abort(other, "a")
    put_at = rig.seen[writer]
    rig.hear(writer)
    rig.hear(other)
    rig.tick(5.0)
    rig.put(writer, "a", seen=put_at)
    assert [type(error) for error in rig.put_failures(writer)] == [RequestAborted]
    for _ in range(2):
        rig.tick(5.0)
    assert not any(session.owed for session in rig.state.sessions.values()) and not rig.state.tombstones


def test_too_many_notices_are_replaced_by_the_word_that_some_are_lost(make_rig: Any) -> None:
    rig = make_rig(max_notices=2)
    writer, silent = rig.join(), rig.join()
    for number in range(5):
        rig.abort(writer, f"r{number}")
    assert len(rig.state.sessions[silent].notices) == 2
    rig.hear(silent)
    first, second = rig.heard(silent, ef.Notices)
    assert not first.lost and second.lost and [n.rid for n in second.notices] == ["r1", "r2"]


def test_a_late_put_of_an_aborted_life_is_refused(rig: Any) -> None:
    """Its session had not heard of the abort when it put."""
    writer, other, reader = rig.join(), rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.abort(other, "a")
    rig.put(writer, "a", 1)
    (error,) = rig.put_failures(writer)
    assert type(error) is RequestAborted and error.facts["reason"] == "stop"
    rig.release(reader, *rig.arrived(reader))
    assert rig.failures(reader) == [] and rig.is_empty()


def test_a_put_after_the_abort_was_heard_opens_a_new_life(rig: Any) -> None:
    writer, other = rig.join(), rig.join()
    rig.put(writer, "a", 0, tag="one")
    rig.abort(other, "a")
    rig.hear(writer)
    rig.put(writer, "a", 0, tag="two", last=True)
    assert tags(rig.read(rig.reader())) == ["two"] and rig.is_empty()


@pytest.mark.parametrize("verb", ["finish", "begin"])
def test_a_session_that_goes_on_by_itself_need_not_have_heard(rig: Any, verb: str) -> None:
    """abort(), finish() or begin(), put(), said at once: the put is of a new use, whatever was heard."""
    writer = rig.join()
    rig.put(writer, "a", tag="one")
    rig.abort(writer, "a")
    getattr(rig, verb)(writer, "a")
    rig.put(writer, "a", tag="two", last=True)
    assert rig.put_failures(writer) == [] and tags(rig.read(rig.reader())) == ["two"]


def test_another_abort_shuts_what_finish_had_opened(rig: Any) -> None:
    writer, other = rig.join(), rig.join()
    rig.abort(writer, "a")
    rig.finish(writer, "a")
    rig.abort(other, "a")
    rig.put(writer, "a")
    assert kinds(rig.put_failures(writer)) == [RequestAborted]


def test_a_late_put_does_not_get_into_the_life_that_follows(rig: Any) -> None:
    """The session was sent the next life already; its put of the aborted one is refused, and poisons nothing."""
    thinker, talker, vocoder = rig.join(), rig.reader(), rig.reader(edge=rig.other)
    rig.put(thinker, "a", tag="one")
    rig.read(talker)
    old = rig.seen[talker]
    rig.abort(thinker, "a")
    rig.hear(thinker)
    rig.put(thinker, "a", tag="two", last=True)
    assert tags(rig.arrived(talker)) == ["two"]
    rig.put(talker, "a", edge=rig.other, tag="late", seen=old)
    assert kinds(rig.put_failures(talker)) == [RequestAborted]
    rig.hear(talker)
    rig.put(talker, "a", edge=rig.other, tag="two out", last=True)
    assert tags(rig.read(vocoder)) == ["two out"] and rig.failures(vocoder) == []


def test_an_aborted_rids_put_does_not_wait_for_room(make_rig: Any) -> None:
    rig = make_rig(pool=64)
    writer, other = rig.join(), rig.join()
    rig.put(writer, "x")
    waiting = rig.reserve(writer, 64, rid="a")
    rig.abort(other, "a")
    assert type(rig.refusal(writer, waiting)) is RequestAborted
    assert not rig.state.edge(rig.edge).waiters


def test_abort_of_one_member_only_marks_it(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.seal(writer, rig.room(writer), rig.member("a", last=True), rig.member("b", last=True))
    a, b = rig.arrived(reader)
    rig.abort(writer, "a")
    rig.release(reader, a)
    assert rig.used == 64
    rig.release(reader, b)
    assert rig.is_empty()


def test_the_holder_of_an_aborted_payload_dies(rig: Any) -> None:
    """Void payloads are not delivered again."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    rig.abort(writer, "a")
    rig.die(reader)
    assert rig.is_empty() and rig.arrived(rig.reader()) == []


# -- tombstones -----------------------------------------------------------------------------------


def test_tombstones_go_when_every_live_session_has_passed_them(make_rig: Any) -> None:
    rig = make_rig(heartbeat=5.0)
    writer, silent = rig.join(), rig.join()
    rig.abort(writer, "a")
    rig.hear(writer)
    rig.tick(5.0)
    assert set(rig.state.tombstones) == {"a"}
    rig.hear(silent)
    rig.tick(5.0)
    assert not rig.state.tombstones and not rig.state.graves


def test_a_dead_session_keeps_no_tombstone(rig: Any) -> None:
    writer, silent = rig.join(), rig.join()
    rig.abort(writer, "a")
    rig.hear(writer)
    rig.die(silent)
    assert not rig.state.tombstones


def test_a_session_that_only_holds_views_keeps_no_tombstone(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    rig.abort(writer, "b")
    rig.hear(writer)
    held = rig.arrived(reader)
    rig.leave(reader, held)
    rig.tick(10.0)
    assert not rig.state.tombstones
    rig.release(reader, *held)
    assert reader not in rig.state.sessions and rig.is_empty()


def test_ends_alone_need_no_answer(rig: Any) -> None:
    """Only aborts are told: sessions pass the ends of lives by themselves."""
    writer, reader = rig.join(), rig.reader()
    for number in range(5):
        rig.put(writer, f"r{number}", last=True)
    rig.read(reader)
    rig.tick(10.0)
    assert not rig.state.tombstones and not rig.heard(writer, ef.Notices)


def test_tombstones_are_kept_up_to_a_number_and_laggards_are_not_believed(make_rig: Any) -> None:
    """What was forgotten for want of room might be an aborted rid: a session that lags is refused."""
    rig = make_rig(max_tombstones=4)
    writer, laggard = rig.join(), rig.join()
    for number in range(10):
        rig.abort(writer, f"r{number}")
        rig.hear(writer)
    assert len(rig.state.tombstones) == 4
    rig.put(laggard, "r0")
    rig.put(laggard, "new")
    assert kinds(rig.put_failures(laggard)) == [RequestAborted] * 2
    rig.put(writer, "r0", last=True)
    assert rig.put_failures(writer) == []


def test_a_laggard_may_go_on_with_what_is_open(make_rig: Any) -> None:
    rig = make_rig(max_tombstones=1)
    writer, laggard = rig.join(), rig.join()
    rig.put(laggard, "mine", 0)
    for number in range(3):
        rig.abort(writer, f"r{number}")
    rig.put(laggard, "mine", 1, last=True)
    assert rig.put_failures(laggard) == []


def test_a_life_that_ends_does_not_bury_the_abort_before_it(rig: Any) -> None:
    """A third session's late put of the aborted life is refused still."""
    writer, late, reader = rig.join(), rig.join(), rig.reader()
    rig.abort(writer, "a")
    rig.hear(writer)
    rig.put(writer, "a", last=True)
    rig.read(reader)
    rig.finish(writer, "a")
    assert rig.is_empty()
    rig.put(late, "a")
    assert kinds(rig.put_failures(late)) == [RequestAborted]


def test_a_finish_that_follows_an_abort_leaves_the_next_life(rig: Any) -> None:
    """1. the reader has a part; 2. the rid is aborted; 3. the writer opens a new life; 4. the reader's finish, which
    means the aborted one, arrives."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.read(reader)
    rig.abort(reader, "a")
    rig.hear(writer)
    rig.begin(writer, "a")
    rig.finish(reader, "a")
    rig.put(writer, "a", 0, last=True, tag="new")
    assert tags(rig.read(reader)) == ["new"]


def test_a_finish_that_follows_an_abort_leaves_the_next_life_although_nothing_was_taken(rig: Any) -> None:
    """1. a part is on its way to the reader; 2. the rid is aborted; 3. the writer's new life is on its way, too; 4. the
    reader's finish, which means the aborted one, arrives."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.abort(writer, "a")
    rig.hear(writer)
    rig.finish(writer, "a")
    rig.put(writer, "a", 0, tag="new")
    rig.finish(reader, "a")
    rig.put(writer, "a", 1, last=True, tag="newer")
    # What was under way arrives all the same; a client lets it go.
    assert tags(rig.read(reader)) == ["", "new", "newer"]


@pytest.mark.parametrize("heard", [False, True])
def test_a_finish_of_an_aborted_life_of_which_nothing_had_come_leaves_the_next(rig: Any, heard: bool) -> None:
    """The reader finishes before it has heard of the abort, or says that it has."""
    writer, reader = rig.join(), rig.reader()
    rig.abort(writer, "a")
    rig.finish(writer, "a")
    rig.put(writer, "a", 0, tag="new")
    if heard:
        rig.hear(reader)
    rig.finish(reader, "a", aborted=heard)
    rig.put(writer, "a", 1, last=True, tag="newer")
    assert tags(rig.read(reader)) == ["new", "newer"]


def test_a_finish_after_the_request_was_opened_again_means_the_new_one(rig: Any) -> None:
    """Although the word of the abort is still on its way to its session."""
    writer, reader = rig.join(), rig.reader()
    rig.abort(writer, "a")
    for _ in range(2):
        rig.finish(reader, "a")
    rig.finish(writer, "a")
    rig.put(writer, "a", 0, tag="new")
    rig.finish(reader, "a")
    rig.put(writer, "a", 1, last=True, tag="newer")
    # What was under way arrives all the same; a client lets it go.
    assert tags(rig.read(reader)) == ["new"]
