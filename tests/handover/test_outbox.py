"""A step is one put of what the config lets go; a failed put ends its request at both ends, and no other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter.config import TransferConfig
from tests.handover.links import (
    AUDIO,
    FROM,
    IDS,
    LAYER_0,
    LAYER_24,
    TO,
    Link,
    Poison,
    ids,
    keyed,
    raising,
    read,
    received,
    with_calls,
)

#: The requests of these tests.
RIDS = [*"abcdrst", "good", "bad", "bad-1", "held", "waits", "queued", "req-a-b", *(f"r{i}" for i in range(8))]

BOTH = pytest.mark.parametrize("background", [False, True], ids=["inline", "background"])


BROKER = {"put_timeout": 2.0}


# -- what leaves ----------------------------------------------------------------------------------


@BOTH
def test_only_what_the_config_selects_leaves_under_its_keys(pair: Link, background: bool) -> None:
    outbox = pair.outbox(background=background)
    step = {
        LAYER_24: torch.tensor([24]),
        AUDIO: torch.tensor([7]),
        IDS: torch.tensor([1]),
        LAYER_0.replace("0", "1"): torch.tensor([1]),
        "ids.other": torch.tensor([2]),
        "hidden_states.last": torch.tensor([3]),
        "meta": torch.tensor([4]),
    }
    outbox.send(1, {"req-a-b": step}, last=["req-a-b"])
    outbox.flush()
    assert received(pair, "req-a-b") == [
        {"req-a-b-24": [24], "req-a-b-codes.audio": [7], "req-a-b-thinker_input_ids": [1]}
    ]


@BOTH
@pytest.mark.parametrize("name", ["hidden_states.layers[1]", "ids.other", "state.other", "meta", "not [a name"])
def test_what_is_filtered_is_never_touched(pair: Link, background: bool, name: str) -> None:
    outbox = pair.outbox(background=background)
    outbox.send(1, {"r": {name: Poison(), **ids(1)}}, last=["r"])  # type: ignore[dict-item]
    assert received(pair, "r") == [{"r-thinker_input_ids": [1]}]
    assert outbox.failures() == {}


def test_wants_says_what_may_leave(pair: Link) -> None:
    outbox = pair.outbox()
    names = [IDS, AUDIO, LAYER_0, LAYER_24, "hidden_states.layers[1]", "ids.other", "a.b", "meta", ""]
    assert [name for name in names if outbox.wants(name)] == [IDS, AUDIO, LAYER_0, LAYER_24]


@pytest.mark.parametrize(
    "config",
    [
        TransferConfig.disabled(),
        TransferConfig.from_mapping({"enabled": True, "items": [], "key_templates": {"ids": "{rid}-{id_type}"}}),
    ],
    ids=["disabled", "no items"],
)
def test_a_config_that_lets_nothing_leave_puts_nothing(pair: Link, config: TransferConfig) -> None:
    outbox, calls = with_calls(pair, config)
    outbox.send(1, {"r": {IDS: Poison()}}, last=["r"])
    assert (calls.puts, list(outbox), outbox.failures()) == ([], [], {})


def test_a_step_is_one_put(pair: Link) -> None:
    """Requests that end with nothing to send are in it."""
    outbox, calls = with_calls(pair)
    outbox.send(1, {rid: ids(1) for rid in "abc"})
    outbox.send(2, {"a": ids(2), "b": {}, "c": {}}, last=["b"])
    assert calls.puts == [["a", "b", "c"], ["a", "b"]]
    for rid in "abc":
        outbox.finish(rid)
    assert [len(received(pair, rid)) for rid in "abc"] == [3, 2, 2], "the last of each is the empty one that ends it"


def test_a_request_of_which_nothing_may_leave_puts_nothing(pair: Link) -> None:
    outbox, calls = with_calls(pair)
    outbox.send(1, {"r": {"meta": torch.tensor([1])}, "s": {}})
    assert (calls.puts, list(outbox)) == ([], [])


@pytest.mark.parametrize(
    "step", [{}, {"r": {}}, {"r": {"meta": torch.tensor([1])}}], ids=["absent", "empty", "filtered"]
)
def test_a_request_that_ends_with_nothing_to_send_is_an_end_alone(pair: Link, step: Any) -> None:
    inbox = pair.inbox()
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    outbox.send(2, step, last=["r"])
    outbox.send(3, {}, last=["r"])
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (read(arrived.payloads), arrived.ended) == ({"r": [[1]]}, {"r"})
    assert not inbox.pull(["r"]), "it ends once"
    assert outbox.failures() == {}
    outbox.finish("r")
    inbox.finish("r")


def test_finish_ends_a_stream_that_has_not_ended_and_opens_the_rid_again(pair: Link) -> None:
    inbox = pair.inbox()
    outbox = pair.outbox()
    for step in (1, 2):
        outbox.send(step, {"r": ids(step)})
        outbox.finish("r")
        pair.settle()
        arrived = inbox.pull(["r"])
        assert (read(arrived.payloads), arrived.ended) == ({"r": [[step]]}, {"r"})
        inbox.finish("r")
    assert list(outbox) == []


def test_the_end_of_a_finished_stream_needs_no_room(pair: Link) -> None:
    """Where the pool is full the node's finish says it."""
    inbox = pair.inbox()
    outbox = pair.outbox(timeout=0.0)
    outbox.send(1, {"r": ids(1)})
    pair.settle()
    inbox.waiting(["r"])
    other = pair.node("other")
    held = []
    size = 4 << 20
    while size >= 64:
        try:
            held.append(
                other.edge("x", "y").put(
                    f"{size}-{len(held)}", {"b": torch.empty(size, dtype=torch.uint8)}, timeout=0.0
                )
            )
        except errors.PoolFull:
            size //= 2
    outbox.finish("r")
    pair.settle()
    arrived = inbox.pull(["r"])
    assert (read(arrived.payloads), arrived.ended, arrived.failed) == ({"r": [[1]]}, {"r"}, {})
    inbox.finish("r")
    for ticket in held:
        other.abort(ticket.rid)


