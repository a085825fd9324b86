"""talker_mtp: which rows are called together, what they are given, and whose generator they draw from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.hooks import MtpInput
from runner_adapter.plan import StepPlan
from runner_adapter.talker import Talker
from tests.runner_adapter.models import WIDTH, TalkingModel, flat


class ListModel(TalkingModel):
    talker_mtp_accepts_per_row_generators = True


class Stage:
    """A talker and its buffer over any number of steps; each step's decode rows have one token each."""

    def __init__(self, model: object | None = None, max_rows: int = 8, **more: Any) -> None:
        self.model = TalkingModel() if model is None else model
        self.talker = Talker(self.model, max_rows=max_rows, dtype=torch.float32, device="cpu", **more)
        self.buffer = ModelIntermediateBuffer()
        self.failures: dict[str, Exception] = {}
        self.embeds = torch.empty(0)

    def step(self, rids: Sequence[str], seeds: Mapping[str, int] | None = None, prompt: int = 0) -> Stage:
        """Token n has the id n, embeds 10n, hidden 100n, text_step 1000n; a prompt of `prompt` tokens comes first."""
        counts = {"prompt": prompt, **dict.fromkeys(rids, 1)}
        plan = StepPlan.make(counts, counts, prefill={"prompt"})
        for rid in rids:
            if rid not in self.buffer:
                self.buffer.add(rid, {"meta": {"kept": torch.tensor(1)}})
        numbers = torch.arange(plan.tokens)
        self.embeds = wide(numbers * 10)
        inputs = [MtpInput(row, wide(numbers * 100)[row.start, None], wide(numbers * 1000)[row.start, None])
                  for row in plan.decode]  # fmt: skip
        self.run(inputs, numbers, seeds)
        return self

    def run(self, inputs: Sequence[MtpInput], ids: torch.Tensor, seeds: Mapping[str, int] | None = None) -> None:
        self.talker.run(inputs, self.buffer, ids, self.embeds, seeds=seeds, failures=self.failures)

    def codes(self, rid: str) -> list[int]:
        """The request's codes: its token's id and what was drawn for it."""
        [row] = self.buffer.nested(rid)["codes"]["audio"].tolist()
        return row

    @property
    def column(self) -> list[float]:
        return self.embeds[:, 0].tolist()


def wide(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.float()[:, None].repeat(1, WIDTH)


def columns(inputs: tuple[torch.Tensor, ...]) -> list[list[float]]:
    """Ids, and the first columns of the others."""
    return [part.tolist() if part.ndim == 1 else part[:, 0].tolist() for part in inputs]


def draws_alone(seed: int, steps: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(10**9, (1,), generator=generator)) for _ in range(steps)]


# -- packing ------------------------------------------------------------------------------------


def test_decode_rows_are_packed_in_row_order_and_called_once() -> None:
    stage = Stage().step(["b", "a", "c"], prompt=2)
    [(inputs, keywords)] = stage.model.batches
    assert columns(inputs) == [[2, 3, 4], [20, 30, 40], [200, 300, 400], [2000, 3000, 4000]]
    assert [(part.dtype, part.shape[1:]) for part in inputs] == [
        (torch.int32, ()),
        *[(torch.float32, (WIDTH,))] * 3,
    ]
    assert keywords == {}


def test_each_rows_embeds_go_to_its_token_and_no_other() -> None:
    stage = Stage().step(["b", "a", "c"], prompt=2)
    assert stage.column == [0, 10, 2020, 3030, 4040]


def test_each_rows_codes_merge_into_its_map() -> None:
    stage = Stage().step(["b", "a"], prompt=2)
    assert [stage.codes(rid)[0] for rid in "ba"] == [2, 3]
    assert stage.buffer.nested("a")["codes"]["audio"].shape == (1, 2)
    assert stage.buffer.nested("a")["meta"]["kept"] == 1


