"""What workers do. Each role gets its pipe to the test first."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, NoReturn

import torch

import connector
from connector import Edge, Node, Payload, errors
from connector.arena import blocks, tensors
from runner_adapter import TransferConfig, connect_adapter
from tests.kill.host import Pipe

#: Words (int32) of a chunk, two tensors together.
WORDS = 512
TRANSFER = TransferConfig.from_mapping({"enabled": True, "items": ["ids"], "key_templates": {"ids": "{rid}-{id_type}"}})


def chunk(rid: str, index: int) -> dict[str, torch.Tensor]:
    """A chunk whose bits say which it is."""
    seed = sum(rid.encode()) * 1009 + index
    return {"head": torch.tensor([seed, index]), "body": torch.full((WORDS,), seed, dtype=torch.int32)}


def check(payload: Payload, rid: str, index: int) -> None:
    expected = chunk(rid, index)
    assert payload.rid == rid
    assert payload.index == index
    assert list(payload) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(payload[key], tensor), (rid, index, key)


def _rest() -> NoReturn:
    while True:
        signal.pause()


def _join(endpoint: str, stage: str, edge: list[str], **options: Any) -> tuple[Node, Edge]:
    node = connector.connect(stage=stage, endpoint=endpoint)
    return node, node.edge(edge[0], edge[1], **options)


# -- writers --------------------------------------------------------------------------------------


def _stop_at(pipe: Pipe, stage: str) -> None:
    """From now on a put stops for ever at `stage`, having said so."""

    def stop() -> NoReturn:
        pipe.tell("stopped")
        _rest()

    copies: list[int] = []
    copy, seal = tensors.copy_payload, blocks.seal

    def stopping_copy(*arguments: Any) -> None:
        if stage == "reserved":
            stop()
        copy(*arguments)
        copies.append(1)
        if stage == "copying":
            stop()

    def stopping_seal(*arguments: Any) -> None:
        if stage == "header":
            stop()
        seal(*arguments)
        stop()

    if stage in ("reserved", "copying"):
        vars(tensors)["copy_payload"] = stopping_copy
    else:
        vars(blocks)["seal"] = stopping_seal


def stopped_writer(
    pipe: Pipe, endpoint: str, edge: list[str], rid: str, before: int, stage: str, last: bool = False, many: int = 0
) -> None:
    """Puts `before` chunks, flushed; then one more (or a step of `many` rids) that stops at `stage`."""
    node, out = _join(endpoint, edge[0], edge)
    for index in range(before):
        out.put(rid, chunk(rid, index), last=False)
    node.flush()
    if stage in ("reserved", "copying", "header", "ready"):
        _stop_at(pipe, stage)
    if many:
        out.put_many({f"{rid}/{i}": chunk(f"{rid}/{i}", 0) for i in range(many)}, last=last)
    else:
        out.put(rid, chunk(rid, before), last=last)
    node.flush()
    pipe.tell("stopped")
    _rest()


def opened_stage(pipe: Pipe, endpoint: str, edge: list[str], rid: str) -> None:
    """The adapter of a stage that has begun the request, and puts nothing."""
    adapter = connect_adapter(object(), TRANSFER, stage=edge[0], sends=edge[1], endpoint=endpoint)
    adapter.begin_step(new=[rid], scheduled=[rid])
    assert adapter.outbox is not None
    adapter.outbox.flush()
    pipe.tell("begun")
    _rest()


def streaming_writer(pipe: Pipe, endpoint: str, edge: list[str], rid: str, timeout: float = 60.0) -> None:
    """Puts chunks without end; tells each; at a failure, which."""
    node, out = _join(endpoint, edge[0], edge)
    index = 0
    try:
        while True:
            out.put(rid, chunk(rid, index), last=False, timeout=timeout)
            index += 1
            pipe.tell("put", count=index)
    except errors.ConnectorError as error:
        pipe.tell("failed_put", kind=type(error).__name__, facts={k: str(v) for k, v in error.facts.items()})
    _rest()


def racing_writer(pipe: Pipe, endpoint: str, edge: list[str], rid: str, number: int) -> None:
    """Puts one payload that says `number`, at the word; tells what became of it."""
    node, out = _join(endpoint, f"{edge[0]}-{number}", edge)
    pipe.tell("ready")
    pipe.hear()
    ticket = out.put(rid, {"who": torch.full((4096,), number)})
    try:
        node.flush()
        pipe.tell("put", outcome=ticket.result())
    except errors.ConnectorError as error:
        pipe.tell("refused", kind=type(error).__name__)
    node.close()


def batching_writer(pipe: Pipe, endpoint: str, edge: list[str], replica: int, rids: list[str], count: int) -> None:
    """Puts `count` steps, a chunk of each rid in each."""
    node = connector.connect(stage=edge[0], endpoint=endpoint)
    out = node.edge(edge[0], edge[1], replica)
    for index in range(count):
        out.put_many({rid: chunk(rid, index) for rid in rids}, last=index == count - 1, timeout=60.0)
    node.flush()
    pipe.tell("put", count=count)
    node.close()


# -- readers --------------------------------------------------------------------------------------


def stopped_reader(
    pipe: Pipe,
    endpoint: str,
    edge: list[str],
    rid: str,
    take: int = 0,
    release: int = 0,
    poll: bool = False,
    wait: bool = False,
    resume: bool = False,
) -> None:
    """Takes `take` chunks, gives the first `release` of them back, says so and holds the rest."""
    node, source = _join(endpoint, edge[1], edge, resume=resume)
    held: list[Payload] = []
    if poll:
        assert source.wait(60.0)
    for index in range(take):
        held.append(source.take(rid, timeout=60.0))
        check(held[-1], rid, index)
    del held[:release]
    node.flush()
    pipe.tell("stopped")
    if wait:
        source.take(rid, timeout=600.0)
    _rest()


def streaming_reader(
    pipe: Pipe, endpoint: str, edge: list[str], rid: str, reader: int = 0, readers: int = 1, quiet: bool = False
) -> None:
    """Takes a stream, each chunk checked for order and content and then released; tells how it ended."""
    _, source = _join(endpoint, edge[1], edge, reader=reader, readers=readers)
    index = 0
    pipe.tell("ready")
    try:
        for payload in source.stream(rid, timeout=60.0):
            check(payload, rid, index)
            index += 1
            del payload
            if not quiet:
                pipe.tell("took", count=index)
        pipe.tell("ended", count=index)
    except errors.ConnectorError as error:
        pipe.tell("broke", count=index, kind=type(error).__name__)
    _rest()


def holding_reader(pipe: Pipe, endpoint: str, edge: list[str], rid: str) -> None:
    """Takes one payload, holds it until the word, gives it back."""
    node, source = _join(endpoint, edge[1], edge)
    held = [source.take(rid, timeout=60.0)]
    node.flush()
    pipe.tell("holding")
    pipe.hear()
    held.clear()
    node.flush()
    pipe.tell("released")
    node.close()


# -- bystanders -----------------------------------------------------------------------------------


def paced_writer(pipe: Pipe, endpoint: str, edge: list[str], rid: str) -> None:
    """Puts as many more chunks as it is told to."""
    node, out = _join(endpoint, edge[0], edge)
    index = 0
    while True:
        word, facts = pipe.hear()
        if word == "leave":
            node.close()
            return
        for _ in range(facts["count"]):
            out.put(rid, chunk(rid, index), last=False, timeout=60.0)
            index += 1
        pipe.tell("put", count=index)


def paced_reader(pipe: Pipe, endpoint: str, edge: list[str], rid: str) -> None:
    """Takes as many more chunks as it is told to, and checks each."""
    node, source = _join(endpoint, edge[1], edge)
    index = 0
    while True:
        word, facts = pipe.hear()
        if word == "leave":
            node.close()
            return
        for _ in range(facts["count"]):
            check(source.take(rid, timeout=60.0), rid, index)
            index += 1
        pipe.tell("took", count=index)


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role
    for role in (
        stopped_writer,
        opened_stage,
        streaming_writer,
        racing_writer,
        batching_writer,
        stopped_reader,
        streaming_reader,
        holding_reader,
        paced_writer,
        paced_reader,
    )
}