# -- failures -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("value", [[1, 2], 3, "text", None, {"a": torch.tensor([1])}], ids=str)
def test_what_is_no_tensor_fails_its_request_alone_at_both_ends(pair: Link, background: bool, value: Any) -> None:
    inbox = pair.inbox()
    outbox = pair.outbox(background=background)
    outbox.send(1, {"good": ids(1), "bad": ids(1)})
    outbox.send(2, {"good": ids(2), "bad": {IDS: value}}, last=["good"])
    outbox.flush()
    failed = outbox.failures()
    assert list(failed) == ["bad"]
    assert isinstance(failed["bad"], errors.InvalidPayload)
    assert (failed["bad"].facts["rid"], failed["bad"].facts["key"]) == ("bad", "bad-thinker_input_ids")
    assert outbox.failures() == {}, "each is told once"
    pair.settle()
    arrived = inbox.pull(["good", "bad"])
    assert read(arrived.payloads)["good"] == [[1], [2]]
    assert "InvalidPayload" in arrived.failed["bad"].facts["reason"]


def test_a_tensor_that_cannot_be_carried_names_its_key(pair: Link) -> None:
    outbox = pair.outbox()
    outbox.send(1, {"bad": {IDS: torch.empty(2, device="meta")}, "good": ids(1)}, last=["good"])
    failed = outbox.failures()
    assert {rid: type(error) for rid, error in failed.items()} == {"bad": errors.UnsupportedTensor}
    assert failed["bad"].facts["key"] == "bad-thinker_input_ids"
    assert received(pair, "good") == [{"good-thinker_input_ids": [1]}]


@BOTH
def test_one_poisoned_stream_among_eight_fails_alone(pair: Link, background: bool) -> None:
    """put_many is all or nothing: it is put again without the one."""
    inbox = pair.inbox()
    outbox, calls = with_calls(pair, background=background)
    rids = [f"r{i}" for i in range(8)]
    outbox.send(1, {rid: ids(1) for rid in rids})
    outbox.flush()
    pair.reader.abort("r5", "cancelled")
    pair.settle()
    outbox.send(2, {rid: ids(2) for rid in rids}, last=rids)
    outbox.flush()
    failed = outbox.failures()
    assert {rid: type(error) for rid, error in failed.items()} == {"r5": errors.RequestAborted}
    others = [rid for rid in rids if rid != "r5"]
    assert calls.puts == [rids, rids, others]
    pair.settle()
    arrived = inbox.pull(rids)
    assert read(arrived.payloads) == {rid: [[1], [2]] for rid in others}
    assert arrived.ended == set(others)


@BOTH
def test_a_failed_put_ends_its_request_at_both_ends(pair: Link, background: bool) -> None:
    """And is logged once, with its rid; what follows of it is dropped until it is finished."""
    inbox = pair.inbox()
    outbox, calls = with_calls(
        pair, instead={"bad": raising(errors.PayloadTooLarge("no", rid="bad", size=2, limit=1))}, background=background
    )
    outbox.send(1, {"bad": ids(1), "good": ids(1)})
    outbox.send(2, {"bad": ids(2), "good": ids(2)}, last=["bad", "good"])
    outbox.flush()
    assert calls.puts == [["bad", "good"], ["good"], ["good"]]
    assert outbox.counters["dropped"] == 1
    assert {rid: type(error) for rid, error in outbox.failures().items()} == {"bad": errors.PayloadTooLarge}
    with pytest.raises(errors.RequestAborted, match="aborted") as caught:
        pair.reader.edge(FROM, TO).take("bad", timeout=0.0)
    assert caught.value.facts["reason"] == "PayloadTooLarge: no"
    pair.settle()
    assert read(inbox.pull(["good"]).payloads) == {"good": [[1], [2]]}
    calls.instead.clear()
    outbox.finish("bad")
    outbox.send(3, {"bad": ids(3)}, last=["bad"])
    outbox.flush()
    assert (outbox.failures(), calls.puts[-1]) == ({}, ["bad"])