def test_the_buffers_keep_their_addresses() -> None:
    """A captured graph reads them there, however many rows a step has, and for a call of one row as well."""
    stage = Stage()
    for rids, seeds in ((["a"], {}), (["a", "b", "c"], {"b": 1}), (["c", "b"], {})):
        stage.step(rids, seeds)
    talker = stage.talker
    mine = [part.data_ptr() for part in (talker.input_ids, talker.inputs_embeds, talker.last_hidden, talker.text_step)]
    assert stage.model.addresses == [tuple(mine)] * 4


def test_a_padded_call_has_the_captured_size_and_zeros_behind_its_rows() -> None:
    """Not what an earlier, larger step left there."""
    stage = Stage(padded=lambda rows: 4)
    stage.step(["a", "b", "c", "d"], prompt=1).step(["b"], prompt=1)
    assert columns(stage.model.batches[1][0]) == [[1, 0, 0, 0], [10, 0, 0, 0], [100, 0, 0, 0], [1000, 0, 0, 0]]
    assert stage.column == [0, 1010]
    assert stage.codes("b")[0] == 1


@pytest.mark.parametrize("size", [1, 9])
def test_a_padded_size_that_does_not_hold_the_rows_or_fit_the_buffers_is_the_runners_fault(size: int) -> None:
    with pytest.raises(errors.UsageError, match=f"rows=2 size={size} limit=8"):
        Stage(padded=lambda rows: size).step(["a", "b"])


def test_a_step_that_does_not_fit_the_buffers_is_the_runners_fault() -> None:
    with pytest.raises(errors.UsageError, match="rows=3 max_rows=2"):
        Stage(max_rows=2).step(["a", "b", "c"])
    model = TalkingModel()
    model.mtp_hidden_size = WIDTH + 1
    with pytest.raises(errors.UsageError, match=f"width={WIDTH} buffer_width={WIDTH + 1}"):
        Stage(model).step(["a"])


def test_a_step_without_decode_rows_calls_nothing() -> None:
    stage = Stage().step([], prompt=2)
    assert stage.model.batches == []
    stage.talker.run([], stage.buffer, torch.tensor([1]), None, failures={})
    assert stage.model.batches == []


def test_sampling_is_given_as_it_is() -> None:
    stage = Stage(sampling={"top_k": 50, "temperature": None}).step(["a"], {"a": 1})
    keywords = dict(stage.model.batches[0][1])
    del keywords["generator"]
    assert keywords == {"top_k": 50, "temperature": None}


def test_inputs_of_another_dtype_are_converted() -> None:
    stage = Stage()
    stage.buffer.add("a")
    stage.embeds = wide(torch.tensor([1])).bfloat16()
    row = StepPlan.make(["a"], {"a": 1}).decode[0]
    stage.run([MtpInput(row, wide(torch.tensor([2])).half(), wide(torch.tensor([3])).double())], torch.tensor([7]))
    assert columns(stage.model.batches[0][0]) == [[7], [1], [2], [3]]
    assert (stage.embeds.dtype, stage.column) == (torch.bfloat16, [4])


def test_a_warm_up_calls_zeros_without_a_request() -> None:
    """At the captured size, whatever the last step left."""
    stage = Stage(padded=lambda rows: 4, sampling={"top_k": 50})
    stage.step(["a", "b"])
    stage.talker.warm_up(3)
    assert columns(stage.model.batches[1][0]) == [[0, 0, 0, 0]] * 4
    assert stage.model.batches[1][1] == {"top_k": 50}
    with pytest.raises(errors.UsageError, match="rows=0"):
        stage.talker.warm_up(0)


# -- generators ---------------------------------------------------------------------------------


def test_a_seeded_request_is_called_alone_and_the_others_together() -> None:
    """In the order of each call's first row."""
    stage = Stage().step(["a", "b", "c", "d", "e"], {"a": 1, "d": 2})
    assert [columns(inputs)[0] for inputs, _ in stage.model.batches] == [[0], [1, 2, 4], [3]]
    seeds = [g["generator"].initial_seed() if g else None for _, g in stage.model.batches]
    assert seeds == [1, None, 2]
    assert stage.column == [0, 1010, 2020, 3030, 4040]


