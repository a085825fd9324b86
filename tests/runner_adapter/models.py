"""Small models with hooks, which keep what they were given, and a step around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.hooks import Extras, Hooks, MtpInputs
from runner_adapter.plan import StepPlan

#: Columns of embeds and hidden states.
WIDTH = 4

#: Three requests: two tokens of a prompt, one token, three tokens; and one token of padding.
COUNTS = {"a": 2, "b": 1, "c": 3}
IDS = [10, 11, 20, 30, 31, 32, 0]

Given = dict[str, Any]


class HookModel:
    """Calls what the test gives for each rid, or else `usual`; `calls` holds each call's keywords."""

    has_preprocess = True
    has_postprocess = True

    def __init__(self, **own: Callable[[Given], Any]) -> None:
        self.own = own
        self.calls: list[Given] = []

    def preprocess(self, **given: Any) -> Any:
        self.calls.append(given)
        return self.own.get(given["request_id"], usual)(given)

    def postprocess(self, hidden: torch.Tensor, **given: Any) -> Any:
        self.calls.append({"hidden": hidden, **given})
        return self.own.get(given["request_id"], kept_last)(self.calls[-1])

    @property
    def called(self) -> list[str]:
        return [given["request_id"] for given in self.calls]


class TalkingModel(HookModel):
    """Also predicts codes for decode rows: embeds + text_step, and (id, a draw) as each row's codes."""

    mtp_hidden_size = WIDTH

    def __init__(self, **own: Callable[[Given], Any]) -> None:
        super().__init__(**own)
        #: The batched calls: copies of the four inputs, and the keywords.
        self.batches: list[tuple[tuple[torch.Tensor, ...], Given]] = []
        self.addresses: list[tuple[int, ...]] = []

    def talker_mtp(
        self, ids: torch.Tensor, embeds: torch.Tensor, hidden: torch.Tensor, text_step: torch.Tensor, **given: Any
    ) -> Any:
        inputs = (ids, embeds, hidden, text_step)
        self.batches.append((tuple(part.clone() for part in inputs), given))
        self.addresses.append(tuple(part.data_ptr() for part in inputs))
        if "generators" in given:
            draws = torch.cat([torch.randint(10**9, (1,), generator=one) for one in given["generators"]])
        else:
            draws = torch.randint(10**9, ids.shape, generator=given.get("generator"))
        return embeds + text_step, torch.stack([ids.long(), draws], dim=1)

    @property
    def sizes(self) -> list[int]:
        """Rows of each batched call."""
        return [len(inputs[0]) for inputs, _ in self.batches]


def usual(given: Given) -> Any:
    """Ids one higher, each token's id as its embed, and how many tokens there were."""
    ids = given["input_ids"]
    return ids + 1, embeds_of(ids), {"meta": {"seen": torch.tensor(len(ids))}}


def kept_last(given: Given) -> Any:
    """The last hidden state, where preprocess of the next step finds it."""
    return {"hidden_states": {"last": given["hidden"][-1]}}


def embeds_of(ids: torch.Tensor) -> torch.Tensor:
    """[n, WIDTH]: each id in every column."""
    return ids.float()[:, None].repeat(1, WIDTH)


def gives(answer: Any) -> Callable[[Given], Any]:
    return lambda given: answer


def raises(error: BaseException) -> Callable[[Given], Any]:
    def hook(given: Given) -> Any:
        raise error

    return hook


def talks(hidden: float, step: float, **update: Any) -> Callable[[Given], Any]:
    """As `usual`, with mtp_inputs full of these two numbers."""

    def hook(given: Given) -> Any:
        ids, embeds, mine = usual(given)
        row = torch.ones(1, WIDTH)
        return ids, embeds, {**mine, **update, "mtp_inputs": (row * hidden, row * step)}

    return hook


def flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as lists, so that maps compare."""
    return {k: flat(v) if isinstance(v, Mapping) else v.tolist() for k, v in nested.items()}


class Step:
    """One step of a model over COUNTS; what came of it."""

    def __init__(self, model: object, maps: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.hooks = Hooks(model)
        self.plan = StepPlan.make(COUNTS, COUNTS, prefill={"a", "c"}, padded_tokens=7)
        self.buffer = ModelIntermediateBuffer()
        for rid in COUNTS:
            self.buffer.add(rid, (maps or {}).get(rid))
        self.failures: dict[str, Exception] = {}
        self.ids = torch.tensor(IDS)
        self.embeds: torch.Tensor | None = torch.full((7, WIDTH), -1.0)
        self.mtp: MtpInputs = []

    def preprocess(self, extras: Extras | None = None) -> Step:
        self.ids, self.embeds, self.mtp = self.hooks.preprocess(
            self.plan, self.buffer, self.ids, self.embeds, extras=extras, failures=self.failures
        )
        return self

    def postprocess(self, outputs: object = None, **more: Any) -> Step:
        hidden = torch.arange(7.0)[:, None].repeat(1, WIDTH)
        self.hooks.postprocess(self.plan, self.buffer, hidden, outputs, failures=self.failures, **more)
        return self

    def map(self, rid: str) -> dict[str, Any]:
        return flat(self.buffer.nested(rid))

    @property
    def column(self) -> list[float]:
        """The first column of the embeds."""
        assert self.embeds is not None
        return self.embeds[:, 0].tolist()