def test_a_failure_is_logged_once_with_its_rid(pair: Link, caplog: pytest.LogCaptureFixture) -> None:
    outbox = pair.outbox()
    with caplog.at_level(logging.ERROR, "runner_adapter"):
        outbox.send(1, {"bad-1": {IDS: 3}})  # type: ignore[dict-item]
        outbox.send(2, {"bad-1": {IDS: 3}})  # type: ignore[dict-item]
    assert [record.message.count("rid='bad-1'") for record in caplog.records] == [1]


def test_a_refusal_that_names_nobody_is_found_out(pair: Link) -> None:
    """Eight requests of which one is too large: halves, until it is alone."""

    def too_large() -> None:
        raise errors.PayloadTooLarge("the step does not fit")

    outbox, calls = with_calls(pair, instead={"r2": too_large})
    rids = [f"r{i}" for i in range(4)]
    outbox.send(1, {rid: ids(1) for rid in rids}, last=rids)
    assert list(outbox.failures()) == ["r2"]
    assert calls.puts == [rids, ["r0", "r1"], ["r2", "r3"], ["r2"], ["r3"]]
    assert [len(received(pair, rid)) for rid in ("r0", "r1", "r3")] == [1, 1, 1]


@pytest.mark.parametrize("kind", [errors.PoolFull, errors.PoolDeadlock, errors.BrokerLost])
def test_a_step_that_is_refused_as_a_whole_fails_all_its_requests(
    pair: Link, kind: type[errors.ConnectorError]
) -> None:
    """Such a refusal names one rid of the step, which is no more to blame than the others; nothing is tried again."""
    outbox, calls = with_calls(pair, instead={"a": raising(kind("no", rid="a"))})
    outbox.send(1, {"a": ids(1), "b": ids(1)})
    failed = outbox.failures()
    assert {rid: (type(error), error.facts["rid"]) for rid, error in failed.items()} == {
        "a": (kind, "a"),
        "b": (kind, "b"),
    }
    assert calls.puts == [["a", "b"]]


def test_no_room_is_a_failure_after_the_timeout(pair: Link) -> None:
    outbox = pair.outbox(timeout=0.0)
    outbox.send(1, {"held": {IDS: torch.zeros(5 << 20, dtype=torch.uint8)}})
    outbox.send(2, {"r": {IDS: torch.zeros(5 << 20, dtype=torch.uint8)}})
    assert {rid: type(error) for rid, error in outbox.failures().items()} == {"r": errors.PoolFull}


def test_what_the_broker_refuses_behind_a_put_is_a_failure(pair: Link) -> None:
    """Seen at the next look, and the request is not put any more."""
    inbox = pair.inbox()
    first = pair.node(FROM)
    first.edge(FROM, TO, readers=2).put("r", keyed("r", 0), last=False, readers=2)
    first.status()
    outbox, calls = with_calls(pair)
    outbox.send(1, {"r": ids(1), "s": ids(1)})
    pair.settle()
    assert {rid: type(error) for rid, error in outbox.failures().items()} == {"r": errors.ReadersMismatch}
    outbox.send(2, {"r": ids(2), "s": ids(2)}, last=["r", "s"])
    assert calls.puts == [["r", "s"], ["s"]]
    outbox.flush()
    assert outbox.failures() == {}
    pair.settle()
    assert read(inbox.pull(["s"]).payloads) == {"s": [[1], [2]]}


def test_flush_raises_no_refusal_that_failures_tells(pair: Link) -> None:
    first = pair.node(FROM)
    first.edge(FROM, TO, readers=2).put("r", keyed("r", 0), last=False, readers=2)
    first.status()
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    outbox.flush()
    assert list(outbox.failures()) == ["r"]


