"""A session that says that it is in a use of a rid, before anything of it was put; and aborts that mean one use."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.errors import AlreadyPut, RequestAborted, WriterDied


def kinds(errors: list[Any]) -> list[type]:
    return [type(error) for error in errors]


def tags(descriptors: list[ef.Descriptor]) -> list[str]:
    return [d.manifest.decode() for d in descriptors]


def told(rig: Any, session: int) -> list[str]:
    """Rids whose aborts the session was told of."""
    return [notice.rid for said in rig.said[session] if isinstance(said, ef.Notices) for notice in said.notices]


def test_a_reader_in_a_use_of_which_nothing_came_gets_nothing_of_the_next_before_it_has_finished(rig: Any) -> None:
    """The sender is a little faster: it has ended the first use, and begun the second."""
    writer, reader = rig.join(), rig.reader()
    rig.enter(writer, "a", sends=True)
    rig.enter(reader, "a")
    rig.finish(writer, "a")
    rig.enter(writer, "a", sends=True)
    rig.put(writer, "a", 0, tag="second")
    assert tags(rig.read(reader)) == []
    rig.finish(reader, "a")
    rig.enter(reader, "a")
    rig.put(writer, "a", 1, last=True, tag="and last")
    assert tags(rig.read(reader)) == ["second", "and last"]


def test_the_finish_of_a_use_of_which_nothing_came_means_that_one(rig: Any) -> None:
    """What is still put of it is for nobody here."""
    writer, reader = rig.join(), rig.reader()
    rig.enter(writer, "a", sends=True)
    rig.enter(reader, "a")
    rig.finish(reader, "a")
    rig.enter(reader, "a")
    rig.put(writer, "a", 0, last=True, tag="first")
    rig.finish(writer, "a")
    assert tags(rig.read(reader)) == []
    rig.put(writer, "a", 0, last=True, tag="second")
    assert tags(rig.read(reader)) == ["second"]


def test_a_reader_that_nobody_sends_to_goes_on_to_the_use_that_a_sender_begins(rig: Any) -> None:
    """One that knows nothing of entering, and says that it is through with a use before."""
    writer, reader = rig.join(), rig.reader()
    rig.enter(reader, "a")
    rig.finish(writer, "a")
    rig.begin(writer, "a")
    rig.put(writer, "a", 0, last=True, tag="only")
    assert tags(rig.read(reader)) == ["only"]


def test_who_enters_late_is_in_the_use_that_owes_it_something(make_rig: Any) -> None:
    """Of both uses nothing was sent to it yet: there was no room under way."""
    rig = make_rig(window=1)
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "another", 0, tag="in the way")
    for tag in ("first", "second"):
        rig.put(writer, "a", 0, last=True, tag=tag)
        rig.begin(writer, "a")
    rig.enter(reader, "a")
    assert tags(rig.read(reader)) == ["in the way", "first"]
    rig.finish(reader, "a")
    assert tags(rig.read(reader)) == ["second"]


def test_entering_does_not_open_a_rid_whose_abort_is_on_its_way(rig: Any) -> None:
    """That may have been the use that is meant: the next put is a late one."""
    writer, other = rig.join(), rig.join()
    rig.abort(other, "a")
    rig.enter(writer, "a", sends=True)
    rig.put(writer, "a", 0)
    assert kinds(rig.put_failures(writer)) == [RequestAborted]


def test_who_enters_a_use_of_which_it_has_heard_the_abort_is_told_again(rig: Any) -> None:
    """Nobody has begun the rid since: that was its use."""
    writer, reader = rig.join(), rig.reader()
    rig.enter(writer, "a", sends=True)
    rig.abort(writer, "a", "made no first token", mine=True)
    rig.hear(reader)
    (first,) = rig.heard(reader, ef.Notices)[-1].notices
    assert first.edges == (rig.edge,)
    rig.finish(reader, "a", aborted=True)
    rig.enter(reader, "a", heard=first.life)
    (again,) = rig.heard(reader, ef.Notices)[-1].notices
    assert (again.rid, again.life, again.reason) == ("a", first.life, "again") and again.number > first.number
    rig.hear(reader)
    rig.finish(reader, "a", aborted=True)
    assert not rig.state.lives


def test_who_has_heard_an_abort_enters_the_use_that_others_have_begun_since(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.enter(writer, "a", sends=True)
    rig.abort(writer, "a", mine=True)
    rig.hear(reader)
    rig.finish(writer, "a", aborted=True)
    rig.enter(writer, "a", sends=True)
    rig.finish(reader, "a", aborted=True)
    rig.enter(reader, "a", heard=1)
    rig.put(writer, "a", 0, last=True, tag="second")
    assert told(rig, reader) == ["a"] and tags(rig.read(reader)) == ["second"]


def test_who_enters_late_is_in_the_use_that_its_own_sender_is_in(rig: Any) -> None:
    """The first of three stages is in the next already."""
    stages = Stages(rig)
    stages.again(stages.thinker)
    stages.enter(stages.last)
    rig.put(stages.sends, "a", 0, edge=rig.other, last=True, tag="codes")
    assert tags(rig.read(stages.last)) == ["codes"]


def test_a_process_that_reads_and_sends_with_two_sessions_is_in_one_use(rig: Any) -> None:
    writer, ahead = rig.join(), rig.join()
    reads, sends, last = rig.join("talker", 7), rig.join("talker", 7), rig.reader(edge=rig.other)
    rig.subscribe(reads)
    # A use that nobody of this process takes part in, and that goes on.
    rig.enter(ahead, "a", sends=True, edge=rig.third)
    rig.finish(writer, "a")
    rig.begin(writer, "a")
    rig.put(writer, "a", 0, tag="second")
    rig.enter(reads, "a")
    rig.enter(sends, "a", sends=True, edge=rig.other)
    rig.put(sends, "a", 0, edge=rig.other, last=True, tag="codes")
    assert tags(rig.read(reads)) == ["second"] and tags(rig.read(last)) == ["codes"]
    (life,) = [life for life in rig.state.lives["a"] if reads in life.bound]
    assert sends in life.bound


def test_an_abort_of_a_later_use_is_nothing_to_who_is_still_to_come_to_this_one(rig: Any) -> None:
    """Its sender is in this one; the first stage has begun the next and failed in it."""
    stages = Stages(rig)
    rig.put(stages.thinker, "a", 0, last=True)
    stages.again(stages.thinker)
    rig.abort(stages.thinker, "a", mine=True)
    rig.hear(stages.last)
    assert told(rig, stages.last) == []
    stages.enter(stages.last)
    rig.put(stages.sends, "a", 0, edge=rig.other, last=True, tag="codes")
    assert tags(rig.read(stages.last)) == ["codes"]
    rig.finish(stages.last, "a")
    assert told(rig, stages.last) == ["a"]


def test_aborts_of_later_uses_are_told_one_use_after_the_other(rig: Any) -> None:
    """In the order of the uses, whichever was aborted first."""
    stages = Stages(rig)
    stages.enter(stages.last)
    stages.again(stages.thinker, stages.reads)
    second = rig.state.life_number
    stages.again(stages.thinker)
    for session in (stages.thinker, stages.reads):
        rig.abort(session, "a", mine=True)
    for life in (second, second + 1):
        rig.finish(stages.last, "a", aborted=life != second)
        rig.hear(stages.last)
        assert rig.heard(stages.last, ef.Notices)[-1].notices[-1].life == life


def test_an_abort_of_nothing_names_no_life(rig: Any) -> None:
    """A client that leaves when all is over: what begins then is another use."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0, last=True)
    rig.read(reader)
    for session in (writer, reader):
        rig.finish(session, "a")
    rig.abort(writer, "a")
    (notice,) = rig.heard(reader, ef.Notices)[-1].notices
    assert (notice.life, notice.edges) == (0, ())


