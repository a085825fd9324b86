"""Rows at fixed addresses: this step's rows and zeros, whatever the steps before left there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from connector import errors
from runner_adapter import staging
from runner_adapter.maps import BatchMaps, gather
from runner_adapter.plan import StepPlan
from runner_adapter.staging import DeviceRows, RowSpec

ROW = {"last": RowSpec((2,), torch.float32)}
TOKENS = {"hidden": RowSpec((2,), torch.float32, per_token=True)}


class Buffer(dict[str, dict[str, Any]]):
    def names(self, rid: str) -> Mapping[str, Any]:
        return self[rid]

    def nested(self, rid: str) -> dict[str, Any]:
        return dict(self[rid])


class Writes(TorchDispatchMode):
    """What torch writes while it is entered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_":
            source, target = ("meta" if one.is_meta else "host" for one in (args[1], args[0]))
            name = f"copy_ {source}->{target}"
        if name.startswith("copy_") or name in ("cat", "zero_", "stack", "clone", "_to_copy"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def rows(*values: float, device: str = "cpu") -> torch.Tensor:
    """One row of width 2 a value."""
    return torch.tensor([[value, value] for value in values], dtype=torch.float32, device=device).reshape(-1, 2)


def step(
    state: dict[str, dict[str, Any]], counts: dict[str, int] | None = None, **padding: int
) -> tuple[BatchMaps, StepPlan]:
    """The maps by name, and the plan, of all of `state` in its order."""
    plan = StepPlan.make(state, counts or dict.fromkeys(state, 1), **padding)  # type: ignore[arg-type]
    return gather(Buffer(state), plan, "names"), plan


def test_each_request_has_its_row_of_this_step() -> None:
    """[*shape] and [1, *shape], as models keep a row that was cut out of a batch."""
    staged = DeviceRows(ROW, max_rows=4).stage(*step({"b": {"last": rows(2)[0]}, "a": {"last": rows(1)}}))
    assert torch.equal(staged.views["last"], rows(2, 1))
    assert staged.failures == {}


def test_what_a_row_does_not_have_is_zero_never_a_former_step_s() -> None:
    device_rows = DeviceRows(ROW | {"tag": RowSpec((), torch.int64)}, max_rows=4)
    full = {rid: {"last": rows(9), "tag": torch.tensor(9)} for rid in "abcd"}
    device_rows.stage(*step(full))
    state = {"a": {"last": rows(1)}, "b": {}, "c": {"last": rows(3), "tag": torch.tensor(7)}}
    views = device_rows.stage(*step(state, padded_rows=4)).views
    assert torch.equal(views["last"], rows(1, 0, 3, 0))
    assert views["tag"].tolist() == [0, 0, 7, 0]


def test_tokens_lie_at_their_request_s_span_and_the_rest_is_zero() -> None:
    device_rows = DeviceRows(TOKENS, max_rows=4, max_tokens=8)
    device_rows.stage(*step({"old": {"hidden": rows(*[9] * 8)}}, {"old": 8}))
    state = {"a": {"hidden": rows(1, 2)}, "b": {}, "none": {"hidden": rows()}, "c": {"hidden": rows(3)}}
    staged = device_rows.stage(*step(state, {"a": 2, "b": 2, "none": 0, "c": 1}, padded_tokens=7))
    assert torch.equal(staged.views["hidden"], rows(1, 2, 0, 0, 3, 0, 0))
    assert staged.failures == {}


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 99), st.booleans()), max_size=6), min_size=1, max_size=4
    ),
    st.integers(0, 3),
)
def test_any_steps_give_what_rows_one_by_one_would(steps: list[list[tuple[int, int, bool]]], padding: int) -> None:
    """Requests of 0 to 3 tokens, with state and without, one step after another over the same memory."""
    device_rows = DeviceRows(ROW | TOKENS, max_rows=9, max_tokens=21)
    for step_rows in steps:
        state, counts, last, hidden = {}, {}, [], []
        for number, (count, value, has_state) in enumerate(step_rows):
            rid = f"r{number}"
            counts[rid] = count
            state[rid] = {"last": rows(value), "hidden": rows(*[value] * count)} if has_state else {}
            last += [value * has_state]
            hidden += [value * has_state] * count
        sizes = {"padded_rows": len(last) + padding, "padded_tokens": len(hidden) + padding}
        views = device_rows.stage(*step(state, counts, **sizes)).views
        assert torch.equal(views["last"], rows(*last, *[0] * padding))
        assert torch.equal(views["hidden"], rows(*hidden, *[0] * padding))


