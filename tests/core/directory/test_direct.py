"""The direct path: whom a writer told has the payload, whatever the broker knows of it then."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.directory import events as ev
from connector.core.errors import ReaderDied, RequestAborted
from connector.core.names import Handle


class Town:
    """A writer and a reader that can speak directly, and a stream of which the reader has the first chunk."""

    def __init__(self, rig: Any, **how: Any) -> None:
        self.rig = rig
        self.writer = self.join("thinker")
        self.reader = self.join("talker")
        assert rig.subscribe(self.reader, **how) is None

    def join(self, stage: str, direct: bool = True) -> int:
        number = 100 + len(self.rig.state.sessions)
        self.rig.handle(ev.Joined(self.rig.now, number, stage, number, 0, direct))
        self.rig.seen[number] = self.rig.state.sessions[number].seen
        return number

    def begin(self, rid: str = "r") -> ef.Descriptor:
        self.rig.put(self.writer, rid)
        (first,) = self.rig.arrived(self.reader)
        return first

    def tell(self, index: int, rid: str = "r", *, handle: Handle | None = None, **more: Any) -> ef.Descriptor:
        """The writer tells the reader of the next chunk, and seals it."""
        block = handle or self.rig.room(self.writer)
        self.seal(block, self.rig.member(rid, index, **more))
        return self.descriptor(block, index, rid)

    def seal(self, block: Handle, *members: ev.Member, told: bool = True) -> list[ef.Effect]:
        rig, spoken = self.rig, (ev.Told(0, len(members), self.reader),) if told else ()
        number, seen = rig.number(self.writer), rig.seen[self.writer]
        return rig.handle(ev.Sealed(rig.now, self.writer, number, seen, rig.edge, block, 64, members, spoken))

    def descriptor(self, block: Handle, index: int, rid: str = "r", member: int = 0) -> ef.Descriptor:
        return ef.Descriptor(self.rig.edge, 0, rid, 1, index, 0, 0, block, 64, 64, member, b"", index - 1)

    def ways(self, session: int) -> list[tuple[str, int]]:
        return [(way.rid, way.session) for said in self.rig.heard(session, ef.Direct) for way in said.ways]


@pytest.fixture
def town(rig: Any) -> Town:
    return Town(rig)


# -- who is offered it ----------------------------------------------------------------------------


def test_the_first_chunk_opens_the_way_and_introduces_the_two_once(town: Town) -> None:
    town.begin("r")
    town.begin("q")
    assert town.ways(town.writer) == [("r", town.reader), ("q", town.reader)]
    assert [said.other for said in town.rig.heard(town.writer, ef.Introduce)] == [town.reader]


def test_no_way_for_a_payload_that_is_all_of_its_stream(town: Town) -> None:
    town.rig.put(town.writer, "r", last=True)
    assert town.ways(town.writer) == []


@pytest.mark.parametrize("who", ["writer", "reader"])
def test_no_way_with_one_who_cannot_speak_directly(rig: Any, who: str) -> None:
    town = Town(rig)
    alone = town.join("old", direct=False)
    if who == "writer":
        rig.put(alone, "r")
    else:
        rig.leave(town.reader)
        assert rig.subscribe(alone) is None
        rig.put(town.writer, "r")
    assert rig.heard(alone, ef.Direct) == rig.heard(town.writer, ef.Direct) == []


def test_no_way_to_one_of_several_readers(rig: Any) -> None:
    town = Town(rig, readers=2)
    rig.put(town.writer, "r", readers=2)
    assert town.ways(town.writer) == []


def test_no_way_while_something_waits_for_the_window(make_rig: Any) -> None:
    town = Town(make_rig(window=2))
    town.rig.put(town.writer, "r", 0)
    assert town.ways(town.writer) == [("r", town.reader)]
    for index in (1, 2, 3):
        town.rig.put(town.writer, "r", index)
    got = town.rig.arrived(town.reader)
    assert [told.index for told in got] == [0, 1]
    town.rig.handle(ev.FellBack(0.0, town.writer, town.rig.edge, ("r",)))
    assert town.ways(town.writer) == [("r", town.reader)], "two chunks wait here"
    town.rig.take(town.reader, *got)
    assert town.ways(town.writer) == [("r", town.reader)] * 2


def test_a_full_window_withdraws_the_way_and_a_taken_one_opens_it_again(make_rig: Any) -> None:
    town = Town(make_rig(window=2))
    told = [town.begin(), town.tell(1), town.tell(2)]
    assert town.ways(town.writer) == [("r", town.reader), ("r", 0)]
    town.rig.put(town.writer, "r", 3)
    assert town.rig.arrived(town.reader) == []
    town.rig.take(town.reader, *told)
    (came,) = town.rig.arrived(town.reader)
    assert (came.index, came.behind) == (3, 2)
    assert town.ways(town.writer)[-1] == ("r", town.reader)


# -- what was told ----------------------------------------------------------------------------------


def test_what_was_told_is_not_sent_and_is_free_when_it_is_released(town: Town) -> None:
    rig, first = town.rig, town.begin()
    second = town.tell(1)
    assert rig.arrived(town.reader) == []
    rig.release(town.reader, first, second)
    assert rig.used == 0
    last = town.tell(2, last=True)
    rig.release(town.reader, last)
    rig.finish(town.writer, "r")
    rig.finish(town.reader, "r")
    assert rig.is_empty()


def test_a_step_of_which_some_were_told_is_sent_to_its_reader_in_part(town: Town) -> None:
    rig = town.rig
    town.begin("r")
    block = rig.room(town.writer)
    rig.handle(
        ev.Sealed(
            rig.now, town.writer, rig.number(town.writer), rig.seen[town.writer], rig.edge, block, 64,
            (rig.member("r", 1), rig.member("new")), (ev.Told(0, 1, town.reader),),
        )
    )  # fmt: skip
    (came,) = rig.arrived(town.reader)
    assert (came.rid, came.member) == ("new", 1)
    rig.release(town.reader, came, town.descriptor(block, 1, "r"))
    assert rig.used == 64, "the first chunk is still held"


def test_a_release_that_comes_before_the_seal_frees_at_the_seal(town: Town) -> None:
    rig = town.rig
    rig.release(town.reader, town.begin())
    block = rig.room(town.writer)
    early = town.descriptor(block, 1)
    rig.take(town.reader, early)
    rig.release(town.reader, early)
    assert rig.used == 64
    town.seal(block, rig.member("r", 1))
    assert rig.used == 0
    assert [line.what for line in rig.directory.story("r", index=1)] == ["sealed", "delivered", "taken", "released"]


def test_a_release_shows_that_it_was_told_although_the_writer_died_before_it_could_say_so(town: Town) -> None:
    rig = town.rig
    rig.release(town.reader, town.begin())
    block = rig.room(town.writer)
    rig.release(town.reader, town.descriptor(block, 1))
    town.seal(block, rig.member("r", 1), told=False)
    assert rig.arrived(town.reader) == [] and rig.used == 0


def test_what_a_dead_writer_told_and_nobody_spoke_of_is_sent(town: Town) -> None:
    """The reader knows the block, and has it once."""
    town.begin()
    block = town.rig.room(town.writer)
    town.seal(block, town.rig.member("r", 1), told=False)
    (came,) = town.rig.arrived(town.reader)
    assert (came.index, came.handle, came.behind) == (1, block, 0)


def test_a_word_of_a_block_that_goes_unsealed_is_forgotten(town: Town) -> None:
    rig = town.rig
    rig.release(town.reader, town.begin())
    block = rig.room(town.writer)
    rig.release(town.reader, town.descriptor(block, 1))
    rig.give_back(town.writer, block)
    assert rig.used == 0


def test_a_chunk_told_ahead_of_what_waits_here_is_sent_to_nobody_again(make_rig: Any) -> None:
    town = Town(make_rig(window=1))
    rig, first = town.rig, town.begin()
    rig.put(town.writer, "r", 1)
    ahead = town.tell(2)
    rig.put(town.writer, "r", 3, last=True)
    came = rig.arrived(town.reader)
    assert [(told.index, told.behind) for told in came] == [(1, 0)]
    rig.take(town.reader, first, *came)
    assert rig.arrived(town.reader) == []
    rig.take(town.reader, ahead)
    (last,) = rig.arrived(town.reader)
    assert (last.index, last.behind) == (3, 2)
    rig.release(town.reader, first, ahead, *came, last)
    assert rig.used == 0


# -- what becomes of it -----------------------------------------------------------------------------


def test_what_was_told_of_an_aborted_request_stays_until_its_reader_lets_go(town: Town) -> None:
    rig, first = town.rig, town.begin()
    block = rig.room(town.writer)
    rig.abort(town.reader, "r")
    rig.release(town.reader, first)
    town.seal(block, rig.member("r", 1))
    (error,) = rig.put_failures(town.writer)
    assert isinstance(error, RequestAborted)
    assert [hold for said in rig.heard(town.reader, ef.DropHolds)[-1:] for hold in said.holds] == [ev.Hold(block, 0, 0)]
    assert rig.used == 64, "the reader may have views on it"
    rig.release(town.reader, town.descriptor(block, 1))
    assert rig.used == 0


def test_what_was_told_to_a_reader_that_has_finished_stays_until_it_lets_go(town: Town) -> None:
    rig, first = town.rig, town.begin()
    block = rig.room(town.writer)
    rig.release(town.reader, first)
    rig.finish(town.reader, "r")
    town.seal(block, rig.member("r", 1))
    assert rig.used == 64
    rig.release(town.reader, town.descriptor(block, 1))
    assert rig.used == 0


def test_what_was_told_to_a_reader_that_died_goes_to_the_next(town: Town) -> None:
    rig = town.rig
    town.begin()
    block = rig.room(town.writer)
    rig.die(town.reader)
    town.seal(block, rig.member("r", 1, last=True))
    reader = town.join("talker")
    assert rig.subscribe(reader) is None
    got = rig.arrived(reader)
    assert [(told.index, told.behind) for told in got] == [(0, -1), (1, 0)]
    assert all(told.flags & ev.Flags.REDELIVERED for told in got)
    rig.release(reader, *got)
    assert rig.used == 0


def test_what_was_told_ahead_to_a_reader_that_died_goes_to_the_next_in_its_turn(make_rig: Any) -> None:
    town = Town(make_rig(window=1))
    rig = town.rig
    town.begin()
    rig.put(town.writer, "r", 1)
    town.tell(2, last=True)
    assert [told.index for told in rig.arrived(town.reader)] == [1]
    rig.die(town.reader)
    reader = town.join("talker")
    assert rig.subscribe(reader) is None
    assert [(told.index, told.behind) for told in rig.read(reader)] == [(0, -1), (1, 0), (2, 1)]


def test_a_reader_that_died_having_released_what_was_told_fails_the_stream(town: Town) -> None:
    rig, first = town.rig, town.begin()
    told = town.tell(1)
    rig.release(town.reader, first, told)
    rig.die(town.reader)
    (error,) = rig.failures(town.writer)
    assert isinstance(error, ReaderDied)


def test_a_reader_that_leaves_with_a_view_of_an_unsealed_block_stays_until_it_lets_go(town: Town) -> None:
    rig, first = town.rig, town.begin()
    block = rig.room(town.writer)
    held = town.descriptor(block, 1)
    rig.release(town.reader, first)
    rig.leave(town.reader, [held])
    assert town.reader in rig.state.sessions
    town.seal(block, rig.member("r", 1))
    rig.die(town.writer)
    assert rig.used == 64
    rig.release(town.reader, held)
    assert town.reader not in rig.state.sessions
    rig.tick(10_000.0)
    assert rig.used == 0


def test_a_reader_that_leaves_with_a_view_of_a_block_that_goes_unsealed_is_gone(town: Town) -> None:
    rig, first = town.rig, town.begin()
    block = rig.room(town.writer)
    rig.release(town.reader, first)
    rig.leave(town.reader, [town.descriptor(block, 1)])
    rig.give_back(town.writer, block)
    assert town.reader not in rig.state.sessions


def test_end_and_failure_are_said_behind_what_was_told(town: Town) -> None:
    rig, first = town.rig, town.begin("r")
    told = town.tell(1, "r")
    rig.finish(town.writer, "r")
    (ended,) = rig.heard(town.reader, ef.Ended)
    assert (ended.count, ended.behind) == (2, 1)
    rig.release(town.reader, first, told)
    town.begin("q")
    town.tell(1, "q")
    rig.die(town.writer)
    (failed,) = rig.heard(town.reader, ef.StreamFailed)
    assert (failed.rid, failed.behind) == ("q", 1)


def test_what_is_told_ahead_of_a_full_window_lets_through_what_it_is_behind(make_rig: Any) -> None:
    """Told chunks use credits, and are not taken before what comes first: that must not wait for them."""
    town = Town(make_rig(window=2))
    rig, _ = town.rig, town.begin()
    for index in range(1, 6):
        rig.put(town.writer, "r", index)
    assert [told.index for told in rig.arrived(town.reader)] == [1]
    town.tell(6)
    came = rig.arrived(town.reader)
    assert [(told.index, told.behind) for told in came] == [(2, 1), (3, 2), (4, 3), (5, 4)]


def unsaid(town: Town, block: Handle, member: ev.Member, strange: bool = False) -> None:
    """What the broker finds in a block of a writer that has just died."""
    rig, number = town.rig, town.rig.state.sessions[town.writer].applied + 1
    rig.handle(
        ev.Sealed(
            rig.now, town.writer, number, 0, rig.edge, block, 64, (member,), unsaid=True, strange=strange
        )
    )  # fmt: skip


@pytest.mark.parametrize("why", ["behind a hole", "of a use that nobody heard of"])
def test_what_a_dead_writer_may_have_told_stays_until_its_reader_answers(town: Town, why: str) -> None:
    """It did not live to say whom it told, and the payload is not to be read: its reader may have it all the same."""
    rig, first = town.rig, town.begin()
    block = rig.room(town.writer)
    unsaid(town, block, rig.member("r", 2 if why == "behind a hole" else 1), why != "behind a hole")
    rig.die(town.writer)
    rig.release(town.reader, first)
    (drop,) = rig.heard(town.reader, ef.DropHolds)
    assert (drop.holds, drop.writer) == ((rig.hold(town.descriptor(block, 2)),), town.writer)
    assert rig.used == 64
    rig.release(town.reader, town.descriptor(block, 2))
    assert rig.used == 0 and rig.failures(town.reader)
