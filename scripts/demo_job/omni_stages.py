"""Qwen3-Omni's three parts as stages that hand rows on while they are being generated, many requests at once.

Each stage is a StageRunner (omni_runner.py) over a RunnerAdapter; omni_stages.yaml says what leaves it, under these
keys with `{rid}-` before them:

| edge | key | shape | dtype |
|---|---|---|---|
| thinker -> talker | 0, 2: the embeddings, the accepted layer | [prompt, width], then [1, width] a step | bfloat16 |
| | thinker_input_ids (first payload), thinker_output_token_ids (later ones) | [prompt], [1] | int64 |
| | embed.tts_special (first): the thinker's embedding of bos, eos, pad | [3, width] | bfloat16 |
| | meta.image_grid_thw, meta.audio_feature_lengths (first, if any) | [n, 3], [n] | int64 |
| talker -> code2wav | code_predictor_codes | [1, groups] | int64 |
| code2wav -> main | wav | [1, 1, samples] | float32 |
| | codes | [1, groups, frames] | int64 |

The run in one process (omni_uncut.py) goes another way to the same payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from omni_model import DTYPE, load_part, make_prompt, save_weights
from omni_runner import EXACT, StageRunner, StepOutput
from omni_talker import TalkerModel, prompt_rows
from omni_uncut import GREEDY, TEXT_TOKENS, WINDOW, beside_prompt, reference, think, window
from pipelines import SINK, Request
from transport import Station

from runner_adapter import BatchMaps, MergeRules, StepPlan, Talker
from runner_adapter.adapters.transformers import HfStageRunner

__all__ = ["STAGES", "TEXT_TOKENS", "prepare", "reference", "think"]

PROMPT_IDS, OUTPUT_IDS, CODES = "ids.thinker_input_ids", "ids.thinker_output_token_ids", "ids.code_predictor_codes"
SPECIAL, GRID, LENGTHS = "embed.tts_special", "meta.image_grid_thw", "meta.audio_feature_lengths"
EMBEDDINGS, ACCEPTED = "hidden_states.layers[0]", "hidden_states.layers[2]"


def prepare(folder: Path) -> None:
    """Write the configuration and every stage's weights."""
    save_weights(folder)


class ThinkerStage(StageRunner):
    """Generates text greedily; gives the prompt's rows, then the row of each token that is fed back."""

    #: In the output these stand by rid.
    RULES = MergeRules(row_axes=dict.fromkeys((PROMPT_IDS, OUTPUT_IDS, SPECIAL, GRID, LENGTHS), 0))

    def __init__(self, station: Station, requests: Iterable[Request], folder: Path) -> None:
        self._thinker, self._config = load_part("thinker", folder)
        self._layers = (0, int(self._config.talker_config.accept_hidden_layer))
        self.runner = HfStageRunner(self._thinker, exact=EXACT, layers=self._layers)
        super().__init__(station, requests, self._thinker, self.RULES, source=None, target="talker")

    def enter(self, rid: str) -> dict[str, torch.Tensor]:
        request = self.requests[rid]
        inputs = make_prompt(request.says, request.seed)
        arguments: dict[str, Any] = {**inputs, **GREEDY, "max_new_tokens": request.text_tokens}
        self.runner.add(rid, **arguments)
        beside = beside_prompt(self._thinker, self._config, inputs)
        special = beside.pop("special")[0]
        return {SPECIAL: special, **{f"meta.{name}": tensor for name, tensor in beside.items()}}

    def ready(self, rid: str) -> bool:
        return True

    def tokens(self, rid: str) -> int:
        return self.runner.tokens(rid)

    def forward(
        self, plan: StepPlan, embeds: Mapping[str, torch.Tensor], model_intermediate_buffer: BatchMaps, **step: Any
    ) -> StepOutput:
        """Rows of the layers [tokens, width]; the ids that were fed; with a prompt's rows, what its map holds."""
        outputs = self.runner.step(plan.rids)
        failed = self.runner.failures()
        if not outputs:
            return StepOutput(None, set(), failed)
        layers = {n: torch.cat([output.hidden[n][0] for output in outputs.values()]) for n in self._layers}
        beside: dict[str, dict[str, Any]] = {name: {} for name in (PROMPT_IDS, OUTPUT_IDS, SPECIAL, GRID, LENGTHS)}
        for row in [row for row in plan.rows if row.rid in outputs]:
            ids = outputs[row.rid].ids
            beside[PROMPT_IDS if row.prefill else OUTPUT_IDS][row.rid] = None if ids is None else ids[0]
            for name in (SPECIAL, GRID, LENGTHS) if row.prefill else ():
                beside[name][row.rid] = model_intermediate_buffer[row.rid].get(name)
        ended = {rid for rid, output in outputs.items() if output.finished}
        return StepOutput((layers[0], {"hidden_states": {"layers": layers}, **beside}), ended, failed)

    def forget(self, rid: str) -> None:
        if rid in self.runner:
            self.runner.remove(rid)


