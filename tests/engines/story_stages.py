"""Thinker and talker as models in genuine vLLM runners, which have their mixins and are fed by the genuine scheduler.

The engine's: requests, batches, positions, ids, what is sampled, and when a request ends. The adapter's: what comes
and goes, maps, hooks, embeddings. The library's: the forward, with a cache a request, and a talker's draws, which the
engine then takes for its own, being greedy. A model checks that the engine's rows are those that it ran.

To be imported with the demo's modules on the path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from omni_model import DTYPE, load_part, make_prompt
from omni_runner import EXACT, STAGES_FILE, TICK
from omni_stages import ACCEPTED, CODES, EMBEDDINGS, GRID, LENGTHS, OUTPUT_IDS, PROMPT_IDS, SPECIAL
from omni_talker import prompt_rows
from omni_uncut import GREEDY, beside_prompt
from pipelines import Request
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

from runner_adapter import AdapterConfig, RunnerAdapter, StepPlan, Talker, TransferConfig
from runner_adapter.adapters.transformers import HfStageRunner, RowOutput
from runner_adapter.adapters.vllm import V1RunnerMixin, V2RunnerMixin
from tests.e2e.stages import OF_THE_PROMPT, WHOLE, Deaf, FailingModel, OneAStep, StoryStation
from tests.engines.story_crew import Way
from tests.engines.v2_twins import TwinRunner, v2
from tests.engines.vllm_steps import Loop, settings, v1

#: Of the engine's cache, of 16 tokens each: nobody is preempted.
BLOCKS = 128
Named = dict[str, torch.Tensor]


# -- models ---------------------------------------------------------------------------------------


class Answers:
    """What the last forward gave: the output's rows, the logits of each request, and by rid what is handed over."""

    given: dict[str, Named]

    def rows(self, tokens: int, outputs: Mapping[str, RowOutput], spans: Mapping[str, Any], odds: torch.Tensor) -> Any:
        """The forward's output [tokens, width]: the rows of the last layer; `odds`: a row of logits a request."""
        hidden = torch.cat([output.hidden[-1][0] for output in outputs.values()])
        assert len(hidden) == tokens == max(stop for _, stop in spans.values())
        self._ends, self._odds = hidden[[stop - 1 for _, stop in spans.values()]], odds
        return hidden

    def compute_logits(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        assert torch.equal(hidden, self._ends), "the engine samples behind each request's last row"
        return self._odds


class EngineThinker(Answers):
    """Fed by the engine's ids, and greedy."""

    has_preprocess = has_postprocess = requires_raw_input_tokens = False

    def __init__(self, thinker: Any, config: Any, requests: Mapping[str, Request]) -> None:
        self._accepted = int(config.talker_config.accept_hidden_layer)
        self.runner = HfStageRunner(thinker, exact=EXACT, layers=(0, self._accepted, -1))
        self._requests = requests

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        request_ids: list[str],
        request_token_spans: list[tuple[int, int]],
        generated_len: list[int],
        model_intermediate_buffer: Any,
        **_: Any,
    ) -> torch.Tensor:
        spans = dict(zip(request_ids, request_token_spans, strict=True))
        generated = dict(zip(request_ids, generated_len, strict=True))
        fed = {rid: input_ids[start:stop][None].long() for rid, (start, stop) in spans.items()}
        for rid in request_ids:
            if not generated[rid]:
                request = self._requests[rid]
                prompt = {**make_prompt(request.says, request.seed), "input_ids": fed[rid]}
                self.runner.add(rid, **prompt, **GREEDY, max_new_tokens=request.text_tokens)
        outputs = self.runner.step(request_ids)
        self.given = {}
        for rid, output in outputs.items():
            assert output.ids is not None and torch.equal(output.ids, fed[rid]), "the engine's id is the one drawn"
            rows = {EMBEDDINGS: output.hidden[0][0], ACCEPTED: output.hidden[self._accepted][0]}
            ids = {OUTPUT_IDS if generated[rid] else PROMPT_IDS: output.ids[0]}
            there = {} if generated[rid] else model_intermediate_buffer[rid]
            beside = {name: there[name] for name in (SPECIAL, GRID, LENGTHS) if name in there}
            self.given[rid] = {**rows, **ids, **beside}
        return self.rows(len(input_ids), outputs, spans, torch.cat([output.logits for output in outputs.values()]))


