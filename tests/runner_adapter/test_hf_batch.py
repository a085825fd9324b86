"""Requests of a real architecture (a tiny Qwen3-Omni), run together, against the library's generate() for each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector import errors
from runner_adapter.adapters.transformers import HfStageRunner, HfTalker
from runner_adapter.adapters.transformers.packing import ByRow
from tests.runner_adapter.hf_omni import ACCEPTED, COMES, DEMO, Forwards, Models, Outputs, Talking, run, talk

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`:UserWarning"),
]


@pytest.fixture(scope="module")
def demo() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(DEMO))
    names = {"model": "omni_model", "stages": "omni_stages", "talker": "omni_talker", "pipelines": "pipelines"}
    yield SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})
    sys.path.remove(str(DEMO))


@pytest.fixture(scope="module")
def weights(demo: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    demo.model.save_weights(folder)
    return folder


@pytest.fixture(scope="module")
def models(demo: SimpleNamespace, weights: Path) -> Models:
    """In bfloat16, as the demo runs."""
    return Models(demo, weights)


EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "packed"])


@EXACT
def test_thinker_requests_that_come_wait_and_go_are_generate_bit_for_bit(models: Models, exact: bool) -> None:
    """Ids that were fed, embeds and hidden states; text, and image with audio: other lengths, other positions."""
    runner = HfStageRunner(models.thinker, exact=exact, layers=(0, ACCEPTED))
    outputs = run(runner, {rid: models.prompt(rid) for rid in COMES})
    for rid, rows in models.rows.items():
        assert len(outputs[rid]) == len(rows)
        for output, row in zip(outputs[rid], rows, strict=True):
            assert torch.equal(output.ids, row["ids"])
            assert torch.equal(output.hidden[0], row["embed"])
            assert torch.equal(output.hidden[ACCEPTED], row["hidden"])


@EXACT
def test_talker_requests_that_come_wait_and_go_draw_the_codes_of_generate(models: Models, exact: bool) -> None:
    """Sampled frames, and their residual codes: one call of the code predictor a step, or one a row."""
    talking = talk(models, exact)
    for rid in COMES:
        assert torch.equal(torch.stack(talking.codes[rid]), models.codes(rid)), rid


def test_a_product_by_row_has_the_bits_of_each_row_alone() -> None:
    """In float32, where the product of eight rows has others."""
    draw = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(*size, generator=draw) for size in ((8, 2, 48), (64, 48), (64,)))
    for inputs in ((rows, weight), (rows[:, 0], weight, bias)):
        alone = torch.cat([torch.nn.functional.linear(row, *inputs[1:]) for row in inputs[0].split(1)])
        with ByRow():
            assert torch.equal(torch.nn.functional.linear(*inputs), alone)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_a_grouped_product_by_row_gives_each_row_its_own_expert(experts: list[int]) -> None:
    """Any number of rows an expert, none among them."""
    experts.sort()
    draw = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(len(experts), 16, generator=draw), torch.randn(5, 16, 32, generator=draw)
    ends = torch.tensor([sum(expert <= last for expert in experts) for last in range(5)], dtype=torch.int32)
    with ByRow():
        got = torch.nn.functional.grouped_mm(rows, weights, offs=ends)
    torch.testing.assert_close(got, torch.stack([row @ weights[i] for row, i in zip(rows, experts, strict=True)]))


@pytest.mark.parametrize(("exact", "expected"), [(True, [1, 1, 1]), (False, [1, 2])])
def test_a_step_is_a_forward_a_prompt_and_one_for_all_decode_rows_unless_exact(
    models: Models, exact: bool, expected: list[int]
) -> None:
    runner = HfStageRunner(models.thinker, exact=exact)
    for rid in ("a", "b"):
        runner.add(rid, **models.prompt(rid))
    runner.step()
    runner.add("c", **models.prompt("c"))
    with Forwards(models.thinker) as rows:
        runner.step(["a", "c", "b"])
    assert rows == expected


def test_a_request_with_a_padded_prompt_is_not_packed_and_is_generate(models: Models) -> None:
    """Its mask is its own; the others' forward has none."""
    padded = models.prompt("a")
    padded |= {name: torch.nn.functional.pad(padded[name], (2, 0)) for name in ("input_ids", "attention_mask")}
    expected = models.thinker.generate(**padded)[0, padded["input_ids"].shape[1] :]
    runner = HfStageRunner(models.thinker, exact=False)
    for rid, prompt in {"padded": padded, "b": models.prompt("b"), "c": models.prompt("c")}.items():
        runner.add(rid, **prompt)
    tokens = [runner.step()["padded"].token]
    with Forwards(models.thinker) as rows:
        tokens += [runner.step()["padded"].token for _ in range(len(expected) - 1)]
    assert tokens == expected.tolist()
    assert rows[:4] == [1, 2, 1, 2]


