"""One use of a rid after another: what ends a life, and what never gets from one into the next."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.errors import AlreadyPut, RequestAborted


def kinds(errors: list[Any]) -> list[type]:
    return [type(error) for error in errors]


def tags(descriptors: list[ef.Descriptor]) -> list[str]:
    return [d.manifest.decode() for d in descriptors]


# -- finish ---------------------------------------------------------------------------------------


def test_finish_by_the_sender_destroys_nothing_unread(rig: Any) -> None:
    writer = rig.join()
    rig.put_all(writer, "a", 3, last=False)
    rig.finish(writer, "a")
    assert [d.index for d in rig.read(rig.reader())] == [0, 1, 2] and rig.is_empty()


def test_finish_by_a_reader_drops_its_unread_share(make_rig: Any) -> None:
    rig = make_rig(window=1)
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 4)
    (told,) = rig.arrived(reader)
    rig.finish(reader, "a")
    assert rig.used == 64
    rig.release(reader, told)
    assert rig.arrived(reader) == [] and rig.is_empty()


def test_what_comes_after_the_readers_finish_is_not_kept(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.read(reader)
    rig.finish(reader, "a")
    rig.put(writer, "a", 1, last=True)
    assert rig.used == 0 and rig.read(reader) == [] and rig.is_empty()


def test_a_life_ends_with_its_last_stream(rig: Any) -> None:
    writer, reader, vocoder = rig.join(), rig.reader(), rig.reader(edge=rig.other)
    rig.put(writer, "a", last=True)
    rig.put(writer, "a", edge=rig.other, last=True)
    rig.read(reader)
    assert len(rig.state.lives["a"]) == 1
    rig.read(vocoder)
    assert rig.is_empty()


def test_finish_of_a_rid_that_nobody_knows(rig: Any) -> None:
    writer = rig.join()
    rig.finish(writer, "a")
    assert rig.is_empty() and not rig.state.tombstones


# -- a rid used again -----------------------------------------------------------------------------


def test_a_rid_reused_at_once_never_mixes(rig: Any) -> None:
    """B54: one event after finish; the reader has not read the first life."""
    writer = rig.join()
    rig.put_all(writer, "a", 2, last=False, tag="one")
    rig.finish(writer, "a")
    rig.put_all(writer, "a", 2, tag="two")
    reader = rig.reader()
    got = rig.read(reader)
    assert [(d.index, t) for d, t in zip(got, tags(got), strict=True)] == [
        (0, "one"),
        (1, "one"),
        (0, "two"),
        (1, "two"),
    ]
    assert len({d.life for d in got}) == 2 and rig.is_empty()


def test_a_session_in_the_first_life_is_not_shown_the_second(rig: Any) -> None:
    """Not on another edge either: its views of the first are alive."""
    writer, reader = rig.join(), rig.reader()
    assert rig.subscribe(reader, edge=rig.third) is None
    rig.put(writer, "a", tag="one", last=True)
    (told,) = rig.arrived(reader)
    rig.take(reader, told)
    rig.finish(writer, "a")
    rig.put(writer, "a", edge=rig.third, tag="two", last=True)
    assert rig.arrived(reader) == []
    rig.finish(reader, "a")
    assert tags(rig.arrived(reader)) == ["two"]


def test_an_unread_life_on_another_edge_comes_first(make_rig: Any) -> None:
    """The first life waits for the window; the second, by name on another edge, does not overtake it."""
    rig = make_rig(window=1)
    writer, reader = rig.join(), rig.reader()
    assert rig.subscribe(reader, edge=rig.third) is None
    rig.put(writer, "x", last=True)
    rig.put(writer, "a", tag="one", last=True)
    rig.finish(writer, "a")
    rig.claim(reader, "a", edge=rig.third)
    rig.put(writer, "a", edge=rig.third, tag="two", last=True)
    assert tags(rig.read(reader)) == ["", "one", "two"] and rig.is_empty()


def test_a_failed_life_does_not_keep_the_next_one_back(rig: Any) -> None:
    """Its failure is all that the reader is told of it, on one edge; the next life is on another."""
    writer, reader = rig.join(), rig.join()
    rig.put(writer, "a", 1)
    rig.finish(writer, "a")
    rig.put(writer, "a", edge=rig.third, tag="two", last=True)
    assert rig.subscribe(reader, edge=rig.third, push=False) is None
    assert rig.subscribe(reader) is None
    rig.claim(reader, "a", edge=rig.third)
    assert [type(e).__name__ for e in rig.failures(reader)] == ["StreamGap"]
    assert tags(rig.read(reader)) == ["two"] and rig.is_empty()


def test_an_edge_never_goes_back_to_an_older_life(rig: Any) -> None:
    """Two writers: one is in the first life still when the other has begun the second on the same edge."""
    old, new, reader = rig.join(), rig.join(), rig.reader()
    rig.put(old, "a", edge=rig.other)
    rig.begin(new, "a")
    rig.put(new, "a", 0, tag="new")
    rig.put(old, "a", 0, tag="old")
    assert kinds(rig.put_failures(old)) == [AlreadyPut]
    rig.put(new, "a", 1, tag="new", last=True)
    assert tags(rig.read(reader)) == ["new", "new"] and rig.failures(reader) == []


def test_a_readers_late_finish_does_not_drop_the_next_life(rig: Any) -> None:
    """It released all of the first life; the second was pushed before its finish of the first arrived."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", tag="one", last=True)
    rig.read(reader)
    rig.finish(writer, "a")
    rig.put(writer, "a", 0, tag="two")
    rig.put(writer, "a", 2, tag="two", last=True)
    rig.finish(reader, "a")
    rig.put(writer, "a", 1, tag="two")
    assert tags(rig.read(reader)) == ["two"] * 3 and rig.is_empty()


