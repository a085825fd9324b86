"""The sender's half: what is unread stays, what is lost stops its stream, and what was aborted is gone."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from connector import Node, errors
from runner_adapter.adapters.vllm_omni import hub
from runner_adapter.adapters.vllm_omni.bridge import OmniBridge
from runner_adapter.adapters.vllm_omni.keys import Key, Place
from tests.kill.brokers import eventually
from tests.omni.looks import HANG, got, other_process, unread


def test_a_put_over_an_unread_payload_is_refused_and_the_first_one_stays(
    pair: tuple[OmniBridge, OmniBridge],
) -> None:
    sender, receiver = pair
    sender.put("0", "1", "r_0_0", "first")
    with pytest.raises(errors.AlreadyPut) as refused:
        sender.put("0", "1", "r_0_0", "second")
    assert refused.value.facts["key"] == "r_0_0"
    assert got(receiver, "r_0_0") == "first"
    sender.put("0", "1", "r_0_0", "third")
    assert got(receiver, "r_0_0") == "third"


def test_another_process_cannot_put_over_it_either(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    sender.put("0", "1", "r_0_0", "first")
    other = other_process(broker)
    try:
        with pytest.raises(errors.AlreadyPut):
            other.put(Place("0", "1", "r_0_0"), "second", 1.0)
    finally:
        other.close()
    assert got(receiver, "r_0_0") == "first"


def test_a_sender_that_leaves_takes_nothing_unread_with_it(broker: Node, made: Callable[..., OmniBridge]) -> None:
    sender = made(0)
    sender.put("0", "1", "r_0_0", "kept")
    sender.close()
    assert got(made(1), "r_0_0") == "kept"


KILLED = """
import os, signal, sys
from runner_adapter.adapters.vllm_omni.bridge import OmniBridge
OmniBridge({"endpoint": sys.argv[1]}).put("0", "1", "r_0_0", "kept")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_sender_that_is_killed_takes_nothing_unread_with_it(
    broker: Node, pair: tuple[OmniBridge, OmniBridge]
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, broker.endpoint], check=False)
    assert done.returncode == -9
    assert got(pair[1], "r_0_0") == "kept"


