"""Decode rows of several requests in one forward, with the bits that each has alone.

A kernel for a matrix product is chosen by the number of rows, and with it the last bits. So in a shared forward every
matrix product is called row by row (`ByRow`), and a layer's attention once per request, with that request's own cache
and without padding or mask: the very calls that the request makes alone. What rows share is the rest of a layer, which
treats each row for itself (norms, rotations, activations, sums), and the interpreter's time, most of it in a small
model. Equal bits rest on that: they were measured, on a CPU, and a kernel that looks at a row's place would break them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from connector import errors

#: The library's name of the attention that packed rows can be cut for, and of the one that cuts them.
ATTENTION, BY_REQUEST = "sdpa", "sdpa_by_request"
#: What a decoder reads at a row of one token, and the dimension of each that counts requests.
_AXES = {"input_ids": 0, "inputs_embeds": 0, "position_ids": -2}
#: Settings, equal in all rows. `generation_step` is counted by a talker and read by nobody: its embeds are given.
_SETTINGS = ("use_cache", "output_hidden_states", "generation_step")
#: What experts call for all rows at once; torch has it since 2.8.
_GROUPED = getattr(torch, "_grouped_mm", None)

Generators = Sequence[torch.Generator | None]


class ByRow(TorchFunctionMode):
    """While entered, this thread's matrix products and draws are called once for each row of their batch.

    Row i of a `torch.multinomial` draws from generator i, where generators are given: the library itself knows one
    for all rows.
    """

    def __init__(self, generators: Generators | None = None) -> None:
        super().__init__()
        self._generators = generators

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and len(args[0]) > 1:
            return torch.cat([func(row, *args[1:], **kwargs) for row in args[0].split(1)])
        if func is _GROUPED and len(args[0]) > 1:
            # Rows [n, width] in the order of their experts; `offs` int32 [experts] is where each expert's end.
            rows, offs = enumerate(args[0].split(1)), kwargs["offs"]
            return torch.cat([func(row, *args[1:], **{**kwargs, "offs": (offs > i).int()}) for i, row in rows])
        if func is torch.multinomial and self._generators is not None:
            pairs = zip(args[0].split(1), self._generators, strict=True)
            return torch.cat([func(row, *args[1:], **kwargs, generator=generator) for row, generator in pairs])
        return func(*args, **kwargs)


def packable(cache: Cache) -> bool:
    """Whether a layer of the cache is its tokens' keys and values and nothing else: then a row needs no mask."""
    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


def lengths(cache: Cache) -> list[int]:
    """Tokens in each layer of a packable cache, for `cut_back`."""
    layers: list[Any] = list(cache.layers)
    return [layer.get_seq_length() for layer in layers]


def cut_back(cache: Cache, tokens: Sequence[int]) -> None:
    """The cache as it was when it had these lengths, whatever layers have been written since.

    The lengths, and not the tensors, are kept over a forward: those would be each cache a second time.
    """
    layers: list[Any] = list(cache.layers)
    for layer, length in zip(layers, tokens, strict=True):
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


class Rows(list[torch.Tensor]):
    """Keys or values of several requests, [1, heads, tokens, width] each, on their way from cache to attention."""


class RowsCache(Cache):
    """The caches of several requests as the cache of one forward; each row's keys go to its own."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        # The layers say which kinds of cache there are. Their lengths are the first request's: nobody needs them,
        # since positions are given and there is no mask.
        super().__init__(layers=caches[0].layers)
        self._caches = caches

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Keys and values [rows, heads, 1, width] in, `Rows` of all tokens of each request out."""
        pairs = [
            cache.update(key_states[i : i + 1], value_states[i : i + 1], layer_idx, *args, **kwargs)
            for i, cache in enumerate(self._caches)
        ]
        return Rows(keys for keys, _ in pairs), Rows(values for _, values in pairs)


def _attend(module: Any, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """The library's sdpa; for packed rows once per request, without a mask: a single query sees all its keys."""
    if not isinstance(key, Rows):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    outputs = [
        sdpa_attention_forward(module, query[i : i + 1], key[i], value[i], None, **kwargs)[0] for i in range(len(key))
    ]
    return torch.cat(outputs), None


AttentionInterface.register(BY_REQUEST, _attend)
AttentionMaskInterface.register(BY_REQUEST, sdpa_mask)


def rope_types(model: Any) -> set[str]:
    """How the decoder's layers make their rotations, by the library's names."""
    rope: Any = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_kind = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    return {str(kind["rope_type"]) for kind in by_kind if "rope_type" in kind}


def enable(model: Any) -> None:
    """Let the model's attention be cut by request; calls of one request are as before.

    UsageError: it is not sdpa; the rotations of all rows depend on the longest one.
    """
    decoder = model.config.get_text_config(decoder=True)
    if "longrope" in rope_types(model):
        raise errors.UsageError(
            "the rotations of packed rows would be those of the longest one; use exact=True", model=type(model).__name__
        )
    if decoder._attn_implementation not in (ATTENTION, BY_REQUEST):
        raise errors.UsageError(
            "packed decode rows need another attention; load the model with it, or use exact=True",
            model=type(model).__name__,
            attention=decoder._attn_implementation,
            needed=ATTENTION,
        )
    model.set_attn_implementation(BY_REQUEST)


def pack(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One forward's inputs from those of several requests, one token each; all of them ids, or all embeds.

    Ids [1, 1] or embeds [1, 1, width], positions [..., 1, 1] and caches are put together. What else a row holds (a
    prompt's features) is not given: a decoder does not read it at a decode row.
    """
    packed: dict[str, Any] = {name: rows[0][name] for name in _SETTINGS if name in rows[0]}
    for name, value in rows[0].items():
        if isinstance(value, Cache):
            packed[name] = RowsCache([row[name] for row in rows])
        elif name in _AXES and value is not None:
            packed[name] = torch.cat([row[name] for row in rows], _AXES[name])
    return packed
