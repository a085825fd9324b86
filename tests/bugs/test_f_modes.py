"""Kind F of the bug log, transfer modes: each works at each place of a pipeline, and two that differ are told apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import connector
from connector import Node, errors
from runner_adapter import MergeRules, RunnerAdapter, StepPlan, TransferConfig, connect_adapter

#: Seconds until input that does not come is a hang. A guard, never a measure.
HANG = 60.0
ROWS = MergeRules(accumulated=["ids.words"], row_axes={"ids.words": 0})
CONFIG = TransferConfig.from_mapping(
    {"enabled": True, "items": ["ids"], "key_templates": {"ids": "{rid}-{id_type}"}, "id_types": ["words"]}
)


@pytest.fixture(scope="module")
def host() -> Iterator[Node]:
    with connector.connect(stage="host", embedded=True, pool="8MiB", log_level="error") as node:
        yield node


def stage(host: Node, owned: ExitStack, **options: Any) -> RunnerAdapter:
    adapter = connect_adapter(object(), CONFIG, endpoint=host.endpoint, rules=ROWS, **options)
    return owned.enter_context(adapter)


def step(adapter: RunnerAdapter, new: list[str], **sent: Any) -> None:
    """One with a row of the request; `sent`: what it hands on, and `last`."""
    adapter.begin_step(new=new, scheduled=["r"])
    adapter.receive()
    plan = StepPlan.make(["r"], {"r": 1})
    if sent:
        beside = {"r": {"ids.words": torch.tensor([sent["word"]])}}
        adapter.send(plan, torch.zeros(1, 4), beside=beside, last=["r"] if sent["last"] else [])


def read_all(adapter: RunnerAdapter) -> list[int]:
    new = ["r"]
    while not adapter.input_ended("r"):
        step(adapter, new)
        new = []
        assert adapter.failures() == {}
        if not adapter.input_ended("r"):
            assert adapter.wait(HANG)
    words: list[int] = adapter.buffer["r"]["r-words"].tolist()
    return words


@pytest.mark.parametrize("full", [False, True], ids=["chunks", "full payload"])
def test_b66_each_mode_works_in_the_first_the_middle_and_the_last_stage(host: Node, full: bool) -> None:
    reads: dict[str, Any] = {"full_payload": full}
    sends: dict[str, Any] = {"whole": ROWS} if full else {}
    with ExitStack() as owned:
        first = stage(host, owned, stage="first", sends="middle", **sends)
        middle = stage(host, owned, stage="middle", reads="first", sends="last", **reads, **sends)
        last = stage(host, owned, stage="last", reads="middle", **reads)
        for number, new in enumerate([["r"], [], []]):
            step(first, new, word=number, last=number == 2)
        words = read_all(middle)
        for word in words:
            step(middle, [], word=word + 10, last=word == words[-1])
        assert (words, read_all(last)) == ([0, 1, 2], [10, 11, 12])
        for adapter in (first, middle, last):
            adapter.begin_step(finished=["r"])
            assert adapter.failures() == {}


def test_b67_a_stream_where_one_payload_is_expected_fails_at_both_ends(host: Node) -> None:
    with ExitStack() as owned:
        sender = stage(host, owned, stage="chunks", sends="whole")
        reader = stage(host, owned, stage="whole", reads="chunks", full_payload=True)
        reader.begin_step(new=["r"], scheduled=["r"])
        for number, new in enumerate([["r"], []]):
            step(sender, new, word=number, last=False)
        failed: dict[str, Exception] = {}
        while not failed:
            assert reader.wait(HANG)
            step(reader, [])
            failed = reader.failures()
        assert isinstance(failed["r"], errors.InvalidPayload) and "set up wrongly" in str(failed["r"])
        step(sender, [], word=2, last=True)
        assert sender.outbox is not None
        sender.outbox.flush()
        assert isinstance(sender.failures()["r"], errors.RequestAborted)
