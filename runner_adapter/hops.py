"""What hooks of vLLM-Omni 0.30 hand over, read from their code once, so that a config can say it. No torch."""

from __future__ import annotations

from collections.abc import Mapping

_CODES = ("codes.audio", "meta.finished")
_FRAMES = (*_CODES, "meta.left_context_size")
_EMBEDS = ("embed.prefill", "embed.decode", "embed.tts_bos", "embed.tts_eos", "embed.tts_pad")
_SHAPES = ("embed.prefill_shape", "hidden_states.output_shape")
_REFERENCE = ("meta.ref_context_size", "meta.ref_context_request_id", "meta.ref_context_included")
_SIZES = ("meta.codec_chunk_frames", "meta.codec_left_context_frames", "meta.code_flat_numel")

#: Names that each gives in any of its forms, by module and function; the function's ending is its form.
HOOKS: Mapping[str, tuple[str, ...]] = {
    "audio8_tts.slow_ar_to_codec_decoder": _FRAMES,
    "breeze_tts_2.talker2code2wav": (*_FRAMES, "meta.request_id"),
    "covo_audio.llm2code2wav": _CODES,
    "fish_speech.slow_ar_to_dac_decoder": _FRAMES,
    "higgs_audio_v2.talker2code2wav": _FRAMES,
    "higgs_audio_v3.talker2code2wav": (*_FRAMES, "meta.right_holdback_size"),
    "mimo_audio.llm2code2wav": (*_FRAMES, *_SIZES),
    "moss_tts.talker2codec_delay": _FRAMES,
    "personaplex.talker2code2wav": (*_CODES, "meta.is_segment_finished"),
    "qwen2_5_omni.talker2code2wav": _CODES,
    "qwen2_5_omni.thinker2talker": ("embed.prefill", "hidden_states.output", *_SHAPES, "ids.prompt", "ids.output"),
    "qwen3_omni.talker2code2wav": _FRAMES,
    "qwen3_omni.thinker2talker": (
        *_EMBEDS,
        *("hidden_states.output", "ids.all", "ids.prompt", "ids.output", "meta.finished"),
    ),
    "qwen3_tts.talker2code2wav": (*_FRAMES, "meta.request_id", *_REFERENCE),
    "step_audio2.thinker2token2wav": _FRAMES,
    "voxtral_tts.generator2tokenizer": _CODES,
}

#: Stage -> the hook of what it sends, by pipeline. A deploy config says which pipeline it is for, or bears its name.
PIPELINES: Mapping[str, Mapping[int, str]] = {
    "arktts": {0: "audio8_tts.slow_ar_to_codec_decoder"},
    "aura_omni": {2: "qwen3_tts.talker2code2wav"},
    "breeze": {0: "breeze_tts_2.talker2code2wav"},
    "covo_audio": {0: "covo_audio.llm2code2wav"},
    "fish_qwen3_omni": {0: "fish_speech.slow_ar_to_dac_decoder"},
    "higgs_audio_v2": {0: "higgs_audio_v2.talker2code2wav"},
    "higgs_multimodal_qwen3": {0: "higgs_audio_v3.talker2code2wav"},
    "joyai_vl_interaction": {1: "qwen3_tts.talker2code2wav"},
    "mimo_audio": {0: "mimo_audio.llm2code2wav"},
    "moss_tts": {0: "moss_tts.talker2codec_delay"},
    "personaplex": {0: "personaplex.talker2code2wav"},
    "qwen2_5_omni": {0: "qwen2_5_omni.thinker2talker", 1: "qwen2_5_omni.talker2code2wav"},
    "qwen3_omni_moe": {0: "qwen3_omni.thinker2talker", 1: "qwen3_omni.talker2code2wav"},
    "qwen3_tts": {0: "qwen3_tts.talker2code2wav"},
    "step_audio_2": {0: "step_audio2.thinker2token2wav"},
    "voxtral_tts": {0: "voxtral_tts.generator2tokenizer"},
}
