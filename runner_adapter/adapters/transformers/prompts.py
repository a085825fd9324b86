"""A request before its first step: what it is given is looked at, then generate() prepares it.

What does not fit is refused here, since a forward could only fail on it: on a CUDA device an id outside the vocabulary
ends the device's use for the whole process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer
from transformers.generation import GenerationMode

from connector import errors
from runner_adapter.talker import is_seed

#: Arguments of generate() that have no meaning for a request that is run step by step.
_REFUSED = ("assistant_model", "cache", "custom_generate", "past_key_values", "streamer", "synced_gpus")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
#: Ids, in a model's config, whose rows a model may put in itself; they need not be in its vocabulary.
_PLACEHOLDERS = ("image_token_id", "audio_token_id", "video_token_id")
#: What generate() raises for what it does not take or has not at hand, and an encoder for features it cannot read.
_NOT_TAKEN = (ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError)


class Prepared(NamedTuple):
    """What generate() makes of its arguments before its first forward."""

    ids: torch.Tensor
    processors: Any
    criteria: Any
    config: Any
    kwargs: dict[str, Any]


class Limits:
    """What a model can be fed. Where the model does not say it, nothing is checked."""

    def __init__(self, model: Any) -> None:
        self._model = model
        try:
            self._embedding: Any = model.get_input_embeddings()
        except NotImplementedError:
            self._embedding = None
        #: An encoder's prompt is not what the decoder's positions count.
        decoder = None if model.config.is_encoder_decoder else model.config.get_text_config(decoder=True)
        positions = getattr(decoder, "max_position_embeddings", None)
        self._positions: int | None = positions if isinstance(positions, int) and positions > 0 else None
        self._placeholders = {getattr(model.config, name, None) for name in _PLACEHOLDERS}

    def check_prompt(self, rid: str, inputs: dict[str, Any]) -> None:
        """InvalidPayload: ids or embeds that the model cannot read."""
        ids, embeds = inputs.get("input_ids", inputs.get("inputs")), inputs.get("inputs_embeds")
        if ids is not None and "inputs" in inputs and self._model.main_input_name != "input_ids":
            ids = None
        if embeds is not None:
            self.check_embeds(rid, embeds)
            self._check_length(rid, embeds.shape[1])
        if ids is not None:
            self._check_ids(rid, ids, least=1 if embeds is None else 0)

    def check_embeds(self, rid: str, embeds: object, *, tokens: int | None = None) -> None:
        """InvalidPayload unless they are [1, `tokens`, the model's width], in its dtype and on its device."""
        if not isinstance(embeds, torch.Tensor) or embeds.ndim != 3:
            raise errors.InvalidPayload("embeds are a tensor [1, tokens, width]", rid=rid, given=_said(embeds))
        _check_one(rid, embeds, least=1)
        if tokens is not None and embeds.shape[1] != tokens:
            raise errors.InvalidPayload("a decode row's embeds are [1, 1, width]", rid=rid, given=_said(embeds))
        width = getattr(self._embedding, "embedding_dim", None)
        if width is not None and embeds.shape[2] != width:
            raise errors.InvalidPayload(
                "the embeds have another width than the model's", rid=rid, size=embeds.shape[2], limit=width
            )
        weight = getattr(self._embedding, "weight", None)
        self._check_place(rid, embeds, [self._model.dtype if weight is None else weight.dtype])

    def _check_ids(self, rid: str, ids: object, *, least: int) -> None:
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise errors.InvalidPayload("a prompt's ids are a tensor [1, tokens]", rid=rid, given=_said(ids))
        _check_one(rid, ids, least=least)
        self._check_place(rid, ids, [torch.int64, torch.int32])
        self._check_length(rid, ids.shape[1])
        size = getattr(self._embedding, "num_embeddings", None)
        if size is None:
            return
        for token in ids.unique().tolist():
            if not 0 <= token < size and token not in self._placeholders:
                raise errors.InvalidPayload("an id is outside the model's vocabulary", rid=rid, id=token, limit=size)

    def _check_place(self, rid: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
        if tensor.dtype not in dtypes:
            raise errors.InvalidPayload(
                "ids or embeds have another dtype than the model reads",
                rid=rid,
                dtype=str(tensor.dtype),
                needed=" or ".join(map(str, dtypes)),
            )
        if tensor.device != self._model.device:
            raise errors.InvalidPayload(
                "a request's tensors must be on the model's device",
                rid=rid,
                device=str(tensor.device),
                needed=str(self._model.device),
            )

    def _check_length(self, rid: str, tokens: int) -> None:
        if self._positions is not None and tokens > self._positions:
            raise errors.InvalidPayload(
                "the prompt is longer than the model has positions", rid=rid, size=tokens, limit=self._positions
            )


def prepare(model: Any, limits: Limits, rid: str, seed: int | None, inputs: dict[str, Any]) -> tuple[Prepared, Cache]:
    """What generate() makes of the request, and its cache. UsageError, InvalidPayload: it cannot run; says why."""
    refused = [name for name in _REFUSED if name in inputs]
    # The library would run such a request to its end, in threads of its own.
    refused += ["cache_implementation"] * (inputs.get("cache_implementation") == "paged")
    if refused:
        raise errors.UsageError("a request that runs step by step takes no such argument", rid=rid, given=refused)
    _check_seed(rid, seed)
    limits.check_prompt(rid, inputs)
    try:
        prepared: Prepared = model.generate(**inputs, custom_generate=_prepared)
    except torch.OutOfMemoryError:
        raise
    except _NOT_TAKEN as error:
        raise errors.UsageError(f"generate() does not take the request: {error}", rid=rid) from error
    return prepared, _check(model, rid, prepared, seed)


def cache_layers(cache: Cache) -> list[Any]:
    """All layers of a cache, a decoder's own and those of what it reads of an encoder."""
    if isinstance(cache, EncoderDecoderCache):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


def check_layers(model: Any, layers: Sequence[object]) -> tuple[int, ...]:
    """The hidden states that are wanted, by layer. UsageError: the model has no such layer."""
    # One behind each layer, and in front what the first one is given.
    most: int | None = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    wanted: list[int] = []
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise errors.UsageError("a layer is a whole number", given=_said(layer))
        if most is not None and not -most - 1 <= layer <= most:
            raise errors.UsageError("the model has no such layer", layer=layer, least=-most - 1, limit=most)
        wanted.append(layer)
    return tuple(wanted)


def _check(model: Any, rid: str, prepared: Prepared, seed: int | None) -> Cache:
    """The request's cache, by whatever name this version of the library hands it on."""
    config = prepared.config
    mode = config.get_generation_mode()
    caches = [value for value in prepared.kwargs.values() if isinstance(value, Cache)]
    layers = [layer for cache in caches for layer in cache_layers(cache)]
    wrong = {
        "only greedy and sampled requests run step by step": mode not in _MODES,
        "one request is one prompt": prepared.ids.shape[0] != 1,
        "a prompt is read in one forward": config.prefill_chunk_size is not None,
        "a request needs its cache": not config.use_cache or not caches,
        # The library makes it as long as the longest one before it, and the length is seen in the bits.
        "a cache of fixed length depends on other requests": any(isinstance(layer, StaticLayer) for layer in layers),
        "a request's tensors must be on the model's device": prepared.ids.device != model.device,
        "a sampled request needs a seed": config.do_sample and seed is None,
    }
    for what, so in wrong.items():
        if so:
            raise errors.UsageError(what, rid=rid, mode=str(mode.value), prompts=prepared.ids.shape[0])
    return caches[0]


def _check_seed(rid: str, seed: object) -> None:
    if seed is not None and not is_seed(seed):
        raise errors.UsageError("a seed is a whole number of 64 bits", rid=rid, given=f"{seed!r}"[:40])


def _check_one(rid: str, prompt: torch.Tensor, *, least: int) -> None:
    if prompt.shape[0] != 1:
        raise errors.InvalidPayload("one request is one prompt", rid=rid, prompts=prompt.shape[0])
    if prompt.shape[1] < least:
        raise errors.InvalidPayload("a prompt has a token at least", rid=rid, given=_said(prompt))


def _said(value: object) -> str:
    return f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _prepared(
    model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
) -> Prepared:
    """Called by generate() in the place of its own loop."""
    return Prepared(input_ids, logits_processor, stopping_criteria, generation_config, kwargs)
