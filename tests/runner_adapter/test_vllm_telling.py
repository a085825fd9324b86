"""What a runner's output tells its scheduler."""

from __future__ import annotations

from types import SimpleNamespace

from runner_adapter.adapters.vllm.telling import Fed, tell


def test_an_output_that_is_still_on_its_way_tells_when_it_is_there() -> None:
    late = SimpleNamespace(get_output=lambda: SimpleNamespace(tokens=[1]))
    fed = Fed(frozenset("b"), frozenset())
    assert tell(late, {"a": ValueError("of a")}, fed) is late
    found = late.get_output()
    assert (found.tokens, found.adapter_failures, found.adapter_fed) == ([1], {"a": "ValueError: of a"}, fed)


def test_an_output_of_which_there_is_nothing_to_tell_is_the_same() -> None:
    one = SimpleNamespace()
    assert tell(one, {}, None) is one
