"""vLLM-Omni's own chunk adapter on both ends of our connector, to the end of every stream."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

from connector import Node, errors
from runner_adapter.adapters.vllm_omni.plugin import TensorConnector
from tests.engines.omni_stages import FRAMES, TOLD, Receiving, Sending, wire
from tests.kill.brokers import eventually
from tests.omni.test_omni_codec import same

ROOT = Path(__file__).resolve().parents[2]
OURS, THEIRS = "TensorConnector", "SharedMemoryConnector"


@pytest.fixture
def stages(broker: Node) -> Iterator[Callable[..., tuple[Sending, Receiving]]]:
    """Makes both stages over a connector; shuts them down."""
    made: list[Sending | Receiving] = []

    def make(name: str = OURS) -> tuple[Sending, Receiving]:
        extra = {"endpoint": broker.endpoint} if name == OURS else {}
        sending, receiving = Sending(name, **extra), Receiving(name, **extra)
        made.extend([sending, receiving])
        return sending, receiving

    yield make
    for stage in made:
        stage.adapter.shutdown()
        stage.adapter.recv_thread.join()
        stage.adapter.save_thread.join()


def segments() -> set[str]:
    """What lies in shared memory beside brokers' arenas."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("tc-")}


def live(broker: Node) -> list[str]:
    return sorted(row["rid"] for row in broker.payloads())


def run(sending: Sending, receiving: Receiving) -> dict[str, list[tuple[str, Any]]]:
    for external in FRAMES:
        receiving.add(external)
    receiving.step()
    sending.steps(FRAMES)
    receiving.to_the_end()
    return receiving.got


def test_every_chunk_of_every_request_arrives_as_it_was_sent(
    broker: Node, stages: Callable[..., tuple[Sending, Receiving]]
) -> None:
    before = segments()
    sending, receiving = stages()
    got = run(sending, receiving)
    for external, chunks in got.items():
        assert [key for key, _ in chunks] == [f"{external}_0_{number}" for number in range(len(chunks))]
    assert {key: wire(data) for chunks in got.values() for key, data in chunks} == {
        key: wire(data) for key, data in sending.sent.items()
    }
    assert len(sending.sent) > 2 * len(FRAMES)
    eventually(lambda: live(broker), [], broker)
    counters = broker.counters()
    assert counters["payloads_sealed"] == counters["payloads_released"] == len(sending.sent)
    assert counters["puts_refused"] == counters["aborts"] == 0
    assert segments() == before


def test_no_connector_of_theirs_is_there(stages: Callable[..., tuple[Sending, Receiving]]) -> None:
    sending, receiving = stages()
    run(sending, receiving)
    assert type(sending.adapter.connector) is type(receiving.adapter.connector) is TensorConnector
    assert [found for found in gc.get_objects() if type(found) is SharedMemoryConnector] == []


def test_it_is_what_their_own_connector_would_have_brought(stages: Callable[..., tuple[Sending, Receiving]]) -> None:
    ours, theirs = run(*stages(OURS)), run(*stages(THEIRS))
    assert ours.keys() == theirs.keys() == FRAMES.keys()
    for external, chunks in ours.items():
        assert same([[key, data] for key, data in chunks], [[key, data] for key, data in theirs[external]])


def told(lines: Iterable[str]) -> str:
    """The next line that stage 0 says: the engine logs to the same place."""
    return next(line.removeprefix(TOLD).rstrip("\n") for line in lines if line.startswith(TOLD))


def test_two_processes(broker: Node) -> None:
    program = [sys.executable, "-m", "tests.engines.omni_stages", broker.endpoint]
    receiving = Receiving(OURS, endpoint=broker.endpoint)
    with subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stage:
        assert stage.stdin is not None and stage.stdout is not None
        try:
            assert told(stage.stdout) == "ready"
            for external in FRAMES:
                receiving.add(external)
            receiving.step()
            stage.stdin.write("go\n")
            stage.stdin.flush()
            receiving.to_the_end()
            sent = json.loads(told(stage.stdout))
            assert {key: wire(data) for chunks in receiving.got.values() for key, data in chunks} == sent
            eventually(lambda: live(broker), [], broker)
            assert broker.counters()["payloads_sealed"] == len(sent)
            stage.stdin.write("end\n")
            stage.stdin.flush()
        finally:
            receiving.adapter.shutdown()
            stage.stdin.close()
    assert stage.returncode == 0


