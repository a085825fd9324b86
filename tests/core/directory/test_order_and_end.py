"""Chunks of a stream come in order, each once; END and gaps are told whatever the order of events."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.directory.events import Flags
from connector.core.errors import InvalidPayload, StreamEnded, StreamGap


def indices(descriptors: list[ef.Descriptor]) -> list[int]:
    return [d.index for d in descriptors]


def ends(rig: Any, session: int, got: list[ef.Descriptor]) -> int:
    """How often the reader was told of an END."""
    marks = sum(bool(d.flags & (Flags.LAST | Flags.END_ONLY)) for d in got)
    return marks + len(rig.heard(session, ef.Ended))


def test_chunks_come_in_order_each_once(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 5)
    assert indices(rig.read(reader)) == [0, 1, 2, 3, 4]
    assert rig.read(reader) == [] and rig.is_empty()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_chunks_put_out_of_order_come_in_order(rig: Any, order: tuple[int, ...]) -> None:
    """The last chunk may be put first: those before it are not behind its END."""
    writer, reader = rig.join(), rig.reader()
    for index in order:
        rig.put(writer, "a", index, last=index == 3, tag=str(index))
    got = rig.read(reader)
    assert [(d.index, d.manifest) for d in got] == [(i, str(i).encode()) for i in range(4)]
    assert ends(rig, reader, got) == 1 and rig.put_failures(writer) == [] and rig.is_empty()


def test_a_chunk_waits_for_the_one_before(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 1)
    assert rig.arrived(reader) == []
    rig.put(writer, "a", 0)
    assert indices(rig.arrived(reader)) == [0, 1]


def test_two_rids_do_not_wait_for_each_other(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 1)
    rig.put(writer, "b", 0)
    assert [(d.rid, d.index) for d in rig.arrived(reader)] == [("b", 0)]


@pytest.mark.parametrize("read_between", [False, True])
@pytest.mark.parametrize("late_reader", [False, True])
@pytest.mark.parametrize("how", ["flag", "alone", "finish"])
def test_one_end_after_all_chunks(rig: Any, how: str, late_reader: bool, read_between: bool) -> None:
    """END with the last chunk, alone, or by finish; before the reader is there, or between its polls."""
    writer = rig.join()
    reader = 0 if late_reader else rig.reader()
    got: list[ef.Descriptor] = []
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 1, last=how == "flag")
    if read_between and reader:
        got += rig.read(reader)
    if how == "alone":
        rig.put(writer, "a", 2, end=True)
    if how == "finish":
        rig.finish(writer, "a")
    reader = reader or rig.reader()
    got += rig.read(reader)
    payloads = [d for d in got if not d.flags & Flags.END_ONLY]
    assert indices(payloads) == [0, 1] and ends(rig, reader, got) == 1
    assert rig.is_empty()


def test_end_by_finish_is_said_behind_the_chunks(rig: Any) -> None:
    """A reader that comes late gets chunks first, then the count."""
    writer = rig.join()
    rig.put(writer, "a", 0)
    rig.finish(writer, "a")
    reader = rig.reader()
    said = [type(e) for e in rig.said[reader] if isinstance(e, (ef.Deliver, ef.Ended))]
    assert said == [ef.Deliver, ef.Ended]
    assert rig.heard(reader, ef.Ended)[0].count == 1


def test_finish_after_the_last_chunk_says_no_second_end(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 2)
    rig.finish(writer, "a")
    got = rig.read(reader)
    assert ends(rig, reader, got) == 1 and rig.is_empty()


def test_end_alone_after_the_flag_is_ignored(rig: Any) -> None:
    """END said twice of the same count is one END, and no failure of the put."""
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 2)
    effects = rig.put(writer, "a", 2, end=True)
    assert [note.outcome for note in rig.of(effects, ef.PutNoted)] == ["ignored"]
    got = rig.read(reader)
    assert ends(rig, reader, got) == 1 and rig.put_failures(writer) == []


def test_a_stream_of_no_chunks(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0, end=True)
    (mark,) = rig.read(reader)
    assert mark.flags & Flags.END_ONLY and mark.index == 0
    assert rig.is_empty() and rig.state.counters["payloads_sealed"] == 0


def test_an_empty_payload_is_a_payload(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", nbytes=0, last=True)
    (got,) = rig.read(reader)
    assert got.index == 0 and rig.state.counters["payloads_released"] == 1 and rig.is_empty()


def test_a_chunk_behind_the_end_is_refused_and_harms_nobody(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 2)
    rig.put(writer, "a", 2)
    assert [type(e) for e in rig.put_failures(writer)] == [StreamEnded]
    assert indices(rig.read(reader)) == [0, 1] and rig.failures(reader) == []


def test_a_chunk_at_an_end_mark_is_behind_the_end(rig: Any) -> None:
    writer = rig.join()
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 1, end=True)
    rig.put(writer, "a", 1)
    assert [type(e) for e in rig.put_failures(writer)] == [StreamEnded]


@pytest.mark.parametrize("mark", [{"last": True}, {"end": True}])
def test_an_end_before_a_chunk_that_was_put_is_refused(rig: Any, mark: dict[str, bool]) -> None:
    writer = rig.join()
    rig.put(writer, "a", 3)
    rig.put(writer, "a", 1, **mark)
    assert [type(e) for e in rig.put_failures(writer)] == [InvalidPayload]


def test_a_gap_is_an_error_at_the_reader_behind_what_came_in_order(rig: Any) -> None:
    writer = rig.join()
    for index in (0, 1, 3):
        rig.put(writer, "a", index)
    rig.finish(writer, "a")
    reader = rig.reader()
    said = [type(e) for e in rig.said[reader] if isinstance(e, (ef.Deliver, ef.StreamFailed))]
    assert said == [ef.Deliver, ef.StreamFailed]
    assert indices(rig.read(reader)) == [0, 1]
    (error,) = rig.failures(reader)
    assert type(error) is StreamGap
    assert error.facts["missing"] == ["2"] and error.facts["end"] == 4 and error.facts["rid"] == "a"
    assert rig.is_empty()


def test_a_gap_before_a_flagged_end_is_found_at_finish(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 1, last=True)
    assert rig.arrived(reader) == [] and rig.failures(reader) == []
    rig.finish(writer, "a")
    assert [type(e) for e in rig.failures(reader)] == [StreamGap] and rig.is_empty()


def test_members_of_one_block_come_in_order_whatever_their_place(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.seal(writer, rig.room(writer), rig.member("a", 1, last=True), rig.member("b", 0), rig.member("a", 0))
    got = [(d.rid, d.index, d.member) for d in rig.read(reader)]
    assert [g for g in got if g[0] == "a"] == [("a", 0, 2), ("a", 1, 0)]
    assert ("b", 0, 1) in got and rig.used == 0


def test_a_numbered_event_said_again_changes_nothing(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    effects = rig.again()
    assert [type(e) for e in effects] == [ef.Acked]
    assert indices(rig.read(reader)) == [0] and rig.put_failures(writer) == []


def test_a_missing_number_is_asked_for(rig: Any) -> None:
    writer = rig.join()
    rig.number(writer)
    rig.finish(writer, "a")
    assert [e.number for e in rig.heard(writer, ef.AskResend)] == [1]
    assert rig.state.sessions[writer].applied == 0


def test_the_window_holds_pushes_back_until_they_are_taken(make_rig: Any) -> None:
    rig = make_rig(window=4)
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 10)
    first = rig.arrived(reader)
    assert indices(first) == [0, 1, 2, 3]
    rig.take(reader, *first[:2])
    assert indices(rig.arrived(reader)) == [4, 5]


def test_a_long_stream_does_not_keep_another_back(make_rig: Any) -> None:
    """What the window lets through is shared in turns."""
    rig = make_rig(window=16)
    writer = rig.join()
    rig.put_all(writer, "long", 40)
    rig.put(writer, "short")
    reader = rig.reader()
    assert "short" in {d.rid for d in rig.arrived(reader)}
