"""A refusal that leaves a hole fails the stream at both ends; one that does not harms nobody."""

from __future__ import annotations

from typing import Any

from connector.core.directory import effects as ef
from connector.core.errors import AlreadyPut, PoolFull, ProtocolViolation, ReadersMismatch
from connector.core.names import Handle


def kinds(errors: list[Any]) -> list[type]:
    return [type(error) for error in errors]


def test_a_hole_poisons_the_stream_with_its_cause(rig: Any) -> None:
    writer = rig.join()
    rig.put(writer, "a", 0, tag="zero")
    rig.put(writer, "a", 1, readers=2)
    rig.put(writer, "a", 2)
    rig.put(writer, "a", 3)
    assert kinds(rig.put_failures(writer)) == [ReadersMismatch] * 3
    assert {error.facts["index"] for error in rig.put_failures(writer)} == {1}
    assert kinds(rig.failures(writer)) == [ReadersMismatch]
    reader = rig.reader()
    said = [type(e) for e in rig.said[reader] if isinstance(e, (ef.Deliver, ef.StreamFailed))]
    assert said == [ef.Deliver, ef.StreamFailed]
    assert [d.manifest for d in rig.read(reader)] == [b"zero"]
    assert kinds(rig.failures(reader)) == [ReadersMismatch]


def test_each_put_gets_an_error_of_its_own(rig: Any) -> None:
    """One exception object must not be raised by many puts."""
    writer = rig.join()
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 1, readers=2)
    rig.put(writer, "a", 2)
    rig.put(writer, "a", 3)
    errors = rig.put_failures(writer)
    assert len({id(error) for error in errors}) == 3


def test_a_waiting_take_hears_of_the_poison_at_once(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader(push=False)
    rig.claim(reader, "a")
    rig.put(writer, "a", 0)
    rig.read(reader)
    rig.wait(reader, "a")
    rig.put(writer, "a", 1, readers=3)
    assert kinds(rig.failures(reader)) == [ReadersMismatch]
    assert not rig.state.sessions[reader].takes


def test_a_put_that_waits_for_room_hears_of_the_poison_at_once(make_rig: Any) -> None:
    """It could only be refused later."""
    rig = make_rig(pool=256)
    writer = rig.join()
    rig.put(writer, "a", 0)
    spare = rig.room(writer)
    big = rig.reserve(writer, 256, rid="a")
    rig.seal(writer, spare, rig.member("a", 1, readers=2))
    assert type(rig.refusal(writer, big)) is ReadersMismatch
    assert not rig.state.sessions[writer].rooms


def test_other_streams_are_not_poisoned(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 1, readers=2)
    rig.put(writer, "b", last=True)
    rig.put(writer, "a", 0, edge=rig.other, last=True)
    assert [d.rid for d in rig.read(reader)] == ["a", "b"]
    assert [d.rid for d in rig.read(rig.reader(edge=rig.other))] == ["a"]


def test_sixteen_writers_of_one_key(rig: Any) -> None:
    """B56: one winner, fifteen are told, its reader gets one whole payload."""
    writers, reader = [rig.join() for _ in range(16)], rig.reader()
    for writer in writers:
        rig.put(writer, "a", last=True, tag=str(writer))
    assert [kinds(rig.put_failures(writer)) for writer in writers] == [[]] + [[AlreadyPut]] * 15
    assert [d.manifest for d in rig.read(reader)] == [str(writers[0]).encode()]
    assert rig.failures(reader) == []
    for writer in writers:
        rig.die(writer)
    assert rig.failures(reader) == [] and rig.is_empty()


def test_a_writer_that_comes_after_the_payload_was_read_is_told_too(rig: Any) -> None:
    """B56: the life goes on until its sender has finished, however fast its reader is."""
    first, second, reader = rig.join(), rig.join(), rig.reader()
    rig.put(first, "a", last=True)
    assert len(rig.read(reader)) == 1
    rig.put(second, "a", last=True)
    assert kinds(rig.put_failures(second)) == [AlreadyPut]
    rig.finish(first, "a")
    rig.put(second, "a", last=True)
    assert len(rig.read(reader)) == 1 and rig.is_empty()


def test_a_refused_duplicate_of_a_read_stream_opens_no_life(rig: Any) -> None:
    first, second, reader = rig.join(), rig.join(), rig.reader()
    rig.put(first, "a", last=True)
    rig.read(reader)
    rig.put(second, "a", last=True)
    assert rig.is_empty() and not rig.state.sessions[second].bound


def test_a_seal_of_a_block_that_is_not_ones_own_is_refused(rig: Any) -> None:
    """It costs its sender an error; the stream of another is not touched."""
    writer, stranger, reader = rig.join(), rig.join(), rig.reader()
    handle = rig.room(writer)
    rig.seal(stranger, handle, rig.member("a"))
    rig.seal(stranger, Handle(handle.offset, handle.generation + 1), rig.member("a"))
    assert kinds(rig.put_failures(stranger)) == [ProtocolViolation] * 2
    rig.seal(writer, handle, rig.member("a", last=True))
    assert len(rig.read(reader)) == 1 and rig.failures(reader) == []


def test_a_writers_own_seal_of_an_unknown_block_is_a_hole(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.seal(writer, Handle(4096, 99), rig.member("a", 1))
    rig.read(reader)
    assert kinds(rig.failures(reader)) == [ProtocolViolation]


def test_a_refused_member_keeps_no_other_back(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    handle = rig.room(writer)
    rig.seal(writer, handle, rig.member("a", 0), rig.member("b", last=True), rig.member("a", 1, last=True))
    assert [(e.number, e.member) for e in rig.heard(writer, ef.PutFailed)] == [(2, 0)]
    assert [(d.rid, d.index) for d in rig.read(reader)] == [("a", 0), ("b", 0), ("a", 1)]
    assert rig.is_empty()


def test_a_block_of_refused_members_is_freed(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    handle = rig.room(writer)
    effects = rig.seal(writer, handle, rig.member("a", 0), rig.member("a", 0))
    assert [e.handle for e in rig.of(effects, ef.FreeEntry)] == [handle]
    assert len(rig.read(reader)) == 1


def test_the_poison_goes_when_writer_and_reader_have_gone_on(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 1, readers=2)
    rig.read(reader)
    rig.put(writer, "a", 2)
    assert len(rig.put_failures(writer)) == 2
    rig.finish(writer, "a")
    rig.finish(reader, "a")
    assert rig.is_empty()
    rig.put(writer, "a", last=True)
    assert len(rig.read(reader)) == 1 and len(rig.put_failures(writer)) == 2


def test_a_release_of_what_is_not_held_changes_nothing(rig: Any) -> None:
    writer, reader, stranger = rig.join(), rig.reader(), rig.join()
    rig.put(writer, "a", last=True)
    (told,) = rig.arrived(reader)
    rig.release(stranger, told)
    assert rig.used == 64
    rig.release(reader, told._replace(member=5), told._replace(reader=3))
    assert rig.used == 64
    rig.release(reader, told, told)
    rig.release(reader, told)
    assert rig.used == 0 and rig.state.sessions[reader].held == 0


def test_a_put_refused_for_room_poisons_nothing_by_itself(make_rig: Any) -> None:
    """No index was used: the same put may come again."""
    rig = make_rig(pool=64)
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    late = rig.reserve(writer, 64, timeout=1.0, rid="a")
    rig.tick(2.0)
    assert type(rig.refusal(writer, late)) is PoolFull
    rig.read(reader)
    rig.put(writer, "a", 1, last=True)
    assert [d.index for d in rig.read(reader)] == [1] and rig.is_empty()
