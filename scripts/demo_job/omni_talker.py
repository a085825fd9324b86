"""The talker's part of a request: codec frames sampled while the thinker's rows still come in.

`talk` is the library's own loop, for one request alone. `TalkerModel` is the same talker as a stage's model: a
RunnerAdapter calls its hooks for each row of a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from omni_model import SPEAKER
from omni_runner import EXACT
from pipelines import Request
from transformers import Qwen3OmniMoeForConditionalGeneration as Omni
from transport import Tensors

from connector import errors
from runner_adapter.adapters.transformers import HfStageRunner, HfTalker

LEAST_FRAMES, MOST_FRAMES = Request.frames
#: Rows of the talker's prompt for the assistant's turn: three of its own, and six that say how to speak.
ASSISTANT_ROWS = 9

Emit = Callable[[Tensors], None]

# The talker is driven by embeddings, as the library itself drives it: there is no prompt to penalise.
warnings.filterwarnings("ignore", "Passing `repetition_penalty` with `inputs_embeds`", UserWarning)


class TrailingRows:
    """What the talker adds to its steps: one row per thinker row, then the end row; fetched when first asked for.

    The library compares a step with `.shape[1]` and then reads `[:, step]`, as of a tensor [1, rows, width].
    """

    def __init__(self, rows: Iterator[torch.Tensor], end: torch.Tensor) -> None:
        self._source = rows
        self._end: torch.Tensor | None = end
        self._rows: list[torch.Tensor] = []

    @property
    def shape(self) -> tuple[int, TrailingRows]:
        """Its second number is not known yet: comparing with it fetches."""
        return 1, self

    def __gt__(self, step: int) -> bool:
        while len(self._rows) <= step:
            row = next(self._source, None)
            if row is None:
                # The end row is given once, after the last row.
                row, self._end = self._end, None
            if row is None:
                return False
            self._rows.append(row)
        return True

    def __getitem__(self, at: tuple[slice, int]) -> torch.Tensor:
        return self._rows[at[1]]


def _spoken(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """Which of the thinker's prompt ids [prompt] the talker's prompt has a row for: those of the user's turns."""
    turns = [i for i, token in enumerate(ids.tolist()) if token == config.im_start_token_id]
    spoken = torch.zeros(len(ids), dtype=torch.bool)
    for start, stop in zip(turns, [*turns[1:], len(ids)], strict=True):
        spoken[start:stop] = int(ids[start + 1]) == config.user_token_id
    return spoken


def prompt_rows(config: Any, ids: torch.Tensor) -> int:
    """How many rows the talker's prompt has, of the thinker's prompt ids [prompt]."""
    return int(_spoken(config, ids).sum()) + ASSISTANT_ROWS


def _talker_inputs(talker: Any, config: Any, prompt: Tensors, first: Tensors) -> dict[str, Any]:
    """The talker's prefill, from the prompt's rows and the first generated one."""
    # The library's own helpers ask no more of the whole model than this.
    library: Any = SimpleNamespace(config=config, talker=talker)
    ids = prompt["ids"]
    length = ids.shape[1]
    whole = config.thinker_config
    media = torch.isin(ids, torch.tensor([whole.audio_token_id, whole.image_token_id, whole.video_token_id]))
    user = Omni._get_talker_user_parts(library, 0, length, media, prompt["hidden"], prompt["embed"])
    spoken = _spoken(config, ids[0])
    bos, eos, pad = talker.text_projection(prompt["special"]).chunk(3, 1)
    answer, answer_ids, _ = Omni._get_talker_assistant_parts(
        library,
        int((ids[0] == config.im_start_token_id).nonzero()[-1]),
        length + 1,
        config.talker_config.speaker_id[SPEAKER],
        torch.cat((prompt["embed"], first["embed"]), 1),
        pad,
        bos,
        eos,
    )
    embeds = torch.cat((user[:, spoken], answer), 1)
    return {
        "inputs_embeds": embeds,
        "talker_input_ids": torch.cat((ids[:, spoken], answer_ids), 1),
        "attention_mask": torch.ones(embeds.shape[:2], dtype=torch.int64),
        "tts_pad_embed": pad,
        "eos": eos,
    }


def sampling(config: Any, frames: tuple[int, int]) -> dict[str, Any]:
    """generate()'s arguments for the talker: the model's own usual ones, and the fewest and the most steps."""
    size, eos = config.talker_config.text_config.vocab_size, config.talker_config.codec_eos_token_id
    return {
        "min_new_tokens": frames[0],
        "max_new_tokens": frames[1],
        "do_sample": True,
        "top_k": 50,
        "temperature": 0.9,
        "repetition_penalty": 1.05,
        "eos_token_id": eos,
        "suppress_tokens": [token for token in range(size - 1024, size) if token != eos],
    }


