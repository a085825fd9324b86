"""Requests of a model that generates, each driven as the library's generate() would, several of them a step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from connector import errors
from runner_adapter.adapters.transformers import packing

#: Arguments of generate() that have no meaning for a request that is run step by step.
_REFUSED = ("assistant_model", "cache", "custom_generate", "past_key_values", "streamer", "synced_gpus")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class RowOutput(NamedTuple):
    """What a step gave for one request. The tensors may be views of the whole step's: copy what is kept."""

    #: The id that was drawn, and whether the request has ended with it.
    token: int
    finished: bool
    #: The ids that the model was fed, int64 [1, tokens]; None where it was fed embeds.
    ids: torch.Tensor | None
    #: Before any processor, float32 [1, vocabulary].
    logits: torch.Tensor
    #: By layer, in the model's dtype: [1, tokens, width]. 0 is what the first layer was given.
    hidden: dict[int, torch.Tensor]


class _Prepared(NamedTuple):
    """What generate() makes of its arguments before its first forward."""

    ids: torch.Tensor
    processors: Any
    criteria: Any
    config: Any
    kwargs: dict[str, Any]


@dataclass(slots=True)
class _Request:
    rid: str
    #: Prompt and drawn ids, int64 [1, n]. A prompt of embeds has none.
    ids: torch.Tensor
    processors: Any
    criteria: Any
    config: Any
    #: What generate() hands from forward to forward: positions, cache, settings.
    kwargs: dict[str, Any]
    cache: Cache
    generator: torch.Generator | None
    started: bool = False
    waiting: bool = False
    finished: bool = False

    @property
    def by_embeds(self) -> bool:
        return self.kwargs.get("inputs_embeds") is not None


