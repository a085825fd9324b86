"""vLLM-Omni's contract over a real broker, without vLLM-Omni: with it, see tests/engines."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import connector
from connector import Node, errors
from runner_adapter.adapters import vllm_omni
from runner_adapter.adapters.vllm_omni import taking
from runner_adapter.adapters.vllm_omni.bridge import OmniBridge
from runner_adapter.adapters.vllm_omni.keys import Place
from tests.kill.brokers import eventually
from tests.omni.looks import HANG, got, other_process, unread, waiting_takes


def test_a_payload_is_got_once(pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    ok, size, metadata = sender.put("0", "1", "r_0_0", {"meta": {"finished": torch.tensor(True)}, "n": [1, 2]})
    assert (ok, metadata) == (True, None)
    found = receiver.get("0", "1", "r_0_0", {"source_host": "elsewhere", "source_port": 1})
    assert found is not None and found[1] == size > 0
    assert found[0]["n"] == [1, 2] and found[0]["meta"]["finished"].equal(torch.tensor(True))
    assert receiver.get("0", "1", "r_0_0") is None


def test_arguments_have_the_names_that_vllm_omni_uses(pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    sender.put(from_stage="0", to_stage="1", put_key="r_0_0", data=1)
    assert receiver.get(from_stage="0", to_stage="1", get_key="r_0_0", metadata=None) == (1, 3)


@pytest.mark.parametrize("key", [5, None, b"r_0_0", ("r", 0)])
def test_a_key_is_text(pair: tuple[OmniBridge, OmniBridge], key: Any) -> None:
    """5 and "5" would be one request id, and what was put under one be got under the other."""
    sender, receiver = pair
    calls: list[Callable[[], object]] = [
        lambda: sender.put("0", "1", key, 1),
        lambda: receiver.get("0", "1", key),
        lambda: receiver.get_with_deadline("0", "1", key, deadline=0.0),
        lambda: sender.cleanup(key),
    ]
    for call in calls:
        with pytest.raises(errors.InvalidPayload, match="a key is text") as refusal:
            call()
        assert refusal.value.facts == {"key": repr(key), "type": type(key).__name__}
    assert sender.health()["failed_puts"] == 1


def test_a_get_before_the_put_finds_nothing_and_later_what_was_put(pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    assert receiver.get("0", "1", "r_0_0") is None
    assert receiver.get("0", "1", "r_0_0") is None
    sender.put("0", "1", "r_0_0", "late")
    assert receiver.get("0", "1", "r_0_0") == ("late", 7)


def test_a_key_that_is_waited_for_is_not_asked_for_again(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    assert receiver.get("0", "1", "r_0_0") is None
    eventually(lambda: waiting_takes(broker), 1, broker)
    for _ in range(5):
        assert receiver.get("0", "1", "r_0_0") is None
    assert waiting_takes(broker) == 1


def test_two_edges_hold_a_payload_each_under_one_key(pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    sender.put("0", "1", "r_0_0", "for 1")
    sender.put("0", "2", "r_0_0", "for 2")
    assert got(receiver, "r_0_0", ("0", "2")) == "for 2"
    assert got(receiver, "r_0_0", ("0", "1")) == "for 1"


@pytest.mark.parametrize("key", ["a/b_0_0", "../../x_0_1", "ü" * 500 + "_0_0", "omni_0_to_1_kv_cache_r"])
def test_any_key_is_carried(pair: tuple[OmniBridge, OmniBridge], key: str) -> None:
    sender, receiver = pair
    sender.put("0", "1", key, key)
    assert got(receiver, key) == key


def test_a_key_that_is_too_long_is_refused_by_name(pair: tuple[OmniBridge, OmniBridge]) -> None:
    with pytest.raises(errors.InvalidPayload, match="too long") as refused:
        pair[0].put("0", "1", "k" * 1021, 1)
    assert refused.value.facts["limit"] == 1024


def test_what_cannot_be_read_is_an_error_with_its_key_and_gone(
    broker: Node, pair: tuple[OmniBridge, OmniBridge]
) -> None:
    _, receiver = pair
    broker.edge("0", "1").put("r_0_0@0_1", {"hidden": torch.ones(2)})
    broker.flush()
    with pytest.raises(errors.ProtocolViolation) as refused:
        got(receiver, "r_0_0")
    assert refused.value.facts["key"] == "r_0_0"
    eventually(lambda: unread(broker), [], broker)
    broker.finish("r_0_0@0_1")


def test_a_get_with_a_deadline_waits_for_it(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    _, receiver = pair
    found: list[Any] = []
    deadline = time.monotonic() + HANG
    thread = threading.Thread(
        target=lambda: found.append(receiver.get_with_deadline("0", "1", "r_0_0", deadline=deadline))
    )
    thread.start()
    other = other_process(broker)
    try:
        other.put(Place("0", "1", "r_0_0"), "came", 1.0)
        thread.join()
    finally:
        other.close()
    assert found == [("came", 7)]
    assert time.monotonic() < deadline


def test_a_deadline_that_has_passed_finds_what_is_there(pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    sender.put("0", "1", "r_0_0", 1)
    assert receiver.get_with_deadline("0", "1", "r_0_0", None, deadline=time.monotonic() - 1) == (1, 3)
    assert receiver.get_with_deadline("0", "1", "r_0_1", None, deadline=time.monotonic() - 1) is None


def test_an_abandoned_key_is_waited_for_no_more_and_may_be_asked_for_again(
    broker: Node, pair: tuple[OmniBridge, OmniBridge]
) -> None:
    sender, receiver = pair
    assert receiver.get("0", "1", "r_0_0") is None
    eventually(lambda: waiting_takes(broker), 1, broker)
    receiver.abandon_get("r_0_0")
    eventually(lambda: waiting_takes(broker), 0, broker)
    sender.put("0", "1", "r_0_0", 1)
    assert got(receiver, "r_0_0") == 1


def test_what_nobody_comes_for_is_dropped_in_the_end(
    broker: Node, pair: tuple[OmniBridge, OmniBridge], caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = pair
    assert receiver.get("0", "1", "r_0_0") is None
    sender.put("0", "1", "r_0_0", 1)
    eventually(lambda: [row["state"] for row in broker.payloads()], ["taken"], broker)
    assert receiver._hub is not None and receiver._hub._taker is not None
    receiver.reap_consumed()
    assert unread(broker) == ["r_0_0@0_1"]
    with caplog.at_level(logging.WARNING):
        receiver._hub._taker.tidy(time.monotonic() + taking.LIE_SECONDS + 1)
    gc.collect()
    eventually(lambda: unread(broker), [], broker)
    assert "r_0_0" in caplog.text


def test_an_abort_by_others_is_told_once(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    assert receiver.get("0", "1", "r_0_0") is None
    eventually(lambda: waiting_takes(broker), 1, broker)
    broker.abort("r_0_0@0_1", "the operator says so")
    with pytest.raises(errors.RequestAborted, match="operator"):
        got(receiver, "r_0_0")
    assert receiver.get("0", "1", "r_0_0") is None
    with pytest.raises(errors.RequestAborted, match="operator"):
        sender.put("0", "1", "r_0_0", "late")
    sender.cleanup("r_0_0")
    sender.put("0", "1", "r_0_0", "anew")
    assert got(receiver, "r_0_0") == "anew"
    broker.finish("r_0_0@0_1")


def test_a_failure_is_told_once(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    sender.put("0", "1", "r_0_0", "dropped")
    broker.remove(broker.edge("0", "1").name, "r_0_0@0_1")
    with pytest.raises(errors.StreamPoisoned, match="operator"):
        got(receiver, "r_0_0")
    assert receiver.get("0", "1", "r_0_0") is None
    sender.put("0", "1", "r_0_0", "anew")
    assert got(receiver, "r_0_0") == "anew"


def test_a_second_process_reads_an_edge_by_name(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    """Replicas of a stage read one edge; each asks for its own requests' keys."""
    sender, first = pair
    assert first.get("0", "1", "a_0_0") is None
    second = other_process(broker)
    try:
        assert second.take(Place("0", "1", "b_0_0"), 0.0) is None
        for _ in range(2):
            sender.put("0", "1", "b_0_0", 7)
            found = second.take(Place("0", "1", "b_0_0"), 0.0)
            assert found is not None
            found.done()
            assert second.take(Place("0", "1", "b_0_0"), 0.0) is None
        sender.put("0", "1", "a_0_0", 1)
        assert got(first, "a_0_0") == 1
        for edge in (("0", "2"), ("0", "1")):
            sender.put(*edge, "c_0_0", edge)
        found = second.take(Place("0", "1", "c_0_0"), 0.0)
        assert found is not None
        found.done()
        assert got(first, "c_0_0", ("0", "2")) == ["0", "2"]
    finally:
        second.close()
    eventually(lambda: unread(broker), [], broker)