def test_the_address_is_the_same_in_each_step() -> None:
    device_rows = DeviceRows(ROW | TOKENS, max_rows=4, max_tokens=8)
    captured = device_rows.stage(gather(Buffer(), StepPlan.empty(2, 4), "names"), StepPlan.empty(2, 4)).views
    state = {"a": {"last": rows(1), "hidden": rows(1, 2)}, "b": {"last": rows(3), "hidden": rows(3)}}
    views = device_rows.stage(*step(state, {"a": 2, "b": 1}, padded_tokens=4)).views
    assert {name: view.data_ptr() for name, view in views.items()} == {
        name: view.data_ptr() for name, view in captured.items()
    }
    # What a graph does when it is replayed.
    assert torch.equal(captured["last"], rows(1, 3))
    assert torch.equal(captured["hidden"], rows(1, 2, 3, 0))


def test_a_step_without_requests_stages_zeros() -> None:
    device_rows = DeviceRows(ROW | TOKENS, max_rows=4, max_tokens=8)
    device_rows.stage(*step({"a": {"last": rows(9), "hidden": rows(9)}}))
    plan = StepPlan.empty(padded_rows=2, padded_tokens=3)
    views = device_rows.stage(gather(Buffer(), plan, "names"), plan).views
    assert torch.equal(views["last"], rows(0, 0))
    assert torch.equal(views["hidden"], rows(0, 0, 0))


@pytest.mark.parametrize(
    ("name", "value", "error", "facts"),
    [
        ("last", rows(1).double(), errors.UnsupportedTensor, {"dtype": "torch.float64"}),
        ("last", rows(1).to_sparse(), errors.UnsupportedTensor, {"layout": "torch.sparse_coo"}),
        ("last", rows(1).to("meta"), errors.UnsupportedTensor, {"device": "meta"}),
        ("last", torch.ones(1, 3), errors.InvalidPayload, {"shape": "(1, 3)", "wanted": "(1, 2)"}),
        ("last", rows(1, 2), errors.InvalidPayload, {"shape": "(2, 2)", "wanted": "(1, 2)"}),
        ("last", torch.ones(2, 1), errors.InvalidPayload, {"shape": "(2, 1)", "wanted": "(1, 2)"}),
        ("last", [1.0, 1.0], errors.InvalidPayload, {"type": "list"}),
        ("hidden", rows(1), errors.InvalidPayload, {"shape": "(1, 2)", "wanted": "(2, 2)"}),
        ("hidden", rows(1)[0], errors.InvalidPayload, {"shape": "(2,)", "wanted": "(2, 2)"}),
        ("hidden", torch.ones(2, 2, 2), errors.InvalidPayload, {"shape": "(2, 2, 2)", "wanted": "(2, 2)"}),
    ],
)
def test_what_does_not_fit_is_its_own_request_s_failure(
    name: str, value: Any, error: type[errors.UsageError], facts: dict[str, str]
) -> None:
    """Its row is zero; the others have theirs."""
    device_rows = DeviceRows(ROW | TOKENS, max_rows=4, max_tokens=8)
    state = {rid: {"last": rows(5), "hidden": rows(5, 5)} for rid in ("before", "bad", "behind")}
    device_rows.stage(*step(state, dict.fromkeys(state, 2)))
    state["bad"] = {**state["bad"], name: value}
    staged = device_rows.stage(*step(state, dict.fromkeys(state, 2)))
    assert list(staged.failures) == ["bad"]
    assert type(staged.failures["bad"]) is error
    # It would hold the maps.
    assert staged.failures["bad"].__traceback__ is None
    told = staged.failures["bad"].facts
    assert told.items() >= {"rid": "bad", "name": name, **facts}.items()
    zeroed = {"last": rows(5, 0, 5), "hidden": rows(5, 5, 0, 0, 5, 5)}[name]
    assert torch.equal(staged.views[name], zeroed)


def test_a_request_s_first_failure_is_told() -> None:
    staged = DeviceRows(ROW | TOKENS, max_rows=4, max_tokens=8).stage(
        *step({"bad": {"last": torch.ones(3), "hidden": torch.ones(3)}})
    )
    assert staged.failures["bad"].facts["name"] == "last"


