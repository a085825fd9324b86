"""Processes of the stress test: payloads made from a seed, put by producers, made again and compared by consumers.

Run as `python -m tests.stress.roles produce|consume ENDPOINT PAYLOADS NUMBER...`; prints one line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
import threading

import torch

import connector

RIDS = 8
PATIENCE = 300.0
BASE_BYTES = 1 << 20
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def base() -> torch.Tensor:
    """Random bytes that all payloads are cut from; the same in every process."""
    maker = torch.Generator().manual_seed(20_26)
    return torch.randint(0, 256, (BASE_BYTES,), generator=maker, dtype=torch.uint8)


def chunks_of(payloads: int, producer: int, number: int, producers: int) -> int:
    """How many chunks a producer's request has: `payloads` in all, shared out as evenly as can be."""
    place = producer * RIDS + number
    return payloads // (producers * RIDS) + (place < payloads % (producers * RIDS))


def rid_of(producer: int, number: int) -> str:
    return f"stress-{producer}-{number}"


def make(source: torch.Tensor, producer: int, number: int, index: int) -> dict[str, torch.Tensor]:
    """The payload of one chunk: 0 to 3 tensors of any dtype, shape, layout and size, some of them large or empty."""
    chance = random.Random((producer * RIDS + number) * 1_000_003 + index)
    return {f"{index}.{k}": _tensor(source, chance) for k in range(chance.choice((0, 1, 1, 1, 2, 3)))}


def _tensor(source: torch.Tensor, chance: random.Random) -> torch.Tensor:
    dtype = chance.choice(DTYPES)
    rows, columns = chance.randint(0, 12), chance.choice((1, 3, 8, 33))
    if chance.random() < 0.01:
        rows = chance.randint(100, 1000)
    size = rows * columns * dtype.itemsize
    offset = chance.randrange((BASE_BYTES - size) // 16) * 16
    flat = source[offset : offset + size]
    # A bool of any other byte than 0 and 1 is no value.
    flat = flat & 1 if dtype is torch.bool else flat
    whole = flat.view(dtype).view(rows, columns)
    layout = chance.randrange(6)
    if layout == 1:
        return whole.t()
    if layout == 2:
        return whole[:, ::2]
    if layout == 3:
        return whole[rows // 2 :].unsqueeze(1)
    if layout == 4 and whole.numel():
        return whole[0, 0]
    return whole.expand(2, rows, columns) if layout == 5 else whole


def same(found: torch.Tensor, sent: torch.Tensor) -> bool:
    """Dtype, shape and every bit."""
    if found.dtype != sent.dtype or found.shape != sent.shape:
        return False
    bits = AS_BITS[sent.dtype.itemsize]
    return torch.equal(found.view(bits), sent.view(bits))


def produce(endpoint: str, payloads: int, producer: int, producers: int) -> dict[str, int]:
    """All chunks of this producer's requests, in random turns, one by one or as steps of several requests."""
    source, chance = base(), random.Random(producer)
    left = {number: chunks_of(payloads, producer, number, producers) for number in range(RIDS)}
    total, at = sum(left.values()), dict.fromkeys(left, 0)
    with connector.connect(stage=f"producer{producer}", endpoint=endpoint, timeout=PATIENCE) as node:
        edge = node.edge("producer", "consumer", producer)
        while left := {number: count for number, count in left.items() if at[number] < count}:
            turn = chance.sample(sorted(left), min(len(left), chance.choice((1, 1, 1, 2, 5))))
            step = {rid_of(producer, n): make(source, producer, n, at[n]) for n in turn}
            last = {rid_of(producer, n) for n in turn if at[n] + 1 == left[n]}
            if len(step) > 1:
                edge.put_many(step, last=last, timeout=PATIENCE)
            else:
                [(rid, payload)] = step.items()
                edge.put(rid, payload, last=rid in last, timeout=PATIENCE)
            for n in turn:
                at[n] += 1
        node.flush(PATIENCE)
    return {"put": total}


class Reading:
    """One edge of a consumer: every request polled to its end, each chunk made again and compared."""

    def __init__(self, node: connector.Node, payloads: int, producer: int, producers: int) -> None:
        self.edge = node.edge("producer", "consumer", producer)
        self.producer = producer
        self.open = {
            rid_of(producer, n): (n, chunks_of(payloads, producer, n, producers))
            for n in range(RIDS)
            if chunks_of(payloads, producer, n, producers)
        }
        self.next = dict.fromkeys(self.open, 0)
        self.taken = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        source = base()
        while self.open and not self.wrong:
            if not self.edge.wait(PATIENCE):
                self.wrong.append(f"nothing came for {sorted(self.open)}")
                return
            arrived = self.edge.poll()
            self.wrong += [f"{rid}: {error}" for rid, error in arrived.failed.items()]
            for rid, chunks in arrived.items():
                for chunk in chunks:
                    self.look(source, rid, chunk)
            for rid in arrived.ended:
                _, count = self.open.pop(rid)
                if self.next[rid] != count:
                    self.wrong.append(f"{rid} ended after {self.next[rid]} of {count}")

    def look(self, source: torch.Tensor, rid: str, chunk: connector.Payload) -> None:
        number, _ = self.open[rid]
        sent = make(source, self.producer, number, self.next[rid])
        if chunk.index != self.next[rid]:
            self.wrong.append(f"{rid}: {chunk.index} came when {self.next[rid]} was due")
        elif list(chunk) != list(sent) or not all(same(chunk[key], tensor) for key, tensor in sent.items()):
            self.wrong.append(f"{rid}[{chunk.index}] is not what was put")
        self.next[rid] += 1
        self.taken += 1


def consume(endpoint: str, payloads: int, producers: list[int], count: int) -> dict[str, object]:
    """A thread for each producer's edge."""
    with connector.connect(stage="consumer", endpoint=endpoint, timeout=PATIENCE) as node:
        readings = [Reading(node, payloads, producer, count) for producer in producers]
        threads = [threading.Thread(target=reading.run) for reading in readings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {"taken": sum(r.taken for r in readings), "wrong": [line for r in readings for line in r.wrong][:10]}


def main(role: str, endpoint: str, payloads: str, producers: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    if role == "produce":
        told: object = produce(endpoint, int(payloads), int(numbers[0]), int(producers))
    else:
        told = consume(endpoint, int(payloads), [int(number) for number in numbers], int(producers))
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
