"""Kind G of the bug log: fork, start methods, and threads that share a node. Each test is named after its entry."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import connector
from connector.core import errors
from tests.bugs.peers import PATIENCE, Peer

THREADS = 8


@pytest.fixture(scope="module")
def host() -> Iterator[connector.Node]:
    with connector.connect(stage="a", embedded=True, pool="16MiB") as node:
        yield node


def test_b76_a_forked_child_takes_nothing_from_its_parent(host: connector.Node) -> None:
    """The child's use of node, edge and close is refused or does nothing; its exit hooks leave the parent's data."""
    host.edge("a", "fork").put("b76", {"n": torch.tensor([1, 2, 3])}, last=False)
    fork = """
edge = node.edge("a", "fork")
kept = edge.take("b76", timeout=60)
child = os.fork()
if child == 0:
    import sys
    refused = 0
    for call in (lambda: edge.put("b76", {}), lambda: edge.take("b76"), lambda: edge.poll(), lambda: node.flush(),
                 lambda: node.abort("b76"), lambda: node.edge("a", "b"), lambda: node.status()):
        try:
            call()
        except connector.errors.ForkedClient:
            refused += 1
    node.close()
    # Its own copy of the view dies, and the interpreter ends in order.
    del kept
    if refused != 7:
        os._exit(3)
    from atexit import _run_exitfuncs
    _run_exitfuncs()
    os._exit(0)
value = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
    with Peer(host.endpoint) as peer:
        assert peer.run(fork) == 0
        [row] = host.payloads(rid="b76")
        assert row["state"] == "taken" and row["holders"]
        assert peer.run("value = kept['n'].tolist(); del kept") == [1, 2, 3]
        host.edge("a", "fork").put("b76", {"n": torch.tensor([4])}, last=True)
        assert peer.run("value = edge.take('b76', timeout=60)['n'].tolist()") == [4]


def test_b76_forks_amid_traffic_lock_nothing_up(host: connector.Node) -> None:
    """Children are made while other threads hold the client's locks; they connect anew and end."""
    code = """
import threading
edge = node.edge("a", "amid")
stop = threading.Event()
def traffic(rid):
    while not stop.is_set():
        edge.put(rid, {"n": torch.zeros(8)})
        edge.take(rid, timeout=60).release()
        node.finish(rid)
threads = [threading.Thread(target=traffic, args=(f"amid{i}",)) for i in range(3)]
for thread in threads:
    thread.start()
codes = []
for i in range(5):
    child = os.fork()
    if child == 0:
        try:
            node.status()
        except connector.errors.ForkedClient:
            own = connector.connect(stage="child", endpoint=node.endpoint)
            own.edge("a", "own").put(f"child{i}", {"n": torch.zeros(1)})
            own.close()
            os._exit(0)
        os._exit(3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
for thread in threads:
    thread.join(60)
value = codes
"""
    with Peer(host.endpoint) as peer:
        assert peer.run(code) == [0] * 5
        into = host.edge("a", "own")
        assert [into.take(f"child{i}", timeout=PATIENCE)["n"].tolist() for i in range(5)] == [[0.0]] * 5


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_b77_children_of_every_start_method_connect_for_themselves(host: connector.Node, method: str) -> None:
    """With a client in the parent before; the inherited one says clearly that it is the parent's."""
    host.edge("a", method).put("b77-" + method, {"n": torch.tensor([1, 2, 3])})
    code = """
import multiprocessing
edge = node.edge("a", method)
inherited = edge if method == "fork" else None
start = multiprocessing.get_context(method)
child = start.Process(target=use_after_start, args=(node.endpoint, ("a", method), rid, inherited))
child.start()
child.join(60)
value = [child.exitcode, node.status()["sessions"] >= 2]
"""
    with Peer(host.endpoint) as peer:
        assert peer.run(code, method=method, rid="b77-" + method) == [0, True]


def _traffic(node: connector.Node, number: int, rounds: int, wrong: list[str]) -> None:
    """Puts and takes of one thread, each payload made from its number and index, and looked at whole."""
    edge = node.edge("t", "t")
    maker = torch.Generator().manual_seed(number)
    for i in range(rounds):
        size = int(torch.randint(1, 2000, (1,), generator=maker))
        sent = {f"k{number}": torch.randint(0, 255, (size,), generator=maker, dtype=torch.uint8), "i": torch.tensor(i)}
        edge.put(f"t{number}", sent, last=i == rounds - 1)
        with edge.take(f"t{number}", timeout=PATIENCE) as found:
            if list(found) != list(sent) or not all(torch.equal(found[k], t) for k, t in sent.items()):
                wrong.append(f"thread {number} round {i}")


def test_b78_b79_threads_share_a_node_without_cross_talk(host: connector.Node) -> None:
    """Eight threads on one client: every payload comes back to its own thread, whole."""
    wrong: list[str] = []
    threads = [threading.Thread(target=_traffic, args=(host, n, 150, wrong)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads) and wrong == []
    row = host.counters()["edges"]["t:t:0"]
    assert row["payloads_sealed"] == THREADS * 150 and row["refused"] == 0


def test_b79_threads_on_one_edge_share_one_stream(host: connector.Node) -> None:
    """Chunks that several threads put without an index get each its own number."""
    edge = host.edge("t", "one")
    threads = [
        threading.Thread(target=lambda n=n: [edge.put("b79", {"n": torch.tensor(n)}, last=False) for _ in range(50)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    edge.end("b79")
    host.flush()
    found = [(p.index, int(p["n"])) for p in edge.stream("b79", timeout=PATIENCE)]
    assert [index for index, _ in found] == list(range(200))
    assert sorted(n for _, n in found) == sorted(list(range(4)) * 50)


def test_b78_close_from_another_thread_ends_a_waiting_take(host: connector.Node) -> None:
    """ClientClosed, and no abort of the process; puts under way end the same way."""
    node = connector.connect(stage="closing", endpoint=host.endpoint)
    told: list[BaseException] = []

    def take() -> None:
        try:
            node.edge("t", "never").take("b78", timeout=PATIENCE)
        except errors.ConnectorError as error:
            told.append(error)

    def put() -> None:
        edge = node.edge("t", "dropped")
        try:
            while True:
                edge.put("b78-puts", {"n": torch.zeros(10)}, last=False)
        except errors.ConnectorError as error:
            told.append(error)

    threads = [threading.Thread(target=call) for call in (take, put, put)]
    for thread in threads:
        thread.start()
    while not any(row["waiting_takes"] for row in host.status("sessions")["sessions"]):
        assert not told
    node.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert [type(error) for error in told] == [errors.ClientClosed] * 3
    host.abort("b78-puts")