@pytest.mark.parametrize(
    ("specs", "counts", "padding", "facts"),
    [
        (ROW, {"a": 1, "b": 1, "c": 1}, {}, {"rid": "c", "name": "last", "size": 3, "limit": 2}),
        (ROW, {"a": 1, "b": 1}, {"padded_rows": 4}, {"name": "last", "size": 4, "limit": 2}),
        (TOKENS, {"a": 2, "b": 2}, {}, {"rid": "b", "name": "hidden", "size": 4, "limit": 3}),
        (TOKENS, {"a": 2}, {"padded_tokens": 8}, {"name": "hidden", "size": 8, "limit": 3}),
    ],
)
def test_a_step_that_has_no_room_is_refused(
    specs: dict[str, RowSpec], counts: dict[str, int], padding: dict[str, int], facts: dict[str, Any]
) -> None:
    with pytest.raises(errors.UsageError) as caught:
        DeviceRows(specs, max_rows=2, max_tokens=3).stage(*step({rid: {} for rid in counts}, counts, **padding))
    assert caught.value.facts == facts


def test_a_refused_step_writes_nothing() -> None:
    """Not even the names that have room for it."""
    device_rows = DeviceRows(ROW | TOKENS, max_rows=2, max_tokens=1)
    kept = device_rows.stage(*step({"a": {"last": rows(1)}})).views["last"]
    with pytest.raises(errors.UsageError, match="more tokens"):
        device_rows.stage(*step({"a": {"last": rows(2)}}, {"a": 2}))
    assert torch.equal(kept, rows(1))


def test_maps_of_another_step_are_refused() -> None:
    maps, _ = step({"a": {"last": rows(1)}, "b": {"last": rows(2)}})
    _, plan = step({"b": {}, "a": {}})
    with pytest.raises(errors.UsageError, match="not this step's"):
        DeviceRows(ROW, max_rows=4).stage(maps, plan)


@pytest.mark.parametrize("form", ["keys", "nested"])
def test_maps_that_do_not_hold_names_are_refused(form: Any) -> None:
    """They would be zeros, and nobody would know why."""
    buffer, plan = Buffer({"a": {"last": rows(1)}}), StepPlan.make(["a"], {"a": 1})
    with pytest.raises(errors.UsageError, match="gathered by name") as caught:
        DeviceRows(ROW, max_rows=4).stage(gather(buffer, plan, form), plan)
    assert caught.value.facts == {"form": form, "names": ["last"]}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_dtypes_keep_their_bits(dtype: torch.dtype) -> None:
    """A strided view, too, and zeros behind it."""
    value = torch.arange(16, dtype=torch.uint8).view(2, 8)[:, ::2].to(dtype)
    staged = DeviceRows({"x": RowSpec((2, 4), dtype)}, max_rows=3).stage(*step({"a": {"x": value}}, padded_rows=2))
    view = staged.views["x"]
    assert view.dtype == dtype
    assert torch.equal(view[0].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))
    assert not view[1].contiguous().view(torch.uint8).any()


def test_gradients_and_inference_mode_are_no_hindrance() -> None:
    """Made in inference mode and used outside of it, and the other way round."""
    with torch.inference_mode():
        device_rows = DeviceRows(ROW, max_rows=2)
        inside = rows(1)
    state = {"a": {"last": inside}, "b": {"last": rows(2).requires_grad_()}}
    view = device_rows.stage(*step(state)).views["last"]
    assert torch.equal(view, rows(1, 2))
    assert not view.requires_grad
    with torch.inference_mode():
        assert torch.equal(device_rows.stage(*step(state)).views["last"], rows(1, 2))


def test_rows_that_are_alike_are_one_copy_a_name() -> None:
    """On the host straight into the block; for another device into the host's, then one transfer for all names."""
    maps, plan = step({rid: {"last": rows(1), "hidden": rows(1)} for rid in "abcd"})
    for device, ways in (
        # zero_ is the padding, empty here.
        ("cpu", ["cat", "zero_"] * 2),
        ("meta", [*["cat", "zero_"] * 2, "copy_ host->meta", *["copy_ meta->meta"] * 2]),
    ):
        device_rows = DeviceRows(ROW | TOKENS, max_rows=4, max_tokens=8, device=device)
        with Writes() as writes:
            device_rows.stage(maps, plan)
        assert writes.seen == ways


def test_rows_of_host_and_device_mix() -> None:
    """`meta` has no values, but the way is that of any device: what is there already is laid behind the transfer."""
    device_rows = DeviceRows(ROW, max_rows=5, device="meta")
    there = {"last": rows(2).to("meta")}
    with Writes() as writes:
        staged = device_rows.stage(
            *step({"x": there, "host": {"last": rows(1)}, "none": {}, "y": there}, padded_rows=5)
        )
    assert staged.failures == {}
    assert (staged.views["last"].device.type, staged.views["last"].shape) == ("meta", (5, 2))
    assert writes.seen == ["cat", "zero_", "zero_", "copy_ host->meta", "copy_ meta->meta", "cat", "cat"]


