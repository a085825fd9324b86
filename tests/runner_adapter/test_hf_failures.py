"""A request that a model of the library cannot run fails alone: the others are bit for bit as if it were not there."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import Cache

from connector import errors
from runner_adapter.adapters.transformers import HfStageRunner, RowOutput
from tests.runner_adapter.hf_omni import Forwards

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {**GREEDY, "do_sample": True, "seed": 3}
#: Tokens of each prompt. No other request than "bad" comes to the position of its last one.
LENGTHS = {"a": 3, "bad": 14, "b": 5}
EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "packed"])

Logits = list[torch.Tensor]


@pytest.fixture
def model() -> Any:
    """In float32, where the bits are seen."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def prompt(rid: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(map(ord, rid)))
    return torch.randint(3, 100, (1, LENGTHS[rid]), generator=draw)


def alone(model: Any, rid: str) -> Logits:
    """What the library's own loop makes of the request."""
    made = model.generate(prompt(rid), **GREEDY, return_dict_in_generate=True, output_logits=True)
    return list(made.logits)


def same(got: Logits, expected: Logits) -> bool:
    return len(got) == len(expected) and all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def run(runner: HfStageRunner, steps: int = 8, **given: Any) -> dict[str, Logits]:
    logits: dict[str, Logits] = {}
    for _ in range(steps):
        for rid, output in runner.step(**given).items():
            logits.setdefault(rid, []).append(output.logits.clone())
    return logits


class Boom(Exception):
    pass


