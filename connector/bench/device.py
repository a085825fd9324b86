"""Copies between the pool and a device, beside those of torch's own page-locked memory: `connector bench --device`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

import connector
from connector.bench.payloads import WrongBytes
from connector.bench.waiting import until_idle

#: bf16 [16384, 2048], 64 MiB; and a step's rows of it.
SHAPE, ROWS = (16384, 2048), 64
ROUNDS, POOL = 9, "512MiB"
_GIB = 1 << 30


class Copied(NamedTuple):
    """`way`: d2h (a put, until it is sealed) or h2d (a view, until it is there), GiB/s, medians over the rounds; and of
    torch's own page-locked memory. `copies`: launched by a step of ROWS rows."""

    way: str
    gib_per_s: float
    pinned_gib_per_s: float
    copies: int

    @property
    def ratio(self) -> float:
        return self.gib_per_s / self.pinned_gib_per_s


def run(name: str, say: Callable[[str], None], rounds: int = ROUNDS, shape: tuple[int, int] = SHAPE) -> list[Copied]:
    """Measure with a private broker, in this process. UsageError if there is no such device."""
    device = torch.device(name)
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        raise connector.errors.UsageError("torch finds no CUDA device", device=name)
    with connector.connect(stage="bench", embedded=True, pool=POOL, page_lock=cuda) as node:
        until_idle()
        if cuda and not node.page_locked:
            say("the pool's pages could not be locked: what follows is of pageable memory")
        return list(_measured(node, device, rounds, shape))


def _measured(node: connector.Node, device: torch.device, rounds: int, shape: tuple[int, int]) -> Iterator[Copied]:
    edge = node.edge("bench", "bench")
    there = torch.randn(shape, device=device).to(torch.bfloat16)
    host = torch.empty(shape, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    out, into, own, ref = [], [], [], []
    for number in range(rounds):
        out.append(_seconds(device, partial(_put, node, edge, str(number), there)))
        own.append(_seconds(device, partial(host.copy_, there, non_blocking=True)))
        taken = edge.take(str(number))
        found: list[torch.Tensor] = []
        into.append(_seconds(device, partial(_send, taken["x"], device, found)))
        ref.append(_seconds(device, partial(_send, host, device, found)))
        if not all(torch.equal(one, there) for one in found):
            raise WrongBytes("a tensor came back to its device with other bytes")
        del taken
    size = there.nbytes / _GIB
    with _launched(device) as counts:
        edge.put_many({f"row {at}": {"x": there[at]} for at in range(ROWS)}, last=True)
        node.flush()
    steps = {f"row {at}": edge.take(f"row {at}")["x"] for at in range(ROWS)}
    yield Copied("d2h", size / statistics.median(out), size / statistics.median(own), counts.get("d2h", 0))
    with _launched(device) as counts:
        _send(torch.stack(list(steps.values())), device, [])
    yield Copied("h2d", size / statistics.median(into), size / statistics.median(ref), counts.get("h2d", 0))


def _put(node: connector.Node, edge: connector.Edge, rid: str, tensor: torch.Tensor) -> None:
    edge.put(rid, {"x": tensor})
    node.flush()


def _send(tensor: torch.Tensor, device: torch.device, found: list[torch.Tensor]) -> None:
    found.append(tensor.to(device, non_blocking=True, copy=True))


def _seconds(device: torch.device, act: Callable[[], object]) -> float:
    _synchronize(device)
    begun = time.perf_counter()
    act()
    _synchronize(device)
    return time.perf_counter() - begun


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _launched(device: torch.device) -> Iterator[dict[str, int]]:
    """Copies that torch's profiler sees the device make, by way."""
    counts: dict[str, int] = {}
    if device.type != "cuda":
        yield counts
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield counts
        _synchronize(device)
    for event in profile.key_averages():
        for way, told in (("d2h", "Memcpy DtoH"), ("h2d", "Memcpy HtoD")):
            if event.key.startswith(told):
                counts[way] = counts.get(way, 0) + event.count
