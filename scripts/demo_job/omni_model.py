"""A Qwen3-Omni small enough for a CPU: its configuration, one set of random weights, and prompts for it.

The architecture is the library's own (thinker, talker, code2wav); there is no tokenizer and no hub access.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as qwen

transformers.logging.set_verbosity_error()

DTYPE = torch.bfloat16
SPEAKER = "demo"
GROUPS = 4
CODES = 64
#: generate() forbids the last 1024 ids of the talker's vocabulary, so it must be larger than that.
TALKER_VOCAB = CODES + 1024
MEL_BINS = 16
#: The audio encoder gives 13 rows for 100 mel frames.
MEL_FRAMES, AUDIO_ROWS = 100, 13
#: t, h, w in patches; 2 x 2 patches merge into one row.
GRID = (1, 4, 6)
PATCH, PATCH_FRAMES, MERGE = 4, 2, 2

#: Special ids of the thinker: above the ids of plain words.
WORDS = 160
IM_START, IM_END, SYSTEM, USER, ASSISTANT, NEWLINE = range(160, 166)
AUDIO, AUDIO_START, AUDIO_END, IMAGE, VIDEO, VISION_START, VISION_END = range(170, 177)
TTS_BOS, TTS_EOS, TTS_PAD = range(180, 183)
THINKER_VOCAB = 192
#: Special ids of the talker: above the codes, inside the forbidden range.
CODEC_BOS, CODEC_EOS, CODEC_PAD, CODEC_THINK_BOS, CODEC_THINK_EOS, CODEC_NOTHINK, SPEAKER_ID = range(CODES, CODES + 7)

_WIDTH, _TALKER_WIDTH, _SPREAD = 48, 32, 0.25
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3], "interleaved": True}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": _SPREAD}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_MARKS = {
    "audio_token_id": AUDIO,
    "audio_start_token_id": AUDIO_START,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "initializer_range": _SPREAD,
}


def _thinker_config() -> dict[str, Any]:
    text = {"vocab_size": THINKER_VOCAB, "hidden_size": _WIDTH, "intermediate_size": 64, "num_hidden_layers": 3}
    audio = {
        "num_mel_bins": MEL_BINS,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 32,
        "output_dim": _WIDTH,
        "downsample_hidden_size": 8,
        "n_window": 50,
        "n_window_infer": 100,
        "max_source_positions": 64,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": _WIDTH,
        "patch_size": PATCH,
        "temporal_patch_size": PATCH_FRAMES,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    return {
        "text_config": {**text, **_HEADS, **_EXPERTS, "rope_parameters": _ROPE, "norm_topk_prob": True},
        "audio_config": {**audio, "initializer_range": _SPREAD},
        "vision_config": {**vision, "initializer_range": _SPREAD},
        **_MARKS,
        "audio_end_token_id": AUDIO_END,
        "vision_end_token_id": VISION_END,
        "user_token_id": USER,
        "position_id_per_seconds": 25,
    }


def _talker_config() -> dict[str, Any]:
    text = {"vocab_size": TALKER_VOCAB, "hidden_size": _TALKER_WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    predictor = {"vocab_size": CODES, "hidden_size": _TALKER_WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    shared = {"shared_expert_intermediate_size": 32, "rope_parameters": _ROPE}
    return {
        "text_config": {**text, **_HEADS, **_EXPERTS, **shared},
        "code_predictor_config": {**predictor, **_HEADS, "num_code_groups": GROUPS, "rope_parameters": _PLAIN_ROPE},
        **_MARKS,
        "num_code_groups": GROUPS,
        "thinker_hidden_size": _WIDTH,
        "accept_hidden_layer": 2,
        "codec_bos_id": CODEC_BOS,
        "codec_eos_token_id": CODEC_EOS,
        "codec_pad_id": CODEC_PAD,
        "codec_think_bos_id": CODEC_THINK_BOS,
        "codec_think_eos_id": CODEC_THINK_EOS,
        "codec_nothink_id": CODEC_NOTHINK,
        "speaker_id": {SPEAKER: SPEAKER_ID},
        "spatial_merge_size": MERGE,
    }


def _code2wav_config() -> dict[str, Any]:
    return {
        "codebook_size": CODES,
        "num_quantizers": GROUPS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "decoder_dim": 32,
        "sliding_window": 8,
        "upsample_rates": (5, 4),
        "upsampling_ratios": (2, 2),
        "rope_parameters": _PLAIN_ROPE,
        "layer_scale_initial_scale": 0.5,
        # Below 0.03 the wave is near silence, above 0.1 it clips and hides differences.
        "initializer_range": 0.085,
    }


def save_weights(folder: Path, seed: int = 0) -> None:
    """Draw one set of weights and write the configuration and a safetensors file for each stage.

    One file set for all processes, never a seed: equal seeds do not promise equal weights across them.
    """
    torch.manual_seed(seed)
    config = Qwen3OmniMoeConfig(
        thinker_config=_thinker_config(),
        talker_config=_talker_config(),
        code2wav_config=_code2wav_config(),
        enable_audio_output=True,
        im_start_token_id=IM_START,
        im_end_token_id=IM_END,
        system_token_id=SYSTEM,
        user_token_id=USER,
        assistant_token_id=ASSISTANT,
        tts_bos_token_id=TTS_BOS,
        tts_eos_token_id=TTS_EOS,
        tts_pad_token_id=TTS_PAD,
    )
    model = Qwen3OmniMoeForConditionalGeneration(config).eval()
    # The library leaves the talker's experts as the allocator gave them (seen in 5.14 and 5.24).
    for module in model.talker.modules():
        if isinstance(module, qwen.Qwen3OmniMoeTalkerTextExperts):
            for weights in module.parameters():
                torch.nn.init.normal_(weights, std=_SPREAD)
    model.to(DTYPE)
    config.save_pretrained(folder)
    for stage in ("thinker", "talker", "code2wav"):
        part = model.get_submodule(stage).state_dict()
        save_file({name: tensor.contiguous() for name, tensor in part.items()}, folder / f"{stage}.safetensors")


def load_part(stage: str, folder: Path) -> tuple[Any, Any]:
    """(module, whole configuration) of one stage; only that stage's weights are read."""
    config: Any = Qwen3OmniMoeConfig.from_pretrained(folder)
    parts: dict[str, tuple[Any, Any]] = {
        "thinker": (qwen.Qwen3OmniMoeThinkerForConditionalGeneration, config.thinker_config),
        "talker": (qwen.Qwen3OmniMoeTalkerForConditionalGeneration, config.talker_config),
        "code2wav": (qwen.Qwen3OmniMoeCode2Wav, config.code2wav_config),
    }
    kind, part = parts[stage]
    module = kind._from_config(part).eval().to(DTYPE)
    module.load_state_dict(load_file(folder / f"{stage}.safetensors"))
    if stage == "talker":
        # get_rope_index() reads it for image and audio together, but the talker's configuration has none.
        module.config.audio_config = config.thinker_config.audio_config
    return module, config


