"""Kind B of the bug log: what is put goes away again, whoever fails in between. Each test is named after its entry."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import connector
from connector.core import errors
from connector.testing.contracts.facade import Bench
from tests.bugs.peers import PATIENCE, Peer

eventually = Bench.eventually


@pytest.fixture(scope="module")
def host() -> Iterator[connector.Node]:
    with connector.connect(stage="a", embedded=True, pool="8MiB", heartbeat=0.2, suspect_after=30.0) as node:
        yield node


def number(value: int, length: int = 8) -> dict[str, torch.Tensor]:
    return {"n": torch.full((length,), value)}


def live(host: connector.Node) -> list[int]:
    """Payloads, lives and bytes that are in use (reserved ahead is not in use)."""
    status = host.status()
    return [status["payloads"], status["lives"], status["used_bytes"] - status["reserved_bytes"]]


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("tc-")}


def own_segments(host: connector.Node) -> set[str]:
    return {name for name in segments() if host.status()["arena"] in name}


def run_files(host: connector.Node) -> list[str]:
    return sorted(str(path.relative_to(host.endpoint)) for path in Path(host.endpoint).rglob("*"))


def hear_late_refusals(node: connector.Node) -> None:
    """Chunks that were still on their way when the abort came are refused behind it: flush tells of each."""
    while True:
        try:
            return node.flush()
        except errors.RequestAborted:
            continue


def test_b21_aborted_streams_leave_nothing(host: connector.Node) -> None:
    """500 streams of five chunks, each aborted after two were read; a chunk put after the abort is refused."""
    names, files = own_segments(host), run_files(host)
    reader = connector.connect(stage="b", endpoint=host.endpoint)
    out, into = host.edge("a", "b"), reader.edge("a", "b")
    for i in range(500):
        rid = f"b21-{i}"
        for chunk in range(5):
            out.put(rid, number(chunk), last=False)
        assert [int(into.take(rid, timeout=PATIENCE)["n"][0]) for _ in range(2)] == [0, 1]
        reader.abort(rid)
        with pytest.raises(errors.RequestAborted):
            out.put(rid, number(5), last=False)
            host.flush()
        host.finish(rid)
        reader.finish(rid)
    hear_late_refusals(host)
    eventually(lambda: live(host) == [0, 0, 0])
    assert list(host.payloads()) == [] and own_segments(host) == names
    reader.close()
    eventually(lambda: run_files(host) == files)


def anonymous_kib() -> int:
    """This process's anonymous memory."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1])


def test_b22_aborts_pin_nothing_in_any_map(host: connector.Node) -> None:
    """Thousands of put and abort cycles: the maps of both ends go back to zero, memory does not grow with them."""
    node = connector.connect(stage="b22", endpoint=host.endpoint)
    out = node.edge("b22", "x")
    grown = []
    for part in range(3):
        for i in range(700):
            rid = f"b22-{part}-{i}"
            out.put(rid, number(i, 2000), last=False)
            node.abort(rid)
            node.finish(rid)
        node.flush()
        gc.collect()
        grown.append(anonymous_kib())
    # The last part's 700 cycles handed over 11 MiB.
    assert grown[2] - grown[1] < 2048
    eventually(lambda: live(host) == [0, 0, 0])
    eventually(lambda: host.status()["tombstones"] == 0)
    outgoing, held = node.session.outgoing, node.session.holds.held
    assert [len(outgoing.streams), len(outgoing.aborted), len(outgoing.tickets), len(held)] == [0] * 4
    assert not outgoing.unacked
    node.close()


