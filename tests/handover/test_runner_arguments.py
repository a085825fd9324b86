"""What RunnerAdapter is given of no request, or of another type: an error that names it, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter.runner import Received, RunnerAdapter
from tests.handover.links import TO, Link, ids
from tests.handover.middle import NEXT, Middle, hidden, plan_of
from tests.runner_adapter.models import HookModel, raises

STRANGE = "request-7"


BROKER = {"put_timeout": 5.0}
RIDS = ["a", "b", "c", "request-1", STRANGE]


def rids_at_the_broker(middle: Middle) -> set[str]:
    middle.pair.settle()
    assert middle.adapter.outbox is not None
    middle.adapter.outbox.flush()
    return {row["rid"] for row in middle.pair.sender.payloads()}


# -- of no request --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["row", "beside", "last"])
def test_what_is_of_no_request_is_refused_and_the_others_are_sent(middle: Middle, where: str) -> None:
    """UnknownRequest, with near matches; nothing of it is at the broker, and nothing of it is kept."""
    adapter = middle.adapter
    plan = plan_of(**{STRANGE: 2, "request-1": 1}) if where == "row" else plan_of(**{"request-1": 1})
    adapter.begin_step(new=["request-1"], scheduled=["request-1"])
    beside = {"request-1": ids(4), **({STRANGE: ids(5)} if where == "beside" else {})}
    last = ["request-1", *([STRANGE] if where == "last" else [])]
    with pytest.raises(errors.UnknownRequest) as caught:
        adapter.send(plan, hidden(plan), beside=beside, last=last)
    assert (caught.value.facts["rid"], caught.value.facts["near"]) == (STRANGE, ["request-1"])
    adapter.validate()
    assert rids_at_the_broker(middle) == {"request-1"}
    assert middle.take("request-1") == [4]
    assert adapter.failures() == {}


def test_all_that_is_of_no_request_is_named(middle: Middle) -> None:
    adapter, plan = middle.adapter, plan_of(a=1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    with pytest.raises(errors.UnknownRequest) as caught:
        adapter.send(plan, hidden(plan), beside={"b": ids(1)}, last=["c", "b"])
    assert (caught.value.facts["rid"], caught.value.facts["others"]) == ("b", ["c"])


@pytest.mark.parametrize("where", ["row", "beside", "last"])
def test_what_is_a_finished_requests_is_dropped_and_counted(middle: Middle, where: str) -> None:
    adapter = middle.adapter
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    adapter.begin_step(finished=["a"], scheduled=["b"])
    plan = plan_of(a=1, b=1) if where == "row" else plan_of(b=1)
    beside = {"b": ids(4), **({"a": ids(5)} if where == "beside" else {})}
    adapter.send(plan, hidden(plan), beside=beside, last=["b", *(["a"] if where == "last" else [])])
    assert adapter.buffer.counters["dropped_finished"] == 1
    assert rids_at_the_broker(middle) == {"b"}
    adapter.validate()


def test_what_is_brought_to_a_stranger_takes_nothing_from_the_others(middle: Middle) -> None:
    adapter = middle.adapter
    adapter.begin_step(new=["a"], scheduled=["a"])
    with pytest.raises(errors.UnknownRequest) as caught:
        adapter.bring({"ghost": ids(1), "a": ids(2)})
    assert caught.value.facts["rid"] == "ghost"
    assert adapter.buffer["a"]["a-thinker_input_ids"].tolist() == [2]


def test_a_strangers_part_that_is_refused_is_no_requests_failure(middle: Middle) -> None:
    """Nor does it stop the step on its way."""
    adapter, plan = middle.adapter, plan_of(a=1, b=1)
    adapter.begin_step(new=["a"], scheduled=["a"])
    with pytest.raises(errors.UnknownRequest) as caught:
        adapter.send(plan, (hidden(plan), {"ids": {"thinker_input_ids": [torch.tensor([2]), "no tensor"]}}))
    assert caught.value.facts["rid"] == "b"
    assert middle.take("a") == [2] and adapter.failures() == {}


def test_a_row_of_no_request_whose_hook_fails_aborts_nobody(pair: Link) -> None:
    middle = Middle(pair, HookModel(a=raises(ValueError("of a row"))))
    middle.before.put("a", {"a-thinker_input_ids": torch.tensor([1])}, last=False)
    middle.adapter.preprocess(plan_of(a=1), torch.tensor([5]))
    middle.adapter.validate()
    middle.pair.settle()
    assert middle.pair.sender.aborted("a") is None
    middle.adapter.begin_step(new=["a"], scheduled=["a"])
    assert middle.adapter.receive() == Received({"a"}, set()) and middle.adapter.failures() == {}


def test_an_outbox_that_sends_for_others_than_the_requests_is_found(middle: Middle) -> None:
    adapter = middle.adapter
    adapter.begin_step(new=["a"], scheduled=["a"])
    adapter.validate()
    assert adapter.outbox is not None
    adapter.outbox.send(adapter.requests.steps, {"b": ids(1)})
    with pytest.raises(errors.InvariantBroken, match="b"):
        adapter.validate()


# -- input that is refused ------------------------------------------------------------------------


def test_input_that_is_refused_has_not_ended(middle: Middle, caplog: pytest.LogCaptureFixture) -> None:
    middle.before.put("a", {"a-what else": torch.tensor(1)}, last=True)
    middle.put("b", 2, last=True)
    middle.adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    # What pytest keeps of the log holds the error, and with it the payload.
    with caplog.filtering(lambda record: False):
        assert middle.adapter.receive() == Received({"b"}, {"b"})
    assert [middle.adapter.input_ended(rid) for rid in "ab"] == [False, True]
    assert list(middle.adapter.failures()) == ["a"]


# -- of another type ------------------------------------------------------------------------------

JUNK: list[Any] = [None, 5, "ab", b"x", object(), [1], {1: {}}, torch.zeros(2), float("nan")]
#: What of it a call takes.
TAKEN: dict[str, tuple[type, ...]] = {
    "input_ended": (str,),
    "fail": (str,),
    "input_ids": (torch.Tensor,),
    "inputs_embeds": (type(None),),
    "beside": (type(None),),
    **dict.fromkeys(["extras", "seeds", "sampling_extra_args"], (type(None), dict)),
}
PLAN, TOKENS = plan_of(a=1), torch.zeros(1, dtype=torch.int64)
CALLS: dict[str, Callable[[RunnerAdapter, Any], object]] = {
    "new": lambda adapter, junk: adapter.begin_step(new=junk),
    "finished": lambda adapter, junk: adapter.begin_step(finished=junk),
    "scheduled": lambda adapter, junk: adapter.begin_step(scheduled=junk),
    "maps": lambda adapter, junk: adapter.bring(junk),
    "waiting": lambda adapter, junk: adapter.waiting(junk),
    "input_ended": lambda adapter, junk: adapter.input_ended(junk),
    "preprocess": lambda adapter, junk: adapter.preprocess(junk, TOKENS),
    "input_ids": lambda adapter, junk: adapter.preprocess(PLAN, junk),
    "inputs_embeds": lambda adapter, junk: adapter.preprocess(PLAN, TOKENS, junk),
    "extras": lambda adapter, junk: adapter.preprocess(PLAN, TOKENS, extras=junk),
    "seeds": lambda adapter, junk: adapter.preprocess(PLAN, TOKENS, seeds=junk),
    "gather": lambda adapter, junk: adapter.gather(junk),
    "forward_kwargs": lambda adapter, junk: adapter.forward_kwargs(junk),
    "sampling_extra_args": lambda adapter, junk: adapter.forward_kwargs(PLAN, sampling_extra_args=junk),
    "postprocess": lambda adapter, junk: adapter.postprocess(junk, hidden(PLAN)),
    "send": lambda adapter, junk: adapter.send(junk, hidden(PLAN)),
    "last": lambda adapter, junk: adapter.send(PLAN, hidden(PLAN), last=junk),
    "beside": lambda adapter, junk: adapter.send(PLAN, hidden(PLAN), beside=junk),
    "fail": lambda adapter, junk: adapter.fail(junk, ValueError()),
    "error": lambda adapter, junk: adapter.fail("a", junk),
}


@pytest.mark.parametrize("what", CALLS)
def test_an_argument_of_another_type_is_refused_and_nothing_has_changed(middle: Middle, what: str) -> None:
    """UsageError, or one of its kinds; a str of one rid is not several rids."""
    adapter = middle.adapter
    adapter.begin_step(new=["a"], scheduled=["a"])
    for junk in [one for one in JUNK if not isinstance(one, TAKEN.get(what, ()))]:
        with pytest.raises(errors.UsageError):
            CALLS[what](adapter, junk)
        adapter.validate()
        assert list(adapter.requests) == ["a"]
    assert adapter.failures() == {}


def test_the_error_says_what_is_wanted() -> None:
    adapter = RunnerAdapter(object())
    with pytest.raises(errors.UsageError, match=r"`new` takes several rids, such as a list \[given='NoneType'\]"):
        adapter.begin_step(new=None)  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match="several rids, not one str"):
        adapter.begin_step(new="abc")
    with pytest.raises(errors.UsageError, match="stands twice in `new`"):
        adapter.begin_step(new=["a", "a"])
    with pytest.raises(errors.UsageError, match=r"StepPlan\.make"):
        adapter.gather({"a": 1})  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match=r"`input_ids` is a Tensor \[tokens\].*tokens=2"):
        adapter.preprocess(plan_of(a=2), torch.zeros(1, dtype=torch.int64))
    assert adapter.requests.steps == 0


@pytest.mark.parametrize("bad", [5, torch.zeros(2), "text", [1]], ids=str)
def test_a_first_map_and_what_stands_beside_are_mappings_or_their_requests_failure(middle: Middle, bad: Any) -> None:
    adapter, plan = middle.adapter, plan_of(a=1, b=1, c=1)
    adapter.begin_step(new={"a": bad, "b": None, "c": {}}, scheduled=["a", "b", "c"])
    assert list(adapter.failures()) == ["a"]
    adapter.send(plan, hidden(plan), beside={"b": bad, "c": ids(3)})
    failed = adapter.failures()
    assert {rid: type(error) for rid, error in failed.items()} == {"b": errors.InvalidPayload}
    payload = middle.after.edge(TO, NEXT).take("c", timeout=10.0)
    assert [tensor.tolist() for tensor in payload.values()] == [[3]]
    adapter.validate()


@pytest.mark.parametrize(
    ("option", "given"),
    [("rules", {}), ("form", "x"), ("rows", 4), ("talker", "x")],
    ids=["rules", "form", "rows", "talker"],
)
def test_an_option_of_another_kind_is_refused_by_name(option: str, given: Any) -> None:
    with pytest.raises(errors.UsageError, match=option):
        RunnerAdapter(object(), **{option: given})


def test_rules_of_a_whole_payload_are_rules(pair: Link) -> None:
    with pytest.raises(errors.UsageError, match="whole"):
        pair.outbox(whole=True)


@pytest.mark.parametrize("rid", ["r" * 1025, "\ud800"], ids=["long", "surrogate"])
def test_a_rid_that_the_connector_does_not_take_changes_nothing(middle: Middle, rid: str) -> None:
    adapter = middle.adapter
    for step in ({"new": ["a", rid, "b"]}, {"finished": [rid]}, {"new": ["a"], "scheduled": [rid]}):
        with pytest.raises(errors.InvalidPayload):
            adapter.begin_step(**step)
        adapter.validate()
        assert list(adapter.requests) == []
    adapter.begin_step(new=["a", "b"], scheduled=["a", "b"])
    adapter.begin_step(finished=["a", "b"])


def test_an_adapter_that_was_closed_begins_no_step() -> None:
    adapter = RunnerAdapter(object())
    adapter.close()
    with pytest.raises(errors.ClientClosed):
        adapter.begin_step(new=["a"])
    adapter.validate()