def test_an_abort_in_the_middle_leaves_nothing_and_the_others_go_on(
    broker: Node, stages: Callable[..., tuple[Sending, Receiving]]
) -> None:
    sending, receiving = stages()
    receiving.add("B")
    aborted = receiving.add("A")
    receiving.step()
    sending.steps({"A": 10, "B": 3}, last=False)
    sending.settle()
    receiving.until(lambda: len(receiving.got.get("A", [])) == 1)
    assert "A_0_2@0_1" in live(broker)
    receiving.abort(aborted)
    sending.adapter.finish_requests(
        sending.requests["A"].request_id,
        RequestStatus.FINISHED_ABORTED,
        {sending.requests["A"].request_id: sending.requests["A"]},
    )
    eventually(lambda: [rid for rid in live(broker) if rid.startswith("A_")], [], broker)
    sending.steps({"B": 8})
    receiving.to_the_end()
    assert [key for key, _ in receiving.got["B"]] == ["B_0_0", "B_0_1", "B_0_2", "B_0_3"]
    eventually(lambda: live(broker), [], broker)


def test_a_request_that_comes_again_after_its_abort_gets_its_own_chunks(
    broker: Node, stages: Callable[..., tuple[Sending, Receiving]]
) -> None:
    sending, receiving = stages()
    aborted = receiving.add("A")
    receiving.step()
    sending.steps({"A": 10}, last=False)
    sending.settle()
    receiving.until(lambda: len(receiving.got.get("A", [])) == 2)
    receiving.abort(aborted)
    first = sending.requests["A"]
    sending.adapter.finish_requests(first.request_id, RequestStatus.FINISHED_ABORTED, {first.request_id: first})
    sending.settle()
    receiving.got.clear()
    sending.sent.clear()
    receiving.add("A", "again")
    sending.steps({"A": 11}, seed=7, use="again")
    receiving.to_the_end()
    assert {key: wire(data) for key, data in receiving.got["A"]} == {
        key: wire(data) for key, data in sending.sent.items()
    }
    eventually(lambda: live(broker), [], broker)


def test_a_receiver_that_was_aborted_late_leaves_nothing_for_the_next_use_of_the_id(
    broker: Node, stages: Callable[..., tuple[Sending, Receiving]]
) -> None:
    """Stage 0 has ended the stream, so vLLM-Omni cleans nothing up: the next use's first chunk does."""
    sending, receiving = stages()
    aborted = receiving.add("A")
    receiving.step()
    sending.steps({"A": 11})
    receiving.until(lambda: len(receiving.got.get("A", [])) == 1)
    receiving.abort(aborted)
    sending.settle()
    assert live(broker) != []
    receiving.got.clear()
    sending.sent.clear()
    receiving.add("A", "again")
    sending.steps({"A": 11}, seed=7, use="again")
    receiving.to_the_end()
    assert {key: wire(data) for key, data in receiving.got["A"]} == {
        key: wire(data) for key, data in sending.sent.items()
    }
    eventually(lambda: live(broker), [], broker)


def test_a_lost_chunk_is_never_followed_by_another_under_its_key(
    broker: Node, stages: Callable[..., tuple[Sending, Receiving]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM-Omni logs a failed put and gives its key to the next chunk."""
    sending, receiving = stages()
    receiving.add("A")
    receiving.step()
    sending.steps({"A": 2}, last=False)
    receiving.until(lambda: len(receiving.got.get("A", [])) == 1)
    sender = sending.adapter.connector._hub.sender
    hand_over = sender._hand_over

    def fails_once(*given: Any) -> None:
        monkeypatch.setattr(sender, "_hand_over", hand_over)
        raise errors.PoolFull("no room came")

    monkeypatch.setattr(sender, "_hand_over", fails_once)
    sending.steps({"A": 9})
    sending.settle()
    assert live(broker) == []
    assert [key for key, _ in receiving.got["A"]] == ["A_0_0"]
    told = sending.adapter.collect_failed_send_request_ids()
    assert list(told) == ["A-at-0"] and "no room came" in told["A-at-0"]