def sessions(broker: Node) -> int:
    return len(broker.status("sessions")["sessions"])


def test_connectors_of_a_process_share_one_hub_and_the_last_one_closes_it(
    broker: Node, made: Callable[..., OmniBridge]
) -> None:
    before = sessions(broker)
    one, two = made(1), made(1)
    assert sessions(broker) == before + 1
    one.put("0", "1", "r_0_0", 1)
    one.close()
    one.close()
    assert got(two, "r_0_0") == 1
    two.close()
    eventually(lambda: sessions(broker), before, broker)


def test_a_connector_that_is_collected_leaves_too(broker: Node) -> None:
    before = sessions(broker)
    bridge = OmniBridge({"endpoint": broker.endpoint})
    assert bridge.get("0", "1", "r_0_0") is None
    del bridge
    gc.collect()
    eventually(lambda: sessions(broker), before, broker)


def test_a_closed_connector_says_so(made: Callable[..., OmniBridge]) -> None:
    bridge = made()
    bridge.close()
    with pytest.raises(errors.ClientClosed):
        bridge.put("0", "1", "r_0_0", 1)
    with pytest.raises(errors.ClientClosed):
        bridge.get("0", "1", "r_0_0")
    bridge.reap_consumed()
    assert bridge.health()["status"] == "unhealthy"