@pytest.mark.parametrize("model", [TalkingModel, ListModel])
def test_a_request_draws_from_its_own_seed_whoever_is_beside_it(model: type[TalkingModel]) -> None:
    """Also with the same seed as another."""
    stage = Stage(model())
    seeds = {"a": 11, "b": 22, "c": 11}
    drawn: dict[str, list[int]] = {rid: [] for rid in "abc"}
    for rids in (["a", "u"], ["b", "a", "c", "u"], ["c", "b"], ["u", "a", "b"], ["b"], ["c", "a"]):
        stage.step(rids, seeds)
        for rid in set(rids) & set(drawn):
            drawn[rid].append(stage.codes(rid)[1])
    assert drawn == {rid: draws_alone(seed, 4 if rid != "c" else 3) for rid, seed in seeds.items()}


@given(st.lists(st.lists(st.sampled_from("abcde"), unique=True, min_size=1), max_size=6), st.booleans())
def test_no_batch_changes_what_a_seeded_request_draws(steps: list[list[str]], takes_a_list: bool) -> None:
    stage = Stage(ListModel() if takes_a_list else TalkingModel())
    seeds = {"a": 0, "b": 2**64 - 1, "c": -(2**63), "d": 0}
    drawn: dict[str, list[int]] = {}
    for rids in steps:
        stage.step(rids, seeds)
        for rid in rids:
            drawn.setdefault(rid, []).append(stage.codes(rid)[1])
    assert stage.failures == {}
    assert {r: n for r, n in drawn.items() if r in seeds} == {
        rid: draws_alone(seeds[rid], sum(rid in rids for rids in steps)) for rid in drawn.keys() & seeds
    }


def test_a_model_that_takes_a_list_is_called_once_with_a_generator_a_row() -> None:
    stage = Stage(ListModel(), padded=lambda rows: 8).step(["a", "b", "c"], {"b": 1, "c": 2})
    [(inputs, keywords)] = stage.model.batches
    assert len(inputs[0]) == 3
    assert [one and one.initial_seed() for one in keywords["generators"]] == [None, 1, 2]
    stage.step(["b"], {"b": 1})
    assert stage.model.batches[1][1]["generator"] is keywords["generators"][1]


def test_a_call_with_a_generator_is_not_padded() -> None:
    """Padded rows would draw from the request's stream."""
    stage = Stage(padded=lambda rows: 8).step(["a", "b"], {"b": 1})
    assert stage.model.sizes == [8, 1]


@pytest.mark.parametrize("model", [TalkingModel, ListModel])
def test_a_finished_requests_generator_goes(model: type[TalkingModel]) -> None:
    """The same id again is another request: its stream starts anew."""
    stage = Stage(model())
    drawn = []
    for _ in range(2):
        drawn.append(stage.step(["a"], {"a": 5}).codes("a")[1])
    stage.talker.finish(["a", "never seen"])
    drawn.append(stage.step(["a"], {"a": 5}).codes("a")[1])
    first, second = draws_alone(5, 2)
    assert drawn == [first, second, first]


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "1", True])
def test_a_seed_that_no_generator_takes_fails_its_request_only(seed: Any) -> None:
    stage = Stage().step(["a", "b", "c"], {"b": seed})
    assert list(stage.failures) == ["b"]
    assert type(stage.failures["b"]) is errors.InvalidPayload and "rid='b'" in str(stage.failures["b"])
    assert stage.column == [0, 10, 2020]
    assert [stage.codes(rid)[0] for rid in "ac"] == [0, 2]


