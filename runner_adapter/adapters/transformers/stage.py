"""Requests of a model that generates, each driven as the library's generate() would, several of them a step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from connector import errors
from runner_adapter.adapters.transformers import packing, prompts
from runner_adapter.hooks import Failures, isolated


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


class _Made(NamedTuple):
    """What a forward gave, a row for each of its requests."""

    outputs: Any
    logits: torch.Tensor
    layers: Sequence[torch.Tensor]


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
    prompt has a padding mask is not packed, nor one whose cache keeps more or less than the keys and values of all its
    tokens (a sliding window, a recurrent state). `layers`: the hidden states that are wanted.

    A request that a step fails on leaves with all that was kept for it; the others go on as if it had not been there,
    and `failures` tells it. KeyboardInterrupt and its like pass, and leave the requests of the step in no known state:
    remove them. Not for several threads.

    UsageError: the model has no such layer; its rotations depend on other requests; packed rows need another attention.
    """

    def __init__(self, model: Any, *, exact: bool = True, layers: Sequence[int] = ()) -> None:
        self._model = model
        self._exact = exact
        if "dynamic" in packing.rope_types(model):
            raise errors.UsageError(
                "the model's rotations depend on the requests before", model=type(model).__name__, rope="dynamic"
            )
        self._layers = prompts.check_layers(model, layers)
        self._limits = prompts.Limits(model)
        #: Requests that failed, until they are told.
        self._failed: dict[str, Exception] = {}
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
        UsageError: the rid is there; more than one prompt; beams, or what cannot be run step by step; a cache of fixed
        length; what generate() itself does not take; a seed that is none, or a sampled request without. InvalidPayload:
        ids outside the vocabulary; embeds of another width; a dtype or device that is not the model's; a prompt that is
        empty, or longer than the model has positions. Then nothing is kept of it.
        """
        if rid in self._requests:
            raise errors.UsageError("the request is there already", rid=rid)
        if self._layers:
            inputs["output_hidden_states"] = True
        prepared, cache = prompts.prepare(self._model, self._limits, rid, seed, inputs)
        generator = None if seed is None else torch.Generator(prepared.ids.device).manual_seed(seed)
        self._requests[rid] = _Request(rid, *prepared, cache, generator)
        # Of a former request with this rid nobody asked.
        self._failed.pop(rid, None)

    def remove(self, rid: str) -> None:
        """The request leaves, ended or not, with all that was kept for it. UnknownRequest if it is not there."""
        self._request(rid)
        del self._requests[rid]

    def preempt(self, rid: str) -> None:
        """Keep the request's state, its cache in host memory, until a step names it. UnknownRequest."""
        request = self._request(rid)
        request.waiting = True
        for layer in prompts.cache_layers(request.cache):
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

        What one request fails on is its own: its embeds do not fit (InvalidPayload), its forward, a processor or its
        draw raises. It has no result and is in `failures`. Rows that share a forward which raises are run again alone.
        """
        live = [request.rid for request in self._requests.values() if not (request.finished or request.waiting)]
        rows = [self._request(rid) for rid in (live if rids is None else rids)]
        given = dict(embeds or {})
        _check_step(rows, given)
        failures: dict[str, Exception] = {}
        for request in rows:
            with isolated(failures, [request.rid], "the beginning of a step"):
                self._take_up(request, given)
        results: dict[str, RowOutput] = {}
        decoding = [request for request in rows if request.started and request.rid not in failures]
        for request in rows:
            if not request.started and request.rid not in failures:
                results |= self._forward([request], given, failures)
        # The library runs decode forwards under this, too: it chooses how experts are computed.
        with self._model._optimize_model_for_decode() if decoding else nullcontext():
            for group in self._groups(decoding, given):
                results |= self._forward(group, given, failures)
        for rid in failures:
            del self._requests[rid]
        self._failed |= failures
        return {request.rid: results[request.rid] for request in rows if request.rid in results}

    def failures(self) -> dict[str, Exception]:
        """The first error of each request that failed in a step since the last call, each once. They have left."""
        found, self._failed = self._failed, {}
        return found

    def _take_up(self, request: _Request, given: Mapping[str, torch.Tensor]) -> None:
        """What the request has been given fits, and its cache is on the device."""
        if request.rid in given:
            self._limits.check_embeds(request.rid, given[request.rid], tokens=1)
        if request.waiting:
            request.waiting = False
            for layer in prompts.cache_layers(request.cache):
                layer.prefetch()

    def _groups(self, decoding: list[_Request], given: Container[str]) -> list[list[_Request]]:
        """Requests that share a forward, those with embeds and those with ids; or each its own."""
        groups: dict[object, list[_Request]] = {}
        for request in decoding:
            padded = request.kwargs.get("attention_mask") is not None
            alone = self._exact or padded or not packing.packable(request.cache)
            groups.setdefault(request.rid if alone else request.rid in given, []).append(request)
        return list(groups.values())

    def _forward(
        self, group: Sequence[_Request], given: Mapping[str, torch.Tensor], failures: Failures
    ) -> dict[str, RowOutput]:
        """The group's rows, in one forward if it can be."""
        fed: dict[str, dict[str, Any]] = {}
        for request in group:
            with isolated(failures, [request.rid], "prepare_inputs_for_generation"):
                fed[request.rid] = self._inputs(request, given.get(request.rid))
        ready = [request for request in group if request.rid in fed]
        results: dict[str, RowOutput] = {}
        made = self._together(ready, fed) if len(ready) > 1 else None
        for i, request in enumerate(ready):
            with isolated(failures, [request.rid], "forward"):
                inputs = fed[request.rid]
                if made is None:
                    results[request.rid] = self._result(request, inputs, self._call(inputs), None)
                else:
                    results[request.rid] = self._result(request, inputs, made, i)
        return results

    def _together(self, ready: Sequence[_Request], fed: Mapping[str, dict[str, Any]]) -> _Made | None:
        """One forward for all rows. None if it raises: then each cache is as before, for a forward of its own."""
        before = [packing.lengths(request.cache) for request in ready]
        broken: dict[str, Exception] = {}
        with isolated(broken, [request.rid for request in ready], "the forward of all these, now run one by one,"):
            with packing.ByRow():
                return self._call(packing.pack([fed[request.rid] for request in ready]))
        for request, tokens in zip(ready, before, strict=True):
            packing.cut_back(request.cache, tokens)
        return None

    def _call(self, inputs: Mapping[str, Any]) -> _Made:
        outputs = self._model(**inputs, return_dict=True)
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        return _Made(outputs, logits, _layers(outputs.hidden_states) if self._layers else ())

    def _result(self, request: _Request, fed: Mapping[str, Any], made: _Made, shared: int | None) -> RowOutput:
        """The request's next id, and its own of what the forward made: all, or of a shared one this row."""
        # A packed forward's outputs are everyone's; the keys are in the request's own cache already.
        self._go_on(request, made.outputs if shared is None else None)
        row = slice(shared or 0, (shared or 0) + 1)
        logits = made.logits[row]
        token = self._draw(request, logits)
        hidden = {layer: made.layers[layer][row] for layer in self._layers}
        return RowOutput(token, request.finished, fed.get("input_ids"), logits, hidden)

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
            # On a CUDA device a draw from such odds ends the device's use for all requests.
            if not odds.isfinite().all():
                raise errors.InvalidPayload("nothing can be drawn: the scores are not finite", rid=request.rid)
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
    for rid in given:
        if rid not in seen:
            raise errors.UsageError("embeds are for a request of the step", rid=rid)