class HfStageRunner:
    """Runs a model of the library (a `GenerationMixin` that decodes, on one device, in eval mode) for many requests.

    A request is given as generate() takes it, one prompt each, and is bit for bit what generate() alone would give
    after `torch.manual_seed(seed)`: ids, logits and hidden states. It has its own cache, positions, processors and
    generator; the library's own methods prepare, process and stop it.

    `exact=True`: a forward for each request; equal bits are certain. `exact=False`: the decode rows of a step share
    one forward, several times as fast in a small model; equal bits were measured, see `packing`. A request whose
    prompt has a padding mask is not packed. `layers`: the hidden states that are wanted.

    A step that raises leaves its requests in no known state: remove them. Not for several threads.
    """

    def __init__(self, model: Any, *, exact: bool = True, layers: Sequence[int] = ()) -> None:
        self._model = model
        self._exact = exact
        self._layers = tuple(layers)
        self._requests: dict[str, _Request] = {}
        if not exact:
            packing.enable(model)

    def __contains__(self, rid: object) -> bool:
        return rid in self._requests

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, rid: str, *, seed: int | None = None, **inputs: Any) -> None:
        """A new request; `inputs` are those of generate(), tensors on the model's device. Encoders may run.

        A prompt of `inputs_embeds` is fed by embeds to its end: `step` must be given those of each decode row.
        UsageError: the rid is there; more than one prompt; beams, or what cannot be run step by step; a sampled
        request without a seed.
        """
        if rid in self._requests:
            raise errors.UsageError("the request is there already", rid=rid)
        refused = [name for name in _REFUSED if name in inputs]
        if refused:
            raise errors.UsageError("a request that runs step by step takes no such argument", rid=rid, given=refused)
        if self._layers:
            inputs["output_hidden_states"] = True
        prepared: _Prepared = self._model.generate(**inputs, custom_generate=_prepared)
        cache = self._check(rid, prepared, seed)
        generator = None if seed is None else torch.Generator(prepared.ids.device).manual_seed(seed)
        self._requests[rid] = _Request(rid, *prepared, cache, generator)

    def _check(self, rid: str, prepared: _Prepared, seed: int | None) -> Cache:
        """The request's cache, by whatever name this version of the library hands it on."""
        config = prepared.config
        mode = config.get_generation_mode()
        caches = [value for value in prepared.kwargs.values() if isinstance(value, Cache)]
        wrong = {
            "only greedy and sampled requests run step by step": mode not in _MODES,
            "one request is one prompt": prepared.ids.shape[0] != 1,
            "a prompt is read in one forward": config.prefill_chunk_size is not None,
            "a request needs its cache": not config.use_cache or not caches,
            "a request's tensors must be on the model's device": prepared.ids.device != self._model.device,
            "a sampled request needs a seed": config.do_sample and seed is None,
        }
        for what, so in wrong.items():
            if so:
                raise errors.UsageError(what, rid=rid, mode=str(mode.value), prompts=prepared.ids.shape[0])
        return caches[0]

    def remove(self, rid: str) -> None:
        """The request leaves, ended or not, with all that was kept for it. UnknownRequest if it is not there."""
        self._request(rid)
        del self._requests[rid]

    def preempt(self, rid: str) -> None:
        """Keep the request's state, its cache in host memory, until a step names it. UnknownRequest."""
        request = self._request(rid)
        request.waiting = True
        for layer in request.cache.layers:
            layer.offload()

    def generator(self, rid: str) -> torch.Generator | None:
        """What the request draws from: who draws for it elsewhere (a talker's codes) must use the same one."""
        return self._request(rid).generator

    def tokens(self, rid: str) -> int:
        """How many tokens the request's next step feeds: its prompt's, or 1. UnknownRequest."""
        request = self._request(rid)
        prompt = request.kwargs["inputs_embeds"] if request.by_embeds else request.ids
        return 1 if request.started else int(prompt.shape[1])

    @torch.no_grad()
    def step(
        self, rids: Iterable[str] | None = None, *, embeds: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, RowOutput]:
        """One forward and one draw for each of `rids`, prompts and decode rows mixed; results in this order.

        Without `rids`: all that have not ended and are not preempted. A preempted request that is named goes on.
        `embeds` are given to decode rows instead of their last id, [1, 1, width] by rid. UnknownRequest; UsageError: a
        rid twice or ended, embeds missing, not decoding or not in the step. Then nothing was done.
        """
        live = [request.rid for request in self._requests.values() if not (request.finished or request.waiting)]
        rows = [self._request(rid) for rid in (live if rids is None else rids)]
        given = dict(embeds or {})
        _check_step(rows, given)
        for request in rows:
            if request.waiting:
                request.waiting = False
                for layer in request.cache.layers:
                    layer.prefetch()
        results: dict[str, RowOutput] = {}
        decoding = [request for request in rows if request.started]
        for request in rows:
            if not request.started:
                results |= self._forward([request], given)
        # The library runs decode forwards under this, too: it chooses how experts are computed.
        with self._model._optimize_model_for_decode() if decoding else nullcontext():
            for group in self._groups(decoding, given):
                results |= self._forward(group, given)
        return {request.rid: results[request.rid] for request in rows}

    def _groups(self, decoding: list[_Request], given: Container[str]) -> list[list[_Request]]:
        """Requests that share a forward, those with embeds and those with ids; or each its own."""
        groups: dict[object, list[_Request]] = {}
        for request in decoding:
            alone = self._exact or request.kwargs.get("attention_mask") is not None
            groups.setdefault(request.rid if alone else request.rid in given, []).append(request)
        return list(groups.values())

    def _forward(self, group: list[_Request], given: Mapping[str, torch.Tensor]) -> dict[str, RowOutput]:
        inputs = [self._inputs(request, given.get(request.rid)) for request in group]
        alone = len(group) == 1
        with nullcontext() if alone else packing.ByRow():
            outputs = self._model(**(inputs[0] if alone else packing.pack(inputs)), return_dict=True)
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        layers = _layers(outputs.hidden_states) if self._layers else ()
        results: dict[str, RowOutput] = {}
        for i, (request, fed) in enumerate(zip(group, inputs, strict=True)):
            # A packed forward's outputs are everyone's; the keys are in the request's own cache already.
            self._go_on(request, outputs if alone else None)
            row = slice(i, i + 1)
            token = self._draw(request, logits[row])
            hidden = {layer: layers[layer][row] for layer in self._layers}
            results[request.rid] = RowOutput(token, request.finished, fed.get("input_ids"), logits[row], hidden)
        return results

    def _inputs(self, request: _Request, embeds: torch.Tensor | None) -> dict[str, Any]:
        """The forward's inputs, as generate() makes them; with `embeds` in the place of the last id."""
        last = 1 if request.started else None
        if embeds is None:
            inputs = self._model.prepare_inputs_for_generation(
                request.ids, next_sequence_length=last, is_first_iteration=not request.started, **request.kwargs
            )
            return dict(inputs)
        # The model's own way would make embeds itself: a talker, by drawing codes, from what its last forward left.
        kwargs = {name: value for name, value in request.kwargs.items() if name != "hidden_states"}
        inputs = GenerationMixin.prepare_inputs_for_generation(
            self._model, request.ids, next_sequence_length=last, **kwargs
        )
        return {**inputs, "input_ids": None, "inputs_embeds": embeds}

    def _go_on(self, request: _Request, outputs: Any) -> None:
        """Positions and what else the model hands to its next forward; `outputs` are the request's own, or None."""
        if outputs is None:
            kwargs = GenerationMixin._update_model_kwargs_for_generation(self._model, ModelOutput(), request.kwargs)
        else:
            kwargs = self._model._update_model_kwargs_for_generation(outputs, request.kwargs)
        request.kwargs, request.started = kwargs, True

    def _draw(self, request: _Request, logits: torch.Tensor) -> int:
        """Draw the request's next id as generate() does, and see whether it ends with it."""
        scores = request.processors(request.ids, logits.clone())
        if request.config.do_sample:
            odds = torch.nn.functional.softmax(scores, dim=-1)
            token = torch.multinomial(odds, num_samples=1, generator=request.generator)
        else:
            token = torch.argmax(scores, dim=-1, keepdim=True)
        request.ids = torch.cat((request.ids, token), dim=-1)
        request.finished = bool(request.criteria(request.ids, None).all())
        return int(token)

    def _request(self, rid: str) -> _Request:
        request = self._requests.get(rid)
        if request is None:
            raise errors.UnknownRequest("the runner has no such request", rid=rid)
        return request


