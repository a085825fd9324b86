"""The error tree and the shared names: what they accept, what they refuse, what an error tells."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.core import errors, names
from connector.core.errors import ConnectorError, InvalidPayload, PayloadTooLarge, from_code
from connector.core.names import MAX_INDEX, MAX_RID_BYTES, MAX_STAGE_BYTES, Edge, Handle

STAGES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=":"), min_size=1, max_size=30)


def test_an_error_tells_its_facts_and_drops_those_that_are_none() -> None:
    err = PayloadTooLarge("the payload can never fit", rid="r-1", size=9, limit=5, age=None)
    assert err.facts == {"rid": "r-1", "size": 9, "limit": 5}
    assert str(err) == "the payload can never fit [rid='r-1' size=9 limit=5]"
    assert str(ConnectorError("bare")) == "bare"


@pytest.mark.parametrize("cls", errors.BY_CODE.values(), ids=lambda cls: cls.__name__)
def test_every_error_crosses_the_wire_as_itself(cls: type[ConnectorError]) -> None:
    sent = cls("it failed", rid="r", key="h", size=3)
    came = from_code(type(sent).__name__, sent.message, sent.facts)
    assert (type(came), came.message, came.facts) == (cls, "it failed", {"rid": "r", "key": "h", "size": 3})


@pytest.mark.parametrize("cls", errors.BY_CODE.values(), ids=lambda cls: cls.__name__)
def test_a_copied_error_keeps_class_message_and_facts(cls: type[ConnectorError]) -> None:
    err = copy.copy(cls("it failed", rid="r"))
    assert (type(err), err.message, err.facts) == (cls, "it failed", {"rid": "r"})


def test_the_table_of_codes_holds_every_error_of_the_module() -> None:
    made = {o for o in vars(errors).values() if isinstance(o, type) and issubclass(o, ConnectorError)}
    assert set(errors.BY_CODE.values()) == made


def test_an_unknown_code_gives_the_base_class_with_the_code_as_a_fact() -> None:
    err = from_code("FromTheFuture", "new", {"rid": "r"})
    assert type(err) is ConnectorError
    assert err.facts == {"rid": "r", "code": "FromTheFuture"}
    assert from_code("ConnectorError", "old", {}).facts == {}


def test_errors_of_waiting_are_timeouts_and_others_are_not() -> None:
    timeouts = {name for name, cls in errors.BY_CODE.items() if issubclass(cls, TimeoutError)}
    assert timeouts == {"PoolFull", "Unavailable", "NotYet", "UnknownRequest", "Gone"}


@given(STAGES, STAGES, st.integers(0, MAX_INDEX))
def test_an_edge_parses_back_from_its_text(source: str, target: str, replica: int) -> None:
    edge = Edge(source, target, replica)
    assert Edge.parse(str(edge)) == edge


def test_an_edge_without_replica_is_replica_0() -> None:
    assert Edge.parse("thinker:talker") == Edge("thinker", "talker", 0)


@pytest.mark.parametrize(
    "text", ["", "a", ":b", "a:", "a:b:", "a:b:-1", "a:b:x", "a:b:1:2", "a:b:٣", f"a:b:{MAX_INDEX + 1}", "a:b: 1"]
)
def test_what_is_no_edge_is_refused(text: str) -> None:
    with pytest.raises(InvalidPayload):
        Edge.parse(text)


@pytest.mark.parametrize("stage", ["a:b", "", "x" * (MAX_STAGE_BYTES + 1), "\ud800", 3, None])
def test_an_edge_with_a_bad_stage_is_refused(stage: object) -> None:
    with pytest.raises(InvalidPayload):
        names.check_edge(Edge(stage, "talker"))  # type: ignore[arg-type]


def test_limits_count_utf8_bytes_not_characters() -> None:
    assert names.check_rid("é" * (MAX_RID_BYTES // 2)) == "é" * (MAX_RID_BYTES // 2)
    with pytest.raises(InvalidPayload) as caught:
        names.check_rid("é" * (MAX_RID_BYTES // 2) + "e")
    assert caught.value.facts["size"] == MAX_RID_BYTES + 1
    assert caught.value.facts["limit"] == MAX_RID_BYTES


@pytest.mark.parametrize("rid", ["", None, 5, b"r", "\udfff"])
def test_what_is_no_rid_is_refused(rid: object) -> None:
    with pytest.raises(InvalidPayload):
        names.check_rid(rid)


@pytest.mark.parametrize("rid", ["a/b", "..", "with\nnewline", "nul\0", "x-24", "{rid}", "日本"])
def test_a_hostile_rid_is_only_text(rid: str) -> None:
    assert names.check_rid(rid) is rid


@pytest.mark.parametrize("value", [-1, 11, True, 1.0, "1", None])
def test_a_number_out_of_range_or_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidPayload, match="index must be an int from 0 to 10"):
        names.check_number(value, "index", 10)


def test_numbers_at_both_bounds_pass() -> None:
    assert [names.check_number(n, "n", 10, low=2) for n in (2, 10)] == [2, 10]


def test_handles_differ_by_offset_and_by_generation() -> None:
    assert len({Handle(64, 1), Handle(64, 2), Handle(128, 1), Handle(64, 1)}) == 3
