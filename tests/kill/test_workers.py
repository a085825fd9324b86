"""Rules 7 and 8: a worker dies by SIGKILL at any moment. Nothing leaks, nothing sealed is lost, nobody else notices."""

from __future__ import annotations

import os
import random
import uuid
from pathlib import Path

import pytest

import connector
from connector import Node, Payload, errors
from runner_adapter import connect_adapter
from tests.kill.brokers import NO_PIDFD, assert_settled, broker, eventually
from tests.kill.conftest import Scene
from tests.kill.host import Worker
from tests.kill.roles import TRANSFER, check, chunk


def _rid() -> str:
    return uuid.uuid4().hex


def _edge(rid: str) -> tuple[str, str]:
    """An edge of the rid's own: one live session is an edge's reader, and stays it."""
    return f"left-{rid[:8]}", f"right-{rid[:8]}"


def _kill(scene: Scene, worker: Worker) -> None:
    """SIGKILL; returns when the broker has taken notice."""
    there = scene.node.status()["sessions"]
    worker.kill()
    eventually(lambda: scene.node.status()["sessions"], there - 1, scene.node)


def _writer(scene: Scene, rid: str, at: str, before: int = 3, **more: object) -> Worker:
    writer = scene.host.start(
        "stopped_writer", endpoint=scene.node.endpoint, edge=_edge(rid), rid=rid, before=before, stage=at, **more
    )
    writer.expect("stopped")
    return writer


def _reader(scene: Scene, rid: str, **more: object) -> Worker:
    return scene.host.start("stopped_reader", endpoint=scene.node.endpoint, edge=_edge(rid), rid=rid, **more)


def _put(node: Node, rid: str, count: int, last: bool) -> None:
    out = node.edge(*_edge(rid))
    for index in range(count):
        out.put(rid, chunk(rid, index), last=last and index == count - 1)
    node.flush()


def _drain(node: Node, rid: str, most: int = 100) -> tuple[list[Payload], errors.ConnectorError | None]:
    """All that comes of the rid, checked, and what ended it."""
    source = node.edge(*_edge(rid))
    got: list[Payload] = []
    try:
        for payload in source.stream(rid, timeout=60.0):
            check(payload, rid, payload.index)
            got.append(payload)
            assert len(got) <= most
            # The error's frames must not pin it.
            del payload
    except errors.ConnectorError as error:
        return got, error
    return got, None


# -- writers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["reserved", "copying", "header"])
def test_a_writer_killed_before_the_ready_word_put_nothing(scene: Scene, at: str) -> None:
    """Its chunks before that arrive; then its death is told, with rid, edge and count."""
    rid = _rid()
    _kill(scene, _writer(scene, rid, at))
    got, error = _drain(scene.node, rid)
    assert [payload.index for payload in got] == [0, 1, 2]
    assert isinstance(error, errors.WriterDied)
    assert error.facts["rid"] == rid
    assert error.facts["edge"] == "{}:{}:0".format(*_edge(rid))
    assert error.facts["chunks"] == 3


def test_a_writer_killed_behind_the_ready_word_has_put_the_chunk(scene: Scene) -> None:
    """SEAL was never sent, and yet the payload exists: the word in the block says so."""
    rid = _rid()
    _kill(scene, _writer(scene, rid, "ready"))
    got, error = _drain(scene.node, rid)
    assert [payload.index for payload in got] == [0, 1, 2, 3]
    assert isinstance(error, errors.WriterDied)
    assert error.facts["chunks"] == 4


def test_a_stream_whose_last_ready_word_stands_is_complete(scene: Scene) -> None:
    """A last chunk that was sealed and not announced ends the stream in good order."""
    rid = _rid()
    _kill(scene, _writer(scene, rid, "ready", last=True))
    got, error = _drain(scene.node, rid)
    assert [payload.index for payload in got] == [0, 1, 2, 3]
    assert got[-1].last
    assert error is None


def test_a_whole_step_behind_its_ready_word_arrives(scene: Scene) -> None:
    """A batch is one block: all its members exist with one word."""
    rid = _rid()
    _kill(scene, _writer(scene, rid, "ready", before=0, last=True, many=8))
    for member in range(8):
        got, error = _drain(scene.node, f"{rid}/{member}")
        assert [payload.index for payload in got] == [0]
        assert error is None


def test_a_block_sealed_with_a_damaged_header_is_no_payload(scene: Scene) -> None:
    """The ready word alone does not make one: the header is checked, and the room comes back."""
    rid = _rid()
    writer = _writer(scene, rid, "ready", before=0)
    arena = scene.node._link.session.arena
    assert arena is not None
    words = arena.segment.words
    magic = int.from_bytes(b"TCB1", "little")
    damaged = 0
    for at in range(arena.data_begin >> 3, arena.end >> 3, 8):
        if words[at] and words[at + 1] & 0xFFFFFFFF == magic and words[at + 2] == words[at]:
            if rid.encode() in bytes(arena.segment.buf[at * 8 : at * 8 + 512]):
                words[at + 6] ^= 1
                damaged += 1
    assert damaged == 1
    _kill(scene, writer)
    assert_settled(scene.node, scene.sessions)
    with pytest.raises(errors.UnknownRequest):
        scene.node.edge(*_edge(rid)).take(rid, timeout=0.0)