def test_b23_refused_puts_leave_no_file(host: connector.Node) -> None:
    """Too large, no room, a bad tensor, a bad dtype: the same segments and files as before."""
    names, files = own_segments(host), run_files(host)
    out = host.edge("a", "b23")
    fill = [out.put("b23", number(0, 1 << 18), index=i) for i in range(3)]
    bad: Any = {"n": torch.eye(2).to_sparse()}
    for refused, put in (
        (errors.PayloadTooLarge, lambda: out.put("b23-large", {"n": torch.ones(1).expand(4 << 20)})),
        (errors.PoolFull, lambda: out.put("b23-full", number(0, 1 << 19), timeout=0.05)),
        (errors.UnsupportedTensor, lambda: out.put("b23-bad", bad)),
    ):
        with pytest.raises(refused):
            put()
    assert own_segments(host) == names and len(names) == 2 and run_files(host) == files
    assert host.abort("b23")["payloads"] == len(fill)
    eventually(lambda: live(host) == [0, 0, 0])


def _finish(writer: connector.Node, reader: connector.Node, rid: str) -> None:
    writer.finish(rid)
    reader.finish(rid)


def _times_out(writer: connector.Node, reader: connector.Node, rid: str) -> None:
    with pytest.raises(errors.NotYet):
        while True:
            reader.edge("w", rid).take(rid, timeout=0.01)


