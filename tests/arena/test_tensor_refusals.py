"""Tensors that are refused, by name and reason, and what an error on the way leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from connector.arena.arena import DATA_BEGIN, Arena
from connector.arena.tensors import copy_in, spec_of, specs_of, views
from connector.core.errors import InvalidPayload, InvariantBroken, UnsupportedTensor
from connector.core.layout import Manifest, Slot, check, data_bytes, plan

BASE = DATA_BEGIN + 128


def put(arena: Arena, payload: dict[str, torch.Tensor], base: int = BASE) -> Manifest:
    (manifest,) = plan([specs_of(payload)])
    for slot in manifest.slots:
        copy_in(arena, base + slot.offset, payload[slot.key], slot.nbytes)
    return check(manifest, data_bytes([manifest]))


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("nothing may run on a tensor that is refused")


def fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(2)


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(2).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "unknown quantiser": lambda: torch.empty(2, dtype=torch.qint8),
    "meta": lambda: torch.empty(2, device="meta"),
    "fake": fake,
    "lazy": lambda: torch.nn.parameter.UninitializedParameter(),
    "dispatching": lambda: torch.Tensor._make_subclass(Dispatching, torch.ones(2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_bytes_of_its_own_is_refused_by_name(kind: str) -> None:
    tensor = REFUSED[kind]()
    with pytest.raises(UnsupportedTensor) as caught:
        specs_of({"fine": torch.ones(1), "bad": tensor})
    facts = caught.value.facts
    assert facts["key"] == "bad" and facts["dtype"] == str(tensor.dtype).removeprefix("torch.")
    assert facts["layout"] and facts["device"]


def test_a_tensor_inside_a_functorch_transform_is_refused() -> None:
    seen: list[UnsupportedTensor] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedTensor, match="functorch") as caught:
            spec_of("k", x)
        seen.append(caught.value)
        return x

    torch.func.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(lambda x: inside(x).sum())(torch.ones(2))
    assert [error.facts["key"] for error in seen] == ["k", "k"]


@pytest.mark.parametrize("value", [1, None, [torch.ones(1)], {"a": torch.ones(1)}, 1.5, "x"])
def test_values_that_are_no_tensors_are_refused(value: object) -> None:
    with pytest.raises(InvalidPayload) as caught:
        specs_of({"k": value})
    assert caught.value.facts["key"] == "k" and type(value).__name__ in str(caught.value)


@pytest.mark.parametrize("payload", [None, [("k", 1)], torch.ones(1), {1: torch.ones(1)}, {"\ud800": torch.ones(1)}])
def test_payloads_that_are_no_mapping_of_str_are_refused(payload: object) -> None:
    with pytest.raises(InvalidPayload):
        specs_of(payload)


def test_a_tensor_that_changed_or_lost_its_bytes_is_refused(arena: Arena) -> None:
    with pytest.raises(InvalidPayload) as caught:
        copy_in(arena, BASE, torch.zeros(4), 12)
    assert caught.value.facts == {"size": 16, "expected": 12}
    freed = torch.zeros(64)
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidPayload, match="freed"):
        copy_in(arena, BASE, freed, 256)


def test_nothing_is_copied_or_viewed_outside_of_the_arena(arena: Arena) -> None:
    ones = torch.ones(16)
    for position in (0, DATA_BEGIN - 64, arena.end - 63, -64, 1 << 40):
        with pytest.raises(InvariantBroken):
            copy_in(arena, position, ones, 64)
    slot = Slot("x", "float32", (16,), 0, 64)
    released: list[int] = []
    for base, manifest in [
        (0, Manifest((slot,), 0, 64)),
        (arena.end - 32, Manifest((slot,), 0, 64)),
        (BASE, Manifest((slot,), 64, 128)),
        (BASE, Manifest((slot,), 0, 32)),
    ]:
        with pytest.raises(InvariantBroken):
            views(arena, base, manifest, lambda: released.append(1))
    assert released == [], "after an error the release is the caller's"


def test_an_error_in_the_middle_does_not_release(arena: Arena) -> None:
    released: list[int] = []
    wrong = Manifest((Slot("a", "uint8", (4,), 0, 4), Slot("b", "float99", (4,), 64, 4)), 0, 68)
    with pytest.raises(UnsupportedTensor) as caught:
        views(arena, BASE, wrong, lambda: released.append(1))
    assert caught.value.facts["dtype"] == "float99" and released == []