def _prepared(
    model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
) -> _Prepared:
    """Called by generate() in the place of its own loop."""
    return _Prepared(input_ids, logits_processor, stopping_criteria, generation_config, kwargs)


def _layers(states: Any) -> tuple[torch.Tensor, ...]:
    """The layers' hidden states. A talker gives them in front of its codes."""
    return tuple(states[0] if isinstance(states[0], tuple) else states)


def _check_step(rows: Sequence[_Request], given: Mapping[str, torch.Tensor]) -> None:
    seen: set[str] = set()
    for request in rows:
        if request.rid in seen:
            raise errors.UsageError("a request has one row in a step", rid=request.rid)
        if request.finished:
            raise errors.UsageError("the request has ended: remove it", rid=request.rid)
        if request.started and request.by_embeds and request.rid not in given:
            raise errors.UsageError("the request is fed by embeds, and none were given", rid=request.rid)
        if not request.started and request.rid in given:
            raise errors.UsageError("embeds are for decode rows; the request has not read its prompt", rid=request.rid)
        seen.add(request.rid)
    for rid, embeds in given.items():
        if rid not in seen or embeds.shape[:-1] != (1, 1):
            shape = f"{list(embeds.shape)}"
            raise errors.UsageError("embeds are [1, 1, width], for a request of the step", rid=rid, shape=shape)
