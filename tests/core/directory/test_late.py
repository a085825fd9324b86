"""Stages that come to a use late: when it was aborted, read to its end on another edge, or its sender has died."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.errors import WriterDied

from .test_entering import tags


class Line:
    """thinker -> talker -> code2wav; the talker is one process with a session for each of its edges."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.thinker, self.last = rig.join("thinker", 1), rig.reader("code2wav", edge=rig.other)
        self.reads, self.sends = rig.join("talker", 7), rig.join("talker", 7)
        rig.subscribe(self.reads)
        #: By name, the number of the last abort that it has answered.
        self.answered: dict[str, int] = {}

    def session(self, name: str) -> int:
        return int(getattr(self, name))

    def told(self, name: str) -> list[ef.Notice]:
        """Aborts that the session has heard of since it last answered one."""
        for _ in range(2):
            self.rig.hear(self.session(name))
        notices = [notice for said in self.rig.heard(self.session(name), ef.Notices) for notice in said.notices]
        return [notice for notice in notices if notice.number > self.answered.get(name, 0)]

    def enter(self, *names: str) -> None:
        """As a client does: the abort that it has heard is answered, and named if something was to be on this edge."""
        for name in names:
            edge = self.rig.other if name in ("sends", "last") else self.rig.edge
            heard = self.told(name)
            if heard:
                self.finish(name)
            life = heard[-1].life if heard and edge in heard[-1].edges else 0
            self.rig.enter(self.session(name), "a", sends=name in ("thinker", "sends"), edge=edge, heard=life)

    def finish(self, *names: str) -> None:
        for name in names:
            heard = self.told(name)
            if heard:
                self.answered[name] = heard[-1].number
            self.rig.finish(self.session(name), "a", aborted=bool(heard))

    def fail(self, name: str) -> None:
        self.rig.abort(self.session(name), "a", f"{name} failed", mine=True)

    def reasons(self, name: str) -> list[str]:
        return [notice.reason for notice in self.told(name)]


@pytest.fixture
def line(rig: Any) -> Line:
    return Line(rig)


BOTH = [("reads", "sends"), ("sends", "reads")]


@pytest.mark.parametrize("talker", BOTH)
def test_both_sessions_of_a_stage_that_comes_late_are_in_the_use_that_was_aborted(line: Line, talker: Any) -> None:
    """Whichever says so first. Then the first stage begins anew, and hears of what fails in the talker's next."""
    line.enter("thinker")
    line.fail("thinker")
    line.enter(*talker)
    assert line.told("reads") and line.told("sends")
    line.finish("thinker", *talker)
    line.enter("thinker", *talker)
    line.fail("sends")
    assert line.reasons("thinker") == ["sends failed"]


@pytest.mark.parametrize("talker", BOTH)
@pytest.mark.parametrize("finished", [False, True])
def test_who_comes_last_hears_of_what_failed_before_the_stage_between_began(
    line: Line, talker: Any, finished: bool
) -> None:
    line.enter("thinker")
    line.fail("thinker")
    line.told("last")
    line.enter(*talker)
    if finished:
        line.finish(*talker)
    line.enter("last")
    assert line.told("last")[-1].edges == (line.rig.other,)
    line.finish("last", "thinker")
    assert not line.rig.state.lives


@pytest.mark.parametrize("talker", BOTH)
def test_who_waits_for_what_the_stage_between_would_have_sent_hears_when_that_begins(line: Line, talker: Any) -> None:
    """Then all are in the next."""
    line.enter("thinker")
    line.fail("thinker")
    line.told("last")
    line.enter("last")
    assert len(line.told("last")) == 0
    line.enter(*talker)
    assert [one.edges for one in line.told("last")] == [(line.rig.other,)]
    line.finish("last", *talker, "thinker")
    line.enter("thinker", *talker, "last")
    line.rig.put(line.sends, "a", 0, edge=line.rig.other, last=True, tag="second")
    assert tags(line.rig.read(line.last)) == ["second"]


