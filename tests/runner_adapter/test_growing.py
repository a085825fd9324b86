"""Rows that are appended: what is copied, what a block's room costs, and that nothing that was shown ever changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from connector import errors
from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.merge import Blocks, MergeRules, merged
from runner_adapter.values import Growing, owned
from tests.runner_adapter.test_values import CARRIED, DTYPES, bits, pattern

WIDTH = 3
RULES = MergeRules(accumulated=["x", "y"], spans={"s": ("start", "end")})


class Copied(TorchDispatchMode):
    """Elements that torch copies while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("copy_", "cat", "stack", "clone", "_to_copy"):
            self.elements += args[0].numel() if isinstance(args[0], torch.Tensor) else sum(t.numel() for t in args[0])
        return func(*args, **(kwargs or {}))


def rows(first: int, count: int = 1) -> torch.Tensor:
    """[count, WIDTH]: each row its own number."""
    return torch.arange(first, first + count)[:, None].repeat(1, WIDTH)


def numbers(tensor: torch.Tensor) -> list[int]:
    assert all(len(set(row)) == 1 for row in tensor.tolist())
    return [row[0] for row in tensor.tolist()]


def buffer_of(**more: Any) -> ModelIntermediateBuffer:
    made = ModelIntermediateBuffer(rules=RULES, **more)
    made.add("a")
    return made


def appended(at: int) -> dict[str, torch.Tensor]:
    return {"x": rows(at)}


def spanned(at: int) -> dict[str, torch.Tensor]:
    """The row behind, and the one before it once more, as after a preemption."""
    start = max(0, at - 1)
    return {"s": rows(start, at + 1 - start), "start": torch.tensor(start), "end": torch.tensor(at + 1)}


BOTH = pytest.mark.parametrize(("name", "update"), [("x", appended), ("s", spanned)], ids=["accumulated", "span"])

# -- what it costs --------------------------------------------------------------------------------


@BOTH
def test_n_appends_copy_less_than_four_times_n_rows(name: str, update: Callable[[int], Any]) -> None:
    """Whole copies would be n / 2 times as many."""
    buffer, count = buffer_of(), 500
    with Copied() as copied:
        for at in range(count):
            buffer.merge("a", update(at))
    assert numbers(buffer["a"][name]) == list(range(count))
    ends = 2 * count if name == "s" else 0
    assert count * WIDTH <= copied.elements - ends < 4 * count * WIDTH


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60))
def test_chunks_of_any_sizes_cost_as_little(sizes: list[int]) -> None:
    buffer, total = buffer_of(), 0
    with Copied() as copied:
        for size in sizes:
            buffer.merge("a", {"x": rows(total, size)})
            total += size
    assert numbers(buffer["a"]["x"]) == list(range(total))
    assert copied.elements <= 4 * total * WIDTH


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_the_room_is_twice_what_is_shown_at_most_and_a_first_chunk_has_none(sizes: list[int]) -> None:
    buffer, total = buffer_of(), 0
    for number, size in enumerate(sizes):
        buffer.merge("a", {"x": rows(total, size)})
        total += size
        shown = buffer["a"]["x"]
        assert shown.is_contiguous() and shown.shape == (total, WIDTH)
        assert shown.untyped_storage().nbytes() <= (1 if number == 0 else 2) * shown.nbytes


def test_an_append_in_the_room_leaves_the_rows_where_they_are() -> None:
    buffer = buffer_of()
    buffer.merge("a", {"x": rows(0, 8)})
    buffer.merge("a", {"x": rows(8)})
    address = buffer["a"]["x"].data_ptr()
    for at in range(9, 16):
        buffer.merge("a", {"x": rows(at)})
        assert buffer["a"]["x"].data_ptr() == address


def test_a_copy_of_what_was_shown_carries_no_room() -> None:
    """As a hand-over and `clone` make one."""
    shown = Growing().append(rows(0, 8), [rows(8)], "cpu")
    assert shown.untyped_storage().nbytes() > shown.nbytes
    assert [one.untyped_storage().nbytes() for one in (owned(shown), shown.clone())] == [shown.nbytes] * 2


# -- what was shown -------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3), st.sampled_from(["x", "y"]), st.booleans())))
def test_maps_that_go_on_from_any_earlier_map_never_disturb_another(
    steps: list[tuple[int, int, str, bool]],
) -> None:
    """With one store of blocks for all: each append begins with a map of any age, and some are refused in the end."""
    blocks: Blocks = {}
    first: dict[str, list[int]] = {"x": [0], "y": [0]}
    made = [(merged({}, [{name: rows(0) for name in "xy"}], RULES, "cpu", blocks), first)]
    for number, (age, count, name, refused) in enumerate(steps, start=1):
        current, wanted = made[age % len(made)]
        update = {name: rows(10 * number, count)}
        if refused:
            with pytest.raises(errors.InvalidPayload):
                merged(current, [{**update, "xy"[name == "x"]: torch.ones(1, WIDTH)}], RULES, "cpu", blocks)
        else:
            more = list(range(10 * number, 10 * number + count))
            made.append((merged(current, [update], RULES, "cpu", blocks), {**wanted, name: wanted[name] + more}))
        assert [{name: numbers(one[name]) for name in one} for one, _ in made] == [told for _, told in made]