@pytest.mark.parametrize("waiting", [False, True])
def test_a_writer_killed_after_seal_loses_nothing(scene: Scene, waiting: bool) -> None:
    """What was sealed is read after its writer's death; whoever waits for more is told at once."""
    rid = _rid()
    reader = None
    if waiting:
        reader = scene.host.start("streaming_reader", endpoint=scene.node.endpoint, edge=_edge(rid), rid=rid)
        reader.expect("ready")
    _kill(scene, _writer(scene, rid, "sealed"))
    if reader is None:
        got, error = _drain(scene.node, rid)
        assert [payload.index for payload in got] == [0, 1, 2, 3]
        assert isinstance(error, errors.WriterDied)
    else:
        assert [reader.expect("took")["count"] for _ in range(4)] == [1, 2, 3, 4]
        assert reader.expect("broke") == {"count": 4, "kind": "WriterDied"}


def test_a_stage_killed_before_its_first_chunk_fails_the_request_in_the_next(scene: Scene) -> None:
    """And no other one."""
    rid, other = _rid(), _rid()
    begins, waits = _edge(rid)
    with connect_adapter(object(), TRANSFER, stage=waits, reads=begins, endpoint=scene.node.endpoint) as adapter:
        writer = scene.host.start("opened_stage", endpoint=scene.node.endpoint, edge=(begins, waits), rid=rid)
        writer.expect("begun")
        adapter.begin_step(new=[rid, other], scheduled=[rid, other])
        adapter.receive()
        assert adapter.failures() == {}
        _kill(scene, writer)
        assert adapter.wait(20.0)
        adapter.begin_step(scheduled=[rid, other])
        adapter.receive()
        failed = adapter.failures()
        assert {found: type(error) for found, error in failed.items()} == {rid: errors.WriterDied}
        adapter.begin_step(finished=[rid, other])


def test_a_writer_killed_after_end_fails_nobody(scene: Scene) -> None:
    """A complete stream is not touched by its writer's death."""
    rid = _rid()
    _kill(scene, _writer(scene, rid, "sealed", last=True))
    eventually(lambda: scene.node.status()["sessions"], scene.sessions, scene.node)
    got, error = _drain(scene.node, rid)
    assert [payload.index for payload in got] == [0, 1, 2, 3]
    assert error is None


# -- readers --------------------------------------------------------------------------------------


def test_a_reader_killed_while_it_waits_costs_nothing(scene: Scene) -> None:
    """Nothing was delivered: the next session gets the stream as if it were the first."""
    rid = _rid()
    reader = _reader(scene, rid, wait=True)
    reader.expect("stopped")
    _kill(scene, reader)
    _put(scene.node, rid, 3, last=True)
    got, error = _drain(scene.node, rid)
    assert [(payload.index, payload.redelivered) for payload in got] == [(0, False), (1, False), (2, False)]
    assert error is None


def test_payloads_pushed_to_a_dead_reader_come_again(scene: Scene) -> None:
    """Delivered and not taken: all again, in order, marked."""
    rid = _rid()
    _put(scene.node, rid, 3, last=True)
    reader = _reader(scene, rid, poll=True)
    reader.expect("stopped")
    _kill(scene, reader)
    got, error = _drain(scene.node, rid)
    assert [(payload.index, payload.redelivered) for payload in got] == [(0, True), (1, True), (2, True)]
    assert error is None


@pytest.mark.parametrize("resume", [False, True])
def test_a_reader_that_held_everything_is_followed_by_another(scene: Scene, resume: bool) -> None:
    """It had released nothing: all it was told of again, marked, then the rest."""
    rid = _rid()
    reader = _reader(scene, rid, take=2, resume=resume)
    _put(scene.node, rid, 2, last=False)
    reader.expect("stopped")
    _kill(scene, reader)
    out = scene.node.edge(*_edge(rid))
    eventually(lambda: scene.node.status()["sessions"], scene.sessions, scene.node)
    out.put(rid, chunk(rid, 2), last=True)
    got, error = _drain(scene.node, rid)
    assert [(payload.index, payload.redelivered) for payload in got] == [(0, True), (1, True), (2, False)]
    assert error is None