def test_a_request_draws_from_the_engines_own_generator_where_it_has_one() -> None:
    """As it stands, whatever was drawn from it elsewhere; its seed is not looked at, and nothing of it is kept here."""
    engine = {"a": torch.Generator().manual_seed(5), "b": None, "c": None}
    stage = Stage(generator_of=engine.get)
    draws_elsewhere = int(torch.randint(10**9, (1,), generator=engine["a"]))
    drawn = []
    for _ in range(2):
        stage.step(["a", "b", "c"], {"a": 99, "b": 7})
        drawn.append([stage.codes(rid)[1] for rid in "ab"])
        stage.talker.finish(["a"])
    first, *others = draws_alone(5, 3)
    assert first == draws_elsewhere
    assert drawn == [list(pair) for pair in zip(others, draws_alone(7, 2), strict=True)]
    assert stage.model.sizes == [1, 1, 1] * 2


def test_an_engine_that_does_not_know_a_request_fails_that_request_only() -> None:
    def of(rid: str) -> torch.Generator | None:
        if rid == "b":
            raise errors.UnknownRequest("the runner has no such request", rid=rid)
        return None

    stage = Stage(generator_of=of).step(["a", "b", "c"])
    assert {rid: type(error) for rid, error in stage.failures.items()} == {"b": errors.UnknownRequest}
    assert stage.column == [0, 10, 2020]


# -- failures -----------------------------------------------------------------------------------


class Breaks(TalkingModel):
    """The call raises if the id 1 is in it, after it wrote into its embeds."""

    def talker_mtp(self, ids: torch.Tensor, embeds: torch.Tensor, *more: Any, **keywords: Any) -> Any:
        given = super().talker_mtp(ids, embeds, *more, **keywords)
        if 1 in ids:
            embeds.fill_(-1)
            raise ValueError("no such code")
        return given


def test_a_call_that_raises_fails_its_rows_and_not_the_step(caplog: pytest.LogCaptureFixture) -> None:
    """And is logged once."""
    stage = Stage(Breaks())
    with caplog.at_level(logging.DEBUG, "runner_adapter"):
        stage.step(["a", "b", "c"], {"c": 1})
    assert {rid: str(error) for rid, error in stage.failures.items()} == {"a": "no such code", "b": "no such code"}
    assert stage.column == [0, 10, 2020]
    assert [flat(stage.buffer.nested(rid)) for rid in "ab"] == [{"meta": {"kept": 1}}] * 2
    assert stage.codes("c") == [2, draws_alone(1, 1)[0]]
    assert [record.getMessage() for record in caplog.records] == [
        "talker_mtp failed for request 'a', 'b': no such code"
    ]


def test_a_seeded_requests_call_that_raises_is_its_own_failure() -> None:
    stage = Stage(Breaks()).step(["a", "b", "c"], {"b": 1})
    assert list(stage.failures) == ["b"]
    assert stage.column == [0, 10, 2020]


def test_codes_that_the_buffer_refuses_fail_their_request_only() -> None:
    """Its embeds stay: they belong to the codes."""
    stage = Stage()
    stage.step(["a", "b", "c"])
    stage.buffer = refusing = Refusing(stage.buffer)  # type: ignore[assignment]
    stage.step(["a", "b", "c"])
    assert stage.failures == {"b": refusing.error}
    assert stage.column == [0, 10, 2020]


class Refusing:
    """A buffer that refuses b's updates."""

    def __init__(self, buffer: ModelIntermediateBuffer) -> None:
        self._buffer = buffer
        self.error = errors.InvalidPayload("no more of b", rid="b")

    def __contains__(self, rid: object) -> bool:
        return rid in self._buffer

    def nested(self, rid: str) -> dict[str, Any]:
        return self._buffer.nested(rid)

    def merge(self, rid: str, update: Mapping[str, Any]) -> None:
        if rid == "b":
            raise self.error
        self._buffer.merge(rid, update)


