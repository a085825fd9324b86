"""The talker's part of a request: codec frames sampled while the thinker's rows still come in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from omni_model import SPEAKER
from transformers import Qwen3OmniMoeForConditionalGeneration as Omni
from transport import Tensors

LEAST_FRAMES, MOST_FRAMES = 40, 56

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


def _talker_inputs(talker: Any, config: Any, prompt: Tensors, first: Tensors) -> dict[str, Any]:
    """The talker's prefill, from the prompt's rows and the first generated one."""
    # The library's own helpers ask no more of the whole model than this.
    library: Any = SimpleNamespace(config=config, talker=talker)
    ids = prompt["ids"]
    length = ids.shape[1]
    whole = config.thinker_config
    media = torch.isin(ids, torch.tensor([whole.audio_token_id, whole.image_token_id, whole.video_token_id]))
    user = Omni._get_talker_user_parts(library, 0, length, media, prompt["hidden"], prompt["embed"])
    turns = [i for i, token in enumerate(ids[0].tolist()) if token == config.im_start_token_id]
    spoken = torch.zeros(length, dtype=torch.bool)
    for start, stop in zip(turns, [*turns[1:], length], strict=True):
        spoken[start:stop] = int(ids[0, start + 1]) == config.user_token_id
    bos, eos, pad = talker.text_projection(prompt["special"]).chunk(3, 1)
    answer, answer_ids, _ = Omni._get_talker_assistant_parts(
        library,
        turns[-1],
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


@torch.no_grad()
def talk(talker: Any, config: Any, chunks: Iterator[Tensors], seed: int, emit: Emit) -> None:
    """Sample codec frames with `seed`, each as soon as the thinker's row for it is there; emit each frame."""
    prompt = next(chunks)
    extra = {key: prompt[key] for key in ("image_grid_thw", "audio_feature_lengths") if key in prompt}
    inputs = _talker_inputs(talker, config, prompt, next(chunks))
    del prompt
    rows = (talker.text_projection(chunk["embed"])[:, 0] for chunk in chunks)
    trailing = TrailingRows(rows, inputs.pop("eos")[:, 0])
    size, eos = config.talker_config.text_config.vocab_size, config.talker_config.codec_eos_token_id

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
            min_new_tokens=LEAST_FRAMES,
            max_new_tokens=MOST_FRAMES,
            do_sample=True,
            top_k=50,
            temperature=0.9,
            repetition_penalty=1.05,
            eos_token_id=eos,
            suppress_tokens=[token for token in range(size - 1024, size) if token != eos],
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    finally:
        hook.remove()
    # The talker may stop before the thinker's last row: take the rest, so that every payload is read.
    for _ in chunks:
        pass