def test_all_edges_of_a_session_that_comes_late_are_told(line: Line) -> None:
    rig = line.rig
    further = rig.reader("further", edge=rig.third)
    line.enter("thinker")
    line.fail("thinker")
    rig.hear(further)
    for name in ("sends", "last"):
        line.told(name)
    for edge in (rig.other, rig.third):
        # Before its other session says that they are in the use that was aborted.
        rig.enter(line.sends, "a", sends=True, edge=edge)
    line.enter("reads")
    assert [notice.edges for notice in line.told("last")[-1:]] == [(rig.other,)]
    for _ in range(2):
        rig.hear(further)
    assert rig.heard(further, ef.Notices)[-1].notices[-1].edges == (rig.third,)


def test_a_stage_that_began_and_finished_what_was_aborted_is_not_told_again(line: Line) -> None:
    """When another comes late to it: what it begins next is another use."""
    line.enter("thinker", "last")
    line.fail("thinker")
    line.finish("last", "thinker")
    line.enter("reads", "sends")
    assert line.told("last") == []
    line.finish("reads", "sends")
    line.enter("last", "thinker", "reads", "sends")
    line.rig.put(line.sends, "a", 0, edge=line.rig.other, last=True, tag="second")
    assert tags(line.rig.read(line.last)) == ["second"]


def test_a_sender_that_begins_late_hears_what_its_reader_failed_at(line: Line) -> None:
    line.enter("reads")
    line.fail("reads")
    line.enter("thinker")
    assert line.reasons("thinker") == ["again"]


def test_an_abort_of_every_use_is_told_one_use_after_the_other(line: Line) -> None:
    """The reader is in the first, its sender in the second."""
    rig = line.rig
    line.enter("thinker", "reads")
    rig.put(line.thinker, "a", 0, last=True)
    line.finish("thinker")
    line.enter("thinker")
    rig.abort(line.last, "a", "the operator")
    for _ in range(2):
        assert [(one.reason, one.edges) for one in line.told("reads")] == [("the operator", (rig.edge,))]
        line.finish("reads")
    assert line.told("reads") == []


def test_who_has_not_finished_what_was_aborted_is_sent_nothing_of_the_next(line: Line) -> None:
    """Also if it had read all of it."""
    rig = line.rig
    line.enter("thinker", "reads")
    rig.put(line.thinker, "a", 0, last=True, tag="first")
    assert tags(rig.read(line.reads)) == ["first"]
    line.fail("thinker")
    line.finish("thinker")
    line.enter("thinker")
    rig.put(line.thinker, "a", 0, last=True, tag="second")
    line.told("reads")
    assert tags(rig.read(line.reads)) == []
    line.finish("reads")
    assert tags(rig.read(line.reads)) == ["second"]


def test_a_reader_that_comes_when_another_edge_is_read_to_its_end_is_in_the_same_use(line: Line) -> None:
    """Its sender, who has not finished, then puts to it."""
    rig = line.rig
    rig.put(line.thinker, "a", 0, last=True)
    rig.read(line.reads)
    line.enter("last")
    rig.put(line.thinker, "a", 0, edge=rig.other, last=True, tag="to another")
    assert tags(rig.read(line.last)) == ["to another"]


def test_a_reader_that_comes_when_all_senders_have_finished_is_in_the_next_use(line: Line) -> None:
    rig = line.rig
    rig.put(line.thinker, "a", 0, last=True)
    rig.read(line.reads)
    line.finish("thinker")
    line.enter("last")
    assert [life.number for life in rig.state.lives["a"]] == [2]


