"""The genuine plug-in loader, factory, base class and serializer of vLLM-Omni with our connector."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.plugins import load_general_plugins
from vllm_omni.data_entry_keys import (
    CodesStruct,
    EmbeddingsStruct,
    HiddenStatesStruct,
    IdsStruct,
    MetaStruct,
    OmniPayloadStruct,
)
from vllm_omni.distributed.omni_connectors import get_stage_connector_config, load_omni_transfer_config
from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
from vllm_omni.distributed.omni_connectors.utils.initialization import resolve_connector_spec
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

from connector import Node, errors
from runner_adapter.adapters import vllm_omni
from runner_adapter.adapters.vllm_omni.codec import decode, encode
from tests.kill.brokers import eventually
from tests.omni.test_omni_codec import same

FRESH = """
import sys
from {module} import {loader}
{loader}()
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory as F
print("registered", F.list_registered_connectors().count("TensorConnector"))
import runner_adapter.adapters.vllm_omni as plugin, torch
plugin.register()
print("again", F.list_registered_connectors().count("TensorConnector"), torch.cuda.is_initialized())
"""


@pytest.mark.parametrize(
    ("module", "loader"),
    [("vllm.plugins", "load_general_plugins"), ("vllm_omni.plugins", "load_omni_general_plugins")],
)
def test_a_fresh_process_has_it_after_loading_plugins(module: str, loader: str) -> None:
    program = FRESH.format(module=module, loader=loader)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith(("registered", "again"))]
    assert told == ["registered 1", "again 1 False"]


@pytest.fixture
def create(broker: Node) -> Iterator[Callable[..., OmniConnectorBase]]:
    """Connectors through the factory, closed afterwards."""
    load_general_plugins()
    made: list[OmniConnectorBase] = []

    def make(name: str = "TensorConnector", **extra: Any) -> OmniConnectorBase:
        spec = ConnectorSpec(name=name, extra={"endpoint": broker.endpoint, **extra})
        made.append(OmniConnectorFactory.create_connector(spec))
        return made[-1]

    yield make
    for connector in made:
        connector.close()


def test_the_factory_makes_a_connector_of_their_base_class(create: Callable[..., OmniConnectorBase]) -> None:
    made = create(stage_id=3, codec_chunk_frames=25)
    assert type(made) is vllm_omni.TensorConnector
    assert isinstance(made, OmniConnectorBase)
    assert (made.stage_id, made.config["codec_chunk_frames"]) == (3, 25)


def test_the_chunk_adapter_takes_it_for_one_that_it_must_clean_up_after(
    create: Callable[..., OmniConnectorBase],
) -> None:
    assert isinstance(create(), SharedMemoryConnector)
    assert SharedMemoryConnector not in vllm_omni.TensorConnector.__mro__


DEPLOYMENT = {
    "connectors": {"broker": {"name": "TensorConnector", "extra": {"codec_chunk_frames": 25}}},
    "stages": [
        {"stage_id": 0, "output_connectors": {"to_stage_1": "broker"}},
        {"stage_id": 1, "input_connectors": {"from_stage_0": "broker"}},
    ],
}


@pytest.mark.parametrize(("stage", "role"), [(0, "sender"), (1, "receiver")])
def test_a_deployment_names_it_in_one_line(broker: Node, stage: int, role: str) -> None:
    """Through vLLM-Omni's own reading of a deployment."""
    load_general_plugins()
    DEPLOYMENT["connectors"]["broker"]["extra"]["endpoint"] = broker.endpoint
    (found,) = get_stage_connector_config(load_omni_transfer_config(config_dict=DEPLOYMENT), stage).values()
    spec = resolve_connector_spec(ConnectorSpec(**found["spec"]), stage_id=stage, role=role)
    made = OmniConnectorFactory.create_connector(spec)
    try:
        assert (made.stage_id, made.config["role"]) == (stage, role)
        assert made.health()["status"] == "healthy"
    finally:
        made.close()


@pytest.mark.parametrize("name", ["TensorConnector", "SharedMemoryConnector"])
def test_what_their_own_connector_promises_holds_for_ours(create: Callable[..., OmniConnectorBase], name: str) -> None:
    sender, receiver = create(name, stage_id=0), create(name, stage_id=1)
    assert receiver.get("0", "1", "r_0_0") is None
    ok, size, metadata = sender.put(from_stage="0", to_stage="1", put_key="r_0_0", data={"a": [1, (2,)]})
    assert ok is True and size > 0
    assert receiver.get("0", "1", "r_0_0", metadata)[0] == {"a": [1, [2]]}
    assert receiver.get("0", "1", "r_0_0") is None
    sender.put("0", "1", "r_0_1", b"bytes")
    sender.cleanup("r_0_1")
    assert receiver.get_with_deadline("0", "1", "r_0_1", deadline=0.0) is None
    sender.reap_consumed()
    receiver.abandon_get("r_0_2")
    assert receiver.health()["status"] == "healthy"
    assert receiver.health()["gets"] == 1
    for connector in (sender, receiver, sender):
        connector.close()