def test_cleanup_ends_that_very_key(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    for number in range(3):
        sender.put("0", "1", f"r_0_{number}", number)
    sender.cleanup("r_0_1")
    assert unread(broker) == ["r_0_0@0_1", "r_0_2@0_1"]
    assert receiver.get("0", "1", "r_0_1") is None
    assert got(receiver, "r_0_2") == 2


def test_cleanup_ends_the_key_on_every_edge(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, _ = pair
    sender.put("0", "1", "r_0_0", 1)
    sender.put("0", "2", "r_0_0", 1)
    sender.cleanup("r_0_0")
    assert unread(broker) == []


def test_a_key_can_be_used_again_after_cleanup(pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    sender.put("0", "1", "r_0_0", "old")
    sender.cleanup("r_0_0")
    assert receiver.get("0", "1", "r_0_0") is None
    sender.put("0", "1", "r_0_0", "new")
    assert got(receiver, "r_0_0") == "new"


def test_cleanup_of_a_key_that_was_taken_aborts_nothing(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    sender.put("0", "1", "r_0_0", 1)
    got(receiver, "r_0_0")
    eventually(lambda: unread(broker), [], broker)
    before = broker.counters()["aborts"]
    sender.cleanup("r_0_0")
    assert broker.counters()["aborts"] == before


def test_cleanup_ends_what_another_process_put(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    other = other_process(broker)
    try:
        other.put(Place("0", "1", "r_0_0"), 1, 1.0)
    finally:
        other.close()
    pair[1].cleanup("r_0_0")
    assert unread(broker) == []


def test_what_came_for_a_claim_and_was_ended_since_is_not_handed_out(
    broker: Node, pair: tuple[OmniBridge, OmniBridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted request's chunk, lying here, must not reach the next request of that id."""
    _, receiver = pair
    monkeypatch.setattr(hub, "FRESH_SECONDS", -1.0)
    assert receiver.get("0", "1", "r_0_0") is None
    other = other_process(broker)
    try:
        other.put(Place("0", "1", "r_0_0"), "stale", 1.0)
        eventually(lambda: [row["state"] for row in broker.payloads()], ["taken"], broker)
        other.sender.clean("r_0_0")
        other.put(Place("0", "1", "r_0_0"), "new", 1.0)
        assert got(receiver, "r_0_0") == "new"
    finally:
        other.close()


def test_chunks_behind_a_lost_one_are_refused(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    """vLLM-Omni gives the key of a chunk that was lost to the next one: the reader would see no hole."""
    sender, _ = pair
    sender.put("0", "1", "r_0_0", 0)
    with pytest.raises(errors.InvalidPayload):
        sender.put("0", "1", "r_0_1", object())
    for key in ("r_0_1", "r_0_2"):
        with pytest.raises(errors.StreamPoisoned) as refused:
            sender.put("0", "1", key, 1)
        assert (refused.value.facts["key"], refused.value.facts["lost"]) == (key, 1)
        assert "not carried" in refused.value.facts["cause"]
    sender.put("0", "1", "other_0_1", 1)
    assert unread(broker) == ["other_0_1@0_1", "r_0_0@0_1"]


@pytest.mark.parametrize("again", ["cleanup", "first chunk"])
def test_a_stream_with_a_lost_chunk_can_be_started_anew(pair: tuple[OmniBridge, OmniBridge], again: str) -> None:
    sender, receiver = pair
    with pytest.raises(errors.InvalidPayload):
        sender.put("0", "1", "r_0_1", object())
    if again == "cleanup":
        sender.cleanup("r_0_0")
    else:
        sender.put("0", "1", "r_0_0", 0)
    sender.put("0", "1", "r_0_1", 1)
    assert got(receiver, "r_0_1") == 1


def test_a_stream_that_starts_anew_drops_what_nobody_took_of_its_former_use(
    broker: Node, pair: tuple[OmniBridge, OmniBridge], caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = pair
    for key in ("r_0_0", "r_0_1", "r_0_12", "r_0_0_1", "r_00_1"):
        sender.put("0", "1", key, key)
    sender.put("0", "2", "r_0_1", "another edge")
    assert got(receiver, "r_0_0") == "r_0_0"
    with caplog.at_level(logging.WARNING):
        sender.put("0", "1", "r_0_0", "anew")
    assert unread(broker) == ["r_00_1@0_1", "r_0_0@0_1", "r_0_0_1@0_1", "r_0_1@0_2"]
    assert "dropped 2 untaken chunks of a former use" in caplog.text


def test_a_full_pool_is_an_error_with_the_key_and_passes(pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    big = torch.zeros(20 << 20, dtype=torch.uint8)
    sender._put_timeout = 0.0
    sender.put("0", "1", "a_0_0", big)
    with pytest.raises(errors.PoolFull) as refused:
        sender.put("0", "1", "b_0_0", big)
    assert refused.value.facts["key"] == "b_0_0"
    assert sender.health()["failed_puts"] == 1
    assert got(receiver, "a_0_0").equal(big)
    sender._put_timeout = HANG
    sender.cleanup("b_0_0")
    sender.put("0", "1", "b_0_0", big)
    assert got(receiver, "b_0_0").equal(big)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("req_1_0_12", ("req_1_0_12", "req_1_0", 12, True)),
        ("a\nb_0_0", ("a\nb_0_0", "a\nb_0", 0, True)),
        ("omni_0_to_1_kv_cache_r", ("omni_0_to_1_kv_cache_r", "omni_0_to_1_kv_cache_r", 0, False)),
        ("r_01", ("r_01", "r_01", 0, False)),
        ("r_٣", ("r_٣", "r_٣", 0, False)),
        ("_0", ("_0", "_0", 0, False)),
    ],
)
def test_a_key_is_read_from_the_right(text: str, key: tuple[str, str, int, bool]) -> None:
    assert tuple(Key.parse(text)) == key