def test_an_abort_of_ones_own_use_spares_the_next(rig: Any) -> None:
    """The reader fails in the first; the sender is in the second already, and is not told."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0, last=True, tag="under way")
    rig.finish(writer, "a")
    rig.put(writer, "a", 0, tag="second")
    report = rig.abort(reader, "a", mine=True)
    assert report["payloads"] + report["held"] == 1
    rig.put(writer, "a", 1, last=True, tag="and last")
    assert rig.put_failures(writer) == [] and told(rig, writer) == []
    rig.finish(reader, "a")
    assert tags(rig.read(reader)) == ["under way", "second", "and last"]


def test_an_abort_of_ones_own_use_that_is_over_aborts_nothing(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.read(reader)
    rig.abort(writer, "a")
    rig.hear(writer)
    rig.finish(writer, "a")
    rig.put(writer, "a", 0, tag="second")
    assert rig.abort(reader, "a", mine=True)["payloads"] == 0
    rig.put(writer, "a", 1, last=True, tag="and last")
    assert rig.put_failures(writer) == []
    rig.finish(reader, "a")
    assert tags(rig.read(reader)) == ["second", "and last"]


def test_who_has_finished_what_is_aborted_need_not_hear(rig: Any) -> None:
    """Its next put is the next use's, and no late one."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0, last=True)
    rig.read(reader)
    rig.finish(writer, "a")
    rig.abort(reader, "a")
    assert told(rig, writer) == [] and told(rig, reader) == ["a"]
    rig.put(writer, "a", 0, last=True, tag="second")
    assert rig.put_failures(writer) == []
    rig.finish(reader, "a")
    assert tags(rig.read(reader)) == ["second"]