ENDINGS: dict[str, Callable[[connector.Node, connector.Node, str], object]] = {
    "both finish": _finish,
    "the writer aborts": lambda writer, reader, rid: writer.abort(rid),
    "the reader aborts": lambda writer, reader, rid: reader.abort(rid),
    "the writer leaves": lambda writer, reader, rid: writer.close(),
    "the reader leaves": lambda writer, reader, rid: reader.close(),
    "a time-out": _times_out,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_b24_every_ending_leads_to_the_same_clean_second_life(host: connector.Node, ending: str) -> None:
    """The request's second life starts with chunk 0 and nothing of the first, whatever ended that."""
    rid = f"b24 {ending}"
    with ExitStack() as nodes:
        writer, reader = (nodes.enter_context(connector.connect(stage=s, endpoint=host.endpoint)) for s in ("w", "r"))
        out, into = writer.edge("w", rid), reader.edge("w", rid)
        for i in range(3):
            out.put(rid, number(i), last=False)
        into.take(rid, timeout=PATIENCE)
        ENDINGS[ending](writer, reader, rid)
        if ending == "the writer leaves":
            writer = nodes.enter_context(connector.connect(stage="w", endpoint=host.endpoint))
        if ending == "the reader leaves":
            reader = nodes.enter_context(connector.connect(stage="r", endpoint=host.endpoint))
            # Whoever comes as the reader next is told first that a part of the stream is gone.
            with pytest.raises(errors.ReaderDied):
                reader.edge("w", rid).take(rid, timeout=PATIENCE)
        for node in (writer, reader):
            # Whatever was said of the first life has been heard now.
            node.status()
            node.finish(rid)
            node.flush()
        eventually(lambda: live(host) == [0, 0, 0])
        into = reader.edge("w", rid)
        assert not into.poll()
        ticket = writer.edge("w", rid).put(rid, number(9))
        found = into.take(rid, timeout=PATIENCE)
        assert (ticket.index, found.index, found.redelivered, found["n"].tolist()) == (0, 0, False, [9] * 8)
        del found
    eventually(lambda: live(host) == [0, 0, 0])


@pytest.mark.parametrize("how", [None, signal.SIGTERM, signal.SIGKILL], ids=["exit", "SIGTERM", "SIGKILL"])
def test_b25_a_reader_that_ends_deletes_nothing_of_others(host: connector.Node, how: int | None) -> None:
    """Attached, read, ended: the next reader finds the same payload; no resource tracker, no foreign clean-up."""
    edge, rid = f"b25-{how}", f"b25-rid-{how}"
    names = own_segments(host)
    host.edge("a", edge).put(rid, number(5), readers=2)
    code = """
from multiprocessing import shared_memory
mine = shared_memory.SharedMemory(create=True, size=4096)
mine.close()
mine.unlink()
taken = node.edge("a", edge, reader=0, readers=2).take(rid, timeout=60)
value = taken["n"].tolist()
"""
    with Peer(host.endpoint) as peer:
        assert peer.run(code, edge=edge, rid=rid) == [5] * 8
        peer.end(how)
    assert own_segments(host) == names
    into = host.edge("a", edge, reader=1, readers=2)
    assert into.take(rid, timeout=PATIENCE)["n"].tolist() == [5] * 8
    host.abort(rid)
    eventually(lambda: live(host) == [0, 0, 0])


def test_b25_a_client_starts_no_resource_tracker(host: connector.Node) -> None:
    """Its process has no child after a put and a take."""
    code = """
edge = node.edge("a", "b25")
edge.put("b25", {"n": torch.zeros(3)})
edge.take("b25", timeout=60).release()
value = [open(f"/proc/self/task/{task}/children").read() for task in os.listdir("/proc/self/task")]
"""
    with Peer(host.endpoint) as peer:
        assert set(peer.run(code)) == {""}


def test_b26_the_last_of_several_readers_frees(host: connector.Node) -> None:
    """Four readers, one after the other; one that asks again does not get another's share."""
    out = host.edge("a", "b26")
    out.put("b26", number(7), readers=4)
    for reader in range(4):
        with connector.connect(stage="b26", endpoint=host.endpoint) as node:
            into = node.edge("a", "b26", reader=reader, readers=4)
            assert into.take("b26", timeout=PATIENCE)["n"].tolist() == [7] * 8
            with pytest.raises(errors.Gone):
                into.take("b26", timeout=0)
            rows = list(host.payloads(rid="b26"))
            assert len(rows) == 1 or reader == 3
    eventually(lambda: live(host) == [0, 0, 0])


def test_b27_looks_without_a_take_pin_nothing(host: connector.Node) -> None:
    """Hundreds of looks that are dropped, and takes whose caller raises; then the pool is as free as before."""
    out, into = host.edge("a", "b27"), host.edge("a", "b27")
    ticket = out.put("b27-look", number(1, 1000))
    for _ in range(300):
        assert int(host.inspect(ticket.edge, "b27-look")["n"][0]) == 1
    assert host.abort("b27-look")["payloads"] == 1
    for i in range(300):
        out.put(f"b27-{i}", number(i, 1000))
        with pytest.raises(ZeroDivisionError):
            _ = into.take(f"b27-{i}", timeout=PATIENCE)["n"] // (1 // 0)
    eventually(lambda: live(host) == [0, 0, 0])
    out.put("b27-after", number(0, 1 << 19), timeout=PATIENCE)
    assert host.abort("b27-after")["payloads"] == 1


def test_b27_a_look_is_bound_to_its_process(host: connector.Node) -> None:
    """A peer that looks and is killed holds nothing any more."""
    host.edge("a", "b27").put("b27-killed", number(1))
    host.flush()
    with Peer(host.endpoint) as peer:
        code = "from connector.core.names import Edge; seen = node.inspect(Edge('a', 'b27'), 'b27-killed')"
        peer.run(code)
        host.abort("b27-killed")
        assert live(host)[2] > 0
        peer.end(signal.SIGKILL)
    eventually(lambda: live(host) == [0, 0, 0])


def test_b29_in_use_ends_with_the_tensor(host: connector.Node) -> None:
    """With the object, with the exception whose traceback held it, with the process; until then `ls` says who."""
    out, into = host.edge("a", "b29"), host.edge("a", "b29")
    out.put("b29-del", number(1))
    tensor = into.take("b29-del", timeout=PATIENCE)["n"]
    [row] = host.payloads(rid="b29-del")
    assert row["state"] in ("taken", "delivered") and f"pid {os.getpid()}" in row["holders"][0]
    del tensor
    eventually(lambda: not list(host.payloads(rid="b29-del")))

    def fails() -> None:
        held = into.take("b29-raise", timeout=PATIENCE)["n"]
        raise LookupError(len(held))

    out.put("b29-raise", number(1))
    try:
        fails()
    except LookupError as error:
        assert list(host.payloads(rid="b29-raise")) and error.__traceback__ is not None
    gc.collect()
    eventually(lambda: not list(host.payloads(rid="b29-raise")))
    with Peer(host.endpoint) as peer:
        out.put("b29-crash", number(1), readers=1)
        peer.run("held = node.edge('a', 'b29-peer').poll()")
        host.edge("a", "b29-peer").put("b29-peer", number(2))
        peer.run("held = node.edge('a', 'b29-peer').take('b29-peer', timeout=60)")
        peer.end(signal.SIGKILL)
    found = host.edge("a", "b29-peer").take("b29-peer", timeout=PATIENCE)
    assert found.redelivered and found["n"].tolist() == [2] * 8
    del found
    host.abort("b29-crash")
    eventually(lambda: live(host) == [0, 0, 0])


def test_b29_a_release_can_be_forced(host: connector.Node) -> None:
    """What a stopped process holds is named, and freed on demand."""
    with Peer(host.endpoint) as peer:
        ticket = host.edge("a", "b29-stopped").put("b29-stopped", number(3))
        peer.run("held = node.edge('a', 'b29-stopped').take('b29-stopped', timeout=60); node.status()")
        os.kill(peer.pid, signal.SIGSTOP)
        [row] = host.payloads(rid="b29-stopped")
        assert f"pid {peer.pid}" in row["holders"][0]
        host.remove(ticket.edge, "b29-stopped", force=True)
        os.kill(peer.pid, signal.SIGCONT)
        eventually(lambda: not list(host.payloads(rid="b29-stopped")))
        host.abort("b29-stopped")


def test_b30_tensors_outlive_the_client(host: connector.Node) -> None:
    """Their values are right after close, and the block goes with the last of them."""
    node = connector.connect(stage="b30", endpoint=host.endpoint)
    host.edge("a", "b30").put("b30", number(4, 1000))
    tensor = node.edge("a", "b30").take("b30", timeout=PATIENCE)["n"]
    part = tensor[500:]
    node.close()
    del node, tensor
    gc.collect()
    assert int(part.sum()) == 4 * 500
    del part
    eventually(lambda: live(host) == [0, 0, 0])


def test_b30_the_first_error_is_the_one_that_is_raised(host: connector.Node) -> None:
    """With a view alive inside two with blocks."""
    host.edge("a", "b30").put("b30-raise", number(4))
    with (
        pytest.raises(ZeroDivisionError) as told,
        connector.connect(stage="b30", endpoint=host.endpoint) as node,
        node.edge("a", "b30").take("b30-raise", timeout=PATIENCE) as payload,
    ):
        view = payload["n"]
        _ = view.sum() // (1 // 0)
    assert told.value.__context__ is None and int(view[0]) == 4
    del view, payload, told
    gc.collect()
    eventually(lambda: live(host) == [0, 0, 0])


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("cyclic", [False, True])
def test_b31_a_client_that_is_dropped_disconnects(host: connector.Node, cyclic: bool) -> None:
    """Connect and forget, in a loop: sessions, descriptors and threads of the broker and of this process stay flat."""
    broker = host.status()["pid"]
    sessions, ours, theirs = host.status()["sessions"], _descriptors(os.getpid()), _descriptors(broker)
    for _ in range(40):
        node = connector.connect(stage="b31", endpoint=host.endpoint)
        node.edge("a", "b31").put("b31", {})
        node.abort("b31")
        if cyclic:
            ring: list[Any] = [node]
            ring.append(ring)
            del ring
        del node
    gc.collect()
    eventually(lambda: host.status()["sessions"] == sessions)
    eventually(lambda: _descriptors(broker) <= theirs + 2)
    eventually(lambda: _descriptors(os.getpid()) <= ours + 2)