def drawn(models: Models, seed: int, **sampling: Any) -> tuple[list[int], dict[str, Any]]:
    """What generate() draws for a sampled prompt with this seed, and the prompt."""
    inputs = {**models.prompt("b"), "do_sample": True, **sampling}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = models.thinker.generate(**inputs)
    return ids[0, inputs["input_ids"].shape[1] :].tolist(), inputs


SAMPLING = {
    "plain": {},
    "processed": {"repetition_penalty": 1.3, "top_k": 20, "temperature": 1.5, "suppress_tokens": list(range(50))},
    "ends": {"eos_token_id": list(range(40)), "min_new_tokens": 5, "pad_token_id": 0},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_each_sampled_request_draws_what_generate_draws_with_its_seed(models: Models, sampling: dict[str, Any]) -> None:
    """Two seeds in turns, with the library's processors, to the same end."""
    runner = HfStageRunner(models.thinker)
    expected = {}
    for rid, seed in (("one", 1), ("two", 2)):
        expected[rid], inputs = drawn(models, seed, **sampling)
        runner.add(rid, seed=seed, **inputs)
    tokens: dict[str, list[int]] = {"one": [], "two": []}
    before = torch.get_rng_state()
    for _ in range(max(map(len, expected.values()))):
        for rid, output in runner.step().items():
            tokens[rid].append(output.token)
    assert runner.step() == {}
    assert tokens == expected
    assert expected["one"] != expected["two"]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_greedy_talker_beside_a_sampled_one_is_greedy_in_all_its_codes(models: Models) -> None:
    """Greedy or not is kept on the module, by the request that was added last."""
    runner = HfStageRunner(models.talker, layers=(-1,))
    talking = Talking(models, runner, HfTalker(models.talker))
    greedy = talking.inputs("a", do_sample=False)
    trailing = torch.stack(talking.texts["a"][:-1], 1)
    library = models.talker.generate(
        **greedy,
        trailing_text_hidden=trailing,
        tts_pad_embed=talking.texts["a"][-1][:, None],
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    expected = torch.cat([states[-1] for states in library.hidden_states[1:]])
    runner.add("a", **greedy)
    runner.add("b", seed=models.requests["b"].seed, **talking.inputs("b"))
    outputs: Outputs = {"a": [], "b": []}
    for _ in range(8):
        embeds = {**talking.embeds("a", outputs, do_sample=False), **talking.embeds("b", outputs)}
        for rid, output in runner.step(embeds=embeds).items():
            outputs[rid].append(output)
    assert torch.equal(torch.stack(talking.codes["a"]), expected[:7])
    assert torch.equal(torch.stack(talking.codes["b"]), models.codes("b")[:7])


def test_a_preempted_request_waits_until_a_step_names_it(models: Models) -> None:
    runner = HfStageRunner(models.thinker)
    for rid in ("a", "b", "c"):
        runner.add(rid, **models.prompt(rid))
    runner.preempt("c")
    assert list(runner.step()) == ["a", "b"]
    runner.preempt("a")
    assert list(runner.step()) == ["b"]
    assert list(runner) == ["a", "b", "c"]
    assert list(runner.step(["c", "a"])) == ["c", "a"]
    assert list(runner.step()) == ["a", "b", "c"]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.sampled_from("abcd"), unique=True), st.sets(st.sampled_from("abcd"))), max_size=8)
)
def test_a_request_draws_the_same_in_any_schedule(models: Models, schedule: list[tuple[list[str], set[str]]]) -> None:
    """Steps of any requests in any order, and any of them preempted after each."""
    runner = HfStageRunner(models.thinker)
    tokens: dict[str, list[int]] = {}
    for rids, away in schedule:
        for rid in rids:
            if rid not in runner:
                runner.add(rid, **models.prompt(rid))
        for rid, output in runner.step(rids).items():
            tokens.setdefault(rid, []).append(output.token)
        for rid in away & set(runner):
            runner.preempt(rid)
    for rid, drawn_here in tokens.items():
        assert drawn_here == [int(row["ids"]) for row in models.rows[rid][1 : len(drawn_here) + 1]]


