"""Puts of tensors that are on a device: nobody waits for the copy but who must, and nothing overtakes it wrongly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import connector
from connector import errors
from connector.arena import cuda
from tests.fake_cuda import FakeCuda


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(cuda, "CALLS", made)
    return made


@pytest.fixture
def writer(host: connector.Node, fake: FakeCuda) -> Iterator[connector.Node]:
    with connector.connect(stage="a", endpoint=host.endpoint) as node:
        yield node
        fake.broken = ""
        fake.run()
        node.close()
    with connector.connect(stage="b", endpoint=host.endpoint) as last:
        summary = last.status()
    assert (summary["payloads"], summary["reserved_bytes"]) == (0, 0)


@pytest.fixture
def edge(writer: connector.Node) -> connector.Edge:
    return writer.edge("a", "b")


@pytest.fixture
def reader(host: connector.Node, writer: connector.Node) -> Iterator[connector.Edge]:
    with connector.connect(stage="b", endpoint=host.endpoint) as node:
        yield node.edge("a", "b")
        for rid in ("r", "s", *map(str, range(8))):
            node.finish(rid)


def nothing_there(reader: connector.Edge) -> bool:
    try:
        reader.take("r", timeout=0.0)
    except errors.Unavailable:
        return True
    return False


def values(start: int) -> torch.Tensor:
    return torch.arange(start, start + 256)


def test_the_put_returns_and_the_payload_is_there_when_the_copy_is(
    fake: FakeCuda, edge: connector.Edge, reader: connector.Edge
) -> None:
    source = fake.tensor(values(0))
    # What the caller's stream does before the put is copied, and what it does behind it is not.
    fake.caller.launch(lambda: source.copy_(values(1)))
    ticket = edge.put("r", {"x": source, "host": values(7)})
    fake.caller.launch(lambda: source.fill_(9))
    assert not ticket.done()
    assert nothing_there(reader)
    fake.run()
    taken = reader.take("r")
    assert torch.equal(taken["x"], values(1))
    assert torch.equal(taken["host"], values(7))
    assert torch.equal(source, torch.full((256,), 9))


def test_rows_of_one_tensor_are_one_copy(fake: FakeCuda, edge: connector.Edge, reader: connector.Edge) -> None:
    batch = fake.tensor(torch.stack([values(at) for at in range(8)]))
    edge.put_many({str(at): {"x": batch[at]} for at in range(8)}, last=True)
    assert fake.copies == [8 * 2048]
    fake.run()
    assert all(torch.equal(reader.take(str(at))["x"], values(at)) for at in range(8))


@pytest.mark.parametrize(
    "make",
    [
        lambda there: [there[at] for at in (2, 1, 0)],
        lambda there: [there[0], there[2]],
        lambda there: [there[:, 0], there[:, 1]],
        lambda there: [there[0], there[1][::2]],
        lambda there: [there[0]._neg_view(), there[1]._neg_view()],
    ],
    ids=["another order", "a gap", "columns", "strided behind", "negated"],
)
def test_what_does_not_stand_together_is_copied_each_by_itself(
    fake: FakeCuda, edge: connector.Edge, reader: connector.Edge, make: Callable[[torch.Tensor], list[torch.Tensor]]
) -> None:
    parts = make(fake.tensor(torch.arange(192.0).reshape(3, 64)))
    edge.put_many({str(at): {"x": part} for at, part in enumerate(parts)}, last=True)
    assert len(fake.copies) == len(parts)
    fake.run()
    assert all(torch.equal(reader.take(str(at))["x"], part) for at, part in enumerate(parts))


def test_tensors_without_bytes_and_scalars(fake: FakeCuda, edge: connector.Edge, reader: connector.Edge) -> None:
    empty, scalar = fake.tensor(torch.empty(0, 3)), fake.tensor(torch.tensor(True))
    edge.put("r", {"empty": empty, "scalar": scalar})
    fake.run()
    taken = reader.take("r")
    assert (taken["empty"].shape, taken["scalar"].item()) == ((0, 3), True)


def test_other_requests_overtake_and_the_same_one_does_not(
    fake: FakeCuda, edge: connector.Edge, reader: connector.Edge
) -> None:
    edge.put("r", {"x": fake.tensor(values(0))}, last=False)
    edge.put("s", {"x": values(5)})
    assert torch.equal(reader.take("s")["x"], values(5))
    for act in (
        lambda: edge.put("r", {"x": values(1)}, last=False, timeout=0.0),
        lambda: edge.put("r", {"x": fake.tensor(values(1))}, last=False, timeout=0.0),
        lambda: edge.put_many({"r": {"x": values(1)}}, timeout=0.0),
        lambda: edge.end("r", timeout=0.0),
    ):
        with pytest.raises(errors.NotYet, match="being copied") as caught:
            act()
        assert caught.value.facts == {"rids": ["r"], "waited": 0.0}
    fake.run()
    edge.put("r", {"x": fake.tensor(values(1))}, last=False)
    fake.run()
    edge.put("r", {"x": values(2)}, last=True)
    assert [int(payload["x"][0]) for payload in reader.stream("r")] == [0, 1, 2]


@pytest.mark.parametrize("word", ["finish", "begin", "flush"])
def test_what_means_the_put_waits_for_it(
    fake: FakeCuda, writer: connector.Node, edge: connector.Edge, reader: connector.Edge, word: str
) -> None:
    act = {
        "finish": lambda: writer.finish("r"),
        "begin": lambda: writer.begin("r"),
        "flush": lambda: writer.flush(timeout=0.0),
    }[word]
    ticket = edge.put("r", {"x": fake.tensor(values(0))})
    writer.answer_timeout = 0.0
    with pytest.raises(errors.NotYet, match="being copied"):
        act()
    writer.answer_timeout = 10.0
    fake.run()
    writer.flush()
    assert ticket.result() == "stored"
    assert torch.equal(reader.take("r")["x"], values(0))


def test_finish_waits_and_goes_on_when_the_copy_is_there(
    fake: FakeCuda, writer: connector.Node, edge: connector.Edge, reader: connector.Edge
) -> None:
    edge.put("r", {"x": fake.tensor(values(0))}, last=False)
    finishing = threading.Thread(target=writer.finish, args=("r",))
    finishing.start()
    fake.run()
    finishing.join()
    assert [int(payload["x"][0]) for payload in reader.stream("r")] == [0]


def test_an_abort_meanwhile_is_the_ticket_s(
    fake: FakeCuda, writer: connector.Node, edge: connector.Edge, reader: connector.Edge
) -> None:
    ticket = edge.put("r", {"x": fake.tensor(values(0))})
    writer.abort("r", "no more")
    fake.run()
    with pytest.raises(errors.RequestAborted, match="aborted"):
        writer.flush()
    with pytest.raises(errors.RequestAborted) as caught:
        ticket.result()
    assert caught.value.facts["rid"] == "r"


def test_a_finish_of_another_thread_meanwhile_is_the_ticket_s(
    fake: FakeCuda, writer: connector.Node, edge: connector.Edge, reader: connector.Edge
) -> None:
    """`open` answers an abort: what was put before it is of the use that is over, although puts are taken again."""
    ticket = edge.put("r", {"x": fake.tensor(values(0))})
    writer.abort("r")
    edge.open("r")
    fake.run()
    with pytest.raises(errors.Gone, match="while the payload was copied"):
        writer.flush()
    with pytest.raises(errors.Gone):
        ticket.result()


def test_what_the_device_fails_is_the_ticket_s_and_the_next_put_s(
    fake: FakeCuda, writer: connector.Node, edge: connector.Edge, reader: connector.Edge
) -> None:
    fake.broken = "an illegal memory access"
    ticket = edge.put("r", {"x": fake.tensor(values(0))}, last=False)
    fake.run()
    with pytest.raises(errors.InvalidPayload, match="illegal memory access") as caught:
        writer.flush()
    assert caught.value.facts == {"rid": "r", "edge": "a:b:0", "index": 0}
    with pytest.raises(errors.InvalidPayload):
        ticket.result()
    fake.broken = ""
    assert edge.put("r", {"x": fake.tensor(values(3))}, last=True).index == 0
    fake.run()
    assert torch.equal(reader.take("r")["x"], values(3))


def test_what_cannot_be_launched_is_the_caller_s_and_its_block_comes_back_behind_what_was(
    fake: FakeCuda, writer: connector.Node, edge: connector.Edge
) -> None:
    fake.refuses_copy = "out of resources"
    with pytest.raises(RuntimeError, match="out of resources"):
        edge.put("r", {"x": fake.tensor(values(0))})
    fake.run()
    writer.flush()
    assert writer.status()["payloads"] == 0


def test_a_put_cannot_be_captured(fake: FakeCuda, writer: connector.Node, edge: connector.Edge) -> None:
    fake.capturing = True
    with pytest.raises(errors.UsageError, match="captured"):
        edge.put("r", {"x": fake.tensor(values(0))})
    fake.capturing = False
    fake.run()
    writer.flush()


def test_a_refused_payload_launches_nothing(fake: FakeCuda, writer: connector.Node, edge: connector.Edge) -> None:
    with pytest.raises(errors.UnsupportedTensor):
        edge.put("r", {"x": fake.tensor(values(0)), "y": torch.ones(2, 2).to_sparse()})
    assert fake.copies == []


def test_close_says_good_bye_when_the_copies_are_over(
    fake: FakeCuda, writer: connector.Node, edge: connector.Edge, reader: connector.Edge, host: connector.Node
) -> None:
    edge.put("r", {"x": fake.tensor(values(0))})
    writer.close(timeout=0.0)
    assert "a" in [row["stage"] for row in host.status("sessions")["sessions"]]
    fake.run()
    assert torch.equal(reader.take("r")["x"], values(0))


def test_its_thread_ends_with_the_node(fake: FakeCuda, writer: connector.Node, edge: connector.Edge) -> None:
    edge.put("r", {"x": fake.tensor(values(0))})
    threads = [thread for thread in threading.enumerate() if thread.name == "connector-copies"]
    assert len(threads) == 1
    fake.run()
    writer.flush()
    writer.abort("r")
    writer.close()
    threads[0].join(30.0)
    assert not threads[0].is_alive()


def test_in_an_event_loop(fake: FakeCuda, host: connector.Node, reader: connector.Edge) -> None:
    import asyncio

    async def run() -> None:
        async with await connector.connect_async(stage="a", endpoint=host.endpoint) as node:
            edge = node.edge("a", "b")
            await edge.put("r", {"x": fake.tensor(values(0))}, last=False)
            finishing = asyncio.ensure_future(node.finish("r"))
            await asyncio.sleep(0)
            assert not finishing.done()
            fake.run()
            await finishing

    asyncio.run(run())
    assert [int(payload["x"][0]) for payload in reader.stream("r")] == [0]


# -- page-locked memory -------------------------------------------------------------------------------


def locked(node: connector.Node) -> connector.Node:
    prefault = node._link._prefault
    assert prefault is not None
    assert prefault.done.wait(30.0)
    return node


@pytest.mark.parametrize("readonly", [False, True])
def test_pages_are_locked_until_the_last_view_dies(fake: FakeCuda, host: connector.Node, readonly: bool) -> None:
    node = locked(connector.connect(stage="n", endpoint=host.endpoint, page_lock=True, readonly=readonly))
    assert node.page_locked
    assert sorted(flags for _, flags in fake.locked.values()) == ([1, 9] if readonly else [1])
    assert all(size > 8 << 20 for size, _ in fake.locked.values())
    edge = node.edge("n", "n")
    edge.put("r", {"x": values(0)})
    taken = edge.take("r")
    node.close(timeout=0.0)
    assert fake.locked
    del taken
    node._link.thread.join(30.0)
    assert fake.locked == {}
    assert not node.page_locked


def test_pages_that_cannot_be_locked_are_a_warning(
    fake: FakeCuda, host: connector.Node, caplog: pytest.LogCaptureFixture
) -> None:
    fake.refuses_lock = "operation not permitted"
    with connector.connect(stage="n", endpoint=host.endpoint, page_lock=True) as node:
        assert not locked(node).page_locked
    assert "cannot be locked (see `ulimit -l`): operation not permitted" in caplog.text
    assert fake.locked == {}


def test_the_environment_asks_for_it(fake: FakeCuda, host: connector.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONNECTOR_PAGE_LOCK", "1")
    with connector.connect(stage="n", endpoint=host.endpoint) as node:
        assert locked(node).page_locked
    with connector.connect(stage="n", endpoint=host.endpoint, page_lock=False) as node:
        assert not locked(node).page_locked


def test_without_cuda_it_is_refused(fake: FakeCuda, host: connector.Node) -> None:
    fake.available = False
    with pytest.raises(errors.UsageError, match="page_lock needs a CUDA device"):
        connector.connect(stage="n", endpoint=host.endpoint, page_lock=True)