def test_two_edges_hold_a_payload_each_under_one_key(create: Callable[..., OmniConnectorBase]) -> None:
    connector = create()
    connector.put("0", "1", "r_0_0", "for 1")
    connector.put("0", "2", "r_0_0", "for 2")
    assert connector.get("0", "1", "r_0_0")[0] == "for 1"
    assert connector.get("0", "2", "r_0_0")[0] == "for 2"


@pytest.mark.parametrize("key", ["a/b_0_0", "k" * 1000 + "_0_0"])
def test_a_user_may_choose_any_request_id(create: Callable[..., OmniConnectorBase], key: str) -> None:
    connector = create()
    connector.put("0", "1", key, key)
    assert connector.get("0", "1", key)[0] == key


def test_a_duplicate_is_refused(create: Callable[..., OmniConnectorBase]) -> None:
    connector = create()
    connector.put("0", "1", "r_0_0", "first")
    with pytest.raises(errors.AlreadyPut, match="r_0_0"):
        connector.put("0", "1", "r_0_0", "second")
    assert connector.get("0", "1", "r_0_0")[0] == "first"


def test_the_payload_of_a_sender_that_closed_stays(broker: Node, create: Callable[..., OmniConnectorBase]) -> None:
    sender = create(stage_id=0)
    sender.put("0", "1", "r_0_0", "kept")
    sender.close()
    eventually(lambda: len(broker.status("sessions")["sessions"]), 1, broker)
    assert create(stage_id=1).get("0", "1", "r_0_0")[0] == "kept"


def test_a_connector_that_could_not_be_made_is_an_error_of_the_factory_and_no_other() -> None:
    load_general_plugins()
    with pytest.raises(ValueError, match="Failed to create connector TensorConnector: endpoint must be"):
        OmniConnectorFactory.create_connector(ConnectorSpec(name="TensorConnector", extra={"endpoint": 7}))
    # Its __del__ runs, and what it raised would fail this test.
    gc.collect()


PAYLOADS: dict[str, Any] = {
    "struct": OmniPayloadStruct(
        hidden_states=HiddenStatesStruct(
            output=torch.randn(7, 64).to(torch.bfloat16), layers={0: torch.ones(3), 24: torch.zeros(0, 4)}
        ),
        embed=EmbeddingsStruct(prefill=torch.randn(7, 64), decode_token_start=0),
        ids=IdsStruct(all=[1, 2, 3], prompt=[]),
        codes=CodesStruct(audio=torch.arange(12).view(3, 4).t()),
        meta=MetaStruct(finished=torch.tensor(True), override_keys=[("codes", "audio")], left_context_size=0),
        model_outputs=[torch.ones(1), torch.tensor(3)],
        mtp_inputs=(torch.ones(2), torch.zeros(2)),
        speaker=["one"],
        kv_metadata={"nested": {"deep": [None, 1.5, "text", {"n": -1}]}},
    ),
    "empty struct": OmniPayloadStruct(meta=MetaStruct()),
    "dict": {"a": torch.tensor(False), "b": {7: {8: torch.empty(0, 2, dtype=torch.float16)}}, "none": None},
    "bytes": b"\0\1\2" * 1000,
    "raw tensor": torch.arange(5000, dtype=torch.uint8),
    "array": {"wave": np.arange(6, dtype=np.float32).reshape(2, 3), "ids": np.array([1, 2], dtype="<u2")},
    "large": {"ids": list(range(50_000)), "hidden": torch.randn(1000, 257)},
    "strided": torch.arange(24).view(2, 3, 4)[:, ::2, 1:],
    "nothing": {},
}


@pytest.mark.parametrize("name", sorted(PAYLOADS))
def test_data_comes_back_as_from_their_own_serializer(name: str) -> None:
    theirs = OmniSerializer.deserialize(OmniSerializer.serialize(PAYLOADS[name]))
    assert same(theirs, decode(encode(PAYLOADS[name], "k"), "k"))


def test_what_their_serializer_refuses_is_refused() -> None:
    for data in ({"a": object()}, {"a": np.int64(1)}, {"a": np.array([None])}):
        with pytest.raises(TypeError):
            OmniSerializer.serialize(data)
        with pytest.raises(errors.InvalidPayload):
            encode(data, "k")
