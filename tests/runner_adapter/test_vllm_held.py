"""What a runner does for requests that its scheduler keeps back, over stand-ins of vLLM's objects."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from connector import ConnectorError, errors
from runner_adapter.adapters.vllm.ids import ExternalId, as_it_is
from runner_adapter.adapters.vllm.steps import Steps
from runner_adapter.adapters.vllm.telling import ASKED, Asked, Fed
from runner_adapter.runner import RunnerAdapter
from tests.runner_adapter.test_vllm_steps import CONFIG, output, request


class Source:
    """An inbox that has input for some, and failures of others."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.failed: dict[str, ConnectorError] = {}
        self.begun: list[str] = []
        self.finished: list[str] = []
        self.waits: list[float] = []
        self.lost = False
        #: What comes while the runner sleeps.
        self.comes: set[str] = set()

    def begin(self, rid: str) -> None:
        self.begun.append(rid)

    def finish(self, rid: str) -> None:
        self.finished.append(rid)
        self.here.discard(rid)
        self.failed.pop(rid, None)

    def waiting(self, rids: Iterable[str]) -> set[str]:
        return set(rids) - self.here - self.failed.keys()

    def failing(self, rids: Iterable[str]) -> dict[str, ConnectorError]:
        return {rid: self.failed[rid] for rid in rids if rid in self.failed}

    def pull(self, rids: Iterable[str]) -> Any:
        return SimpleNamespace(payloads={}, ended=set(), failed={})

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        self.here |= self.comes
        if self.lost:
            raise errors.BrokerLost("away")
        return False


class Run:
    def __init__(self, source: Source | None, external_id: ExternalId = as_it_is) -> None:
        inbox: Any = source
        adapter = RunnerAdapter(object(), inbox=inbox, abort=lambda rid, reason: None)
        self.steps = Steps(adapter, object(), CONFIG, embeds=False, external_id=external_id)

    def step(self, made: Any, *asked: str | Asked) -> Fed | None:
        setattr(made, ASKED, [Asked(one, None) if isinstance(one, str) else one for one in asked])
        self.steps.take(made)
        self.steps.begin(made)
        if made.num_scheduled_tokens:
            rids = list(made.num_scheduled_tokens)
            self.steps.plan(rids, dict.fromkeys(rids, 1), dict.fromkeys(rids, 0), padded_tokens=len(rids))
            self.steps.after((None, {}), lambda plan: {})
        return self.steps.held.fed

    @property
    def refused(self) -> dict[str, ConnectorError]:
        return self.steps.held.refused


def empty(**more: Any) -> Any:
    made = output(**more)
    made.num_scheduled_tokens = {}
    return made


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def run(source: Source) -> Run:
    return Run(source)


def test_a_runner_tells_whose_input_is_there_of_those_that_run_and_those_that_wait_to_begin(
    run: Run, source: Source
) -> None:
    """It is told of these once."""
    source.here = {"b"}
    assert run.step(empty(), "a", "b") == Fed(frozenset("b"), frozenset())
    source.here = {"a"}
    assert run.step(output(request("b"))) == Fed(frozenset("a"), frozenset())
    run.steps.adapter._ended.add("b")
    assert run.step(empty()) == Fed(frozenset("a"), frozenset("b"))
    assert source.begun == ["a", "b", "b"], "expected once, and begun"


def test_a_step_without_requests_waits_a_moment_for_input(run: Run, source: Source) -> None:
    """And says what came."""
    run.step(output(request("a")))
    assert source.waits == []
    source.comes = {"b"}
    assert run.step(empty(), "b") == Fed(frozenset("b"), frozenset())
    assert len(source.waits) == 1
    run.step(empty(finished=["a"]))
    assert len(source.waits) == 1, "that of a finished one has something to say"


def test_a_step_without_requests_does_not_wait_when_input_is_there(run: Run, source: Source) -> None:
    """As the one that is made ahead, while the request is under way."""
    source.here = {"a"}
    run.step(empty(), "a")
    run.step(output(request("a")))
    run.step(empty())
    assert source.waits == []


