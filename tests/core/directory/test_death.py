"""Rule 7: the dead leak nothing, lose nothing sealed, and those who wait for them are told."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.directory.events import Flags
from connector.core.errors import ReaderDied, Unclaimed, WriterDied


def kinds(errors: list[Any]) -> list[type]:
    return [type(error) for error in errors]


def told(descriptors: list[ef.Descriptor]) -> list[tuple[int, bool]]:
    return [(d.index, bool(d.flags & Flags.REDELIVERED)) for d in descriptors]


# -- readers --------------------------------------------------------------------------------------


def test_a_dead_reader_that_released_nothing(make_rig: Any) -> None:
    """All of it again, in order, to the next session that subscribes as that reader; marked as far as it was told."""
    rig = make_rig(window=3)
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 5)
    rig.take(reader, rig.arrived(reader)[0])
    rig.die(reader)
    rig.put(writer, "b", last=True)
    successor = rig.reader()
    got = rig.read(successor)
    assert told([d for d in got if d.rid == "a"]) == [(i, i < 4) for i in range(5)]
    assert told([d for d in got if d.rid == "b"]) == [(0, False)]
    assert rig.failures(writer) == [] and rig.is_empty()
    assert rig.state.counters["redelivered"] == 4


def test_redelivery_says_the_end_again(rig: Any) -> None:
    """END was said by itself to the one that died."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a")
    rig.finish(writer, "a")
    assert len(rig.heard(reader, ef.Ended)) == 1
    rig.die(reader)
    successor = rig.reader()
    assert told(rig.read(successor)) == [(0, True)] and len(rig.heard(successor, ef.Ended)) == 1
    assert rig.is_empty()


def test_two_readers_die_one_after_the_other(rig: Any) -> None:
    writer, first = rig.join(), rig.reader()
    rig.put_all(writer, "a", 3)
    rig.die(first)
    second = rig.reader()
    rig.die(second)
    assert told(rig.read(rig.reader())) == [(0, True), (1, True), (2, True)]
    assert rig.is_empty()


def test_a_dead_reader_that_had_released_a_part(rig: Any) -> None:
    """The stream fails at both ends: at the writer now, at the reader's end when its successor comes."""
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 3, last=False)
    got = rig.arrived(reader)
    rig.release(reader, got[0])
    rig.die(reader)
    (error,) = rig.failures(writer)
    assert type(error) is ReaderDied and error.facts["rid"] == "a" and error.facts["reader"] == 0
    assert rig.used == 0
    rig.put(writer, "a", 3)
    assert kinds(rig.put_failures(writer)) == [ReaderDied]
    successor = rig.reader()
    assert rig.read(successor) == [] and kinds(rig.failures(successor)) == [ReaderDied]
    rig.finish(writer, "a")
    assert rig.is_empty()


def test_a_dead_reader_of_an_ended_stream_that_had_released_a_part(rig: Any) -> None:
    """Not an END but the failure is told to the successor, although all was told to the dead one."""
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 2)
    rig.release(reader, rig.arrived(reader)[0])
    rig.die(reader)
    assert kinds(rig.failures(writer)) == [ReaderDied]
    successor = rig.reader()
    assert kinds(rig.failures(successor)) == [ReaderDied] and not rig.heard(successor, ef.Ended)
    rig.finish(writer, "a")
    assert rig.is_empty()