def test_a_reader_that_had_released_a_part_fails_the_rid_at_both_ends(scene: Scene) -> None:
    """Nobody can read such a stream from its start any more."""
    rid = _rid()
    _put(scene.node, rid, 4, last=False)
    reader = _reader(scene, rid, take=3, release=1)
    reader.expect("stopped")
    _kill(scene, reader)
    eventually(lambda: scene.node.status()["sessions"], scene.sessions, scene.node)
    with pytest.raises(errors.ReaderDied) as at_writer:
        scene.node.edge(*_edge(rid)).put(rid, chunk(rid, 4), last=True)
    got, at_reader = _drain(scene.node, rid)
    assert got == []
    assert isinstance(at_reader, errors.ReaderDied)
    for error in (at_writer.value, at_reader):
        assert error.facts["rid"] == rid
        assert error.facts["pid"] == reader.pid
    scene.node.finish(rid)
    scene.node.flush()


def test_a_reader_that_resumes_gets_the_rest(scene: Scene) -> None:
    """It keeps state of its own: only what it had not released comes again."""
    rid = _rid()
    _put(scene.node, rid, 4, last=True)
    reader = _reader(scene, rid, take=3, release=2, resume=True)
    reader.expect("stopped")
    _kill(scene, reader)
    got, error = _drain(scene.node, rid)
    assert [payload.index for payload in got] == [2, 3]
    assert got[0].redelivered
    assert error is None


# -- many -----------------------------------------------------------------------------------------


def test_all_workers_killed_at_once_leave_nothing(scene: Scene) -> None:
    """Three pairs in the middle of their streams, gone in one moment; the node serves the next ones."""
    rids = [_rid() for _ in range(3)]
    workers: list[Worker] = []
    for place, rid in enumerate(rids):
        edge = (f"left{place}", f"right{place}")
        arguments = {"endpoint": scene.node.endpoint, "edge": edge, "rid": rid}
        reader = scene.host.start("streaming_reader", **arguments)
        writer = scene.host.start("streaming_writer", **arguments)
        reader.expect("ready")
        reader.expect("took")
        workers += [reader, writer]
    for worker in workers:
        worker.kill()
    for rid in rids:
        scene.node.abort(rid)
    assert_settled(scene.node, scene.sessions)
    rid = _rid()
    _put(scene.node, rid, 3, last=True)
    got, error = _drain(scene.node, rid)
    assert len(got) == 3
    assert error is None


def test_sixty_kills_at_random_moments(scene: Scene) -> None:
    """A writer and a reader in full stream; after a random number of chunks one dies, then the other, thirty times."""
    chance = random.Random(7)
    for turn in range(30):
        rid = _rid()
        arguments = {"endpoint": scene.node.endpoint, "edge": _edge(rid), "rid": rid}
        reader = scene.host.start("streaming_reader", **arguments)
        writer = scene.host.start("streaming_writer", **arguments)
        reader.expect("ready")
        victim, survivor = (writer, reader) if chance.random() < 0.5 else (reader, writer)
        for _ in range(chance.randrange(1, 30)):
            victim.hear()
        _kill(scene, victim)
        if survivor is reader:
            _check_reader(survivor)
        else:
            _check_writer(scene, survivor, rid)
        _kill(scene, survivor)
        scene.node.abort(rid)
        if turn % 10 == 9:
            scene.bystander.check()
            assert_settled(scene.node, scene.sessions)
            scene.bystander.go()


def _check_reader(reader: Worker) -> None:
    """It hears of its writer's death behind an unbroken row."""
    seen = 0
    event, facts = reader.hear()
    while event in ("ready", "took"):
        seen = facts.get("count", 0)
        event, facts = reader.hear()
    assert (event, facts["kind"], facts["count"]) == ("broke", "WriterDied", seen), facts


def _check_writer(scene: Scene, writer: Worker, rid: str) -> None:
    """Its reader's successor starts anew with chunk 0; or both are told, if the reader had released any."""
    source = scene.node.edge(*_edge(rid))
    try:
        payload = source.take(rid, timeout=60.0)
    except errors.ReaderDied:
        event, facts = writer.hear()
        while event == "put":
            event, facts = writer.hear()
        assert (event, facts["kind"]) == ("failed_put", "ReaderDied"), facts
    else:
        check(payload, rid, 0)


# -- without a pidfd ------------------------------------------------------------------------------


def test_a_dead_client_without_pidfd_is_found_by_its_stream_and_its_lock(scene: Scene) -> None:
    """An old kernel, or another pid namespace: end of file and a free session lock prove the death."""
    with broker(NO_PIDFD) as own, connector.connect(stage="test", endpoint=own.run_dir) as node:
        rid = _rid()
        writer = scene.host.start(
            "stopped_writer", endpoint=own.run_dir, edge=_edge(rid), rid=rid, before=2, stage="copying"
        )
        writer.expect("stopped")
        assert node.status()["sessions"] == 2
        assert _pidfds(own.process.pid) == 1, "beside the one that watches the broker's owner"
        writer.kill()
        got, error = _drain(node, rid)
        assert [payload.index for payload in got] == [0, 1]
        assert isinstance(error, errors.WriterDied)
        got.clear()
        assert_settled(node, 1)


def _pidfds(pid: int) -> int:
    return sum("pidfd" in os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
