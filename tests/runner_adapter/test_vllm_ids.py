"""The engine's ids and the rids, over stand-ins of vLLM's objects; tests/engines has the genuine ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from connector import errors
from runner_adapter import Arrived
from runner_adapter.adapters.vllm.ids import client_id
from runner_adapter.config import AdapterConfig
from tests.runner_adapter.models import flat
from tests.runner_adapter.test_vllm_steps import Engine, V1Runner, output, request, tensor

#: The ids that engines made of the client's `req`, and of its parallel children.
ONE, TWO, THREE = "req-0123abcd", "req-4567ef01", "req-89abcdef"


def engine(**own: Any) -> Engine:
    """As vLLM's by default."""
    return Engine(external_id=lambda engine_id, _: client_id(engine_id), **own)


class Input:
    """An inbox to which nothing comes, and what is said of its requests."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def begin(self, rid: str) -> None:
        self.told.append(("begin", rid))

    def finish(self, rid: str) -> None:
        self.told.append(("finish", rid))

    def fail(self, rid: str, error: Exception) -> None:
        self.told.append(("fail", rid))

    def pull(self, ready: Any) -> Arrived:
        return Arrived({}, set(), {})

    def waiting(self, rids: Any) -> set[str]:
        return set()


# -- which rid ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine_id", "rid"),
    [
        ("req-0123abcd", "req"),
        # Of a client's id that looks so itself, one ending is taken.
        ("req-deadbeef-0123abcd", "req-deadbeef"),
        ("0_req-0123abcd", "0_req"),
        ("a/b c\nd-0123abcd", "a/b c\nd"),
        # Others are their own.
        ("req", "req"),
        ("req-0123ABCD", "req-0123ABCD"),
        ("req-0123abc", "req-0123abc"),
        ("req-0123abcde", "req-0123abcde"),
        ("req-0123abcd\n", "req-0123abcd\n"),
        ("req_0123abcd", "req_0123abcd"),
        ("-0123abcd", "-0123abcd"),
    ],
)
def test_a_rid_is_the_clients_id_without_what_vllm_appended(engine_id: str, rid: str) -> None:
    assert client_id(engine_id) == rid


@pytest.mark.parametrize(("setting", "rid"), [(None, "req"), ("0", "req"), ("1", ONE)])
def test_where_vllm_keeps_its_clients_ids_they_are_the_rids(
    setting: str | None, rid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)
    if setting is not None:
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", setting)
    assert V1Runner().external_id(ONE, request(ONE)) == rid
    assert V1Runner().external_id(ONE, None) == rid


def test_an_engine_that_says_what_its_clients_call_a_request_is_believed() -> None:
    runner = V1Runner()
    assert runner.external_id("chunk-7", request("chunk-7", external_req_id=TWO)) == TWO
    # It makes no ids of its own, so one that it finished before it ever ran is not taken for one.
    assert runner.external_id(ONE, None) == ONE
    assert V1Runner().external_id(ONE, request(ONE, external_req_id=None)) == "req"


def test_a_runner_may_say_what_its_rids_are() -> None:
    class Own(V1Runner):
        def external_id(self, engine_id: str, request: Any) -> str:
            return engine_id.upper()

    runner = Own()
    runner.load_model()
    runner._update_states(output(request("a")))
    assert list(runner.adapter.buffer) == ["A"] and runner.engine_id("A") == "a"  # type: ignore[union-attr]
    with pytest.raises(errors.UnknownRequest):
        runner.engine_id("a")


# -- inside by rid, outside by the engine's id ----------------------------------------------------


def test_rows_and_maps_are_by_rid() -> None:
    run = engine()
    first = {f"0_{ONE}": 0, f"1_{ONE}": 0}
    run.step(output(*(request(one, model_intermediate_buffer=tensor(one[0] == "1")) for one in first)))
    plan = run.plan(**first)
    assert plan.rids == ("0_req", "1_req")
    assert (run.map("0_req"), run.map("1_req")) == ({"x": False}, {"x": True})
    given = run.steps.kwargs()
    assert given["request_ids"] == ["0_req", "1_req"] and given["model_intermediate_buffer"]["1_req"] == {"x": True}


def test_what_running_requests_are_brought_is_by_the_engines_id() -> None:
    run = engine()
    run.step(output(request(ONE), request("other-0123abcd")))
    run.step(output(cached={ONE: 1, "other-0123abcd": 1}, additional_information={ONE: {"x": 1}}))
    assert (run.map("req"), run.map("other")) == ({"x": 1}, {})
    run.steps.bring_one("other-0123abcd", {"x": 2})
    assert (run.map("req"), run.map("other")) == ({"x": 1}, {"x": 2})


def test_counts_and_drafts_are_by_the_engines_id() -> None:
    run = engine(late=True)
    run.step(output(request(ONE)))
    run.step(output(cached={ONE: 1}, drafts={ONE: [-1, -1]}))
    run.step(output(cached={ONE: 4}))
    assert run.plan(**{ONE: 4}).row("req").generated == 2


def test_a_preempted_request_and_a_further_segment_have_the_id_that_they_had() -> None:
    run = engine()
    run.step(output(request(ONE, model_intermediate_buffer=tensor(1))))
    run.step(output(preempted={ONE}, counts={}))
    run.step(output(request(ONE, tokens=4)))
    assert run.map("req") == {"x": 1} and run.plan(**{ONE: 0}).row("req").generated == 2
    run.step(output(request(ONE, prompt=6, model_intermediate_buffer={"y": torch.tensor(2)})))
    assert run.map("req") == {"x": 1, "y": 2, "meta": {"num_processed_tokens": 0}} and run.failed == {}


def test_a_request_that_runs_and_was_never_new_is_named() -> None:
    run = engine()
    run.step(output(request(ONE)))
    with pytest.raises(errors.UnknownRequest) as caught:
        run.step(output(counts={TWO: 1}))
    assert caught.value.facts["rid"] == TWO


def test_what_failed_goes_back_by_the_engines_id_and_the_mirror_too() -> None:
    runner = V1Runner()
    runner.load_model()
    runner._update_states(output(request(ONE, model_intermediate_buffer=tensor(1))))
    assert flat(runner.requests[ONE].additional_information_cpu) == {"x": 1}
    assert runner.adapter is not None
    runner.adapter.fail("req", ValueError("of req"))
    assert runner.sample_tokens(1).adapter_failures == {ONE: "ValueError: of req"}
    assert list(runner.adapter_failures()) == [ONE]


def test_a_failure_is_not_told_of_the_next_request_of_its_rid() -> None:
    runner = V1Runner()
    runner.load_model()
    assert runner.adapter is not None
    runner._update_states(output(request(ONE)))
    runner.adapter.fail("req", ValueError("of the first"))
    runner.sample_tokens(1)
    runner._update_states(output(request(TWO), finished=[ONE]))
    assert runner.adapter_failures() == {}


# -- one rid, several requests --------------------------------------------------------------------


def test_a_request_that_is_finished_frees_its_rid_for_one_of_the_same_step() -> None:
    run = engine()
    run.step(output(request(ONE, model_intermediate_buffer=tensor(1))))
    run.step(output(cached={ONE: 3}))
    run.step(output(request(TWO, model_intermediate_buffer={"y": torch.tensor(2)}), finished=[ONE]))
    assert run.map("req") == {"y": 2} and run.failed == {}
    assert run.plan(**{TWO: 0}).row("req").generated == 0


def test_a_preempted_one_that_is_finished_does_not_go_on_as_the_next() -> None:
    run = engine()
    run.step(output(request(ONE, model_intermediate_buffer=tensor(1))))
    run.step(output(request(TWO, tokens=2), finished=[ONE], preempted={ONE}))
    assert run.map("req") == {} and run.failed == {}


@pytest.mark.parametrize("together", [True, False])
def test_of_two_live_requests_of_one_rid_the_later_is_refused_and_the_first_goes_on(together: bool) -> None:
    run = engine(settings=AdapterConfig(migration_phase=3))
    first, second = (request(one, model_intermediate_buffer=tensor(n)) for n, one in ((1, ONE), (2, TWO)))
    if together:
        run.step(output(first, second))
    else:
        run.step(output(first))
        run.step(output(second, cached={ONE: 0}))
    ((engine_id, error),) = run.steps.failures().items()
    assert engine_id == TWO and type(error) is errors.UsageError
    assert error.facts == {"rid": "req", "engine_id": TWO, "first": ONE}
    # Both have a row in this step; the refused one's has no state, and is nobody's rid.
    plan = run.plan(**{TWO: 0, ONE: 0})
    assert plan.row("req").index == 1 and run.map("req") == {"x": 1}
    assert [dict(one) for one in run.steps.kwargs()["model_intermediate_buffer"]] == [{}, {"x": torch.tensor(1)}]
    # The next of its rid comes when the first has left.
    run.step(output(cached={ONE: 1}, finished=[TWO]))
    run.step(output(request(THREE, model_intermediate_buffer=tensor(3)), finished=[ONE]))
    assert run.map("req") == {"x": 3} and run.failed == {} and len(run.steps.ids) == 1


def test_a_refused_request_takes_no_other_ones_rid() -> None:
    rids = {"a": "r", "b": "r", "c": "b"}
    run = Engine(external_id=lambda engine_id, _: rids[engine_id])
    run.step(output(request("c", model_intermediate_buffer=tensor(1)), request("a"), request("b")))
    assert list(run.steps.failures()) == ["b"]
    assert run.map("b") == {"x": 1} and run.plan(c=0, b=0, a=0).row("b").index == 0


def test_what_is_no_rid_is_its_requests_failure() -> None:
    run = Engine(external_id=lambda engine_id, _: "" if engine_id == "a" else engine_id)
    run.step(output(request("a"), request("b", model_intermediate_buffer=tensor(1))))
    assert {rid: type(error) for rid, error in run.steps.failures().items()} == {"a": errors.InvalidPayload}
    assert run.map("b") == {"x": 1}


def test_one_that_was_finished_before_it_ran_leaves_no_input_behind() -> None:
    inbox = Input()
    run = engine(inbox=inbox, abort=lambda rid, reason: None)
    run.step(output(finished=[ONE], counts={}))
    assert inbox.told == [("finish", "req")]
    run.step(output(request(TWO)))
    # Another request is running by its rid: that one's input stays.
    run.step(output(cached={TWO: 1}, finished=[THREE]))
    assert inbox.told == [("finish", "req"), ("begin", "req")]
    run.step(output(finished=[TWO, ONE], counts={}))
    assert inbox.told[2:] == [("finish", "req")]


def test_what_comes_late_for_a_finished_request_is_not_the_next_ones(caplog: pytest.LogCaptureFixture) -> None:
    run = engine()
    run.step(output(request(ONE)))
    run.step(output(request(TWO), finished=[ONE], additional_information={ONE: tensor(1)}))
    assert run.map("req") == {} and re.search(f"dropped .*{ONE}", caplog.text)
    run.step(output(finished=[TWO], counts={}, additional_information={TWO: tensor(2)}))
    assert run.adapter.buffer.counters["dropped_finished"] == 1


@pytest.mark.parametrize("gives", [None, 7, "", ValueError("of no client")], ids=str)
def test_a_runner_that_cannot_say_a_rid_fails_that_request_alone(gives: Any) -> None:
    """Also for an id that ended before it ran: `request` is None then, which an override may not expect."""

    def external_id(engine_id: str, request: Any) -> Any:
        if engine_id != "bad":
            return engine_id
        if isinstance(gives, Exception):
            raise gives
        return gives

    run = Engine(external_id=external_id)
    run.step(output(request("good"), request("bad")))
    assert run.failed.keys() == {"bad"} and list(run.adapter.buffer) == ["good", "bad"]
    run.step(output(finished={"bad"}, cached={"good": 1}))
    run.step(output(finished={"bad"}, cached={"good": 2}))
    assert list(run.adapter.buffer) == ["good"]
