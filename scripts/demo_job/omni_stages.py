"""Qwen3-Omni's three parts as stages that hand rows on while they are being generated.

| edge | key | shape | dtype |
|---|---|---|---|
| thinker -> talker | embed, hidden | [1, prompt, width], then [1, 1, width] a step | bfloat16 |
| | ids | [1, prompt], then [1, 1] | int64 |
| | special (first chunk) | [1, 3, width]: the thinker's embedding of bos, eos, pad | bfloat16 |
| | image_grid_thw, audio_feature_lengths (first chunk, if any) | [n, 3], [n] | int64 |
| talker -> code2wav | codes | [1, groups, 1] | int64 |
| code2wav -> main | wav | [1, 1, samples] | float32 |
| | codes | [1, groups, frames] | int64 |

The one-process run walks the same functions over lists: a GEMM of one row need not equal the same row of a
larger GEMM, so only the same chunks give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omni_model import load_part, make_prompt, save_weights
from omni_talker import Emit, talk
from pipelines import SINK, Outcome, Reference, Request
from transport import Station, Tensors, digest

TEXT_TOKENS = 24
#: Frames that are decoded at once, and frames of the past that go before them.
WINDOW, CONTEXT = 8, 25


def prepare(folder: Path) -> None:
    """Write the configuration and every stage's weights."""
    save_weights(folder)


@torch.no_grad()
def think(thinker: Any, config: Any, request: Request, emit: Emit) -> None:
    """Generate greedily (it draws no random number); emit the prompt's rows, then the row of each token fed back."""
    inputs = make_prompt(request.says, request.seed)
    special = torch.tensor([[config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]])
    extra = {"special": thinker.get_input_embeddings()(special)}
    if "image_grid_thw" in inputs:
        extra["image_grid_thw"] = inputs["image_grid_thw"]
    if "feature_attention_mask" in inputs:
        extra["audio_feature_lengths"] = inputs["feature_attention_mask"].sum(1)

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layers = output.hidden_states
        rows = {"embed": layers[0], "hidden": layers[config.talker_config.accept_hidden_layer]}
        emit({**rows, "ids": kwargs["input_ids"], **extra})
        extra.clear()

    hook = thinker.register_forward_hook(after, with_kwargs=True)
    try:
        thinker.generate(
            **inputs,
            max_new_tokens=TEXT_TOKENS,
            do_sample=False,
            eos_token_id=None,
            use_audio_in_video=False,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    finally:
        hook.remove()


@torch.no_grad()
def decode(code2wav: Any, chunks: Iterable[Tensors]) -> Iterator[tuple[Tensors, bool]]:
    """({"wav", "codes"}, is it the last) per window. A window waits for the frame behind it: else it is the last."""
    frames = torch.empty(1, code2wav.config.num_quantizers, 0, dtype=torch.int64)
    begin = 0
    for chunk in chunks:
        if frames.shape[-1] == begin + WINDOW:
            yield _window(code2wav, frames, begin), False
            begin += WINDOW
        frames = torch.cat((frames, chunk["codes"]), -1)
    yield _window(code2wav, frames, begin), True


def _window(code2wav: Any, frames: torch.Tensor, begin: int) -> Tensors:
    """Decode frames [begin, end) with CONTEXT frames before them.

    A decode loses a fixed tail of samples; the next window's context holds them, and gives them out first.
    """
    before = min(begin, CONTEXT)
    codes = frames[..., begin - before :]
    wav = code2wav(codes)
    tail = codes.shape[-1] * int(code2wav.total_upsample) - wav.shape[-1]
    fresh = wav[..., max(0, before * int(code2wav.total_upsample) - tail) :]
    return {"wav": fresh.float(), "codes": codes[..., before:]}


def _thinker(station: Station, requests: list[Request], folder: Path) -> None:
    thinker, config = load_part("thinker", folder)
    sender = station.sender("talker")
    for request in requests:
        think(thinker, config, request, partial(sender.send, request.rid))
        sender.end(request.rid)
        station.finish(request.rid)


def _talker(station: Station, requests: list[Request], folder: Path) -> None:
    # One request after the other: the module keeps the running request's rope offset.
    talker, config = load_part("talker", folder)
    receiver, sender = station.receiver("thinker"), station.sender("code2wav")
    for request in requests:
        talk(talker, config, receiver.stream(request.rid), request.seed, partial(sender.send, request.rid))
        sender.end(request.rid)
        station.finish(request.rid)


def _code2wav(station: Station, requests: list[Request], folder: Path) -> None:
    code2wav, _ = load_part("code2wav", folder)
    receiver, sender = station.receiver("talker"), station.sender(SINK)
    for request in requests:
        for tensors, last in decode(code2wav, receiver.stream(request.rid)):
            sender.send(request.rid, tensors, last)
        station.finish(request.rid)


STAGES = {"thinker": _thinker, "talker": _talker, "code2wav": _code2wav}


def reference(requests: list[Request], folder: Path) -> Reference:
    """The same chunk policy in this process, with digests of what would have crossed each edge."""
    thinker, config = load_part("thinker", folder)
    talker, _ = load_part("talker", folder)
    code2wav, _ = load_part("code2wav", folder)
    result = Reference({}, {"thinker:talker": {}, "talker:code2wav": {}, "code2wav:main": {}})
    for request in requests:
        rows: list[Tensors] = []
        frames: list[Tensors] = []
        think(thinker, config, request, rows.append)
        talk(talker, config, iter(rows), request.seed, frames.append)
        windows = [tensors for tensors, _ in decode(code2wav, frames)]
        for edge, chunks in zip(result.digests, (rows, frames, windows), strict=True):
            result.digests[edge][request.rid] = [digest(chunk) for chunk in chunks]
        wav = torch.cat([w["wav"] for w in windows], -1).flatten()
        result.outcomes[request.rid] = Outcome(wav, torch.cat([w["codes"] for w in windows], -1))
    return result