@pytest.mark.parametrize("leave", ["die", "leave"])
def test_who_comes_when_the_only_stage_of_a_use_is_gone_hears_that(line: Line, leave: str) -> None:
    """It had said that it would send, and had not."""
    line.enter("thinker")
    getattr(line.rig, leave)(line.thinker)
    line.enter("reads")
    (notice,) = line.told("reads")[-1:]
    assert notice.reason == "again" and not line.rig.state.lives
    assert line.told("last")[0].reason.endswith("before END: thinker (pid 1)")


def test_who_is_a_use_behind_hears_of_the_death_in_the_next_when_it_comes_there(line: Line) -> None:
    line.enter("thinker", "reads")
    line.rig.put(line.thinker, "a", 0, last=True)
    line.rig.read(line.reads)
    line.finish("thinker")
    line.enter("thinker")
    line.rig.die(line.thinker)
    assert line.told("reads") == [] and line.rig.failures(line.reads) == []
    line.finish("reads")
    assert line.reasons("reads")[0].startswith("the writer's process died")


def test_who_waits_and_has_not_subscribed_yet_hears_of_the_death_as_of_an_abort(line: Line) -> None:
    early = line.rig.join("early")
    line.enter("thinker")
    line.rig.enter(early, "a")
    line.rig.die(line.thinker)
    for _ in range(2):
        line.rig.hear(early)
    (said,) = line.rig.heard(early, ef.Notices)
    assert said.notices[0].edges == (line.rig.edge,) and "thinker (pid 1)" in said.notices[0].reason
    line.rig.finish(early, "a", aborted=True)
    assert not line.rig.state.lives


def test_a_death_in_a_use_in_which_others_are_is_told_to_who_waits_and_aborts_nothing(line: Line) -> None:
    line.enter("thinker", "reads", "sends")
    line.rig.die(line.thinker)
    assert [type(error) for error in line.rig.failures(line.reads)] == [WriterDied]
    assert line.told("sends") == []


def test_aborts_of_uses_that_a_session_was_in_are_all_told_however_many(make_rig: Any) -> None:
    """Those of others' uses are replaced by the word that some are lost."""
    rig = make_rig(max_notices=2)
    writer, silent = rig.join(), rig.reader()
    mine = [f"mine{number}" for number in range(600)]
    for rid in mine:
        rig.enter(silent, rid)
    for number in range(5):
        rig.abort(writer, f"other{number}")
    for rid in mine:
        rig.abort(writer, rid)
    for _ in range(5):
        rig.hear(silent)
    said = rig.heard(silent, ef.Notices)
    heard = [notice.rid for one in said for notice in one.notices]
    assert heard == ["other0", "other1", "other2", *mine] and [one.lost for one in said].count(True) == 1
    assert max(len(one.notices) for one in said) == 256


def test_aborts_that_a_session_is_still_to_come_to_are_bounded(line: Line) -> None:
    """The first of them are told, one use after the other."""
    line.enter("thinker", "reads")
    line.rig.put(line.thinker, "a", 0, last=True)
    for _ in range(100):
        line.finish("thinker")
        line.enter("thinker")
        line.fail("thinker")
    assert len(line.rig.state.sessions[line.reads].deferred["a"]) == 64
    line.finish("reads")
    assert line.reasons("reads") == ["thinker failed"]


def test_who_has_finished_a_newer_use_gets_nothing_of_one_that_goes_on(rig: Any) -> None:
    """It had been read to its end elsewhere; one of its senders had not finished it."""
    ahead, behind = rig.join(), rig.join()
    elsewhere, reader = rig.reader(edge=rig.other), rig.reader()
    rig.begin(behind, "a")
    rig.put(ahead, "a", 0, edge=rig.other, last=True)
    rig.read(elsewhere)
    rig.begin(ahead, "a")
    rig.finish(reader, "a")
    rig.put(behind, "a", 0, last=True, tag="first")
    assert tags(rig.read(reader)) == []
    for session in (ahead, behind):
        rig.finish(session, "a")
    rig.put(behind, "a", 0, last=True, tag="third")
    assert tags(rig.read(reader)) == ["third"]
