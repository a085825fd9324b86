"""Tensors into blocks and out again: every dtype and layout, bit by bit; one copy in, none out."""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from connector.arena import tensors
from connector.arena.arena import DATA_BEGIN, Arena, open_arena
from connector.arena.tensors import copy_in, dtype_named, owned, specs_of, views
from connector.core.errors import InvariantBroken
from connector.core.layout import Manifest, check, data_bytes, plan
from connector.core.specs import DTYPE_BITS, TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

MIB = 1 << 20
BASE = DATA_BEGIN + 128
DTYPES = sorted(tensors._DTYPES)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> bytes:
    """The logical tensor's bytes, row-major, by a way that the product does not take."""
    if tensor.is_complex() and not tensor.is_conj():
        flat = torch.view_as_real(tensor).contiguous().reshape(-1)
    elif tensor.is_conj() or tensor.is_neg():
        return bits(tensor.resolve_conj().resolve_neg())
    else:
        flat = tensor.detach().view(INTEGERS[tensor.element_size()]).contiguous().reshape(-1)
    return bytes(flat.detach().view(torch.uint8).tolist())


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any bit patterns at all: NaN payloads, signalling NaNs, -0.0; for bool 0 and 1."""
    generator = torch.Generator().manual_seed(7)
    count = 1
    for size in shape:
        count *= size
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def put(arena: Arena, payload: dict[str, torch.Tensor], base: int = BASE) -> Manifest:
    (manifest,) = plan([specs_of(payload)])
    for slot in manifest.slots:
        copy_in(arena, base + slot.offset, payload[slot.key], slot.nbytes)
    return check(manifest, data_bytes([manifest]))


def layouts(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    base = random_bits(dtype, 4, 3, 5, 2)
    yield "contiguous", base
    yield "transposed", base.transpose(0, 2)
    yield "sliced", base[:, :, ::2]
    yield "offset", base[2:]
    yield "expanded", base[:1].expand(6, 3, 5, 2)
    yield (
        "channels last",
        base.view(INTEGERS.get(dtype.itemsize, dtype)).to(memory_format=torch.channels_last, copy=True).view(dtype),
    )
    yield "scalar", base[1, 2, 3, 1]
    yield "one row", base[3, 1, 2]
    yield "empty", base[:, :0]
    yield "empty in front", base[:0].transpose(0, 1)
    if dtype.is_complex:
        yield "conj", base.conj()
        yield "conj, transposed", base.conj().t() if base.dim() == 2 else base.conj().transpose(1, 3)
        yield "neg", base.conj().imag
        yield "real part", base.real


def test_every_dtype_of_the_specs_is_one_of_torch() -> None:
    """No carried dtype is missing from this torch, and each takes the bytes that the spec says."""
    assert set(DTYPES) == set(DTYPE_BITS)
    for name in DTYPES:
        assert dtype_named(name).itemsize * 8 == DTYPE_BITS[name]


@pytest.mark.parametrize("name", DTYPES)
def test_every_layout_of_a_dtype_round_trips_bit_by_bit(arena: Arena, name: str) -> None:
    payload = dict(layouts(dtype_named(name)))
    before = {key: bits(tensor) for key, tensor in payload.items()}
    manifest = put(arena, payload)
    taken = views(arena, BASE, manifest, lambda: None)
    copies = owned(taken)
    assert list(taken) == list(payload)
    for key, tensor in payload.items():
        for got in (taken[key], copies[key]):
            assert (got.dtype, got.shape, got.is_contiguous()) == (tensor.dtype, tensor.shape, True), key
            assert not got.is_conj() and not got.is_neg() and not got.requires_grad
            assert bits(got) == before[key], key
        assert bits(tensor) == before[key], "the source changed"


@pytest.mark.parametrize("name", DTYPES)
def test_large_copies_take_the_other_road_to_the_same_bits(new_arena: Callable[..., Arena], name: str) -> None:
    """Above the size from which the GIL is given back."""
    arena = new_arena(8 * MIB)
    source = random_bits(dtype_named(name), 300, 512)
    payload = {"straight": source, "bent": source.t()}
    taken = views(arena, BASE, put(arena, payload), lambda: None)
    for key, tensor in payload.items():
        as_bits = INTEGERS.get(tensor.element_size())
        got, expected = taken[key], tensor
        if as_bits is not None:
            got, expected = got.view(as_bits), expected.view(as_bits)
        else:
            got, expected = (torch.view_as_real(one).view(torch.int64) for one in (got, expected))
        assert torch.equal(got, expected)


def test_nan_payloads_and_negative_zero_stay(arena: Arena) -> None:
    special = torch.tensor([0x7FA0_0001, -0x0060_0003, -0x8000_0000, 0x7FC0_1234], dtype=torch.int32).view(
        torch.float32
    )
    taken = views(arena, BASE, put(arena, {"x": special, "t": special.view(2, 2).t()}), lambda: None)
    assert bits(taken["x"]) == bits(special) and bits(taken["t"]) == bits(special.view(2, 2).t())


def test_what_is_left_of_a_slot_s_bytes_is_untouched(arena: Arena) -> None:
    arena.segment.buf[BASE : BASE + 256] = b"\xee" * 256
    put(arena, {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(3, 1, dtype=torch.uint8).expand(3, 2)})
    assert bytes(arena.segment.buf[BASE : BASE + 256]) == bytes(3) + b"\xee" * 61 + bytes(6) + b"\xee" * 186


class Plain(torch.Tensor):
    """A subclass that counts what runs through its __torch_function__."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        Plain.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_parameters_gradients_and_plain_subclasses_pass(arena: Arena) -> None:
    leaf = torch.randn(3, 4, requires_grad=True)
    payload = {
        "parameter": torch.nn.Parameter(torch.randn(2, 3)),
        "buffer": torch.nn.Parameter(torch.randn(4, 4), requires_grad=False).t(),
        "leaf": leaf,
        "graph": (leaf * 2).t(),
        "subclass": torch.randn(2, 2).as_subclass(Plain),
        "bent subclass": torch.randn(5, 2).t().as_subclass(Plain),
    }
    expected = {key: bits(tensor.detach().as_subclass(torch.Tensor)) for key, tensor in payload.items()}
    Plain.calls = 0
    taken = views(arena, BASE, put(arena, payload), lambda: None)
    assert Plain.calls == 0
    for key, got in taken.items():
        assert type(got) is torch.Tensor and not got.requires_grad and got.grad_fn is None
        assert bits(got) == expected[key]


