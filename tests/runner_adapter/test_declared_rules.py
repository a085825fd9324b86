"""What a model declares of its names in the attributes of vLLM-Omni's runner, and rows that only a segment appends."""

from __future__ import annotations

import pytest
import torch

from connector import errors
from runner_adapter import MergeRules, ModelIntermediateBuffer, RunnerAdapter

EMBEDS = ("embed", "prefill")


class Declaring:
    """A model's own words, as the runner reads them."""

    gpu_resident_buffer_keys = {("hidden_states", "last")}
    streaming_accumulated_keys = {EMBEDS}


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).reshape(-1, 1)


def test_a_models_declared_names_are_the_adapters_rules() -> None:
    """On a device that is not the host: its tensors hold no values here."""
    adapter = RunnerAdapter(Declaring(), device="meta")
    first = {"embed": {"prefill": rows(1)}, "hidden_states": {"last": torch.zeros(1, 4)}}
    adapter.begin_step(new={"a": first}, scheduled=["a"])
    adapter.begin_step(new={"a": {"embed": {"prefill": rows(2, 3)}}}, scheduled=["a"])
    names = adapter.buffer.names("a")
    assert names["embed.prefill"].flatten().tolist() == [1, 2, 3]
    assert {name: tensor.device.type for name, tensor in names.items()} == {
        "embed.prefill": "cpu",
        "hidden_states.last": "meta",
        "meta.num_processed_tokens": "cpu",
    }
    assert adapter.failures() == {}


def test_rules_that_are_given_are_the_only_ones() -> None:
    adapter = RunnerAdapter(Declaring(), rules=MergeRules())
    assert adapter.buffer.rules.by_segment == frozenset()
    more = MergeRules.of(Declaring(), accumulated=["codes.audio"], by_segment=[])
    assert (set(more.accumulated), set(more.by_segment)) == ({"codes.audio"}, set())
    assert set(more.gpu_resident) == {"hidden_states.last"}
    assert MergeRules.of(object()).gpu_resident == frozenset()


def test_only_a_segment_appends_rows_of_a_name_that_grows_by_segment() -> None:
    buffer = ModelIntermediateBuffer(rules=MergeRules.of(Declaring()))
    buffer.add("a", {EMBEDS: rows(1, 2)})
    shown = buffer["a"]
    buffer.new_segment("a", {EMBEDS: rows(3)})
    assert buffer["a"]["embed.prefill"].flatten().tolist() == [1, 2, 3]
    # A hook that has used up the first rows.
    buffer.merge("a", {EMBEDS: rows(3)})
    assert buffer["a"]["embed.prefill"].flatten().tolist() == [3]
    buffer.new_segment("a", {EMBEDS: rows(4)})
    assert buffer["a"]["embed.prefill"].flatten().tolist() == [3, 4]
    assert shown["embed.prefill"].flatten().tolist() == [1, 2]


def test_a_name_grows_in_one_way() -> None:
    with pytest.raises(errors.UsageError, match="two rules") as told:
        MergeRules(accumulated=[EMBEDS], by_segment=["embed.prefill"])
    assert told.value.facts["name"] == "embed.prefill"