def test_released_all_so_far_of_an_open_stream_is_a_part(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.read(reader)
    rig.die(reader)
    assert kinds(rig.failures(writer)) == [ReaderDied]


def test_other_rids_of_the_dead_reader_are_judged_by_themselves(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 2)
    rig.put_all(writer, "b", 2)
    first = next(d for d in rig.arrived(reader) if d.rid == "a")
    rig.release(reader, first)
    rig.die(reader)
    got = rig.read(rig.reader())
    assert [(d.rid, d.index) for d in got] == [("b", 0), ("b", 1)]


def test_a_resuming_reader_gets_only_what_is_left(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader(resume=True)
    rig.put_all(writer, "a", 4)
    got = rig.arrived(reader)
    rig.release(reader, got[0], got[2])
    rig.die(reader)
    assert rig.failures(writer) == []
    successor = rig.reader(resume=True)
    again = rig.read(successor)
    assert told(again) == [(1, True), (3, True)] and rig.is_empty()


def test_a_resuming_reader_is_told_an_end_that_was_released(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader(resume=True)
    rig.put_all(writer, "a", 2)
    rig.release(reader, rig.arrived(reader)[1])
    rig.die(reader)
    successor = rig.reader(resume=True)
    assert told(rig.read(successor)) == [(0, True)] and len(rig.heard(successor, ef.Ended)) == 1
    assert rig.is_empty()


def test_a_failed_stream_is_delivered_again_up_to_its_failure(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 2)
    rig.arrived(reader)
    rig.die(reader)
    rig.die(writer)
    successor = rig.reader()
    said = [type(e) for e in rig.said[successor] if isinstance(e, (ef.Deliver, ef.StreamFailed))]
    assert said == [ef.Deliver, ef.StreamFailed]
    assert told(rig.read(successor)) == [(0, True)] and kinds(rig.failures(successor)) == [WriterDied]
    assert rig.is_empty()


def test_a_voided_payload_is_a_hole_to_the_successor(make_rig: Any) -> None:
    """It held the whole stream when the stream failed for want of the other reader: no END without its chunks."""
    rig = make_rig(unclaimed_after=60.0)
    writer, reader = rig.join(), rig.reader(readers=2)
    rig.put_all(writer, "a", 2, readers=2)
    assert len(rig.arrived(reader)) == 2
    rig.tick(60.0)
    rig.die(reader)
    successor = rig.reader(readers=2)
    assert rig.read(successor) == [] and not rig.heard(successor, ef.Ended)
    assert kinds(rig.failures(successor)) == [Unclaimed]


def test_a_payload_voided_before_it_came_again_is_a_hole(make_rig: Any) -> None:
    """The whole stream was told to one that died, then failed for want of a successor: no END without its chunks."""
    rig = make_rig(unclaimed_after=60.0)
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 2)
    rig.die(reader)
    rig.tick(60.0)
    assert kinds(rig.failures(writer)) == [Unclaimed] and rig.used == 0
    successor = rig.reader()
    assert rig.read(successor) == [] and not rig.heard(successor, ef.Ended)
    assert kinds(rig.failures(successor)) == [Unclaimed]


def test_what_a_reader_had_finished_is_not_delivered_again(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 2)
    rig.finish(reader, "a")
    rig.die(reader)
    assert rig.is_empty() and rig.failures(writer) == [] and rig.read(rig.reader()) == []


def test_takes_of_the_dead_are_gone(rig: Any) -> None:
    reader = rig.reader()
    rig.wait(reader, "a")
    rig.die(reader)
    rig.tick(100.0)
    assert not [e for e in rig.said[reader] if isinstance(e, ef.Refused)]


# -- writers --------------------------------------------------------------------------------------


def test_a_writer_that_dies_before_its_end(rig: Any) -> None:
    writer, reader = rig.join("thinker"), rig.reader()
    rig.put_all(writer, "a", 2, last=False)
    rig.die(writer)
    assert [d.index for d in rig.read(reader)] == [0, 1]
    (error,) = rig.failures(reader)
    assert type(error) is WriterDied and (error.facts["stage"], error.facts["chunks"]) == ("thinker", 2)
    assert rig.is_empty()


@pytest.mark.parametrize("how", ["flag", "finish"])
def test_a_writer_that_dies_after_its_end_loses_nothing(rig: Any, how: str) -> None:
    writer = rig.join()
    rig.put_all(writer, "a", 3, last=how == "flag")
    if how == "finish":
        rig.finish(writer, "a")
    rig.die(writer)
    reader = rig.reader()
    assert [d.index for d in rig.read(reader)] == [0, 1, 2] and rig.failures(reader) == []
    assert rig.is_empty()


def test_a_writer_that_dies_with_a_hole_before_its_end(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 2, last=True)
    rig.die(writer)
    assert [d.index for d in rig.read(reader)] == [0] and kinds(rig.failures(reader)) == [WriterDied]


def test_leaving_before_the_end_is_a_failure_too(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.leave(writer)
    rig.read(reader)
    assert kinds(rig.failures(reader)) == [WriterDied] and writer not in rig.state.sessions


def test_reservations_of_the_dead_end_at_once(rig: Any) -> None:
    """B34: the room can be had again, and no reader sees what was half written."""
    writer, reader = rig.join(), rig.reader()
    whole = rig.room(writer, rig.settings.pool)
    effects = rig.die(writer)
    assert [e.handle for e in rig.of(effects, ef.FreeEntry)] == [whole]
    assert rig.used == 0 and rig.state.reserved_bytes == 0 and rig.arrived(reader) == []


def test_the_death_of_a_room_waiter_lets_the_next_one_go(make_rig: Any) -> None:
    rig = make_rig(pool=1024)
    holder, first, second = rig.join(), rig.join(), rig.join()
    rig.room(holder, 512)
    rig.reserve(first, 1024)
    small = rig.reserve(second, 512)
    assert rig.granted(second, small) is None
    rig.die(first)
    assert rig.granted(second, small) is not None


def test_a_death_is_heard_of_once(rig: Any) -> None:
    writer = rig.join()
    rig.die(writer)
    rig.die(writer)
    assert rig.state.counters["sessions_died"] == 1 and len(rig.heard(writer, ef.Expelled)) == 1


def test_the_dead_are_told_nothing(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.die(reader)
    before = len(rig.said[reader])
    rig.abort(writer, "a")
    rig.tick(100.0)
    assert len(rig.said[reader]) == before


# -- good-byes ------------------------------------------------------------------------------------


def test_leaving_gives_back_what_was_not_taken(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 3)
    rig.leave(reader)
    assert reader not in rig.state.sessions
    assert told(rig.read(rig.reader())) == [(0, True), (1, True), (2, True)]


def test_a_session_that_left_with_views_stays_until_the_last_is_released(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 2)
    held = rig.arrived(reader)
    rig.take(reader, *held)
    rig.leave(reader, held)
    assert not rig.heard(reader, ef.Expelled) and rig.failures(writer) == []
    rig.release(reader, held[0])
    assert not rig.heard(reader, ef.Expelled)
    rig.release(reader, held[1])
    assert len(rig.heard(reader, ef.Expelled)) == 1 and rig.is_empty()


def test_leaving_in_the_middle_with_views_fails_the_stream(rig: Any) -> None:
    """What it has in hand was used: the rest alone is of no use to another."""
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 3)
    got = rig.arrived(reader)
    rig.take(reader, got[0])
    rig.leave(reader, got[:1])
    assert kinds(rig.failures(writer)) == [ReaderDied] and rig.used == 64
    successor = rig.reader()
    assert rig.read(successor) == [] and kinds(rig.failures(successor)) == [ReaderDied]
    rig.release(reader, got[0])
    rig.finish(writer, "a")
    assert rig.is_empty()


def test_leaving_in_the_middle_with_views_and_resume(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader(resume=True)
    rig.put_all(writer, "a", 3)
    got = rig.arrived(reader)
    rig.take(reader, got[0])
    rig.leave(reader, got[:1])
    assert told(rig.read(rig.reader(resume=True))) == [(1, True), (2, True)]
    rig.release(reader, got[0])
    assert rig.is_empty() and rig.failures(writer) == []


def test_death_while_closing(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    held = rig.arrived(reader)
    rig.take(reader, *held)
    rig.leave(reader, held)
    rig.die(reader)
    assert rig.is_empty() and reader not in rig.state.sessions and rig.failures(writer) == []


def test_a_closing_session_asks_for_nothing_more(rig: Any) -> None:
    """It keeps no reader's place and no room."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    held = rig.arrived(reader)
    rig.leave(reader, held)
    rig.subscribe(reader)
    rig.wait(reader, "b")
    assert rig.granted(reader, rig.reserve(reader, 64)) is None
    assert rig.subscribe(rig.join()) is None
    rig.release(reader, *held)
    assert rig.is_empty()


def test_a_closing_session_is_let_go_when_the_operator_frees_its_view(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    held = rig.arrived(reader)
    rig.leave(reader, held)
    rig.remove(writer, "a", force=True)
    assert len(rig.heard(reader, ef.Expelled)) == 1 and rig.used == 0


# -- the silent -----------------------------------------------------------------------------------


def test_a_silent_session_is_suspect_and_keeps_its_blocks(make_rig: Any) -> None:
    """No time-out makes it dead; its answer makes it live again."""
    rig = make_rig(heartbeat=5.0, suspect_after=10.0)
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    (got,) = rig.arrived(reader)
    for _ in range(1000):
        rig.tick(5.0)
        rig.hear(writer)
    assert rig.state.sessions[reader].presence.value == "suspect" and rig.used == 64
    assert len(rig.heard(reader, ef.Ping)) == 1
    rig.hear(reader)
    assert rig.state.sessions[reader].presence.value == "live"
    rig.release(reader, got)
    assert rig.is_empty()
