"""Qwen3-Omni in one process: the library's own generate(), one request after the other, without adapter and connector.

A chunk is what one forward gives: a GEMM of one row need not equal the same row of a larger GEMM, so only the same
chunks give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from omni_model import load_part, make_prompt
from omni_talker import Emit, talk
from pipelines import Outcome, Reference, Request
from transport import Tensors, digest

TEXT_TOKENS = Request.text_tokens
#: Frames that are decoded at once, and frames of the past that go before them.
WINDOW, CONTEXT = 8, 25
#: generate()'s arguments for the thinker: greedy, so that it draws no random number.
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "use_audio_in_video": False}


def beside_prompt(thinker: Any, config: Any, inputs: Tensors) -> Tensors:
    """What the talker needs beside the thinker's rows, of a prompt's inputs."""
    special = torch.tensor([[config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]])
    found = {"special": thinker.get_input_embeddings()(special).detach()}
    if "image_grid_thw" in inputs:
        found["image_grid_thw"] = inputs["image_grid_thw"]
    if "feature_attention_mask" in inputs:
        found["audio_feature_lengths"] = inputs["feature_attention_mask"].sum(1)
    return found


@torch.no_grad()
def think(thinker: Any, config: Any, request: Request, emit: Emit) -> None:
    """Generate; emit the prompt's rows, then the row of each token fed back."""
    inputs = make_prompt(request.says, request.seed)
    extra = beside_prompt(thinker, config, inputs)

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layers = output.hidden_states
        rows = {"embed": layers[0], "hidden": layers[config.talker_config.accept_hidden_layer]}
        emit({**rows, "ids": kwargs["input_ids"], **extra})
        extra.clear()

    hook = thinker.register_forward_hook(after, with_kwargs=True)
    try:
        thinker.generate(
            **inputs,
            **GREEDY,
            max_new_tokens=request.text_tokens,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    finally:
        hook.remove()


@torch.no_grad()
def decode(code2wav: Any, chunks: Iterable[Tensors]) -> Iterator[Tensors]:
    """{"wav", "codes"} per window, of frames {"codes"} [1, groups, 1] each."""
    frames = torch.cat([chunk["codes"] for chunk in chunks], -1)
    for begin in range(0, frames.shape[-1], WINDOW):
        yield window(code2wav, frames[..., : begin + WINDOW], begin)


def window(code2wav: Any, frames: torch.Tensor, begin: int) -> Tensors:
    """Decode the frames from `begin`, of int64 [1, groups, frames], with CONTEXT frames before them.

    A decode loses a fixed tail of samples; the next window's context holds them, and gives them out first.
    """
    before = min(begin, CONTEXT)
    codes = frames[..., begin - before :]
    wav = code2wav(codes)
    tail = codes.shape[-1] * int(code2wav.total_upsample) - wav.shape[-1]
    fresh = wav[..., max(0, before * int(code2wav.total_upsample) - tail) :]
    return {"wav": fresh.float(), "codes": codes[..., before:]}


def reference(requests: list[Request], folder: Path) -> Reference:
    """Every request, with digests of what would have crossed each edge."""
    thinker, config = load_part("thinker", folder)
    talker, _ = load_part("talker", folder)
    code2wav, _ = load_part("code2wav", folder)
    result = Reference({}, {"thinker:talker": {}, "talker:code2wav": {}, "code2wav:main": {}})
    for request in requests:
        rid = request.rid
        rows: list[Tensors] = []
        frames: list[Tensors] = []
        think(thinker, config, request, rows.append)
        talk(talker, config, iter(rows), request.seed, frames.append, request.frames)
        windows = list(decode(code2wav, frames))
        payloads = (
            [_thinker_payload(rid, chunk, config.talker_config.accept_hidden_layer) for chunk in rows],
            [{f"{rid}-code_predictor_codes": frame["codes"][..., 0]} for frame in frames],
            [{f"{rid}-{name}": tensor for name, tensor in chunk.items()} for chunk in windows],
        )
        for edge, chunks in zip(result.digests, payloads, strict=True):
            result.digests[edge][rid] = [digest(chunk) for chunk in chunks]
        wav = torch.cat([w["wav"] for w in windows], -1).flatten()
        result.outcomes[rid] = Outcome(wav, torch.cat([w["codes"] for w in windows], -1))
    return result


def _thinker_payload(rid: str, chunk: Tensors, accepted: int) -> Tensors:
    """A chunk as it crosses the edge: rows without the batch's dimension."""
    ids = "thinker_input_ids" if "special" in chunk else "thinker_output_token_ids"
    rows = {"embed": "0", "hidden": f"{accepted}", "ids": ids, "special": "embed.tts_special"}
    named = {rows[name] if name in rows else f"meta.{name}": name for name in chunk}
    return {f"{rid}-{key}": chunk[name][0] if name in rows else chunk[name] for key, name in named.items()}
