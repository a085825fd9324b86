"""Lives, steps and segments: who leaves, enters, waits and comes back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from runner_adapter.requests import NEAR_LIMIT, Requests, StepChange

NONE = StepChange((), (), (), (), ())


@pytest.fixture
def requests() -> Requests:
    """`a` and `b` are live, and the last step scheduled both."""
    requests = Requests()
    requests.step(new=["a", "b"], scheduled=["a", "b"])
    return requests


def test_a_new_request_is_added_and_active() -> None:
    requests = Requests()
    assert requests.step(new=["a", "b"], scheduled=["b", "a"]) == NONE._replace(added=("a", "b"))
    assert list(requests) == ["a", "b"] and len(requests) == 2
    assert "a" in requests and requests.is_active("a")


def test_a_finished_request_is_gone(requests: Requests) -> None:
    assert requests.step(finished=["a"], scheduled=["b"]) == NONE._replace(removed=("a",))
    assert "a" not in requests and not requests.is_active("a") and list(requests) == ["b"]


def test_an_id_finished_and_new_in_one_step_is_two_requests(requests: Requests) -> None:
    """It was live, and yet is neither a segment nor resumed: the old one left before the new one entered."""
    change = requests.step(finished=["a"], new=["a"], scheduled=["a", "b"])
    assert change == NONE._replace(removed=("a",), added=("a",))
    assert list(requests) == ["b", "a"]


def test_a_new_request_that_is_live_is_a_segment(requests: Requests) -> None:
    assert requests.step(new=["b"], scheduled=["a", "b"]) == NONE._replace(resegmented=("b",))
    assert len(requests) == 2


def test_an_unscheduled_request_waits_and_stays_live(requests: Requests) -> None:
    assert requests.step(scheduled=["b"]) == NONE._replace(waiting=("a",))
    assert "a" in requests and not requests.is_active("a")


def test_a_waiting_request_that_is_scheduled_is_resumed_once(requests: Requests) -> None:
    requests.step(scheduled=["b"])
    assert requests.step(scheduled=["b", "a"]) == NONE._replace(resumed=("a",))
    assert requests.step(scheduled=["a", "b"]) == NONE


def test_a_waiting_request_that_comes_as_a_segment_is_not_resumed_as_well(requests: Requests) -> None:
    requests.step(scheduled=["b"])
    assert requests.step(new=["a"], scheduled=["a", "b"]) == NONE._replace(resegmented=("a",))


def test_a_new_request_that_is_not_scheduled_yet_waits(requests: Requests) -> None:
    change = requests.step(new=["c"], scheduled=["a", "b"])
    assert change == NONE._replace(added=("c",), waiting=("c",))
    assert requests.step(scheduled=["a", "b", "c"]).resumed == ("c",)


def test_a_finished_rid_that_was_never_live_is_removed_too(requests: Requests) -> None:
    """It was aborted before its first step: what came for it, elsewhere, must go. Told twice, it goes once."""
    assert requests.step(finished=["z", "a", "z"], scheduled=["b"]).removed == ("z", "a")


def test_an_unknown_scheduled_rid_is_refused_with_near_matches() -> None:
    requests = Requests()
    requests.step(new=["req-123", "other"], scheduled=[])
    with pytest.raises(errors.UnknownRequest) as caught:
        requests.step(scheduled=["req-124"])
    assert caught.value.facts == {"rid": "req-124", "near": ["req-123"]}


def test_near_matches_cost_no_walk_over_all() -> None:
    """Those beyond the limit are not looked at."""
    requests = Requests()
    requests.step(new=[*(f"{at:09}" for at in range(NEAR_LIMIT)), "req-123"])
    with pytest.raises(errors.UnknownRequest) as caught:
        requests.step(scheduled=["req-124"])
    assert caught.value.facts == {"rid": "req-124"}


def test_a_request_that_finishes_in_the_step_cannot_be_scheduled_in_it(requests: Requests) -> None:
    with pytest.raises(errors.UnknownRequest):
        requests.step(finished=["a"], scheduled=["a", "b"])


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ({"new": ["c", "d", "c"]}, errors.UsageError),
        ({"scheduled": ["a", "b", "a"]}, errors.UsageError),
        ({"finished": "a"}, errors.UsageError),
        ({"new": "c"}, errors.UsageError),
        ({"scheduled": "a"}, errors.UsageError),
        ({"new": [""]}, errors.InvalidPayload),
        ({"finished": [3]}, errors.InvalidPayload),
        ({"scheduled": ["q"]}, errors.UnknownRequest),
    ],
    ids=str,
)
def test_a_refused_step_changes_nothing(requests: Requests, step: dict[str, Any], error: type[Exception]) -> None:
    whole = {"finished": ["b"], "new": ["n"], "scheduled": ["a"], **step}
    with pytest.raises(error):
        requests.step(**whole)
    assert list(requests) == ["a", "b"] and requests.steps == 1
    assert requests.is_active("a") and requests.is_active("b")


def test_a_rid_twice_is_named(requests: Requests) -> None:
    with pytest.raises(errors.UsageError, match="`new`") as caught:
        requests.step(new=["c", "d", "d"])
    assert caught.value.facts == {"rid": "d"}


def test_steps_are_counted_and_an_empty_one_is_a_step(requests: Requests) -> None:
    assert requests.step() == NONE._replace(waiting=("a", "b"))
    assert requests.steps == 2


def test_a_mapping_of_rid_to_tokens_will_do(requests: Requests) -> None:
    """As schedulers have it."""
    assert requests.step(scheduled={"b": 1, "a": 7}) == NONE


def test_tables_that_contradict_each_other_are_found(requests: Requests) -> None:
    requests.validate()
    requests._live.pop("a")
    with pytest.raises(errors.InvariantBroken) as caught:
        requests.validate()
    assert caught.value.facts == {"rids": ["a"]}


RIDS = st.lists(st.sampled_from("abcd"), unique=True)


@given(st.lists(st.tuples(RIDS, RIDS, RIDS)))
def test_random_steps_agree_with_two_sets(steps: list[tuple[list[str], list[str], list[str]]]) -> None:
    """Whatever the order of events, the live ones are those that entered and did not leave after."""
    requests = Requests()
    live: set[str] = set()
    ran: set[str] = set()
    for finished, new, wanted in steps:
        stayed = live - set(finished)
        scheduled = [rid for rid in wanted if rid in stayed or rid in new]
        change = requests.step(finished=finished, new=new, scheduled=scheduled)
        assert change.removed == tuple(finished)
        assert set(change.added) == set(new) - stayed and set(change.resegmented) == set(new) & stayed
        assert set(change.resumed) == set(scheduled) & stayed - ran - set(new)
        live, ran = stayed | set(new), set(scheduled)
        assert set(change.waiting) == live - ran
        assert set(requests) == live and {rid for rid in "abcd" if requests.is_active(rid)} == ran
        requests.validate()