def test_inference_mode_and_another_default_device_change_nothing(arena: Arena) -> None:
    with torch.inference_mode():
        manifest = put(arena, {"x": torch.arange(6).view(2, 3).t(), "e": torch.empty(0, 2)})
    with torch.device("meta"):
        taken = views(arena, BASE, manifest, lambda: None)
    assert taken["x"].tolist() == [[0, 3], [1, 4], [2, 5]] and taken["e"].device.type == "cpu"


def test_specs_say_key_dtype_and_shape_in_order() -> None:
    payload = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.tensor(True), "": torch.empty(0, 4)}
    assert specs_of(payload) == (
        TensorSpec("b", "bfloat16", (2, 3)),
        TensorSpec("a", "bool", ()),
        TensorSpec("", "float32", (0, 4)),
    )
    assert specs_of({}) == ()


# --- copies -----------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops.append(func.name())
        return func(*args, **(kwargs or {}))


def status(field: str) -> int:
    """A field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


BENT = {"aten::detach", "aten::view.dtype", "aten::view", "aten::copy_"}


@pytest.mark.parametrize(
    ("make", "ops"),
    [
        (lambda: torch.ones(4096, 4096), set()),
        (lambda: torch.ones(4096, 4096).t(), BENT),
        (
            lambda: torch.ones(4096, 1).expand(4096, 4096),
            {"aten::detach", "aten::view.dtype", "aten::view", "aten::copy_"},
        ),
        (
            lambda: torch.ones(4096, 2048, dtype=torch.complex64).conj(),
            {"aten::detach", "aten::view", "aten::copy_"},
        ),
    ],
)
def test_64_mib_go_in_with_one_copy(
    new_arena: Callable[..., Arena], make: Callable[[], torch.Tensor], ops: set[str]
) -> None:
    """No clone, contiguous or to on the way, and no memory but the arena's: the peak does not rise."""
    arena = new_arena(65 * MIB)
    source = make()
    with Recorder():
        copy_in(arena, BASE, source, 64 * MIB)  # warm: pages, torch's own pools, what a first dispatch imports
    arena.segment.buf[BASE : BASE + 64 * MIB] = bytes(64 * MIB)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    with Recorder() as recorder:
        copy_in(arena, BASE, source, 64 * MIB)
    assert status("VmHWM") - before < 4 * MIB
    assert set(recorder.ops) <= ops and recorder.ops.count("aten::copy_") == len(ops & {"aten::copy_"})
    assert bytes(arena.segment.buf[BASE : BASE + 8]) != bytes(8)