@torch.no_grad()
def talk(
    talker: Any,
    config: Any,
    chunks: Iterator[Tensors],
    seed: int,
    emit: Emit,
    frames: tuple[int, int] = (LEAST_FRAMES, MOST_FRAMES),
) -> None:
    """Sample codec frames with `seed`, each as soon as the thinker's row for it is there; emit each frame."""
    prompt = next(chunks)
    extra = {key: prompt[key] for key in ("image_grid_thw", "audio_feature_lengths") if key in prompt}
    inputs = _talker_inputs(talker, config, prompt, next(chunks))
    del prompt
    rows = (talker.text_projection(chunk["embed"])[:, 0] for chunk in chunks)
    trailing = TrailingRows(rows, inputs.pop("eos")[:, 0])

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("residual_codes") is not None:
            emit({"codes": kwargs["residual_codes"].unsqueeze(-1)})

    hook = talker.register_forward_pre_hook(before, with_kwargs=True)
    torch.manual_seed(seed)
    try:
        talker.generate(
            **inputs,
            **extra,
            trailing_text_hidden=trailing,
            **sampling(config, frames),
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    finally:
        hook.remove()
    # The talker may stop before the thinker's last row: take the rest, so that every payload is read.
    for _ in chunks:
        pass


class TalkerModel(HfTalker):
    """The talker with its hooks; called once for each row of a step.

    A request's map is what the thinker has sent, rows appended; under `embed` what the hooks keep: `last_hidden`,
    `text_end` and `text_pad`, [1, width] each; and the frame of its last decode row, int64 [1, groups].
    """

    has_preprocess = has_postprocess = True
    talker_mtp_output_key = ("ids", "code_predictor_codes")

    def __init__(self, talker: Any, config: Any, requests: Mapping[str, Request]) -> None:
        super().__init__(talker, exact=EXACT)
        self.runner = HfStageRunner(talker, exact=EXACT, layers=(-1,))
        self._talker, self._config, self._requests = talker, config, requests

    @torch.no_grad()
    def preprocess(
        self, *, input_ids: torch.Tensor, generated: int, input_ended: bool, request_id: str, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """The prompt's rows, or the hidden state and the text's row that the next frame is drawn from."""
        rows, prompt = given["hidden_states"]["layers"][0], len(given["ids"]["thinker_input_ids"])
        if not generated:
            return self._prompt(request_id, rows[: prompt + 1], given)
        # Behind the prompt's rows, and the first generated one, which the talker's prompt has taken.
        text, kept = rows[prompt + 1 :], given["embed"]
        if generated <= len(text):
            step = self._talker.text_projection(text[generated - 1][None, None])[0]
        elif input_ended:
            step = kept["text_end"] if generated == len(text) + 1 else kept["text_pad"]
        else:
            raise errors.NotYet("the thinker's row for this step has not come", rid=request_id, step=generated)
        return input_ids, step, {"mtp_inputs": (kept["last_hidden"], step)}

    def _prompt(
        self, rid: str, rows: torch.Tensor, given: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        layers, ids = given["hidden_states"]["layers"], given["ids"]["thinker_input_ids"]
        if len(rows) <= len(ids):
            raise errors.InvalidPayload("the thinker's stream ended before its first generated row", rid=rid)
        accepted = layers[self._config.talker_config.accept_hidden_layer][: len(ids)]
        prompt = {"ids": ids, "embed": rows[:-1], "hidden": accepted, "special": given["embed"]["tts_special"]}
        batch = {name: tensor[None] for name, tensor in prompt.items()}
        inputs = _talker_inputs(self._talker, self._config, batch, {"embed": rows[None, -1:]})
        kept = {"text_end": inputs.pop("eos")[0], "text_pad": inputs["tts_pad_embed"][0]}
        request = self._requests[rid]
        lengths = sampling(self._config, request.frames)
        self.runner.add(rid, seed=request.seed, **inputs, **given.get("meta", {}), **lengths)
        return inputs["talker_input_ids"][0], inputs["inputs_embeds"][0], {"embed": kept}

    def postprocess(self, hidden: torch.Tensor, **given: Any) -> dict[str, Any]:
        """Keep the row's last hidden state for its next frame."""
        return {"embed": {"last_hidden": hidden[-1:]}}