def test_all_refused_codes_leave_all_embeds(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    stage.step(["b"])
    stage.buffer = Refusing(stage.buffer)  # type: ignore[assignment]
    stage.step(["b"], prompt=1)
    assert list(stage.failures) == ["b"]
    assert stage.column == [0, 10]
    assert [record.getMessage() for record in caplog.records] == [
        "talker_mtp failed for request 'b': no more of b [rid='b']"
    ]


def test_predicted_embeds_have_no_gradient() -> None:
    class Learns(TalkingModel):
        def talker_mtp(self, *given: Any, **keywords: Any) -> Any:
            embeds, codes = super().talker_mtp(*given, **keywords)
            return embeds.requires_grad_() * 2, codes

    stage = Stage(Learns()).step(["a", "b"])
    assert (stage.embeds.requires_grad, stage.column) == (False, [0, 2020])


def test_inputs_of_another_width_fail_their_request_only() -> None:
    stage = Stage()
    plan = StepPlan.make(["a", "b", "c"], dict.fromkeys("abc", 1))
    for rid in "abc":
        stage.buffer.add(rid)
    stage.embeds = wide(torch.arange(3))
    good, narrow = torch.zeros(1, WIDTH), torch.zeros(1, WIDTH - 1)
    parts = zip(plan.decode, [(good, good), (narrow, good), (good, narrow)], strict=True)
    stage.run([MtpInput(row, *two) for row, two in parts], torch.arange(3))
    assert list(stage.failures) == ["b", "c"]
    assert all(f"size={WIDTH - 1} limit={WIDTH}" in str(error) for error in stage.failures.values())
    assert [columns(inputs)[0] for inputs, _ in stage.model.batches] == [[0]]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (torch.zeros(2, WIDTH),),
        (torch.zeros(2, WIDTH), None),
        (torch.zeros(1, WIDTH), torch.zeros(2, 3)),
        (torch.zeros(2, WIDTH), torch.zeros(1, 3)),
        (torch.zeros(2, WIDTH + 1), torch.zeros(2, 3)),
        (torch.zeros(2, 1, WIDTH), torch.zeros(2, 3)),
    ],
)
def test_a_result_that_does_not_fit_fails_the_calls_rows(answer: object) -> None:
    class Wrong:
        mtp_hidden_size = WIDTH

        def talker_mtp(self, *given: Any) -> object:
            return answer

    stage = Stage(Wrong()).step(["a", "b"])
    assert {rid: type(error) for rid, error in stage.failures.items()} == dict.fromkeys("ab", errors.InvalidPayload)
    assert stage.column == [0, 10]


def test_a_request_that_failed_already_is_not_called() -> None:
    stage = Stage()
    stage.failures["b"] = first = ValueError("earlier")
    stage.step(["a", "b"])
    assert columns(stage.model.batches[0][0])[0] == [0]
    assert stage.failures == {"b": first}


# -- the model ----------------------------------------------------------------------------------


def test_codes_merge_under_the_models_own_key() -> None:
    class Speech(TalkingModel):
        talker_mtp_output_key = ("speech", "units")

    stage = Stage(Speech()).step(["a"])
    assert stage.buffer.nested("a")["speech"]["units"][0, 0] == 0
    assert "codes" not in stage.buffer.nested("a")


@pytest.mark.parametrize("key", ["codes", ["codes", "audio"], ("codes",), ("codes", "audio", "x"), ("codes", 1), None])
def test_an_output_key_that_is_no_pair_is_a_type_error_at_construction(key: object) -> None:
    model = TalkingModel()
    model.talker_mtp_output_key = key  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"^talker_mtp_output_key must be a tuple of two str"):
        Stage(model)


def test_the_width_is_the_models_or_else_the_engines() -> None:
    """The model's own wins (runner)."""

    class Plain:
        def talker_mtp(self) -> None: ...

    assert Stage(Plain(), hidden_size=6).talker.width == 6
    assert Stage(TalkingModel(), hidden_size=6).talker.width == WIDTH
    with pytest.raises(errors.UsageError, match="Plain.*width=0"):
        Stage(Plain())


def test_a_model_without_a_talker_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="callable talker_mtp"):
        Stage(object(), hidden_size=6)
    with pytest.raises(errors.UsageError, match="max_rows=0"):
        Stage(TalkingModel(), max_rows=0)