def breaks(model: Any, *positions: int) -> Any:
    """The second layer raises for rows at these positions: the first one's keys are in the caches by then."""

    def before(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.isin(kwargs["position_ids"], torch.tensor(positions)).any():
            raise Boom("here")

    return model.model.layers[1].register_forward_pre_hook(before, with_kwargs=True)


# -- what is refused before the model is met ----------------------------------------------------

IDS, EMBEDS = "input_ids", "inputs_embeds"
BAD: dict[str, tuple[type[errors.ConnectorError], str, dict[str, Any]]] = {
    "an id behind the vocabulary": (errors.InvalidPayload, "id=100 limit=100", {IDS: torch.tensor([[5, 100]])}),
    "an id before it": (errors.InvalidPayload, "id=-1 limit=100", {IDS: torch.tensor([[-1, 5]])}),
    "ids by generate()'s own name": (errors.InvalidPayload, "id=100", {"inputs": torch.tensor([[5, 100]])}),
    "ids of another dtype": (errors.InvalidPayload, "float32", {IDS: torch.ones(1, 3)}),
    "ids in a list": (errors.InvalidPayload, "given='list'", {IDS: [[1, 2]]}),
    "ids without a batch": (errors.InvalidPayload, r"\[3\]", {IDS: torch.ones(3, dtype=torch.int64)}),
    "ids elsewhere": (errors.InvalidPayload, "'meta'", {IDS: torch.ones(1, 3, dtype=torch.int64, device="meta")}),
    "no token": (errors.InvalidPayload, "a token at least", {IDS: torch.ones(1, 0, dtype=torch.int64)}),
    "too many tokens": (errors.InvalidPayload, "size=65 limit=64", {IDS: torch.ones(1, 65, dtype=torch.int64)}),
    "embeds of another width": (errors.InvalidPayload, "size=31 limit=32", {EMBEDS: torch.zeros(1, 3, 31)}),
    "embeds of another dtype": (errors.InvalidPayload, "float64", {EMBEDS: torch.zeros(1, 3, 32).double()}),
    "embeds elsewhere": (errors.InvalidPayload, "'meta'", {EMBEDS: torch.zeros(1, 3, 32, device="meta")}),
    "embeds of two prompts": (errors.InvalidPayload, "prompts=2", {EMBEDS: torch.zeros(2, 3, 32)}),
    "embeds of no token": (errors.InvalidPayload, "a token at least", {EMBEDS: torch.zeros(1, 0, 32)}),
    "too many embeds": (errors.InvalidPayload, "size=65 limit=64", {EMBEDS: torch.zeros(1, 65, 32)}),
    "a seed in words": (errors.UsageError, "given=\"'x'\"", {"seed": "x"}),
    "a seed of more bits": (errors.UsageError, "64 bits", {"seed": 2**64}),
    "a seed of more bits below 0": (errors.UsageError, "64 bits", {"seed": -(2**63) - 1}),
    "a seed that is yes": (errors.UsageError, "given='True'", {"seed": True}),
    "no new tokens": (errors.UsageError, "max_new_tokens", {"max_new_tokens": 0}),
    "a name that is none": (errors.UsageError, "input_idz", {"input_idz": torch.ones(1, 3)}),
    "a cache of fixed length": (errors.UsageError, "fixed length", {"cache_implementation": "static"}),
    "pages": (errors.UsageError, "no such argument", {"cache_implementation": "paged"}),
}


@pytest.mark.parametrize(("kind", "words", "inputs"), BAD.values(), ids=BAD)
def test_a_request_that_cannot_run_is_refused_when_it_comes_and_nothing_of_it_is_kept(
    model: Any, kind: type[errors.ConnectorError], words: str, inputs: dict[str, Any]
) -> None:
    runner = HfStageRunner(model, exact=False)
    runner.add("a", input_ids=prompt("a"), **GREEDY)
    fed = {} if {IDS, EMBEDS, "inputs"} & set(inputs) else {IDS: prompt("b")}
    with Forwards(model) as rows, pytest.raises(errors.UsageError, match=words) as caught:
        runner.add("bad", **{**GREEDY, **fed, **inputs})
    assert type(caught.value) is kind
    assert caught.value.facts["rid"] == "bad"
    assert rows == []
    assert list(runner) == ["a"]
    runner.add("bad", input_ids=prompt("b"), **GREEDY)
    logits = run(runner)
    assert same(logits["a"], alone(model, "a"))
    assert same(logits["bad"], alone(model, "b"))
    assert runner.failures() == {}


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_every_seed_of_torch_is_one(model: Any, seed: int) -> None:
    runner = HfStageRunner(model)
    runner.add("a", input_ids=prompt("a"), **{**SAMPLED, "seed": seed})
    torch.manual_seed(seed)
    expected = model.generate(prompt("a"), **{**GREEDY, "do_sample": True})[0, LENGTHS["a"] :]
    assert [runner.step()["a"].token for _ in range(8)] == expected.tolist()


def test_an_id_whose_row_the_model_puts_in_itself_may_be_outside_its_vocabulary(model: Any) -> None:
    model.config.image_token_id = 100
    runner = HfStageRunner(model)
    runner.add("a", input_ids=torch.tensor([[5, 100]]), **GREEDY)
    with pytest.raises(errors.InvalidPayload, match="id=101"):
        runner.add("b", input_ids=torch.tensor([[100, 101]]), **GREEDY)


@pytest.mark.parametrize("layer", [3, -4, True, "1", 0.0], ids=repr)
def test_a_layer_that_the_model_has_not_is_refused_at_once(model: Any, layer: Any) -> None:
    with pytest.raises(errors.UsageError, match="layer"):
        HfStageRunner(model, layers=(0, layer))


def test_each_layer_of_the_model_can_be_asked_for(model: Any) -> None:
    runner = HfStageRunner(model, layers=range(-3, 3))
    runner.add("a", input_ids=prompt("a"), **GREEDY)
    hidden = runner.step()["a"].hidden
    assert [torch.equal(hidden[layer], hidden[layer + 3]) for layer in (-3, -2, -1)] == [True] * 3
    assert torch.equal(hidden[0], model.get_input_embeddings()(prompt("a")))


# -- what a forward raises ------------------------------------------------------------------------


def start(model: Any, exact: bool, **bad: Any) -> HfStageRunner:
    runner = HfStageRunner(model, exact=exact)
    for rid in LENGTHS:
        runner.add(rid, **{IDS: prompt(rid), **GREEDY, **(bad if rid == "bad" else {})})
    return runner


@EXACT
@pytest.mark.parametrize("position", [13, 14, 17], ids=["prompt", "first decode row", "later"])
def test_a_request_whose_forward_raises_fails_alone(model: Any, exact: bool, position: int) -> None:
    """In a packed forward, too, whose first layer has written into every cache."""
    expected = {rid: alone(model, rid) for rid in LENGTHS}
    breaks(model, position)
    runner = start(model, exact)
    logits = run(runner)
    failed = runner.failures()
    assert list(failed) == ["bad"]
    assert isinstance(failed["bad"], Boom)
    assert runner.failures() == {}, "told once"
    assert list(runner) == ["a", "b"]
    assert same(logits["a"], expected["a"])
    assert same(logits["b"], expected["b"])
    assert same(logits.get("bad", []), expected["bad"][: position - 13])


@EXACT
def test_the_rest_of_a_step_goes_on_in_order_behind_a_failure(model: Any, exact: bool) -> None:
    breaks(model, 14)
    runner = start(model, exact)
    assert list(runner.step(["b", "bad", "a"])) == ["b", "bad", "a"]
    assert list(runner.step(["b", "bad", "a"])) == ["b", "a"]
    with pytest.raises(errors.UnknownRequest):
        runner.step(["bad"])


def test_rows_that_were_run_alone_for_once_share_a_forward_again(model: Any) -> None:
    breaks(model, 14)
    runner = start(model, exact=False)
    runner.step()
    with Forwards(model) as rows:
        runner.step()
        runner.step()
    assert rows == [3, 1, 1, 1, 2], "all, each, and those that are left"


@EXACT
def test_when_every_row_raises_each_has_its_own_error(model: Any, exact: bool) -> None:
    runner = start(model, exact)
    runner.step()
    hook = breaks(model, *range(64))
    assert runner.step() == {}
    failed = runner.failures()
    assert set(failed) == set(LENGTHS)
    assert len(runner) == 0
    hook.remove()
    runner.add("a", input_ids=prompt("a"), **GREEDY)
    assert same(run(runner)["a"], alone(model, "a"))


def test_what_is_no_error_passes(model: Any) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    runner = start(model, exact=False)
    runner.step()
    model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        runner.step()


def raises(*args: Any, **kwargs: Any) -> Any:
    raise Boom("here")


def no_odds(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -torch.inf)


OWN: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "a processor": (Boom, {"logits_processor": [raises]}),
    "a criterion": (Boom, {"stopping_criteria": [raises]}),
    "no odds": (errors.InvalidPayload, {**SAMPLED, "logits_processor": [no_odds]}),
    "a mask of another length": (Exception, {"attention_mask": torch.tensor([[0, 0, 1]])}),
}