@pytest.mark.cuda
def test_on_a_device_a_preempted_cache_is_in_host_memory_and_the_ids_are_generate_s(
    demo: SimpleNamespace, weights: Path
) -> None:
    thinker = demo.model.load_part("thinker", weights)[0].to("cuda")
    prompts = {
        rid: {name: value.to("cuda") for name, value in demo.model.make_prompt(kind, 7).items()}
        for rid, kind in (("a", "text"), ("b", "image+audio"))
    }
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "use_audio_in_video": False}
    runner = HfStageRunner(thinker)
    for rid, prompt in prompts.items():
        runner.add(rid, **prompt, **greedy)
    tokens = {rid: [output.token] for rid, output in runner.step().items()}
    used = torch.cuda.memory_allocated()
    runner.preempt("a")
    assert torch.cuda.memory_allocated() < used
    for rids in [["b"]] * 3 + [["a"]] * 3 + [["a", "b"]] * 8:
        for rid, output in runner.step(rids).items():
            tokens[rid].append(output.token)
    for rid, prompt in prompts.items():
        expected = thinker.generate(**prompt, **greedy)[0, prompt["input_ids"].shape[1] :]
        assert tokens[rid] == expected.tolist()


def test_a_removed_rid_used_again_is_a_new_request(models: Models) -> None:
    """Nothing of the former one is left: not its cache, not its draws."""
    expected, inputs = drawn(models, 3)
    runner = HfStageRunner(models.thinker)
    for _ in range(2):
        runner.add("a", seed=3, **inputs)
        assert [runner.step()["a"].token for _ in range(5)] == expected[:5]
        runner.remove("a")
    assert "a" not in runner
    assert len(runner) == 0


def test_tokens_of_the_next_step_are_the_prompts_then_one(models: Models) -> None:
    runner = HfStageRunner(models.thinker)
    prompt = models.prompt("b")
    runner.add("b", **prompt)
    assert runner.tokens("b") == prompt["input_ids"].shape[1]
    output = runner.step()["b"]
    assert output.ids.shape[1] == prompt["input_ids"].shape[1]
    assert output.logits.shape == (1, models.config.thinker_config.text_config.vocab_size)
    assert output.logits.dtype == torch.float32
    assert output.hidden == {}
    assert runner.tokens("b") == 1
    assert runner.step()["b"].ids.tolist() == [[output.token]]
    embeds = models.thinker.get_input_embeddings()(prompt["input_ids"])
    runner.add("fed", inputs_embeds=embeds, max_new_tokens=2, do_sample=False)
    assert runner.tokens("fed") == embeds.shape[1]
    assert runner.step(["fed"])["fed"].ids is None


TWO = {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "there already": ("there already", {}),
    "two prompts": ("one prompt", {**TWO, "attention_mask": torch.ones(2, 3, dtype=torch.int64)}),
    "two sequences": ("one prompt", {"num_return_sequences": 2, "do_sample": True, "seed": 1}),
    "beams": ("greedy and sampled", {"num_beams": 2}),
    "chunks": ("one forward", {"prefill_chunk_size": 4}),
    "no cache": ("its cache", {"use_cache": False}),
    "no seed": ("needs a seed", {"do_sample": True}),
    "a streamer": ("no such argument", {"streamer": object()}),
}


