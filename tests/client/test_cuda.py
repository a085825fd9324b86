"""Puts from a GPU, as test_from_device.py has them with a fake; these need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import connector

pytestmark = pytest.mark.cuda


@pytest.fixture
def node(host: connector.Node) -> Iterator[connector.Node]:
    with connector.connect(stage="n", endpoint=host.endpoint, page_lock=True) as made:
        prefault = made._link._prefault
        assert prefault is not None
        assert prefault.done.wait(60.0)
        assert made.page_locked
        yield made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_what_is_launched_behind_the_put_does_not_reach_it(node: connector.Node) -> None:
    edge = node.edge("n", "n")
    with torch.cuda.stream(torch.cuda.Stream()):
        source = torch.empty(1 << 18, dtype=torch.int32, device="cuda")
        for at in range(20):
            source.fill_(at)
            edge.put("r", {"x": source}, last=at == 19)
            source.fill_(-1)
    found = [payload["x"].unique().tolist() for payload in edge.stream("r")]
    assert found == [[at] for at in range(20)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_bits_of_every_layout(node: connector.Node, dtype: torch.dtype) -> None:
    edge = node.edge("n", "n")
    whole = torch.arange(64, dtype=torch.uint8, device="cuda").view(8, 8).to(dtype)
    forms = {"whole": whole, "columns": whole[:, ::2], "scalar": whole[0, 0], "empty": whole[:0], "turned": whole.t()}
    edge.put("r", forms)
    found = edge.take("r")
    for name, form in forms.items():
        assert found[name].dtype == dtype
        assert torch.equal(bits(found[name]), bits(form.cpu())), name


def test_a_step_s_rows_and_host_tensors_beside_them(node: connector.Node) -> None:
    edge = node.edge("n", "n")
    rows = torch.arange(64 * 256, dtype=torch.int32, device="cuda").view(64, 256)
    edge.put_many({str(at): {"x": rows[at], "at": torch.tensor(at)} for at in range(64)}, last=True)
    for at in range(64):
        found = edge.take(str(at))
        assert (found["at"].item(), found["x"].tolist()) == (at, rows[at].tolist())


def test_a_view_goes_to_the_device_asynchronously(node: connector.Node) -> None:
    edge = node.edge("n", "n")
    edge.put("r", {"x": torch.arange(1 << 18)})
    view = edge.take("r")["x"]
    assert view.is_pinned()
    there = view.to("cuda", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(there.cpu(), view)


def test_a_put_inside_a_capture_is_refused(node: connector.Node) -> None:
    edge, source = node.edge("n", "n"), torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(connector.errors.UsageError, match="captured"):
        edge.put("r", {"x": source})