class TalkerStage(StageRunner):
    """The talker: a frame a step and request, each when the thinker's row for it is there."""

    #: What a test puts another in the place of.
    MODEL = TalkerModel

    def __init__(self, station: Station, requests: Iterable[Request], folder: Path) -> None:
        talker, self._config = load_part("talker", folder)
        requests = list(requests)
        self.model = self.MODEL(talker, self._config, {request.rid: request for request in requests})
        #: The ids that were drawn last.
        self._drawn: dict[str, int] = {}
        rules = MergeRules(accumulated=(EMBEDDINGS, ACCEPTED, OUTPUT_IDS), row_axes={CODES: 0})
        # The library has one generator for a request's tokens and codes.
        draws = self.model.runner.generator
        frames = Talker(self.model, max_rows=len(requests), dtype=DTYPE, device="cpu", generator_of=draws)
        super().__init__(station, requests, self.model, rules, source="thinker", target="code2wav", talker=frames)

    def ready(self, rid: str) -> bool:
        """A prompt needs the thinker's, and its first generated row; each frame one more, to the last."""
        there = self.adapter.buffer.names(rid)
        prompt, rows = there.get(PROMPT_IDS, ()), there.get(EMBEDDINGS, ())
        return len(rows) - len(prompt) > self.generated[rid] or self.adapter.input_ended(rid)

    def tokens(self, rid: str) -> int:
        if self.generated[rid]:
            return 1
        return prompt_rows(self._config, self.adapter.buffer.names(rid)[PROMPT_IDS])

    def last_ids(self, rid: str) -> torch.Tensor:
        drawn = self._drawn.get(rid)
        return super().last_ids(rid) if drawn is None else torch.tensor([drawn])

    def forward(
        self, plan: StepPlan, embeds: Mapping[str, torch.Tensor], model_intermediate_buffer: BatchMaps, **step: Any
    ) -> StepOutput:
        """Rows of the last layer [tokens, width], and the frames that the decode rows were fed."""
        outputs = self.model.runner.step(plan.rids, embeds={row.rid: embeds[row.rid][None] for row in plan.decode})
        failed = self.model.runner.failures()
        if not outputs:
            return StepOutput(None, set(), failed)
        self._drawn |= {rid: output.token for rid, output in outputs.items()}
        hidden = torch.cat([output.hidden[-1][0] for output in outputs.values()])
        frames = {row.rid: model_intermediate_buffer[row.rid][CODES] for row in plan.decode if row.rid in outputs}
        ended = {rid for rid, output in outputs.items() if output.finished}
        return StepOutput((hidden, {CODES: frames}), ended, failed)

    def forget(self, rid: str) -> None:
        self._drawn.pop(rid, None)
        if rid in self.model.runner:
            self.model.runner.remove(rid)


class Code2WavStage(StageRunner):
    """Code2wav: a window of frames a step and request. It waits for the frame behind it: else it is the last."""

    def __init__(self, station: Station, requests: Iterable[Request], folder: Path) -> None:
        self._code2wav, _ = load_part("code2wav", folder)
        rules = MergeRules(accumulated=(CODES,), row_axes={"ids.wav": 0, "ids.codes": 0})
        super().__init__(station, requests, self._code2wav, rules, source="talker", target=SINK)

    def forget(self, rid: str) -> None:
        """Nothing is kept beside its map."""

    def ready(self, rid: str) -> bool:
        return self._left(rid) > WINDOW or self.adapter.input_ended(rid)

    def tokens(self, rid: str) -> int:
        return min(WINDOW, self._left(rid))

    def _left(self, rid: str) -> int:
        """Frames that are there and not decoded."""
        return len(self.adapter.buffer.names(rid).get(CODES, ())) - self.generated[rid] * WINDOW

    @torch.no_grad()
    def forward(
        self, plan: StepPlan, embeds: Mapping[str, torch.Tensor], model_intermediate_buffer: BatchMaps, **step: Any
    ) -> StepOutput:
        """A window of each row: samples, and the codes [tokens, groups]."""
        parts: dict[str, dict[str, torch.Tensor]] = {"ids.wav": {}, "ids.codes": {}}
        ended = {row.rid for row in plan.rows if self._left(row.rid) <= WINDOW}
        for row in plan.rows:
            begin = row.generated * WINDOW
            frames = model_intermediate_buffer[row.rid][CODES][: begin + row.tokens]
            made = window(self._code2wav, frames.T[None], begin)
            parts["ids.wav"][row.rid], parts["ids.codes"][row.rid] = made["wav"], made["codes"]
        return StepOutput((torch.zeros(plan.tokens, 1), parts), ended)


KINDS: dict[str, Callable[[Station, list[Request], Path], StageRunner]] = {
    "thinker": ThinkerStage,
    "talker": TalkerStage,
    "code2wav": Code2WavStage,
}


def _run(station: Station, requests: list[Request], folder: Path) -> None:
    KINDS[station.stage](station, requests, folder).run()


STAGES = dict.fromkeys(KINDS, _run)