def test_one_that_was_never_made_can_be_closed() -> None:
    bridge = OmniBridge.__new__(OmniBridge)
    bridge.close()
    bridge.reap_consumed()
    bridge.__del__()


def test_health_counts_what_was_done(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    sender, receiver = pair
    sender.put("0", "1", "r_0_0", "x")
    got(receiver, "r_0_0")
    told = {"status": "healthy", "endpoint": broker.endpoint, "failed_puts": 0}
    assert sender.health() == {**told, "puts": 1, "gets": 0, "bytes_transferred": 4}
    assert receiver.health() == {**told, "puts": 0, "gets": 1, "bytes_transferred": 0}


def test_without_its_broker_it_is_unhealthy_and_gets_fail() -> None:
    broker = connector.connect(stage="host", embedded=True, pool="16MiB")
    bridge = OmniBridge({"endpoint": broker.endpoint, "put_timeout": 0.0})
    try:
        assert bridge.get("0", "1", "r_0_0") is None
        broker.close()
        assert bridge.health()["status"] == "unhealthy"
        with pytest.raises(errors.BrokerLost) as lost:
            bridge.put("0", "1", "r_0_1", 1)
        assert lost.value.facts["key"] == "r_0_1"
        with pytest.raises(errors.BrokerLost):
            got(bridge, "r_0_0")
    finally:
        bridge.close()


@pytest.mark.parametrize(
    "extra", [{"endpoint": 1}, {"put_timeout": -1}, {"put_timeout": "30"}, {"stage_id": "1"}, {"stage_id": True}]
)
def test_a_wrong_setting_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        OmniBridge(extra)


def test_the_config_is_kept_flat_for_the_models(made: Callable[..., OmniBridge]) -> None:
    bridge = made(2, codec_chunk_frames=25)
    assert (bridge.stage_id, bridge.config["codec_chunk_frames"]) == (2, 25)


FORKING = """
import os, sys
from runner_adapter.adapters.vllm_omni.bridge import OmniBridge
bridge = OmniBridge({"endpoint": sys.argv[1]})
bridge.put("0", "1", "r_0_0", "parent")
assert bridge.get("0", "1", "q_0_0") is None
child = os.fork()
if not child:
    bridge.put("0", "1", "r_0_1", "child")
    bridge.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
bridge.put("0", "1", "r_0_2", "parent")
assert bridge.get("0", "1", "r_0_2") == ("parent", 9)
bridge.close()
"""


def test_a_forked_child_connects_by_itself(broker: Node, pair: tuple[OmniBridge, OmniBridge]) -> None:
    done = subprocess.run([sys.executable, "-c", FORKING, broker.endpoint], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [got(pair[1], key) for key in ("r_0_0", "r_0_1")] == ["parent", "child"]


def test_register_does_nothing_without_vllm_omni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_omni.util, "find_spec", lambda name: None)
    assert vllm_omni.register() is None
    assert "vllm_omni" not in sys.modules
