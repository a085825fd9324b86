"""Kind E of the bug log: races, order, duplicate ids."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import connector
from connector import Node, Payload, errors
from tests.kill.host import HANG, ROOT, Host
from tests.kill.roles import check, chunk

MIB = 1 << 20


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with connector.connect(stage="a", embedded=True, pool="8MiB", log_level="error") as found:
        yield found


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as found:
        yield found


@pytest.fixture(scope="module")
def other(node: Node) -> Iterator[Node]:
    """Another client of the same broker."""
    with connector.connect(stage="b", endpoint=node.endpoint) as found:
        yield found


def _int(value: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([value])}


def test_b53_no_reader_sees_bytes_before_they_are_there(node: Node, host: Host) -> None:
    """One writer, three readers in processes of their own: each chunk's content is checked, none is ever torn."""
    readers = [
        host.start(
            "streaming_reader", endpoint=node.endpoint, edge=("b53", "c"), rid="r", reader=i, readers=3, quiet=True
        )
        for i in range(3)
    ]
    for reader in readers:
        reader.expect("ready")
    out = node.edge("b53", "c", readers=3)
    for index in range(1500):
        out.put("r", chunk("r", index), last=index == 1499, timeout=HANG)
    for reader in readers:
        assert reader.expect("ended")["count"] == 1500
    host.end_workers()


def test_b54_one_rid_from_two_clients_is_never_mixed(node: Node, other: Node) -> None:
    """The second putter of the same chunk is refused, and its ticket says so; the reader gets the first one's."""
    mine, theirs = node.edge("b54", "c"), other.edge("b54", "c")
    mine.put("id", _int(1))
    node.flush()
    ticket = theirs.put("id", _int(2))
    with pytest.raises(errors.AlreadyPut):
        other.flush()
    assert isinstance(ticket.error, errors.AlreadyPut)
    with mine.take("id") as payload:
        assert payload["x"].tolist() == [1]


def test_b54_a_rid_used_again_at_once_is_a_new_life(node: Node, other: Node) -> None:
    """Finish and use again, a hundred times without a pause: each life shows its own payloads alone."""
    out, source = node.edge("b54again", "c"), other.edge("b54again", "c")
    lives = []
    for life in range(100):
        out.put("id", _int(10 * life), last=False)
        out.put("id", _int(10 * life + 1), last=True)
        node.finish("id")
        got = [(p.life, p.index, p["x"].item()) for p in source.stream("id", timeout=HANG)]
        other.finish("id")
        assert [(index, value) for _, index, value in got] == [(0, 10 * life), (1, 10 * life + 1)]
        lives.append(got[0][0])
    assert lives == sorted(set(lives))


def test_b54_a_late_chunk_of_an_aborted_life_is_not_in_the_next(node: Node, other: Node) -> None:
    """The aborter uses the rid anew at once; what the other end still puts for the old life is refused."""
    old, new = other.edge("b54late", "c"), node.edge("b54late", "c")
    old.put("id", _int(1), last=False)
    other.flush()
    node.abort("id")
    node.begin("id")
    new.put("id", _int(7))
    node.flush()
    with pytest.raises(errors.RequestAborted):
        for _ in range(1000):
            old.put("id", _int(2), last=False)
            other.flush()
    with new.take("id") as payload:
        assert payload["x"].tolist() == [7]
    other.finish("id")
    node.finish("id")
    with pytest.raises(errors.Unavailable):
        new.take("id", timeout=0.0)


def test_b55_a_rid_that_nobody_wrote_is_named_with_its_neighbours(node: Node) -> None:
    """Two ends that made different names of one request: the error at the reader lists what is there."""
    edge = node.edge("b55", "c")
    edge.put("request-1-abc", _int(1))
    node.flush()
    with pytest.raises(errors.UnknownRequest) as caught:
        edge.take("request-1-xyz", timeout=0.0)
    assert caught.value.facts["near"] == ["request-1-abc"]
    edge.take("request-1-abc").release()