@EXACT
@pytest.mark.parametrize(("kind", "bad"), OWN.values(), ids=OWN)
def test_what_one_request_brings_along_fails_it_alone(
    model: Any, exact: bool, kind: type[Exception], bad: dict[str, Any]
) -> None:
    runner = start(model, exact, **bad)
    logits = run(runner)
    failed = runner.failures()
    assert list(failed) == ["bad"]
    assert isinstance(failed["bad"], kind)
    assert same(logits["a"], alone(model, "a"))
    assert same(logits["b"], alone(model, "b"))


FED: dict[str, Callable[[torch.Tensor], Any]] = {
    "another width": lambda row: row[..., 1:],
    "another dtype": lambda row: row.double(),
    "elsewhere": lambda row: row.to("meta"),
    "two tokens": lambda row: row.repeat(1, 2, 1),
    "two rows": lambda row: row.repeat(2, 1, 1),
    "no tensor": lambda row: row.tolist(),
    "no row": lambda row: None,
}


@EXACT
@pytest.mark.parametrize("bend", FED.values(), ids=FED)
def test_embeds_that_do_not_fit_fail_their_request_alone(
    model: Any, exact: bool, bend: Callable[[torch.Tensor], Any]
) -> None:
    runner = start(model, exact)
    tokens = {rid: torch.tensor([[output.token]]) for rid, output in runner.step().items()}
    rows = {rid: model.get_input_embeddings()(token) for rid, token in tokens.items()}
    rows["bad"] = bend(rows["bad"])
    results = runner.step(embeds=rows)
    failed = runner.failures()
    assert list(failed) == ["bad"]
    assert isinstance(failed["bad"], errors.InvalidPayload)
    assert failed["bad"].facts["rid"] == "bad"
    assert list(results) == ["a", "b"]
    assert torch.equal(results["a"].logits, alone(model, "a")[1])
    assert torch.equal(results["b"].logits, alone(model, "b")[1])


