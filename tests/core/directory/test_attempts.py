"""Re-sending: retries, refusals, and what a higher attempt may replace."""

from __future__ import annotations

from typing import Any

from connector.core.directory import effects as ef
from connector.core.directory.events import Flags
from connector.core.errors import AlreadyPut


def notes(rig: Any, session: int) -> list[str]:
    return [note.outcome for note in rig.heard(session, ef.PutNoted)]


def kinds(errors: list[Any]) -> list[type]:
    return [type(error) for error in errors]


def test_the_same_index_with_another_number_is_refused(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", tag="first")
    rig.put(writer, "a", tag="second")
    assert kinds(rig.put_failures(writer)) == [AlreadyPut]
    assert [d.manifest for d in rig.read(reader)] == [b"first"] and rig.failures(reader) == []


def test_a_higher_attempt_replaces_what_no_reader_was_told_of(rig: Any) -> None:
    writer = rig.join()
    rig.put(writer, "a", 0, tag="old", size=128)
    rig.put(writer, "a", 0, attempt=1, tag="new")
    assert notes(rig, writer) == ["replaced"] and rig.used == 64
    (got,) = rig.read(rig.reader())
    assert (got.manifest, got.attempt) == (b"new", 1)


def test_a_higher_attempt_is_ignored_once_a_reader_was_told(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0, tag="old")
    rig.put(writer, "a", 0, attempt=1, tag="new")
    assert notes(rig, writer) == ["ignored"] and rig.put_failures(writer) == []
    assert [d.manifest for d in rig.read(reader)] == [b"old"] and rig.used == 0


def test_the_same_higher_attempt_twice_is_refused(rig: Any) -> None:
    writer = rig.join()
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 0, attempt=2)
    rig.put(writer, "a", 0, attempt=2)
    rig.put(writer, "a", 0, attempt=1)
    assert kinds(rig.put_failures(writer)) == [AlreadyPut, AlreadyPut]
    assert rig.put_failures(writer)[0].facts["known_attempt"] == 2


def test_a_replay_replaces_only_the_unread(rig: Any) -> None:
    """B58: 0..4 sent, 0..1 told, rolled back to 1 and 1..6 sent again."""
    writer = rig.join()
    rig.put_all(writer, "a", 2, last=False, tag="old")
    reader = rig.reader()
    told = rig.arrived(reader)
    rig.die(reader)
    assert [d.index for d in told] == [0, 1]
    reader = rig.reader()
    rig.put(writer, "a", 2, tag="old")
    for index in range(1, 4):
        rig.put(writer, "a", index, attempt=1, last=index == 3, tag="new")
    got = rig.read(reader)
    assert [(d.index, d.manifest) for d in got] == [(0, b"old"), (1, b"old"), (2, b"old"), (3, b"new")]
    assert notes(rig, writer) == ["ignored", "ignored"] and rig.is_empty()


def test_a_replay_after_all_was_consumed_opens_nothing(rig: Any) -> None:
    """B58: the stream is gone, but its session has not finished: nothing is handed over twice."""
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 3)
    assert len(rig.read(reader)) == 3 and rig.is_empty()
    rig.put(writer, "a", 1, attempt=1)
    rig.put(writer, "a", 2, attempt=1, last=True)
    assert notes(rig, writer) == ["ignored", "ignored"]
    rig.put(writer, "a", 0)
    assert kinds(rig.put_failures(writer)) == [AlreadyPut]
    assert rig.read(reader) == [] and rig.is_empty()


def test_a_replay_moves_the_end(rig: Any) -> None:
    """The chunk that carried END is replaced by one that does not: the stream goes on."""
    writer = rig.join()
    rig.put_all(writer, "a", 2)
    rig.put(writer, "a", 1, attempt=1)
    rig.put(writer, "a", 2, attempt=1, last=True)
    assert rig.put_failures(writer) == []
    got = rig.read(rig.reader())
    assert [(d.index, bool(d.flags & Flags.LAST)) for d in got] == [(0, False), (1, False), (2, True)]
    assert rig.is_empty()


def test_an_end_mark_gives_way_to_a_chunk_of_a_higher_attempt(rig: Any) -> None:
    writer = rig.join()
    rig.put(writer, "a", 0)
    rig.put(writer, "a", 1, end=True)
    rig.put(writer, "a", 1, attempt=1)
    rig.put(writer, "a", 2, end=True, attempt=1)
    assert notes(rig, writer) == ["replaced"] and rig.put_failures(writer) == []
    got = rig.read(rig.reader())
    assert [(d.index, bool(d.flags & Flags.END_ONLY)) for d in got] == [(0, False), (1, False), (2, True)]
    assert rig.is_empty()


def test_a_replay_that_flags_the_end_that_a_mark_told(rig: Any) -> None:
    """First END came alone, then the last chunk comes again with the flag: the same END, told once."""
    writer = rig.join()
    rig.put_all(writer, "a", 2, last=False)
    rig.put(writer, "a", 2, end=True)
    rig.put(writer, "a", 1, attempt=1, last=True, tag="new")
    assert rig.put_failures(writer) == [] and notes(rig, writer) == ["replaced"]
    got = rig.read(rig.reader())
    assert [d.manifest for d in got] == [b"", b"new", b""]
    assert sum(bool(d.flags & (Flags.LAST | Flags.END_ONLY)) for d in got) == 1
    assert rig.is_empty()


def test_two_attempts_of_one_chunk_in_one_block(rig: Any) -> None:
    """The block is not freed under the member that replaces another one of it."""
    writer = rig.join()
    rig.seal(writer, rig.room(writer), rig.member("a", tag="old"), rig.member("a", attempt=1, tag="new", last=True))
    assert notes(rig, writer) == ["replaced"] and rig.used == 64
    assert [d.manifest for d in rig.read(rig.reader())] == [b"new"] and rig.is_empty()


def test_a_reader_that_has_finished_does_not_keep_a_chunk_from_being_replaced(rig: Any) -> None:
    """No reader was told: one is not there, the other wants nothing."""
    writer, other = rig.join(), rig.join()
    assert rig.subscribe(other, reader=1, readers=2, push=False) is None
    rig.put(writer, "a", readers=2)
    rig.finish(other, "a")
    rig.put(writer, "a", attempt=1, readers=2, tag="new")
    assert notes(rig, writer) == ["replaced"]
    assert [d.manifest for d in rig.read(rig.reader(readers=2))] == [b"new"]