class Sent:
    """An event behind a copy, and what is asked of it."""

    def __init__(self, number: int, told: list[str]) -> None:
        self._number, self._told = number, told

    def synchronize(self) -> None:
        self._told.append(f"wait {self._number}")

    def record(self, stream: object) -> None:
        self._told.append(f"sent {self._number} on {stream}")


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], list[str]]:
    """The host's memory as if it were a GPU's: where tensors lie that are "there", and what is asked of events."""
    there: set[int] = set()
    told: list[str] = []
    numbers = itertools.count()
    monkeypatch.setattr(staging, "_HOST", torch.device("meta"))
    monkeypatch.setattr(staging, "_is_on", lambda tensor, device: tensor.data_ptr() in there)
    monkeypatch.setattr(staging, "_is_cuda", lambda device: True)
    monkeypatch.setattr(staging, "_page_locked", lambda room: torch.full((room,), 255, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Sent(next(numbers), told))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s stream")
    return there, told


def test_a_step_waits_for_the_copy_of_the_step_before_the_last(as_device: tuple[set[int], list[str]]) -> None:
    device_rows = DeviceRows(ROW | TOKENS, max_rows=4, max_tokens=8)
    for value in range(3):
        views = device_rows.stage(*step({"a": {"last": rows(value), "hidden": rows(value)}})).views
        assert torch.equal(views["last"], rows(value))
        # One without anything from the host waits for nothing.
        device_rows.stage(*step({"a": {}}))
    assert as_device[1] == [told for turn in (0, 1, 0) for told in (f"wait {turn}", f"sent {turn} on cpu's stream")]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 99), st.sampled_from("hdn")), max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_steps_to_a_device_give_what_rows_one_by_one_would(
    as_device: tuple[set[int], list[str]], steps: list[list[tuple[int, int, str]]], padding: int
) -> None:
    """As above, each request's tensors on the host, on the device, or none."""
    there, _ = as_device
    device_rows = DeviceRows(ROW | TOKENS | {"tag": RowSpec((), torch.int8)}, max_rows=9, max_tokens=21)
    for step_rows in steps:
        state, counts, last, hidden, tags = {}, {}, [], [], []
        for number, (tokens, value, place) in enumerate(step_rows):
            rid = f"r{number}"
            counts[rid] = tokens
            state[rid] = {"last": rows(value), "hidden": rows(*[value] * tokens)} if place != "n" else {}
            if place == "h":
                state[rid]["tag"] = torch.tensor([value], dtype=torch.int8)
            there.update(tensor.data_ptr() for tensor in state[rid].values() if place == "d")
            last += [value * (place != "n")]
            hidden += [value * (place != "n")] * tokens
            tags += [value * (place == "h")]
        sizes = {"padded_rows": len(last) + padding, "padded_tokens": len(hidden) + padding}
        views = device_rows.stage(*step(state, counts, **sizes)).views
        there.clear()
        assert torch.equal(views["last"], rows(*last, *[0] * padding))
        assert torch.equal(views["hidden"], rows(*hidden, *[0] * padding))
        assert views["tag"].tolist() == [*tags, *[0] * padding]


@pytest.mark.cuda
def test_rows_of_host_and_device_mix_and_steps_do_not_overtake_each_other() -> None:
    """The second step's rows are written while the first one's transfer may be under way."""
    device_rows = DeviceRows(ROW, max_rows=4, device="cuda")
    seen = []
    for value in range(1, 50):
        state = {"host": {"last": rows(value)}, "none": {}, "there": {"last": rows(-value, device="cuda")}}
        seen.append(device_rows.stage(*step(state, padded_rows=4)).views["last"].clone())
    assert [view.tolist() for view in seen] == [rows(value, 0, -value, 0).tolist() for value in range(1, 50)]


@pytest.mark.cuda
def test_a_captured_graph_reads_the_rows_of_later_steps() -> None:
    device_rows = DeviceRows(ROW, max_rows=4, device="cuda")
    plan = StepPlan.empty(padded_rows=2)
    view = device_rows.stage(gather(Buffer(), plan, "names"), plan).views["last"]
    out = torch.zeros(2, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(view * 2)
    for value in (1, 2, 3):
        device_rows.stage(*step({"a": {"last": rows(value)}}, padded_rows=2))
        graph.replay()
        assert out.tolist() == rows(2 * value, 0).tolist()
