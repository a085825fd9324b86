"""Callers that wait for a chunk: how they are answered, and what they are told at their deadline."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.directory import effects as ef
from connector.core.errors import BrokerStopping, Gone, NotYet, RequestAborted, UnknownRequest


def test_a_delivery_answers_the_wait(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader(push=False)
    waiting = rig.wait(reader, "a", timeout=5.0)
    rig.put(writer, "a", last=True)
    assert len(rig.arrived(reader)) == 1
    rig.tick(10.0)
    assert rig.refusal(reader, waiting) is None


def test_one_chunk_answers_one_caller(rig: Any) -> None:
    """Two threads wait for the same rid: the second is told at its deadline."""
    writer, reader = rig.join(), rig.reader(push=False)
    first, second = rig.wait(reader, "a"), rig.wait(reader, "a")
    rig.put(writer, "a", 0)
    rig.tick(5.0)
    assert rig.refusal(reader, first) is None and type(rig.refusal(reader, second)) is NotYet


def test_not_yet_says_what_is_missing(rig: Any) -> None:
    writer, reader = rig.join("thinker"), rig.reader()
    rig.put(writer, "a", 0)
    rig.read(reader)
    rig.put(writer, "a", 2)
    rig.put(writer, "a", 3)
    waiting = rig.wait(reader, "a", timeout=5.0)
    rig.tick(5.0)
    error = rig.refusal(reader, waiting)
    assert type(error) is NotYet and isinstance(error, TimeoutError)
    assert error.facts["waiting_for"] == 1 and error.facts["there_already"] == ["2", "3"]
    assert error.facts["waited"] == 5.0 and error.facts["writers"] == [f"thinker (pid {1000 + writer})"]
    assert (error.facts["rid"], error.facts["edge"]) == ("a", str(rig.edge))


def test_not_yet_of_a_rid_that_is_on_another_edge(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", edge=rig.other)
    waiting = rig.wait(reader, "a", timeout=1.0)
    rig.tick(1.0)
    error = rig.refusal(reader, waiting)
    assert type(error) is NotYet and error.facts["seen_on"] == [str(rig.other)]


def test_an_answer_on_the_way_back_is_not_yet_there(rig: Any) -> None:
    """The waiting session's own stream of the rid was read to its end: its life goes on until it finishes."""
    thinker, talker = rig.reader(edge=rig.third), rig.reader()
    rig.put(thinker, "a", last=True)
    rig.read(talker)
    waiting = rig.wait(thinker, "a", timeout=1.0, edge=rig.third)
    rig.tick(1.0)
    assert type(rig.refusal(thinker, waiting)) is NotYet


def test_unknown_names_near_matches(rig: Any) -> None:
    """B55: the two sides disagree about the rid."""
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "req-1-abc")
    rig.put(writer, "something else")
    waiting = rig.wait(reader, "req-1-xyz", timeout=1.0)
    rig.tick(1.0)
    error = rig.refusal(reader, waiting)
    assert type(error) is UnknownRequest and error.facts["near"] == ["req-1-abc"]


@pytest.mark.parametrize("how", ["taken", "finished"])
def test_gone_once_all_was_taken(rig: Any, how: str) -> None:
    """As long as the end is remembered: until the next heartbeat that all sessions have passed it at."""
    rig.tick(0.0)
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    rig.read(reader)
    if how == "finished":
        rig.finish(writer, "a")
        rig.finish(reader, "a")
    waiting = rig.wait(reader, "a", timeout=1.0)
    rig.tick(1.0)
    assert type(rig.refusal(reader, waiting)) is Gone


