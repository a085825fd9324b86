"""Every kind of tensor through put and take: bit for bit, or refused by key and dtype."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import connector
from connector.core import errors
from connector.testing.contracts.facade import PATIENCE
from connector.testing.contracts.samples import bits, same


class Tagged(torch.Tensor):
    """A subclass that is a plain tensor with a name."""


def _complex() -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.complex64)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(4, 7).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.randn(1, 6).expand(5, 6),
    "expanded scalar": lambda: torch.tensor(2.5).expand(3, 2),
    "sliced with a step": lambda: torch.randn(9, 9)[1::3, ::2],
    "sliced behind": lambda: torch.arange(100)[37:],
    "overlapping": lambda: torch.arange(10.0).unfold(0, 4, 1),
    "channels-last": lambda: torch.randn(2, 3, 5, 4).contiguous(memory_format=torch.channels_last),
    "conj": lambda: _complex().conj(),
    "conj transposed": lambda: _complex().mH,
    "neg": lambda: _complex().conj().imag,
    "conj and neg": lambda: _complex().conj().imag[1:].t(),
    "real part": lambda: _complex().real,
    "requires grad": lambda: torch.randn(3, 3, requires_grad=True),
    "with a graph": lambda: torch.randn(3, 3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.randn(4)),
    "buffer": lambda: torch.nn.BatchNorm1d(3).running_mean,  # type: ignore[return-value, dict-item]
    "subclass": lambda: torch.randn(4).as_subclass(Tagged),
    "0-dim": lambda: torch.tensor(-0.0),
    "0-dim of a row": lambda: torch.arange(5)[3],
    "empty": lambda: torch.empty(0),
    "empty in the middle": lambda: torch.empty(3, 0, 2, dtype=torch.int8),
    "many dims": lambda: torch.zeros([1] * 60 + [2]),
    "large": lambda: torch.arange(300_000),
    "large and strided": lambda: torch.arange(400_000).view(500, 800).t(),
    "inference": lambda: _inference(),
    "shared memory": lambda: torch.arange(64).share_memory_(),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(4, 4)


@pytest.fixture
def edge(host: connector.Node) -> connector.Edge:
    return host.edge("all", "all")


def over(host: connector.Node, edge: connector.Edge, payload: dict[str, torch.Tensor]) -> connector.Payload:
    host.finish("end-to-end")
    edge.put("end-to-end", payload)
    return edge.take("end-to-end", timeout=PATIENCE)


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_arrives_as_what_it_shows(host: connector.Node, edge: connector.Edge, kind: str) -> None:
    """Plain, dense and without a graph; the source is as it was."""
    sent = VIEWS[kind]()
    before = (bits(sent), sent.stride(), sent.is_conj(), sent.is_neg(), sent.requires_grad)
    found = over(host, edge, {"x": sent})
    same(found, {"x": sent})
    tensor = found["x"]
    assert type(tensor) is torch.Tensor and tensor.is_contiguous() and not tensor.requires_grad
    assert not tensor.is_conj() and not tensor.is_neg()
    assert before == (bits(sent), sent.stride(), sent.is_conj(), sent.is_neg(), sent.requires_grad)


def test_an_empty_payload_arrives(host: connector.Node, edge: connector.Edge) -> None:
    """{} is one."""
    assert dict(over(host, edge, {})) == {}


def test_all_kinds_go_in_one_payload(host: connector.Node, edge: connector.Edge) -> None:
    """In their order, each as if it were alone."""
    sent = {kind: make() for kind, make in VIEWS.items()}
    same(over(host, edge, sent), sent)


def _makeable() -> list[torch.dtype]:
    """Every dtype that torch.empty can make."""
    found = []
    for value in vars(torch).values():
        if isinstance(value, torch.dtype) and value not in found:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    torch.empty(1, dtype=value)
                except (RuntimeError, NotImplementedError):
                    continue
            found.append(value)
    return found


@pytest.mark.parametrize("dtype", _makeable(), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_arrives_or_is_refused_by_name(
    host: connector.Node, edge: connector.Edge, dtype: torch.dtype
) -> None:
    """All bit patterns of it, as bytes; a refusal names rid, edge, key and dtype."""
    size = 96 * max(dtype.itemsize, 1)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    try:
        sent = raw.view(dtype)
    except RuntimeError:
        sent = torch.empty(8, dtype=dtype)
    host.finish("end-to-end")
    try:
        edge.put("end-to-end", {"x": sent})
    except errors.UnsupportedTensor as error:
        named = (error.facts["rid"], error.facts["edge"], error.facts["key"], error.facts["dtype"])
        assert named == ("end-to-end", str(edge.name), "x", str(dtype).removeprefix("torch."))
        return
    found = edge.take("end-to-end", timeout=PATIENCE)["x"]
    assert found.dtype == dtype and found.shape == sent.shape
    assert bytes(found.view(torch.uint8).tolist()) == bytes(raw.tolist())


def _quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)


def _compressed() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


REFUSED: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": _compressed,
    "quantised": _quantised,
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": _nested,
    "lazy": lambda: torch.nn.parameter.UninitializedParameter(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_plain_bytes_is_refused_by_name(host: connector.Node, edge: connector.Edge, kind: str) -> None:
    """UnsupportedTensor with rid, edge, key and dtype; the rest of the payload is not put either."""
    sent = REFUSED[kind]()
    host.finish("refused")
    with pytest.raises(errors.UnsupportedTensor) as told:
        edge.put("refused", {"fine": torch.zeros(2), "odd": sent})
    facts = told.value.facts
    assert (facts["rid"], facts["edge"], facts["key"]) == ("refused", str(edge.name), "odd")
    assert facts["dtype"] == str(sent.dtype).removeprefix("torch.")
    with pytest.raises(errors.Unavailable):
        edge.take("refused", timeout=0)


def test_the_same_tensor_twice_is_two_tensors(host: connector.Node, edge: connector.Edge) -> None:
    """Aliases are carried by value."""
    x = torch.arange(6)
    found = over(host, edge, {"a": x, "b": x, "part": x[2:4]})
    same(found, {"a": x, "b": x, "part": x[2:4]})
    assert found["a"].data_ptr() != found["b"].data_ptr()