class Stages:
    """thinker -> talker -> code2wav, the middle one with a session for each edge; all but the last have entered."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.thinker, self.reads, self.sends = rig.join(), rig.reader(), rig.join()
        self.last = rig.reader(edge=rig.other)
        for session in (self.thinker, self.reads, self.sends):
            self.enter(session)

    def enter(self, session: int) -> None:
        sends = session in (self.thinker, self.sends)
        edge = self.rig.other if session in (self.sends, self.last) else self.rig.edge
        self.rig.enter(session, "a", sends=sends, edge=edge)

    def again(self, *sessions: int) -> None:
        for session in sessions:
            self.rig.finish(session, "a")
            self.enter(session)


def test_who_enters_when_one_edge_is_read_to_its_end_is_in_the_same_use(rig: Any) -> None:
    stages = Stages(rig)
    rig.put(stages.thinker, "a", 0, last=True)
    rig.read(stages.reads)
    stages.enter(stages.last)
    rig.put(stages.sends, "a", 0, edge=rig.other, last=True, tag="codes")
    assert tags(rig.read(stages.last)) == ["codes"]


def test_a_use_goes_on_when_one_edge_is_read_to_its_end_and_the_other_has_nothing(rig: Any) -> None:
    """The last stage, still in it, gets nothing of the next."""
    stages = Stages(rig)
    stages.enter(stages.last)
    rig.put(stages.thinker, "a", 0, last=True)
    rig.read(stages.reads)
    stages.again(stages.thinker, stages.reads, stages.sends)
    rig.put(stages.sends, "a", 0, edge=rig.other, tag="second")
    assert tags(rig.read(stages.last)) == []
    rig.finish(stages.last, "a")
    assert tags(rig.read(stages.last)) == ["second"]


def test_an_abort_is_told_before_what_it_lets_through(rig: Any) -> None:
    """To a reader that says nothing of uses."""
    first, second, reader = rig.join(), rig.join(), rig.reader()
    rig.put(first, "a", 0, tag="first")
    rig.begin(second, "a")
    rig.put(second, "a", 0, tag="second")
    rig.abort(first, "a", mine=True)
    said = [type(effect) for effect in rig.said[reader] if isinstance(effect, ef.Deliver | ef.Notices)]
    assert said == [ef.Deliver, ef.Notices, ef.Deliver]


def test_an_abort_lets_nothing_through_before_it_is_answered(rig: Any) -> None:
    stages = Stages(rig)
    stages.enter(stages.last)
    stages.again(stages.sends)
    rig.put(stages.sends, "a", 0, edge=rig.other, tag="second")
    rig.abort(stages.thinker, "a", mine=True)
    rig.hear(stages.last)
    said = [type(effect) for effect in rig.said[stages.last] if isinstance(effect, ef.Deliver | ef.Notices)]
    assert said == [ef.Notices]
    rig.finish(stages.last, "a", aborted=True)
    assert tags(rig.read(stages.last)) == ["second"]


def test_an_abort_that_waits_its_turn_is_told_before_what_it_lets_through(rig: Any) -> None:
    """The reader has not heard of another abort yet, so this one is not sent: nor is what it lets through."""
    first, second, reader = rig.join(), rig.join(), rig.reader()
    rig.put(first, "a", 0, tag="first")
    rig.begin(second, "a")
    rig.put(second, "a", 0, tag="second")
    rig.abort(first, "another")
    rig.abort(first, "a", mine=True)
    rig.hear(reader)
    said = [type(effect) for effect in rig.said[reader] if isinstance(effect, ef.Deliver | ef.Notices)]
    assert said == [ef.Deliver, ef.Notices, ef.Notices, ef.Deliver]


def test_a_sender_that_begins_is_in_the_use_that_others_wait_in(rig: Any) -> None:
    """It knows nothing of entering; the stage behind it has entered, to read and to send."""
    reads, sends, plain = rig.reader(), rig.join(), rig.join()
    rig.enter(reads, "a")
    rig.enter(sends, "a", sends=True)
    rig.begin(plain, "a")
    rig.put(plain, "a", 0, last=True, tag="only")
    assert tags(rig.read(reads)) == ["only"]


def test_an_abort_of_ones_own_use_spares_the_one_before(rig: Any) -> None:
    """The sender is done with it; its reader is slow, and hears of the abort when it comes to the next."""
    writer, reader = rig.join(), rig.reader()
    rig.enter(writer, "a", sends=True)
    rig.enter(reader, "a")
    rig.put(writer, "a", 0, last=True, tag="first")
    rig.finish(writer, "a")
    rig.enter(writer, "a", sends=True)
    rig.put(writer, "a", 0, tag="second")
    assert rig.abort(writer, "a", mine=True)["payloads"] == 1
    rig.hear(reader)
    assert told(rig, reader) == [] and tags(rig.read(reader)) == ["first"]
    rig.finish(reader, "a")
    assert told(rig, reader) == ["a"]


def test_what_a_session_puts_of_an_older_use_is_no_late_put_of_one_that_was_aborted(rig: Any) -> None:
    stages = Stages(rig)
    stages.enter(stages.last)
    rig.put(stages.thinker, "a", 0, last=True)
    stages.again(stages.thinker)
    rig.abort(stages.thinker, "a", mine=True)
    rig.put(stages.sends, "a", 0, edge=rig.other, last=True, tag="codes")
    assert rig.put_failures(stages.sends) == [] and tags(rig.read(stages.last)) == ["codes"]
    rig.finish(stages.sends, "a")
    rig.put(stages.sends, "a", 0, edge=rig.other, tag="late")
    assert kinds(rig.put_failures(stages.sends)) == [RequestAborted]
    rig.hear(stages.sends)
    rig.finish(stages.sends, "a", aborted=True)
    rig.finish(stages.last, "a")
    rig.hear(stages.last)
    rig.finish(stages.last, "a", aborted=True)
    rig.put(stages.sends, "a", 0, edge=rig.other, last=True, tag="third")
    assert tags(rig.read(stages.last)) == ["third"]


@pytest.mark.parametrize("how", ["aborted", "read"])
def test_an_edge_that_has_handed_over_a_use_takes_no_first_chunk_of_one_before(rig: Any, how: str) -> None:
    """A reader would go back to it; its client would take that for a repetition."""
    slow, fast, reader = rig.join(), rig.join(), rig.reader(edge=rig.other)
    rig.put(slow, "a", 0)
    rig.begin(fast, "a")
    rig.put(fast, "a", 0, edge=rig.other, last=how == "read", tag="second")
    assert tags(rig.read(reader)) == ["second"]
    if how == "aborted":
        rig.abort(fast, "a", mine=True)
    rig.put(slow, "a", 0, edge=rig.other, tag="first")
    assert kinds(rig.put_failures(slow)) == [AlreadyPut]
    rig.hear(reader)
    assert tags(rig.read(reader)) == []


def test_a_use_in_which_a_reader_only_waited_is_over_when_it_has_left_it(rig: Any) -> None:
    """What it waited for was in a later one, which a sender began that had finished this."""
    writer, other, reader = rig.join(), rig.join(), rig.reader()
    rig.enter(reader, "a")
    rig.finish(writer, "a")
    rig.put(writer, "a", 0, last=True, tag="only")
    assert tags(rig.read(reader)) == ["only"]
    rig.finish(writer, "a")
    rig.finish(reader, "a")
    assert not rig.state.lives
    rig.put(other, "a", 0, last=True, tag="next")
    assert tags(rig.read(reader)) == ["next"]


def test_a_reader_that_waits_hears_that_the_sender_died_before_its_first_chunk(rig: Any) -> None:
    writer, reader, other = rig.join(), rig.reader(), rig.reader(edge=rig.other)
    rig.enter(writer, "a", sends=True)
    rig.enter(reader, "a")
    rig.die(writer)
    assert kinds([e.error for e in rig.heard(reader, ef.StreamFailed)]) == [WriterDied]
    assert rig.heard(other, ef.StreamFailed) == []
    rig.finish(reader, "a")
    assert not rig.state.lives


def test_of_a_sender_that_died_only_those_hear_who_are_in_the_use(rig: Any) -> None:
    """The next use of the rid is not this one's, and one that has finished it waits for nothing."""
    writer, reader = rig.join(), rig.reader()
    rig.enter(writer, "a", sends=True)
    rig.enter(writer, "b", sends=True)
    rig.enter(reader, "a")
    rig.finish(reader, "a")
    rig.die(writer)
    assert rig.heard(reader, ef.StreamFailed) == [] and not rig.state.lives


