"""Kind A of the bug log: what arrives is what was put, to the bit. Each test is named after its entry.

Those on batch rows and request maps are in test_a_runner.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import connector
from connector.core import errors
from connector.core.keys import TemplateSet
from tests.bugs.peers import PATIENCE, Peer, described


@pytest.fixture(scope="module")
def host() -> Iterator[connector.Node]:
    with connector.connect(stage="a", embedded=True, pool="8MiB") as node:
        yield node


@pytest.fixture(scope="module")
def peer(host: connector.Node) -> Iterator[Peer]:
    with Peer(host.endpoint, "b") as process:
        process.run("edge = node.edge('a', 'b')")
        yield process


def over(host: connector.Node, peer: Peer, rid: str, payload: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """The payload as the other process found it; compared with what was put."""
    host.edge("a", "b").put(rid, payload)
    found: dict[str, list[Any]] = peer.run("value = described(edge.take(rid, timeout=60))", rid=rid)
    assert found == described(payload) and list(found) == list(payload)
    return found


def test_b01_bf16_arrives_bit_identical(host: connector.Node, peer: Peer) -> None:
    """NaN payloads and -0.0 included, at two bytes an element."""
    sent = torch.randn(7, 5).bfloat16()
    sent.view(torch.int16)[0, :4] = torch.tensor([0x7FC1, -0x003E, -0x8000, 0x7F81], dtype=torch.int32).short()
    host.edge("a", "b").put("b01-size", {"h": sent})
    host.flush()
    [row] = host.payloads(rid="b01-size")
    assert (row["nbytes"], row["tensors"]) == (70, [["h", "bfloat16", [7, 5], 70]])
    host.abort("b01-size")
    [dtype, shape, told] = over(host, peer, "b01", {"h": sent})["h"]
    assert (dtype, shape) == ("bfloat16", [7, 5])
    assert list(struct.unpack("<35h", bytes.fromhex(told))) == sent.view(torch.int16).flatten().tolist()


def test_b03_a_view_arrives_as_what_it_shows(host: connector.Node, peer: Peer) -> None:
    """At its logical size, and the source is as it was."""
    x = torch.randn(4, 6)
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    sent = {
        "t": x.t(),
        "step": x[:, ::2],
        "expand": x[0].expand(4, 6),
        "tail": x[3:],
        "image": image,
        "flip": x.flip(0),
    }
    before = x.clone(), image.clone(), image.stride()
    over(host, peer, "b03", sent)
    assert torch.equal(x, before[0]) and torch.equal(image, before[1]) and image.stride() == before[2]
    host.edge("a", "b").put("b03-size", {"expand": torch.randn(1, 8).expand(64, 8)})
    host.flush()
    assert [row["nbytes"] for row in host.payloads(rid="b03-size")] == [64 * 8 * 4]
    host.abort("b03-size")


def test_b04_a_scalar_keeps_its_shape_and_its_neighbours(host: connector.Node, peer: Peer) -> None:
    """() is not (1,)."""
    sent = {"scale": torch.tensor(3.5), "flag": torch.tensor(True), "h": torch.randn(4, 4)}
    found = over(host, peer, "b04", sent)
    assert found["scale"][1] == [] and found["flag"][1] == [] and found["h"][1] == [4, 4]


def test_b05_empty_tensors_arrive_and_are_listed(host: connector.Node, peer: Peer) -> None:
    """Beside others and alone; dtype and shape stay, their size is 0."""
    empty = {"codes": torch.empty(0, 16, dtype=torch.int64), "x": torch.empty(3, 0)}
    host.edge("a", "b").put("b05-list", empty)
    host.flush()
    [row] = host.payloads(rid="b05-list")
    assert row["tensors"] == [["codes", "int64", [0, 16], 0], ["x", "float32", [3, 0], 0]] and row["nbytes"] == 0
    host.abort("b05-list")
    over(host, peer, "b05", empty)
    over(host, peer, "b05-mixed", {**empty, "y": torch.ones(2), "z": torch.empty(0)})


@pytest.mark.parametrize(
    "sent", [{}, {"finished": torch.tensor(False)}, {"n": torch.tensor(0)}, {"many": torch.zeros(9)}], ids=str
)
def test_b06_a_falsy_payload_is_there(host: connector.Node, peer: Peer, sent: dict[str, torch.Tensor]) -> None:
    """It differs from none at all, and is cleaned up like any other."""
    rid = f"b06-{list(sent)}"
    with pytest.raises(errors.UnknownRequest):
        host.edge("x", "a").take(rid, timeout=0)
    over(host, peer, rid, sent)
    peer.run("node.status()")
    while list(host.payloads(rid=rid)):
        peer.run("node.status()")


def test_b13_a_layer_that_is_not_there_is_named_with_those_that_are(host: connector.Node) -> None:
    """The producer taps layer 18, the consumer asks for 24: KeyError, no silent fall-through."""
    keys = TemplateSet({"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"})
    into = host.edge("a", "a")
    into.put("b13", {"b13-18": torch.ones(2), "b13-codes": torch.ones(1)})
    taken = into.take("b13", timeout=PATIENCE)
    with pytest.raises(KeyError) as told:
        taken["b13-24"]
    assert "b13-24" in str(told.value) and "b13-18, b13-codes" in str(told.value)
    assert [keys.parse(key) for key in taken] == [("b13", "hidden_states", "18"), ("b13", "ids", "codes")]


def test_b15_what_one_reader_writes_no_other_reader_sees(host: connector.Node, peer: Peer) -> None:
    """Two consumers, each with a copy of its own; taking it warns of nothing."""
    sent = {"t": torch.arange(6.0)}
    out = host.edge("a", "both")
    out.put("b15", sent, readers=2)
    code = "two = node.edge('a', 'both', reader=0, readers=2); t = two.take('b15', timeout=60)['t']; t.add_(1)"
    assert peer.run(code + "; value = t.tolist()") == [1, 2, 3, 4, 5, 6]
    mine = host.edge("a", "both", reader=1, readers=2).take("b15", timeout=PATIENCE)["t"]
    assert torch.equal(mine, sent["t"])
    mine.mul_(10)
    assert peer.run("value = t.tolist()") == [1, 2, 3, 4, 5, 6] and sent["t"].tolist() == [0, 1, 2, 3, 4, 5]


def test_b16_a_buffer_may_be_overwritten_as_soon_as_put_returns(host: connector.Node, peer: Peer) -> None:
    """A thousand times in a row, while the reader is slower."""
    edge = host.edge("a", "b")
    buffer = torch.zeros(64, dtype=torch.int64)
    for i in range(1000):
        buffer.fill_(i)
        edge.put("b16", {"n": buffer}, last=i == 999)
        buffer.fill_(-999)
    code = "value = [p['n'].unique().tolist() for p in edge.stream('b16', timeout=60)]"
    assert peer.run(code) == [[i] for i in range(1000)]


def test_b17_chunks_of_several_rows_keep_every_row(host: connector.Node, peer: Peer) -> None:
    """1, 1, 4 and 2 rows are eight rows in order, and each chunk tells its own."""
    edge = host.edge("a", "b")
    rows = torch.arange(8)
    for part in rows.split([1, 1, 4, 2]):
        edge.put("b17", {"codes": part}, last=False)
    edge.end("b17")
    found = peer.run("value = [p['codes'].tolist() for p in edge.stream('b17', timeout=60)]")
    assert found == [[0], [1], [2, 3, 4, 5], [6, 7]]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4095, 4096, 4097])
def test_b18_a_tensor_is_as_long_as_it_was(host: connector.Node, peer: Peer, size: int) -> None:
    """Blocks and pages are rounded up; nothing behind the last byte is exposed."""
    sent = torch.arange(size).to(torch.uint8)
    over(host, peer, f"b18-{size}", {"bytes": sent})
    host.edge("a", "b").put(f"b18-{size}-end", {"bytes": sent})
    code = "t = edge.take(rid, timeout=60)['bytes']; value = [t.nbytes, t.untyped_storage().nbytes()]; del t"
    assert peer.run(code, rid=f"b18-{size}-end") == [size, size]


@pytest.mark.parametrize(
    "value",
    [torch.Size([1]), (1, 2), [1], {"a": torch.zeros(1)}, b"bytes", "text", None, True, 1, 1.5, memoryview(b"x")],
    ids=lambda value: type(value).__name__,
)
def test_b19_what_is_no_tensor_is_refused_at_put(host: connector.Node, value: Any) -> None:
    """By rid, edge and key; there is nothing whose type could change on the way."""
    with pytest.raises(errors.InvalidPayload) as told:
        host.edge("a", "b").put("b19", {"fine": torch.zeros(1), "odd": value})
    assert told.value.facts == {"rid": "b19", "edge": "a:b:0", "key": "odd"}
    odd_key: Any = {value if isinstance(value, (bytes, tuple, int)) else 7: torch.zeros(1)}
    with pytest.raises(errors.InvalidPayload):
        host.edge("a", "b").put("b19", odd_key)


def test_b20_a_chunk_that_does_not_fit_is_refused_whole(host: connector.Node, peer: Peer) -> None:
    """PayloadTooLarge for that request alone; never a clipped body."""
    edge = host.edge("a", "b")
    edge.put("b20", {"n": torch.ones(10)}, last=False)
    with pytest.raises(errors.PayloadTooLarge) as told:
        edge.put("b20", {"n": torch.ones(1).expand(3 << 20)}, last=False)
    assert told.value.facts["size"] > told.value.facts["limit"] and told.value.facts["rid"] == "b20"
    over(host, peer, "b20-other", {"n": torch.ones(3)})
    edge.put("b20", {"n": torch.full((1 << 20,), 2.0)}, last=True)
    code = "value = [[len(p['n']), float(p['n'].min()), float(p['n'].max())] for p in edge.stream('b20', timeout=60)]"
    assert peer.run(code) == [[10, 1.0, 1.0], [1 << 20, 2.0, 2.0]]
