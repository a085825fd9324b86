"""A block that grows when its writer is killed, or its broker: what was counted is put, and what was not never was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import connector
from connector import errors
from connector.arena import blocks
from connector.client.growing import Step
from connector.client.pairs import Pair
from tests.client.grown import HANG, Streams, left, unsaid
from tests.client.told import hosting
from tests.kill.brokers import BrokerProcess, eventually, run_directory, session_locks

ROOT = Path(__file__).resolve().parents[2]
COUNT = 12
WRITER = "import sys; from tests.client.test_growing_ends import put_until_killed; put_until_killed(*sys.argv[1:])"

#: Where a put of a step is left: behind the call, or before it; whether the chunk joins others; whether it is put.
WHERE: dict[str, tuple[Any, str, bool, bool, bool]] = {
    "uncounted": (blocks, "grow", True, True, False),
    "counted": (blocks, "grow", False, True, True),
    "told": (Pair, "send", False, True, True),
    "unsealed": (blocks, "grow", False, False, False),
    "sealed": (blocks, "seal", False, False, True),
    "noted": (Step, "settle", False, False, True),
}


def put_until_killed(endpoint: str, where: str) -> None:
    """A process of its own: rounds of chunks, until it dies by its own hand."""
    streams = Streams(endpoint, COUNT, alone=True)
    kind, name, before, joins, _ = WHERE[where]
    call = getattr(kind, name)

    def killed(*arguments: Any) -> Any:
        step = streams.step()
        if step is None or step.pending is None or bool(step.rids) is not joins:
            return call(*arguments)
        if not before:
            call(*arguments)
        counts = {rid: len(sent) for rid, sent in streams.sent.items()}
        print(json.dumps([streams.last, counts]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, name, killed)
    while True:
        with unsaid(streams.writer):
            streams.put_all()
        streams.writer.flush()
        streams.writer.status()


@pytest.fixture
def host() -> Iterator[connector.Node]:
    with hosting(True) as node:
        yield node


@pytest.mark.parametrize("where", WHERE)
def test_a_writer_that_is_killed_in_a_step(host: connector.Node, where: str) -> None:
    """Each chunk is read once and in order, then each stream has lost its writer; blocks go when they are released."""
    with connector.connect(stage="b", endpoint=host.endpoint) as reader:
        into = reader.edge("a", "b")
        into.poll()
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, host.endpoint, where], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            kept: dict[str, connector.Payload] = {}
            failed: dict[str, Exception] = {}
            while len(failed) < COUNT:
                assert into.wait(HANG)
                found = into.poll()
                failed |= found.failed
                for rid, payloads in found.items():
                    for payload in payloads:
                        assert payload.index == (kept[rid].index + 1 if rid in kept else 0)
                        assert int(payload["x"][0]) == payload.index * COUNT + int(rid[1:]) + 1
                        kept[rid] = payload
            assert process.stdout is not None
            victim, counts = json.loads(process.stdout.read())
            assert process.wait(HANG) == -signal.SIGKILL
        counts[victim] -= not WHERE[where][4]
        assert {rid: payload.index + 1 for rid, payload in kept.items()} == counts
        assert all(type(error) is errors.WriterDied for error in failed.values())
        del found, payloads, payload
        # What was released of a block is said a moment later, if more of it is held.
        held = {(rid, payload.index) for rid, payload in kept.items()}
        eventually(lambda: {(row["rid"], row["index"]) for row in host.payloads()}, held, reader)
        kept.clear()
        for rid in counts:
            reader.finish(rid)
        reader.flush()
        assert left(host) == [0, 0, 0, 0]


def test_a_step_of_a_broker_that_is_lost_is_lost_whole() -> None:
    """Each ticket says so, and the next broker has none of it; its streams' next use grows as ever."""
    with run_directory() as run_dir:
        broker = BrokerProcess(run_dir, direct=True)
        streams = Streams(run_dir, COUNT)
        with streams.writer, streams.reader:
            streams.begin()
            with unsaid(streams.writer):
                tickets = streams.put_all()
                step = streams.step()
                assert step is not None and step.waits(streams.writer.session)
                assert len(step.tickets) > 1 and set(step.tickets) <= set(tickets)
                broker.end(signal.SIGKILL)
                while session_locks(run_dir):
                    streams.writer.session.drain()
                broker = BrokerProcess(run_dir, direct=True)
                streams.reader.status()
                while streams.writer.session.outgoing.unacked:
                    streams.reader.status()
            with pytest.raises(errors.BrokerLost, match="started anew"):
                streams.writer.flush()
            for ticket in tickets:
                with pytest.raises(errors.BrokerLost, match="lost"):
                    ticket.result()
            assert left(streams.reader) == [0, 0, 0, 0]
            for rid in streams.rids:
                streams.writer.finish(rid)
                streams.reader.finish(rid)
            streams.settle()
            streams.sent = {rid: [] for rid in streams.rids}
            streams.came = dict.fromkeys(streams.rids, 0)
            streams.begin()
        assert broker.end() == 0