def test_b56_of_sixteen_writers_of_one_key_one_wins(node: Node, host: Host) -> None:
    """Sixteen processes at once: one is stored, fifteen get AlreadyPut, and the content is the winner's alone."""
    writers = [
        host.start("racing_writer", endpoint=node.endpoint, edge=("b56", "c"), rid="r", number=n) for n in range(16)
    ]
    for writer in writers:
        writer.expect("ready")
    for writer in writers:
        writer.tell("go")
    told = [writer.hear() for writer in writers]
    winners = [number for number, (event, _) in enumerate(told) if event == "put"]
    assert len(winners) == 1
    assert told[winners[0]][1]["outcome"] == "stored"
    assert [facts["kind"] for event, facts in told if event == "refused"] == ["AlreadyPut"] * 15
    with node.edge("b56", "c").take("r", timeout=HANG) as payload:
        assert torch.equal(payload["who"], torch.full((4096,), winners[0]))
    host.end_workers()


#: Puts under names made from templates, with optional parts, and prints them.
NAMER = """
import json, sys, torch, connector
from connector.core.keys import TemplateSet
templates = TemplateSet({"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"})
keys = [templates.format("r-1", "hidden_states", 18), templates.format("r-1", "ids", "prompt")]
keys += ["", "None", "k" * 100]
with connector.connect(stage="namer", endpoint=sys.argv[1]) as node:
    node.edge("b57", "c", int(sys.argv[2])).put("r-1", {key: torch.zeros(1) for key in keys})
    node.flush()
print(json.dumps(keys))
"""