class FedRunner(HfStageRunner):
    """A prompt begins when the engine's forward has its embeddings."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._coming: dict[str, dict[str, Any]] = {}

    def add(self, rid: str, **inputs: Any) -> None:
        self._coming[rid] = inputs

    def begin(self, rid: str, embeds: torch.Tensor) -> None:
        super().add(rid, **{**self._coming.pop(rid), "inputs_embeds": embeds})


class EngineTalker(FailingModel, Answers):
    """Fed by the engine's embeddings. A row of the thinker that has not come it speaks without (PR, root cause)."""

    requires_raw_input_tokens = False

    def __init__(self, talker: Any, config: Any, requests: Mapping[str, Request]) -> None:
        super().__init__(talker, config, requests)
        self.runner = FedRunner(talker, exact=EXACT, layers=(-1,))
        self._vocabulary = int(config.talker_config.text_config.vocab_size)
        #: By rid, the thinker's rows that each of its forwards was given.
        self.seen: dict[str, list[int]] = {}

    def preprocess(self, **given: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        before = given["_omni_num_computed_tokens"] - given["_omni_prompt_len"]
        return super().preprocess(**given, generated=max(0, before + 1), input_ended=True)

    def __call__(
        self,
        *,
        inputs_embeds: torch.Tensor,
        request_ids: list[str],
        request_token_spans: list[tuple[int, int]],
        generated_len: list[int],
        model_intermediate_buffer: Any,
        **_: Any,
    ) -> torch.Tensor:
        spans = dict(zip(request_ids, request_token_spans, strict=True))
        decoding, self.given = {}, {}
        for rid, generated in zip(request_ids, generated_len, strict=True):
            start, stop = spans[rid]
            # A copy: the engine's buffer is the next step's, too.
            embeds = inputs_embeds[start:stop][None].clone()
            self.seen.setdefault(rid, []).append(len(model_intermediate_buffer[rid][EMBEDDINGS]))
            if generated:
                decoding[rid] = embeds
                self.given[rid] = {CODES: model_intermediate_buffer[rid][CODES]}
            else:
                self.runner.begin(rid, embeds)
        outputs = self.runner.step(request_ids, embeds=decoding)
        odds = torch.zeros(len(outputs), self._vocabulary)
        for row, output in enumerate(outputs.values()):
            odds[row, output.token] = 1.0
        return self.rows(len(inputs_embeds), outputs, spans, odds)


# -- runners --------------------------------------------------------------------------------------


class Handing:
    """What the model's last forward gave is handed over beside its output."""

    model: Any

    def beside(self, plan: StepPlan) -> dict[str, Named]:
        return {row.rid: self.model.given.get(row.rid, {}) for row in plan.rows}


class V1Runner(Handing, V1RunnerMixin, CPUModelRunner):
    pass


class V1OmniRunner(Handing, V1RunnerMixin, OmniGPUModelRunner, CPUModelRunner):
    pass


class V2Runner(Handing, V2RunnerMixin, TwinRunner):
    pass


RUNNERS: dict[str, Any] = {"v1": (v1, V1Runner), "v1-omni": (v1, V1OmniRunner), "v2": (v2, V2Runner)}


class RestingLoop(Loop):
    """The scheduler is not shown those running requests that rest."""

    def __init__(self, runner: Any, rests: Callable[[Any], bool], **options: Any) -> None:
        super().__init__(runner, **options)
        self._rests = rests

    def schedule(self, cached: Mapping[str, Any] | None = None) -> SchedulerOutput:
        running = self.scheduler.running
        self.scheduler.running = [request for request in running if not self._rests(request)]
        output = super().schedule(cached)
        self.scheduler.running += [request for request in running if self._rests(request)]
        return output


# -- stages ---------------------------------------------------------------------------------------


class EngineStage(ABC):
    """A stage's requests through its engine, until all have ended."""

    MODEL: Any

    def __init__(self, way: Way, station: StoryStation, requests: list[Request], folder: Path) -> None:
        self.requests = {request.rid: request for request in requests}
        self.failed: dict[str, Exception] = {}
        self._station = station
        self.part, self.config = load_part(station.stage, folder)
        self.model = self.MODEL(self.part, self.config, self.requests)
        make, kind = RUNNERS[way.version]
        self.runner = make(kind, self._settings(), self.model)
        self.runner.use_adapter(self._adapter(way, station))
        self.loop = RestingLoop(self.runner, self._rests, blocks=BLOCKS, v2=way.version == "v2")

    @abstractmethod
    def _adapter(self, way: Way, station: StoryStation) -> RunnerAdapter: ...

    @abstractmethod
    def _submit(self, request: Request) -> None:
        """Give the request to the scheduler."""

    def _rests(self, request: Any) -> bool:
        """Whether a running request of the scheduler is left out of this step."""
        return False

    def _settings(self) -> Any:
        text = self.part.config.text_config
        sizes = {"vocab_size": text.vocab_size, "hidden_size": text.hidden_size}
        made = settings(hf_overrides=sizes, dtype=str(DTYPE).removeprefix("torch."))
        # The library reads a prompt in one forward.
        made.scheduler_config.enable_chunked_prefill = False
        return made

    @property
    def seen(self) -> dict[str, Any]:
        return {"maps": len(self.runner.adapter.buffer), "caches": len(self.model.runner)}

    def run(self) -> None:
        for request in self.requests.values():
            self._submit(request)
        while self.loop.scheduler.has_requests():
            self._hear()
            self._step()

    def _hear(self) -> None:
        """Requests that failed in another stage, and have not ended in this one."""
        for rid, why in self._station.failed_elsewhere().items():
            if rid not in self.loop.ended:
                self.failed[rid] = RuntimeError(why)
                self.loop.abort(rid)
                self._forget(rid)

    def _forget(self, rid: str) -> None:
        if rid in self.model.runner:
            self.model.runner.remove(rid)

    def _step(self) -> bool:
        """Whether a request ran."""
        ended = set(self.loop.ended)
        output = self.loop.step()
        if output.num_scheduled_tokens:
            entering = len(output.scheduled_new_reqs)
            self._station.steps.append((entering, len(output.num_scheduled_tokens) - entering))
        for rid in self.loop.ended.keys() - ended:
            self._forget(rid)
            if self.loop.ended[rid].finish_reason is FinishReason.ERROR:
                self.failed[rid] = RuntimeError(self.loop.ended[rid].stop_reason)
                self._station.tell_failed(rid, str(self.failed[rid]))
        return bool(output.num_scheduled_tokens)


class ThinkerStage(EngineStage):
    MODEL = EngineThinker

    def _adapter(self, way: Way, station: StoryStation) -> RunnerAdapter:
        config = TransferConfig.from_yaml(STAGES_FILE, "thinker")
        station.whole = WHOLE if way.full_payload else None
        return RunnerAdapter(
            self.model,
            config,
            settings=AdapterConfig.from_yaml(STAGES_FILE, "thinker"),
            outbox=station.outbox("talker", config),
            form="names",
        )

    def _submit(self, request: Request) -> None:
        inputs = make_prompt(request.says, request.seed)
        beside = beside_prompt(self.part, self.config, inputs)
        first = {SPECIAL: beside.pop("special")[0], **{f"meta.{name}": tensor for name, tensor in beside.items()}}
        prompt = inputs["input_ids"][0].tolist()
        self.loop.add(request.rid, *prompt, tokens=request.text_tokens, model_intermediate_buffer=first)

    def _step(self) -> bool:
        ran = super()._step()
        if not ran:
            # A stage that reads sleeps in such a step, for input; this one for what the others tell.
            self._station.listen(TICK)
        return ran

    def _rests(self, request: Any) -> bool:
        """One that is to fail in the talker, from when it has all that it needs before: it lives here when it fails."""
        step = FailingModel.FAILS.get(request.request_id)
        return step is not None and request.num_output_tokens >= OF_THE_PROMPT + step


class TalkerStage(EngineStage):
    MODEL = EngineTalker

    def _adapter(self, way: Way, station: StoryStation) -> RunnerAdapter:
        config = TransferConfig.from_yaml(STAGES_FILE, "talker")
        self._inbox, _ = station.inbox("thinker", way.full_payload)
        source = self._inbox if way.full_payload else OneAStep(self._inbox)
        return RunnerAdapter(
            self.model,
            config,
            settings=AdapterConfig.from_yaml(STAGES_FILE, "talker"),
            rules=WHOLE,
            inbox=Deaf(source) if way.deaf else source,
            outbox=station.outbox("code2wav", config),
            # The library has one generator for a request's tokens and codes.
            talker=Talker(
                self.model,
                max_rows=len(self.requests),
                dtype=DTYPE,
                device="cpu",
                generator_of=self.model.runner.generator,
            ),
            form="names",
        )

    def _submit(self, request: Request) -> None:
        # The engine counts rows; what stands there the hook says.
        rows = prompt_rows(self.config, make_prompt(request.says, request.seed)["input_ids"][0])
        self.loop.add(
            request.rid, *[0] * rows, tokens=request.frames[1], stop=[self.config.talker_config.codec_eos_token_id]
        )

    @property
    def seen(self) -> dict[str, Any]:
        return {**super().seen, "rows": self.model.seen, "unread": list(self._inbox)}


STAGES = {"thinker": ThinkerStage, "talker": TalkerStage}