def test_views_copy_nothing(arena: Arena) -> None:
    manifest = put(arena, {"x": torch.ones(100, 100), "s": torch.tensor(2.0)})
    with Recorder() as recorder:
        taken = views(arena, BASE, manifest, lambda: None)
    assert set(recorder.ops) <= {"aten::view"}
    assert taken["x"].data_ptr() == arena.segment.address + BASE
    arena.segment.buf[BASE : BASE + 4] = bytes(4)
    assert taken["x"][0, 0] == 0


# --- release ----------------------------------------------------------------------------------


def taken_with(arena: Arena, payload: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    released: list[str] = []
    return views(arena, BASE, put(arena, payload), lambda: released.append("once")), released


def test_the_last_tensor_releases_once(arena: Arena) -> None:
    taken, released = taken_with(arena, {"a": torch.ones(4), "b": torch.ones(2, 2), "e": torch.empty(0)})
    a, b, empty = taken["a"], taken["b"], taken["e"]
    del taken
    del a
    assert released == []
    del b
    assert released == ["once"]
    del empty
    gc.collect()
    assert released == ["once"]


def test_views_of_views_and_other_objects_hold(arena: Arena) -> None:
    taken, released = taken_with(arena, {"a": torch.arange(24.0)})
    view = taken["a"].view(2, 3, 4)[1].t()[2:].view(torch.int32)
    storage = view.untyped_storage()
    del taken
    gc.collect()
    assert released == [] and view.view(torch.float32)[0].tolist() == [14.0, 18.0, 22.0]
    del view
    assert released == []
    del storage
    assert released == ["once"]


def test_a_reference_cycle_releases_when_it_is_collected(arena: Arena) -> None:
    taken, released = taken_with(arena, {"a": torch.ones(4)})
    cycle: dict[str, object] = {"tensor": taken["a"]}
    cycle["self"] = cycle
    del taken, cycle
    gc.collect()
    assert released == ["once"]


def test_a_release_that_knows_its_own_views_is_collected(arena: Arena) -> None:
    """The callable holds the dictionary, a wrong use: the payload stays until the dictionary is cleared."""
    manifest = put(arena, {"a": torch.ones(4)})
    released: list[int] = []
    held: dict[str, torch.Tensor] = {}
    held.update(views(arena, BASE, manifest, lambda: released.append(len(held))))
    gc.collect()
    assert released == []
    held.clear()
    assert released == [0]


def test_another_thread_may_drop_the_last_view(arena: Arena) -> None:
    taken, released = taken_with(arena, {"a": torch.ones(4), "b": torch.ones(4)})
    box = [taken]
    del taken
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert released == ["once"]


@pytest.mark.parametrize("payload", [{}, {"e": torch.empty(0, 3)}, {"e": torch.empty(2, 0), "f": torch.empty(0)}])
def test_a_payload_without_bytes_is_released_at_once(arena: Arena, payload: dict[str, torch.Tensor]) -> None:
    taken, released = taken_with(arena, payload)
    assert released == ["once"] and list(taken) == list(payload)
    assert [tensor.shape for tensor in taken.values()] == [tensor.shape for tensor in payload.values()]
    del taken
    gc.collect()
    assert released == ["once"]


def test_an_exception_s_traceback_holds_only_as_long_as_it_lives(arena: Arena) -> None:
    taken, released = taken_with(arena, {"a": torch.ones(4)})

    def use(payload: dict[str, torch.Tensor]) -> None:
        row = payload["a"][1:]
        raise ValueError(row.shape)

    with pytest.raises(ValueError) as caught:
        use(taken)
    del taken
    assert released == []
    del caught
    gc.collect()
    assert released == ["once"]


def test_members_of_one_block_release_one_by_one(arena: Arena) -> None:
    payloads = [{"x": torch.full((5,), float(rid))} for rid in range(3)]
    manifests = plan([specs_of(payload) for payload in payloads])
    released: list[int] = []
    taken = []
    for rid, (payload, manifest) in enumerate(zip(payloads, manifests, strict=True)):
        for slot in manifest.slots:
            copy_in(arena, BASE + slot.offset, payload[slot.key], slot.nbytes)
        taken.append(views(arena, BASE, manifest, lambda rid=rid: released.append(rid)))  # type: ignore[misc]
    assert [member["x"][0].item() for member in taken] == [0, 1, 2]
    taken.pop(1)
    assert released == [1]
    taken.clear()
    assert sorted(released) == [0, 1, 2]


def test_tensors_outlive_close_and_unlink(arena: Arena) -> None:
    taken, released = taken_with(arena, {"a": torch.arange(1000)})
    arena.unlink()
    arena.close()
    gc.collect()
    assert taken["a"].sum() == 499500 and released == []
    assert arena.uuid in Path("/proc/self/maps").read_text()
    taken.clear()
    gc.collect()
    assert released == ["once"]
    assert arena.uuid not in Path("/proc/self/maps").read_text()


def test_owned_copies_pin_nothing(arena: Arena) -> None:
    taken, released = taken_with(arena, {"a": torch.arange(8.0), "s": torch.tensor(1), "e": torch.empty(0)})
    copies = owned(taken)
    taken.clear()
    assert released == ["once"]
    arena.segment.buf[BASE : BASE + 64] = bytes(64)
    assert copies["a"].tolist() == list(range(8)) and copies["s"].shape == ()


# --- processes --------------------------------------------------------------------------------

READER = """
import json, resource, sys, torch
from connector.arena.arena import open_arena
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from connector.arena.tensors import copy_in, views
from connector.core.layout import Manifest, Slot
uuid, size, base, rows, begin, end, mode = json.loads(sys.argv[1])
arena = open_arena(uuid, size, readonly=mode != "write")
manifest = Manifest(tuple(Slot(k, d, tuple(s), o, n) for k, d, s, o, n in rows), begin, end)
taken = views(arena, base, manifest, lambda: print("released", flush=True), readonly=mode != "write")
arena.close()
if mode == "spoil":
    taken["x"].add_(1)
for key, tensor in taken.items():
    print(key, bytes(tensor.reshape(-1).view(torch.uint8).tolist()).hex())
if mode == "write":
    taken["x"].add_(1)
"""


def ask(arena: Arena, manifest: Manifest, mode: str) -> str:
    return json.dumps([arena.uuid, arena.size, BASE, manifest.slots, manifest.begin, manifest.end, mode])


def test_another_process_sees_the_same_bytes(arena: Arena, child: Callable[..., object]) -> None:
    payload = {"x": torch.randn(7, 5).bfloat16(), "y": torch.tensor([-0.0, float("nan")]), "e": torch.empty(0)}
    manifest = put(arena, payload)
    for mode in ("read", "write"):
        out, err = child(READER, ask(arena, manifest, mode)).communicate()  # type: ignore[attr-defined]
        expected = [f"{key} {bits(tensor).hex()}".strip() for key, tensor in payload.items()]
        lines = [line.strip() for line in out.splitlines()]
        assert lines[:3] == expected and "Warning" not in err
    taken = views(arena, BASE, manifest, lambda: None)
    assert bits(taken["x"]) == bits(payload["x"] + 1), "what the other process wrote is seen here"


def test_a_write_through_a_read_only_mapping_ends_the_writer(arena: Arena, child: Callable[..., object]) -> None:
    """The debug setting: a consumer that changes a payload in place is found, the bytes stay."""
    source = torch.arange(8.0)
    process = child(READER, ask(arena, put(arena, {"x": source}), "spoil"))
    process.communicate()  # type: ignore[attr-defined]
    assert process.returncode == -signal.SIGSEGV  # type: ignore[attr-defined]
    assert bytes(arena.segment.buf[BASE : BASE + 32]) == bits(source)


def test_a_read_only_arena_gives_views_without_a_warning(arena: Arena) -> None:
    manifest = put(arena, {"x": torch.arange(6)})
    opened = open_arena(arena.uuid, arena.size, readonly=True)
    taken = views(opened, BASE, manifest, lambda: None, readonly=True)
    assert taken["x"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(InvariantBroken):
        copy_in(opened, BASE, torch.ones(2), 8)
    with pytest.raises(InvariantBroken):
        views(arena, BASE, manifest, lambda: None, readonly=True)
    opened.close()