def make_prompt(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """The thinker's inputs for a "text" or an "image+audio" request; equal in every process."""
    draw = torch.Generator().manual_seed(seed)
    inputs: dict[str, torch.Tensor] = {}
    turn: list[int] = []
    if kind == "image+audio":
        frames, high, wide = GRID
        patches = frames * high * wide
        turn += [VISION_START, *[IMAGE] * (patches // MERGE**2), VISION_END, AUDIO_START, *[AUDIO] * AUDIO_ROWS]
        turn += [AUDIO_END]
        pixels = torch.randn(patches, 3 * PATCH_FRAMES * PATCH**2, generator=draw)
        sound = torch.randn(1, MEL_BINS, MEL_FRAMES, generator=draw)
        inputs |= {"pixel_values": pixels.to(DTYPE), "image_grid_thw": torch.tensor([GRID])}
        inputs |= {"input_features": sound.to(DTYPE)}
        inputs |= {"feature_attention_mask": torch.ones(1, MEL_FRAMES, dtype=torch.int64)}
    turn += torch.randint(0, WORDS, (8 + seed % 5,), generator=draw).tolist()
    system = [IM_START, SYSTEM, NEWLINE, 1, 2, 3, IM_END, NEWLINE]
    ids = [*system, IM_START, USER, NEWLINE, *turn, IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE]
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64), **inputs}
