"""Errors on the wire: each class arrives as itself, and nothing that an error tells can keep it from arriving."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.core.errors import BY_CODE, ConnectorError, PayloadTooLarge
from connector.wire import codec
from connector.wire.fields import MAX_TEXT
from connector.wire.messages import Failure


def through(error: ConnectorError) -> ConnectorError:
    envelope = codec.decode(codec.encode(0, [Failure(3, error)]), from_broker=True)
    (came,) = envelope.messages
    assert isinstance(came, Failure)
    assert came.request == 3
    return came.error


@pytest.mark.parametrize("cls", BY_CODE.values(), ids=lambda cls: cls.__name__)
def test_every_class_crosses_with_message_and_facts(cls: type[ConnectorError]) -> None:
    """What the broker saw is what the caller reads."""
    facts: dict[str, Any] = {"rid": "r-1", "edge": "a:b:0", "size": 2**62, "age": 0.5, "force": True, "near": ["x"]}
    came = through(cls("no room", **facts))
    assert (type(came), came.message, came.facts) == (cls, "no room", facts)


def test_an_error_of_a_newer_peer_arrives_as_the_base_with_its_code() -> None:
    """The caller can still catch it."""
    newer = type("FromTheFuture", (ConnectorError,), {})
    came = through(newer("new", rid="r"))
    assert (type(came), came.message) == (ConnectorError, "new")
    assert came.facts == {"rid": "r", "code": "FromTheFuture"}


@pytest.mark.parametrize(
    ("fact", "arrives"),
    [
        (2**80, str(2**80)),
        ("\ud800/run", "\\ud800/run"),
        (b"bytes", "b'bytes'"),
        ((1, 2), [1, 2]),
        ({"a": (1,)}, {"a": [1]}),
        ({3: 4}, {"3": 4}),
        (frozenset([1]), "frozenset({1})"),
        ("x" * (MAX_TEXT + 5), "x" * MAX_TEXT),
    ],
)
def test_a_fact_that_does_not_travel_arrives_as_text(fact: object, arrives: object) -> None:
    """Big numbers, lone surrogates of a path, other types."""
    assert through(PayloadTooLarge("too large", what=fact)).facts == {"what": arrives}


def test_a_fact_that_nests_too_deep_arrives_as_text_below() -> None:
    """The peer refuses what nests deeper than its limit."""
    fact: Any = "core"
    for _ in range(20):
        fact = [fact]
    came = through(PayloadTooLarge("too large", what=fact))
    assert "core" in str(came.facts["what"])


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 2**63, -(2**63) - 1])
def test_a_number_of_64_bits_stays_one_and_a_larger_one_is_told_in_words(number: int) -> None:
    """Both ends of int64 are numbers; what is beyond them has no place in a message."""
    fits = -(2**63) <= number < 2**63
    assert through(ConnectorError("x", size=number)).facts == {"size": number if fits else str(number)}


def test_a_message_that_is_too_long_is_cut() -> None:
    """Else the peer would refuse the whole frame, and whoever waits would never hear."""
    assert through(ConnectorError("é" * (MAX_TEXT + 1))).message == "é" * MAX_TEXT
    assert through(ConnectorError("\ud800" * MAX_TEXT)).message.startswith("\\ud800\\ud800")


@pytest.mark.parametrize("name", ["self", "message", "cls", "facts", "", "with space", "\n"])
def test_a_fact_of_any_name_is_no_danger(name: str) -> None:
    """Facts become keyword arguments; a peer's fact must not stand for one of ours."""
    error = ConnectorError("x")
    error.facts[name] = 1
    came = through(error)
    assert came.message == "x"
    assert came.facts == ({} if name in ("self", "message") else {name: 1})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters()), st.dictionaries(st.text(st.characters()), ANYTHING, max_size=4))
def test_whatever_an_error_holds_it_arrives(message: str, facts: dict[str, Any]) -> None:
    """An error that cannot be told would be a caller that waits for ever."""
    error = ConnectorError(message)
    error.facts |= facts
    assert isinstance(through(error), ConnectorError)