@EXACT
def test_of_a_request_that_failed_nothing_is_left(model: Any, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache, its ids and its generator go, although its error is kept."""
    # What pytest keeps of a log record are frames, and with them a step's tensors.
    monkeypatch.setattr(logging.getLogger("runner_adapter"), "disabled", True)
    runner = start(model, exact, **SAMPLED)
    kept: list[weakref.ref[Any]] = [weakref.ref(runner.generator("bad"))]

    def before(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        kept.extend(weakref.ref(value) for value in kwargs.values() if isinstance(value, torch.Tensor | Cache))

    model.register_forward_pre_hook(before, with_kwargs=True)
    breaks(model, 13)
    runner.step(["bad"])
    gc.collect()
    assert len(kept) > 2
    assert [ref() for ref in kept] == [None] * len(kept)
    assert list(runner.failures()) == ["bad"]


def test_a_failure_is_logged_with_the_rid(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    breaks(model, 13)
    start(model, exact=False).step()
    assert [(record.levelname, record.name) for record in caplog.records] == [("ERROR", "runner_adapter")]
    assert "'bad'" in caplog.text


def test_a_rid_that_failed_and_comes_again_is_a_new_request(model: Any) -> None:
    hook = breaks(model, 14)
    runner = start(model, exact=False)
    run(runner, 2)
    hook.remove()
    runner.add("bad", input_ids=prompt("bad"), **GREEDY)
    assert runner.failures() == {}, "the former one's is not told of this one"
    assert same(run(runner)["bad"], alone(model, "bad"))


# -- caches ---------------------------------------------------------------------------------------


def test_rows_of_a_sliding_window_are_not_packed_and_are_generate() -> None:
    """In the forward of one such row the library's attention has a mask, which packed rows have not."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval()
    runner = start(model, exact=False)
    with Forwards(model) as rows:
        logits = run(runner)
    assert rows == [1] * 24
    assert all(same(logits[rid], alone(model, rid)) for rid in LENGTHS)


ROPES: dict[str, tuple[bool, dict[str, Any]]] = {
    "of the longest row so far": (True, {"rope_type": "dynamic", "factor": 2.0}),
    "of the longest row": (
        False,
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "original_max_position_embeddings": 8,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    ),
}


@pytest.mark.parametrize(("exact", "rope"), ROPES.values(), ids=ROPES)
def test_rotations_that_come_from_other_requests_are_refused(exact: bool, rope: dict[str, Any]) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e4, **rope})).eval()
    with pytest.raises(errors.UsageError, match="rotations"):
        HfStageRunner(model, exact=exact)


def test_rotations_of_the_longest_row_are_its_own_in_a_forward_of_its_own() -> None:
    torch.manual_seed(0)
    rope = {"rope_theta": 1e4, **ROPES["of the longest row"][1]}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).eval()
    logits = run(start(model, exact=True))
    assert all(same(logits[rid], alone(model, rid)) for rid in LENGTHS)


def test_an_encoder_decoder_can_be_preempted_and_is_generate() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model: Any = T5ForConditionalGeneration(T5Config(vocab_size=100, **sizes)).eval()
    model.generation_config.decoder_start_token_id = 0
    runner = start(model, exact=True)
    outputs: dict[str, list[RowOutput]] = {rid: [] for rid in LENGTHS}
    for moment in range(10):
        if moment == 3:
            runner.preempt("a")
        rids = [rid for rid in LENGTHS if len(outputs[rid]) < 8 and not (rid == "a" and moment in (3, 4))]
        for rid, output in runner.step(rids).items():
            outputs[rid].append(output)
    for rid, made in outputs.items():
        assert same([output.logits for output in made], alone(model, rid))