def test_finish_means_the_newer_life_once_its_payload_was_taken(make_rig: Any) -> None:
    rig = make_rig(window=1)
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", tag="one", last=True)
    rig.read(reader)
    rig.finish(writer, "a")
    rig.put_all(writer, "a", 3, tag="two")
    (told,) = rig.arrived(reader)
    rig.release(reader, told)
    rig.finish(reader, "a")
    assert rig.used == 64
    rig.release(reader, *rig.arrived(reader))
    assert rig.is_empty()


def test_a_middle_stage_answers_in_the_life_that_it_has_read(rig: Any) -> None:
    """Its output of the first life comes after the second was pushed to it, and must not get into the second."""
    thinker, talker, vocoder = rig.join(), rig.reader(), rig.reader(edge=rig.other)
    rig.put(thinker, "a", tag="one", last=True)
    rig.read(talker)
    rig.finish(thinker, "a")
    rig.put(thinker, "a", tag="two", last=True)
    second = rig.arrived(talker)
    assert tags(second) == ["two"]
    rig.put(talker, "a", edge=rig.other, tag="one out", last=True)
    rig.finish(talker, "a")
    rig.take(talker, *second)
    rig.release(talker, *second)
    rig.put(talker, "a", edge=rig.other, tag="two out", last=True)
    out = rig.read(vocoder)
    assert tags(out) == ["one out", "two out"]
    assert [d.life for d in out] == [second[0].life - 1, second[0].life]
    rig.finish(talker, "a")
    assert rig.is_empty() and rig.put_failures(talker) == []


def test_a_reader_that_becomes_a_sender_after_the_drain_keeps_its_life(rig: Any) -> None:
    thinker, talker, vocoder = rig.join(), rig.reader(), rig.reader(edge=rig.other)
    rig.put(thinker, "a", last=True)
    (got,) = rig.read(talker)
    assert rig.is_empty()
    rig.put(talker, "a", edge=rig.other, last=True)
    (out,) = rig.read(vocoder)
    assert out.life == got.life and rig.is_empty()


def test_a_second_sender_joins_a_life_that_the_reader_is_still_in(rig: Any) -> None:
    """encoder -> talker comes after thinker -> talker was read: talker's output is of the same life."""
    thinker, encoder = rig.join("thinker"), rig.join("encoder")
    talker, vocoder = rig.reader(), rig.reader("vocoder", edge=rig.other)
    assert rig.subscribe(talker, edge=rig.third) is None
    rig.put(thinker, "a", tag="text", last=True)
    rig.finish(thinker, "a")
    (text,) = rig.read(talker)
    rig.put(encoder, "a", edge=rig.third, tag="image")
    rig.put(talker, "a", edge=rig.other, tag="speech")
    rig.put(encoder, "a", 1, edge=rig.third, tag="image", last=True)
    images = rig.read(talker)
    assert [(d.life, d.index) for d in images] == [(text.life, 0), (text.life, 1)]
    rig.put(talker, "a", 1, edge=rig.other, last=True)
    assert {d.life for d in rig.read(vocoder)} == {text.life}
    assert rig.is_empty()


def test_a_new_writer_after_the_old_one_has_gone_opens_a_new_life(rig: Any) -> None:
    """A reader that never finishes is done by its last release."""
    first, reader = rig.join(), rig.reader()
    rig.put(first, "a", tag="one", last=True)
    rig.read(reader)
    rig.leave(first)
    rig.put(rig.join(), "a", tag="two", last=True)
    assert tags(rig.read(reader)) == ["two"]