@BOTH
def test_abort_ends_a_request_everywhere_and_drops_what_follows(pair: Link, background: bool) -> None:
    inbox = pair.inbox()
    outbox = pair.outbox(background=background)
    outbox.send(1, {"r": ids(1)})
    outbox.flush()
    outbox.abort("r", "the model's hook raised")
    outbox.send(2, {"r": ids(2)}, last=["r"])
    outbox.flush()
    assert outbox.failures() == {}, "the caller knows"
    pair.settle()
    assert inbox.pull(["r"]).failed["r"].facts["reason"] == "the model's hook raised"
    outbox.finish("r")
    outbox.send(3, {"r": ids(3)}, last=["r"])
    inbox.finish("r")
    outbox.flush()
    pair.settle()
    assert read(inbox.pull(["r"]).payloads) == {"r": [[3]]}


def test_a_rid_that_is_none_fails_alone(pair: Link) -> None:
    outbox = pair.outbox()
    outbox.send(1, {"": ids(1), "x" * 2000: ids(1), "good": ids(1)}, last=["good"])
    assert {rid: type(error) for rid, error in outbox.failures().items()} == {
        "": errors.InvalidPayload,
        "x" * 2000: errors.InvalidPayload,
    }
    assert len(received(pair, "good")) == 1


# -- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [3, 2, -1])
def test_a_step_is_sent_once_and_in_rising_order(pair: Link, again: int) -> None:
    outbox, calls = with_calls(pair)
    outbox.send(3, {"r": ids(1)})
    with pytest.raises(errors.UsageError) as caught:
        outbox.send(again, {"r": ids(2)})
    assert caught.value.facts == {"step": again, "sent": 3}
    assert (calls.puts, outbox.sent("r")) == ([["r"]], 1)


def test_last_is_no_text(pair: Link) -> None:
    with pytest.raises(errors.UsageError):
        pair.outbox().send(1, {"r": ids(1)}, last="r")


# -- sent again -----------------------------------------------------------------------------------


@BOTH
def test_a_chunk_sent_again_replaces_one_that_nobody_has(pair: Link, background: bool) -> None:
    """B58: each index once, in order; a replayed step is no second chunk."""
    outbox = pair.outbox(background=background)
    for step in range(3):
        outbox.send(step, {"r": ids(step)}, last=["r"] if step == 2 else [])
    outbox.resend("r", 1, ids(10), attempt=1)
    outbox.resend("r", 2, ids(20), attempt=1)
    outbox.flush()
    assert received(pair, "r") == [{"r-thinker_input_ids": [n]} for n in (0, 10, 20)]
    assert (outbox.counters["replaced"], outbox.sent("r"), outbox.failures()) == (2, 3, {})
    outbox.finish("r")


def test_a_chunk_sent_again_is_ignored_once_its_reader_has_it(pair: Link) -> None:
    inbox = pair.inbox()
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    pair.settle()
    first = inbox.pull(["r"])
    outbox.resend("r", 0, ids(10), attempt=1)
    outbox.send(2, {"r": ids(2)}, last=["r"])
    pair.settle()
    second = inbox.pull(["r"])
    assert [read(step.payloads) for step in (first, second)] == [{"r": [[1]]}, {"r": [[2]]}]
    assert outbox.failures() == {}
    assert outbox.counters["ignored"] == 1
    outbox.finish("r")
    inbox.finish("r")


def test_a_stream_with_an_end_of_its_own_keeps_it_when_a_chunk_is_sent_again(pair: Link) -> None:
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    outbox.send(2, {}, last=["r"])
    outbox.resend("r", 0, ids(10), attempt=1)
    outbox.flush()
    assert outbox.failures() == {}
    assert received(pair, "r") == [{"r-thinker_input_ids": [10]}, {}]
    outbox.finish("r")


@pytest.mark.parametrize(("rid", "index", "attempt"), [("r", 1, 1), ("s", 0, 1), ("r", -1, 1), ("r", 0, 0)])
def test_only_what_was_sent_is_sent_again(pair: Link, rid: str, index: int, attempt: int) -> None:
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    with pytest.raises(errors.UsageError) as caught:
        outbox.resend(rid, index, ids(2), attempt)
    assert (caught.value.facts["rid"], caught.value.facts["index"]) == (rid, index)


def test_an_attempt_that_is_not_above_the_last_one_is_a_failure(pair: Link) -> None:
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1)})
    for _ in range(2):
        outbox.resend("r", 0, ids(10), attempt=1)
    outbox.flush()
    assert {rid: type(error) for rid, error in outbox.failures().items()} == {"r": errors.AlreadyPut}


def test_sent_counts_the_chunks_of_the_use_of_the_rid(pair: Link) -> None:
    outbox = pair.outbox()
    outbox.send(1, {"r": ids(1), "s": {"meta": torch.tensor([1])}})
    outbox.send(2, {"r": {}})
    outbox.send(3, {"r": ids(2)})
    assert (outbox.sent("r"), outbox.sent("s"), outbox.sent("t")) == (2, 0, 0)
    outbox.finish("r")
    assert outbox.sent("r") == 0