def test_a_broker_that_is_started_again_is_a_pause_for_those_that_wait(run: Run, source: Source) -> None:
    source.lost = True
    assert run.step(empty(), "a") == Fed()
    assert len(source.waits) == 1


def test_a_request_that_failed_elsewhere_need_not_begin(run: Run, source: Source) -> None:
    """It ends, and what is known of it is dropped."""
    source.failed["a"] = errors.RequestAborted("the thinker broke", rid="a")
    source.here = {"b"}
    assert run.step(empty(), "a", "b") == Fed(frozenset("b"), frozenset())
    assert {one: str(error) for one, error in run.refused.items()} == {"a": str(source.failed["a"])}
    assert source.waits == []
    run.step(empty(finished=["a"]))
    assert source.finished == ["a"] and run.refused == {} and "a" not in run.steps.ids.held


def named(engine_id: str, request: Any) -> str:
    if request is None:
        raise LookupError("nobody knows")
    return str(request.external_req_id)


def test_the_rid_under_which_a_request_waited_is_its_rid(source: Source) -> None:
    """What the scheduler calls new need not say it again."""
    run = Run(source, named)
    source.here = {"client"}
    run.step(empty(), Asked("engine-1", "client"))
    new = request("engine-1")
    new.external_req_id = "another"
    run.step(output(new))
    assert run.steps.ids.rid("engine-1") == "client" and not run.steps.ids.held


def test_a_request_that_leaves_while_it_waits_frees_the_rid_that_it_waited_under(source: Source) -> None:
    """Its input, which has come, is not the next one's. The next may have its id, too."""
    run = Run(source, named)
    run.step(empty(), Asked("engine-1", "client"))
    source.here = {"client"}
    assert run.step(empty(finished=["engine-1"]), Asked("engine-1", "client")) == Fed()
    assert source.finished == ["client"] and source.begun == ["client", "client"]
    assert run.step(empty(finished=["engine-1"]), Asked("engine-2", "client")) == Fed()
    assert source.finished == ["client", "client"] and list(run.steps.ids.held) == ["engine-2"]


@pytest.mark.parametrize("begun", [True, False])
def test_of_two_requests_with_one_rid_the_later_is_refused_at_once(source: Source, begun: bool) -> None:
    """It does not wait until the first, whose input it would take for its own, has left."""
    run = Run(source, named)
    source.here = {"client"}
    run.step(empty(), Asked("engine-1", "client"))
    if begun:
        run.step(output(request("engine-1")))
    fed = run.step(empty(), Asked("engine-2", "client"))
    assert fed == Fed(frozenset(["engine-1"]))
    error = run.refused["engine-2"]
    assert isinstance(error, errors.UsageError) and error.facts["first"] == "engine-1"
    run.step(empty(finished=["engine-2"]))
    assert source.finished == [], "the first goes on"


@pytest.mark.parametrize(
    ("external", "error"), [("x" * 2000, errors.InvalidPayload), (None, errors.UsageError)], ids=["long", "raises"]
)
def test_a_request_whose_rid_cannot_be_said_is_refused(
    source: Source, external: str | None, error: type[ConnectorError]
) -> None:
    def say(engine_id: str, request: Any) -> str:
        if external is None:
            raise AttributeError("'Asked' object has no attribute 'sampling_params'")
        return external

    run = Run(source, say)
    run.step(empty(), "a")
    assert type(run.refused["a"]) is error
    assert source.waits == [] and source.begun == []


def test_what_is_brought_to_a_request_that_waits_is_dropped(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.step(empty(), "a")
    run.step(output(request("b")))
    made = output(cached={"b": 1}, model_intermediate_buffer={"a": {"x": 1}, "b": {}})
    run.step(made)
    assert "not live" in caplog.text


def test_who_is_not_asked_or_reads_nothing_tells_nothing(run: Run, source: Source) -> None:
    made = empty()
    run.steps.take(made)
    run.steps.begin(made)
    assert run.steps.held.fed is None and source.waits == []
    assert Run(None).step(empty(), "a") is None