@pytest.mark.parametrize(("words", "inputs"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_step_by_step_is_refused(models: Models, words: str, inputs: dict[str, Any]) -> None:
    runner = HfStageRunner(models.thinker)
    runner.add("a", **models.prompt("a"))
    prompt = models.prompt("a")
    if inputs:
        prompt = {name: value for name, value in prompt.items() if name != "attention_mask"} | inputs
    with pytest.raises(errors.UsageError, match=words) as caught:
        runner.add("b" if inputs else "a", **prompt)
    assert caught.value.facts["rid"] == ("b" if inputs else "a")
    assert list(runner) == ["a"]


WRONG_STEPS: dict[str, tuple[type[errors.ConnectorError], list[str], dict[str, tuple[int, ...]]]] = {
    "twice": (errors.UsageError, ["a", "a"], {}),
    "unknown": (errors.UnknownRequest, ["a", "x"], {}),
    "ended": (errors.UsageError, ["a", "ended"], {}),
    "embeds for a prompt": (errors.UsageError, ["a", "new"], {"new": (1, 1, 48)}),
    "embeds for another": (errors.UsageError, ["a"], {"x": (1, 1, 48)}),
    "no embeds": (errors.UsageError, ["a", "fed"], {}),
}


@pytest.mark.parametrize(("kind", "rids", "shapes"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_a_wrong_step_is_refused_before_anything_is_done(
    models: Models, kind: type[errors.ConnectorError], rids: list[str], shapes: dict[str, tuple[int, ...]]
) -> None:
    runner = HfStageRunner(models.thinker)
    ids = models.prompt("a")["input_ids"]
    runner.add("a", **models.prompt("a"))
    runner.add("fed", inputs_embeds=models.thinker.get_input_embeddings()(ids), max_new_tokens=4, do_sample=False)
    runner.add("ended", **{**models.prompt("b"), "max_new_tokens": 1})
    runner.step()
    runner.add("new", **models.prompt("c"))
    embeds = {rid: torch.zeros(shape, dtype=torch.bfloat16) for rid, shape in shapes.items()}
    with Forwards(models.thinker) as rows, pytest.raises(kind):
        runner.step(rids, embeds=embeds)
    assert rows == []


@pytest.mark.parametrize("call", [HfStageRunner.remove, HfStageRunner.preempt, HfStageRunner.generator])
def test_a_rid_that_is_not_there_is_unknown(models: Models, call: Callable[[HfStageRunner, str], object]) -> None:
    with pytest.raises(errors.UnknownRequest):
        call(HfStageRunner(models.thinker), "x")


def test_packed_rows_want_the_attention_that_can_be_cut(demo: SimpleNamespace, weights: Path) -> None:
    thinker, _ = demo.model.load_part("thinker", weights)
    thinker.set_attn_implementation("eager")
    with pytest.raises(errors.UsageError) as caught:
        HfStageRunner(thinker, exact=False)
    assert caught.value.facts["attention"] == "eager"
    HfStageRunner(thinker)


@EXACT
def test_a_row_of_the_talker_draws_what_it_draws_alone(models: Models, exact: bool) -> None:
    """In any order of rows; and its generator goes on from call to call."""
    talker = HfTalker(models.talker, exact=exact)
    ids = torch.tensor([3, 3, 5], dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)
    hidden, text = torch.randn(2, 3, talker.mtp_hidden_size, generator=draw).to(torch.bfloat16)

    def frames(*rows: int) -> dict[int, list[int]]:
        own = [torch.Generator().manual_seed(row) for row in rows]
        order = list(rows)
        calls = [talker.talker_mtp(ids[order], None, hidden[order], text[order], generators=own)[1] for _ in range(2)]
        return dict(zip(rows, torch.cat(calls, 1).tolist(), strict=True))

    alone = frames(0) | frames(1) | frames(2)
    groups = models.config.talker_config.num_code_groups
    assert [codes[0] for codes in alone.values()] == ids.tolist()
    assert all(codes[:groups] != codes[groups:] for codes in alone.values())
    assert frames(2, 0, 1) == alone
    assert frames(1, 2) == {1: alone[1], 2: alone[2]}


def test_the_talker_wants_a_generator_a_row(models: Models) -> None:
    talker = HfTalker(models.talker)
    rows = torch.zeros(2, talker.mtp_hidden_size, dtype=torch.bfloat16)
    with pytest.raises(errors.UsageError, match="one generator"):
        talker.talker_mtp(torch.zeros(2, dtype=torch.int32), None, rows, rows, generator=torch.Generator())