def test_a_sender_that_finished_a_use_of_nothing_and_dies_has_failed_nobody(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.enter(writer, "a", sends=True)
    rig.enter(reader, "a")
    rig.finish(writer, "a")
    rig.die(writer)
    assert rig.heard(reader, ef.StreamFailed) == []


def test_of_two_senders_of_a_stream_one_dies_before_its_first_chunk(rig: Any) -> None:
    """As of one that dies after it: what the other has put is handed over."""
    writer, other, reader = rig.join(), rig.join(), rig.reader()
    for session in (writer, other):
        rig.enter(session, "a", sends=True)
    rig.put(other, "a", 0, tag="put")
    rig.die(writer)
    assert tags(rig.read(reader)) == ["put"]
    assert kinds([e.error for e in rig.heard(reader, ef.StreamFailed)]) == [WriterDied]


def test_of_the_readers_of_a_sender_that_died_each_hears_who_waits(rig: Any) -> None:
    writer = rig.join()
    first, second = (rig.reader(reader=number, readers=2) for number in range(2))
    rig.enter(writer, "a", sends=True)
    rig.enter(second, "a")
    rig.die(writer)
    assert rig.heard(first, ef.StreamFailed) == []
    assert kinds([e.error for e in rig.heard(second, ef.StreamFailed)]) == [WriterDied]
    rig.finish(second, "a")
    assert not rig.state.lives


def test_lives_of_sessions_that_only_entered_go(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    for number in range(50):
        for session in (writer, reader):
            rig.enter(session, f"a{number}", sends=session == writer)
        for session in (writer, reader):
            rig.finish(session, f"a{number}")
    assert not rig.state.lives
    rig.enter(writer, "a", sends=True)
    rig.enter(reader, "a")
    rig.die(writer)
    rig.leave(reader)
    assert not rig.state.lives


def test_a_late_release_of_a_finished_use_ends_none_that_came_after(rig: Any) -> None:
    """The reader is in a use that was aborted before anything of it came; a view of the one before that dies now. Its
    finish still means the aborted one, not the next."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", tag="old", last=True)
    (old,) = rig.arrived(reader)
    rig.take(reader, old)
    rig.finish(reader, "a")
    for _ in range(2):
        # The second finds nothing to abort: it is of a use that nobody has begun.
        rig.abort(writer, "a")
    rig.enter(reader, "a")
    rig.hear(reader)
    rig.begin(writer, "a")
    rig.put(writer, "a", tag="new", last=True)
    rig.release(reader, old)
    rig.finish(reader, "a")
    assert tags(rig.read(reader)) == ["new"]