def test_gone_while_another_reader_has_not_read(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader(readers=2)
    rig.put(writer, "a", last=True, readers=2)
    rig.read(reader)
    waiting = rig.wait(reader, "a", timeout=1.0)
    rig.tick(1.0)
    assert type(rig.refusal(reader, waiting)) is Gone


def test_aborted_at_the_deadline(rig: Any) -> None:
    """The session has heard of the abort, and waits for a new life that does not come."""
    writer, reader = rig.join(), rig.reader()
    rig.abort(writer, "a", "client went away")
    rig.hear(reader)
    waiting = rig.wait(reader, "a", timeout=1.0)
    assert rig.refusal(reader, waiting) is None
    rig.tick(1.0)
    error = rig.refusal(reader, waiting)
    assert type(error) is RequestAborted and error.facts["reason"] == "client went away"


def test_aborted_at_once_for_one_who_has_not_heard(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.abort(writer, "a")
    assert type(rig.refusal(reader, rig.wait(reader, "a"))) is RequestAborted


def test_a_finish_after_the_abort_lets_the_session_wait_anew(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.abort(writer, "a")
    rig.finish(reader, "a")
    waiting = rig.wait(reader, "a")
    rig.hear(writer)
    rig.put(writer, "a", last=True)
    assert rig.refusal(reader, waiting) is None and len(rig.read(reader)) == 1


def test_gone_after_a_later_life_has_ended(rig: Any) -> None:
    """The abort is of a life before it."""
    writer, reader, third = rig.join(), rig.reader(), rig.reader(edge=rig.other)
    rig.abort(writer, "a")
    rig.hear(writer), rig.hear(third)
    rig.put(writer, "a", last=True)
    rig.read(reader)
    rig.finish(writer, "a")
    rig.finish(reader, "a")
    waiting = rig.wait(third, "a", timeout=1.0, edge=rig.other)
    rig.tick(1.0)
    assert type(rig.refusal(third, waiting)) is Gone


def test_a_wait_that_spans_an_abort_ends_at_its_deadline_at_the_latest(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", 0)
    rig.read(reader)
    waiting = rig.wait(reader, "a", timeout=1.0)
    rig.abort(writer, "a")
    assert [n.rid for e in rig.heard(reader, ef.Notices) for n in e.notices] == ["a"]
    rig.tick(1.0)
    assert type(rig.refusal(reader, waiting)) is RequestAborted


def test_a_cancelled_wait_is_not_answered(rig: Any) -> None:
    reader = rig.reader()
    waiting = rig.wait(reader, "a", timeout=1.0)
    rig.cancel(reader, waiting)
    rig.cancel(reader, waiting)
    rig.tick(1.0)
    assert rig.refusal(reader, waiting) is None
    (subscription,) = rig.state.sessions[reader].subscriptions.values()
    assert not subscription.claims


def test_a_wait_said_twice_is_one_wait(rig: Any) -> None:
    reader = rig.reader()
    rig.wait(reader, "a", timeout=1.0)
    rig.again()
    rig.tick(1.0)
    assert len(rig.heard(reader, ef.Refused)) == 1


def test_a_wait_outlasts_a_life_and_is_answered_by_the_next(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader(push=False)
    rig.put(writer, "a", last=True)
    rig.claim(reader, "a")
    (first,) = rig.arrived(reader)
    waiting = rig.wait(reader, "a")
    rig.release(reader, first)
    rig.finish(writer, "a")
    rig.put(writer, "a", last=True)
    assert [d.life for d in rig.arrived(reader)] == [first.life + 1]
    assert waiting not in rig.state.sessions[reader].takes


def test_everyone_who_waits_is_told_that_the_broker_stops(make_rig: Any) -> None:
    rig = make_rig(pool=64)
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "x", 0)
    waits = [(writer, rig.reserve(writer, 64, rid="y")), (reader, rig.wait(reader, "a"))]
    rig.stop()
    errors = [rig.refusal(*wait) for wait in waits]
    assert [type(error) for error in errors] == [BrokerStopping] * 2
    assert [error.facts["rid"] for error in errors] == ["y", "a"]
    assert all(rig.heard(session, ef.StopSession) for session in (writer, reader))


def test_who_comes_while_the_broker_stops_does_not_wait(make_rig: Any) -> None:
    rig = make_rig(pool=64)
    session = rig.reader()
    rig.put(session, "x", 0, edge=rig.other)
    rig.stop()
    for request in (rig.reserve(session, 64), rig.wait(session, "a")):
        assert type(rig.refusal(session, request)) is BrokerStopping
    rig.release(session, *rig.arrived(session))
    rig.tick(1000.0)
    assert not rig.state.sessions[session].takes and not rig.state.sessions[session].rooms