def test_what_a_refused_update_appended_is_not_there_and_what_is_shown_stays() -> None:
    buffer = buffer_of()
    for at in range(3):
        buffer.merge("a", {"x": rows(at), "y": rows(at)})
    shown = buffer["a"]
    with pytest.raises(errors.InvalidPayload):
        buffer.merge("a", {"x": rows(77), "y": torch.ones(1, WIDTH)})
    buffer.merge("a", {"x": rows(3), "y": rows(3)})
    assert [numbers(shown[name]) for name in "xy"] == [[0, 1, 2]] * 2
    assert [numbers(buffer["a"][name]) for name in "xy"] == [[0, 1, 2, 3]] * 2
    buffer.validate()


def test_rows_behind_a_snapshot_are_not_put_behind_those_before_it() -> None:
    buffer = buffer_of()
    for at in range(3):
        buffer.merge("a", {"x": rows(at)})
    before = buffer["a"]["x"]
    buffer.replace("a", {"x": rows(50)})
    for at in range(51, 54):
        buffer.merge("a", {"x": rows(at)})
    assert numbers(before) == [0, 1, 2] and numbers(buffer["a"]["x"]) == [50, 51, 52, 53]


@pytest.mark.parametrize(
    "ends",
    [
        lambda buffer: buffer.replace("a", {"z": rows(0)}),
        lambda buffer: buffer.replace("a", {"x": rows(0)}),
        lambda buffer: buffer.merge("a", {"x": {"deep": rows(0)}}),
        lambda buffer: buffer.finish(["a"]),
    ],
    ids=["another snapshot", "a snapshot of its own", "a mapping in its place", "the end"],
)
def test_a_block_that_no_map_shows_is_let_go(ends: Callable[[ModelIntermediateBuffer], None]) -> None:
    buffer = buffer_of()
    for at in range(3):
        buffer.merge("a", {"x": rows(at)})
    newest = weakref.ref(buffer["a"]["x"])
    ends(buffer)
    assert newest() is None
    buffer.validate()


def test_rows_taken_from_what_was_shown_are_rows_like_others() -> None:
    """Source and block are the same memory, in the room and beyond it."""
    buffer = buffer_of()
    buffer.merge("a", {"x": rows(0, 4)})
    for _ in range(4):
        buffer.merge("a", {"x": buffer["a"]["x"][:2]})
    assert numbers(buffer["a"]["x"]) == [0, 1, 2, 3, *[0, 1] * 4]


# -- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [True, False])
def test_rows_are_appended_in_inference_mode_and_out_of_it(begun: bool) -> None:
    buffer = buffer_of()
    for at in range(9):
        with torch.inference_mode(begun ^ bool(at % 2)):
            buffer.merge("a", {"x": rows(at)})
    assert numbers(buffer["a"]["x"]) == list(range(9))
    assert not buffer["a"]["x"].is_inference()


def test_what_was_shown_may_stand_in_a_graph_while_more_is_appended() -> None:
    """Autograd asks of what it saved that nobody wrote into it; nobody has."""
    buffer = buffer_of()
    for at in range(3):
        buffer.merge("a", {"x": rows(at).float()})
    weight = torch.ones(WIDTH, requires_grad=True)
    result = (buffer["a"]["x"] * weight).sum()
    buffer.merge("a", {"x": rows(3).float().requires_grad_()})
    result.backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0] * WIDTH
    assert not buffer["a"]["x"].requires_grad and buffer["a"]["x"].grad_fn is None


@pytest.mark.parametrize("name", CARRIED)
def test_rows_of_every_dtype_keep_their_bits(name: str) -> None:
    source, grown = pattern(DTYPES[name], 6, 4), Growing()
    shown = grown.append(source[:1], [source[1:2]], "cpu")
    for at in range(2, 6):
        shown = grown.append(shown, [source[at : at + 1]], "cpu")
    assert shown.dtype == source.dtype and torch.equal(bits(shown), bits(source))


def test_a_conj_view_becomes_the_values_that_it_shows() -> None:
    source = torch.tensor([[1 + 2j], [3 - 4j]])
    grown = Growing()
    shown = grown.append(grown.append(source, [source.conj()], "cpu"), [source.conj().imag.to(source.dtype)], "cpu")
    assert shown.flatten().tolist() == [1 + 2j, 3 - 4j, 1 - 2j, 3 + 4j, -2, 4]


@pytest.mark.parametrize(
    "wrong", [torch.ones(1, WIDTH), torch.ones(1, WIDTH + 1).long(), torch.tensor(1)], ids=["dtype", "width", "0-dim"]
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_done(wrong: torch.Tensor) -> None:
    grown = Growing()
    shown = grown.append(rows(0), [rows(1)], "cpu")
    with pytest.raises(errors.InvalidPayload) as caught:
        grown.append(shown, [rows(2), wrong], "cpu", name="x")
    assert caught.value.facts["name"] == "x"
    assert numbers(grown.append(shown, [rows(3)], "cpu")) == [0, 1, 3] and numbers(shown) == [0, 1]


@pytest.mark.cuda
def test_rows_grow_on_the_device_from_wherever_they_come() -> None:
    rules = MergeRules(accumulated=["x"], gpu_resident=["x"])
    buffer = ModelIntermediateBuffer(rules=rules, device="cuda")
    buffer.add("a", {"x": rows(0, 8)})
    shown: list[Mapping[str, torch.Tensor]] = []
    for at in range(8, 40):
        buffer.merge("a", {"x": rows(at).cuda() if at % 2 else rows(at)})
        shown.append(buffer["a"])
    assert [numbers(one["x"]) for one in shown] == [list(range(at + 1)) for at in range(8, 40)]
    assert {one["x"].device.type for one in shown} == {"cuda"}
    assert len({one["x"].data_ptr() for one in shown}) <= 3
