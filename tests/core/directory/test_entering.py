"""A session that says that it is in a use of a rid, before anything of it was put; and aborts that mean one use."""

from __future__ import annotations

from typing import Any

from connector.core.directory import effects as ef
from connector.core.errors import RequestAborted


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
    """One that knows nothing of entering."""
    writer, reader = rig.join(), rig.reader()
    rig.enter(reader, "a")
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
    assert tags(rig.read(reader)) == ["in the way", "first", "second"]


def test_entering_does_not_open_a_rid_whose_abort_is_on_its_way(rig: Any) -> None:
    """That may have been the use that is meant: the next put is a late one."""
    writer, other = rig.join(), rig.join()
    rig.abort(other, "a")
    rig.enter(writer, "a", sends=True)
    rig.put(writer, "a", 0)
    assert kinds(rig.put_failures(writer)) == [RequestAborted]


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