def test_a_session_never_goes_back_to_an_older_life(rig: Any) -> None:
    """It took part in the second life only; its third use must not get into the first, which is unread."""
    writer, late = rig.join(), rig.join()
    rig.put(writer, "a", tag="one", last=True)
    rig.finish(writer, "a")
    rig.put(writer, "a", tag="two", last=True)
    rig.put(late, "a", edge=rig.other, tag="two", last=True)
    rig.finish(late, "a")
    rig.put(late, "a", edge=rig.other, tag="three", last=True)
    reader = rig.reader(edge=rig.other)
    lives = [d.life for d in rig.read(reader)]
    rig.finish(reader, "a")
    assert [*lives, *(d.life for d in rig.read(reader))] == [2, 3]


def test_begin_starts_a_life_beside_an_unread_one(rig: Any) -> None:
    writer = rig.join()
    rig.put(writer, "a", 0, tag="one")
    rig.begin(writer, "a")
    rig.put(writer, "a", 0, tag="two", last=True)
    assert rig.put_failures(writer) == []
    reader = rig.reader()
    assert tags(rig.read(reader)) == ["one", "two"]
    assert rig.is_empty()


def test_begin_leaves_every_older_life(make_rig: Any) -> None:
    """Two lives are unread; a reader that begins the rid itself is shown neither of them any more."""
    rig = make_rig(window=1)
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "x")
    for _ in range(2):
        rig.put(writer, "a", last=True)
        rig.finish(writer, "a")
    rig.begin(reader, "a")
    assert [d.rid for d in rig.read(reader)] == ["x"]
    rig.finish(reader, "a")
    assert rig.read(reader) == [] and "a" not in rig.state.lives


def test_begin_without_a_put_leaves_nothing(rig: Any) -> None:
    writer = rig.join()
    rig.begin(writer, "a")
    assert len(rig.state.lives["a"]) == 1
    rig.finish(writer, "a")
    assert rig.is_empty()


def test_a_rid_put_again_without_finish_is_refused(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    rig.read(reader)
    rig.put(writer, "a", last=True)
    assert kinds(rig.put_failures(writer)) == [AlreadyPut]
    rig.finish(writer, "a")
    rig.put(writer, "a", last=True)
    assert len(rig.read(reader)) == 1


def test_past_lives_are_kept_up_to_a_number(make_rig: Any) -> None:
    rig = make_rig(max_past=3)
    writer, reader = rig.join(), rig.reader()
    for number in range(10):
        rig.put(writer, f"r{number}", last=True)
    rig.read(reader)
    assert list(rig.state.sessions[writer].past) == ["r7", "r8", "r9"] and rig.is_empty()


def test_the_streams_of_a_past_life_fail_with_their_writer(rig: Any) -> None:
    """The middle stage writes in its old life while it was sent a newer one, and dies."""
    thinker, talker, vocoder = rig.join(), rig.reader(), rig.reader(edge=rig.other)
    rig.put(thinker, "a", last=True)
    rig.read(talker)
    rig.finish(thinker, "a")
    rig.put(thinker, "a", last=True)
    rig.put(talker, "a", edge=rig.other)
    rig.read(vocoder)
    rig.die(talker)
    assert [type(e).__name__ for e in rig.failures(vocoder)] == ["WriterDied"]


# -- the sessions of a life, by rid ---------------------------------------------------------------


@pytest.mark.parametrize("ender", ["finish", "leave", "die"])
def test_a_life_without_streams_ends_with_its_last_session(rig: Any, ender: str) -> None:
    writer = rig.join()
    rig.begin(writer, "a")
    if ender == "finish":
        rig.finish(writer, "a")
    else:
        getattr(rig, ender)(writer)
    assert rig.is_empty()


def test_an_aborted_rid_is_open_for_a_session_that_joined_later(rig: Any) -> None:
    writer = rig.join()
    rig.abort(writer, "a")
    newcomer = rig.join()
    rig.put(newcomer, "a", last=True)
    assert rig.put_failures(newcomer) == [] and len(rig.read(rig.reader())) == 1


def test_a_put_refused_as_late_is_counted_for_its_session(rig: Any) -> None:
    writer, other = rig.join(), rig.join()
    rig.abort(other, "a")
    rig.put(writer, "a")
    assert kinds(rig.put_failures(writer)) == [RequestAborted]
    assert rig.state.sessions[writer].late_puts == 1 and rig.state.counters["late_puts"] == 1