def test_b57_names_are_the_same_in_every_process(node: Node) -> None:
    """Four processes with other hash seeds make, put and list the same names."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", NAMER, node.endpoint, str(seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    printed = [json.loads(process.communicate(timeout=2 * HANG)[0]) for process in started]
    assert printed[1:] == printed[:1] * 3
    assert printed[0][:2] == ["r-1-18", "r-1-prompt"]
    for replica in range(4):
        (row,) = node.payloads(edge=f"b57:c:{replica}")
        assert [tensor[0] for tensor in row["tensors"]] == printed[0]
        with node.edge("b57", "c", replica).take("r-1") as payload:
            assert list(payload) == printed[0]


@pytest.mark.parametrize("read", [0, 3, 5])
def test_b58_replayed_chunks_replace_only_what_nobody_was_told_of(node: Node, other: Node, read: int) -> None:
    """Chunks 0-4, rolled back to 2, then 2-6 with other bytes as attempt 1: each index once, in order, and the tickets
    say which version stands."""
    rid = f"r{read}"
    out, source = node.edge("b58", "c"), other.edge("b58", "c")
    for index in range(5):
        out.put(rid, _int(index), index=index)
    node.flush()
    got = [source.take(rid, timeout=HANG) for _ in range(read)]
    tickets = [out.put(rid, _int(100 + index), index=index, attempt=1, last=index == 6) for index in range(2, 7)]
    node.flush()
    got += source.stream(rid, timeout=HANG)
    outcomes = [ticket.result() for ticket in tickets]
    assert [payload.index for payload in got] == list(range(7))
    expected = [0, 1]
    for index, outcome in enumerate(outcomes, 2):
        if index >= 5:
            assert outcome == "stored"
        else:
            # A claimed rid's chunks are told ahead of its reader's takes: those stand.
            assert outcome == ("ignored" if read else "replaced")
        expected.append(index if outcome == "ignored" else 100 + index)
    assert [payload["x"].item() for payload in got] == expected


def test_b59_a_pool_of_two_blocks_keeps_the_order(other: Node, node: Node) -> None:
    """Room for two payloads; a reader that holds one or two, by chance: six hundred chunks arrive in their order."""
    chance = random.Random(59)
    with connector.connect(stage="small", embedded=True, pool="1MiB", log_level="error") as small:
        edge = small.edge("b59", "c")
        body = torch.zeros(400 << 10, dtype=torch.uint8)

        def produce() -> None:
            for index in range(600):
                edge.put("r", {"i": torch.tensor(index), "body": body}, last=index == 599, timeout=2 * HANG)

        thread = threading.Thread(target=produce)
        thread.start()
        held: list[Payload] = []
        for expected, payload in enumerate(edge.stream("r", timeout=HANG)):
            assert payload.index == payload["i"].item() == expected
            held.append(payload)
            del payload
            if len(held) == 2 or chance.random() < 0.5:
                held.clear()
        thread.join(HANG)
        assert expected == 599


def test_b60_a_second_put_leaves_the_readers_bytes_alone(node: Node, other: Node) -> None:
    """A reader holds a view; the same chunk is put again, plainly and as a re-send: never mixed."""
    out, source = node.edge("b60", "c"), other.edge("b60", "c")
    out.put("k", {"x": torch.full((64 << 10,), 1)})
    node.flush()
    held = source.take("k", timeout=HANG)
    with pytest.raises(errors.AlreadyPut):
        out.put("k", {"x": torch.full((64 << 10,), 2)}, index=0, last=True)
    again = out.put("k", {"x": torch.full((64 << 10,), 3)}, index=0, last=True, attempt=1)
    node.flush()
    assert again.result() == "ignored"
    for number in range(20):
        out.put(f"fill{number}", {"x": torch.full((8 << 10,), 9)})
    assert torch.equal(held["x"], torch.full((64 << 10,), 1))
    for number in range(20):
        source.take(f"fill{number}", timeout=HANG).release()


@pytest.mark.parametrize("how", ["with the data", "alone", "by finish", "before the reader", "between two polls"])
def test_b62_the_end_is_never_lost(node: Node, other: Node, how: str) -> None:
    """However the end is said, and whenever: all data, then exactly one end."""
    rid = how
    out, source = node.edge("b62", "c"), other.edge("b62", "c")

    def produce() -> None:
        out.put(rid, _int(0), last=False)
        out.put(rid, _int(1), last=how == "with the data")
        if how == "by finish":
            node.finish(rid)
        elif how != "with the data":
            out.end(rid)
        node.flush()

    if how == "before the reader":
        produce()
        got = [payload["x"].item() for payload in source.stream(rid, timeout=HANG)]
    elif how == "between two polls":
        polled_edge, reader = node.edge("b62poll", "c"), other.edge("b62poll", "c")
        polled_edge.put(rid, _int(0), last=False)
        polled_edge.put(rid, _int(1), last=False)
        node.flush()
        got, ends = [], 0
        while ends == 0:
            assert reader.wait(HANG)
            found = reader.poll()
            got += [payload["x"].item() for payload in found.get(rid, [])]
            if len(got) == 2 and rid not in found.ended:
                polled_edge.end(rid)
            ends += rid in found.ended
        node.flush()
        assert not reader.poll()
        assert ends == 1
    else:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(lambda: [p["x"].item() for p in source.stream(rid, timeout=HANG)])
            produce()
            got = reading.result(HANG)
    assert got == [0, 1]
    if how != "between two polls":
        with pytest.raises(errors.Gone):
            source.take(rid, timeout=0.0)


def test_b63_requests_of_many_replicas_are_never_mixed(node: Node, host: Host) -> None:
    """Four producers, two of them with the same rids on another replica; 8 rids each: each chunk is what it says."""
    rids = [f"r{number}" for number in range(8)]
    plan = [(0, rids), (1, rids), (2, [f"x{rid}" for rid in rids]), (3, [f"y{rid}" for rid in rids])]
    with ThreadPoolExecutor(len(plan)) as pool:
        reading = [pool.submit(_drain, node, replica, names) for replica, names in plan]
        for replica, names in plan:
            host.start(
                "batching_writer", endpoint=node.endpoint, edge=("b63", "c"), replica=replica, rids=names, count=150
            )
        for done in reading:
            assert set(done.result(2 * HANG).values()) == {150}
    host.end_workers()


def _drain(node: Node, replica: int, rids: list[str]) -> dict[str, int]:
    """Poll until each rid has ended; every chunk is checked for its place and its content. Chunks by rid."""
    edge = node.edge("b63", "c", replica)
    counts = dict.fromkeys(rids, 0)
    ended: set[str] = set()
    while ended != set(rids):
        assert edge.wait(HANG)
        found = edge.poll()
        assert not found.failed
        _check_all(found, counts)
        ended |= found.ended
        found.clear()
    return counts


def _check_all(found: Mapping[str, list[Payload]], counts: dict[str, int]) -> None:
    for rid, payloads in found.items():
        for payload in payloads:
            check(payload, rid, counts[rid])
            counts[rid] += 1
