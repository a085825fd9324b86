"""The demo's tiny Qwen3-Omni: what the library makes of each request alone, and how a runner is driven with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from runner_adapter.adapters.transformers import HfStageRunner, HfTalker, RowOutput

DEMO = Path(__file__).parents[2] / "scripts" / "demo_job"
#: The step at which each request comes; its kind is the demo's, in turn.
COMES = {"a": 0, "b": 0, "c": 3, "d": 7}
#: Steps at which a request is preempted, in the middle of its run.
AWAY = {"b": range(5, 9), "c": range(10, 11)}
ACCEPTED = 2

Outputs = dict[str, list[RowOutput]]
Embeds = Callable[[Collection[str], Outputs], Mapping[str, torch.Tensor]]


class Models:
    """The demo's model in one dtype, and what the library makes of the demo's requests one at a time."""

    def __init__(self, demo: SimpleNamespace, folder: Path) -> None:
        self.demo = demo
        self.thinker, self.config = demo.model.load_part("thinker", folder)
        self.talker, _ = demo.model.load_part("talker", folder)
        self.requests = {
            rid: demo.pipelines.Request(rid, kind, seed)
            for rid, kind, seed in zip(COMES, demo.pipelines.KINDS * 2, range(7, 11), strict=True)
        }
        self.rows: dict[str, list[dict[str, torch.Tensor]]] = {rid: [] for rid in COMES}
        self.frames: dict[str, list[dict[str, torch.Tensor]]] = {rid: [] for rid in COMES}
        for rid, request in self.requests.items():
            demo.stages.think(self.thinker, self.config, request, self.rows[rid].append)
            demo.talker.talk(self.talker, self.config, iter(self.rows[rid]), request.seed, self.frames[rid].append)

    def prompt(self, rid: str) -> dict[str, Any]:
        request = self.requests[rid]
        return {
            **self.demo.model.make_prompt(request.says, request.seed),
            "max_new_tokens": self.demo.stages.TEXT_TOKENS,
            "do_sample": False,
            "eos_token_id": None,
            "use_audio_in_video": False,
        }

    def codes(self, rid: str) -> torch.Tensor:
        """int64 [frames, groups]."""
        return torch.cat([frame["codes"][..., 0] for frame in self.frames[rid]])


class Talking:
    """Drives talker requests: each step's frames come from one call of talker_mtp, as a stage's step would."""

    def __init__(self, models: Models, runner: HfStageRunner, talker: HfTalker) -> None:
        self.models, self.runner, self.talker = models, runner, talker
        self.texts: dict[str, list[torch.Tensor]] = {}
        self.codes: dict[str, list[torch.Tensor]] = {rid: [] for rid in COMES}

    def inputs(self, rid: str, **sampling: Any) -> dict[str, Any]:
        """What the demo gives generate(): the prompt's embeds, processors, and where the text's rows come from."""
        models = self.models
        chunks = models.rows[rid]
        first = chunks[0]
        made = models.demo.talker._talker_inputs(models.talker, models.config, first, chunks[1])
        rows = [models.talker.text_projection(chunk["embed"])[:, 0] for chunk in chunks[2:]]
        # Rows of the text, then its end; whatever is asked behind that is padding.
        self.texts[rid] = [*rows, made.pop("eos")[:, 0], made.pop("tts_pad_embed")[:, 0]]
        config = models.config.talker_config
        size, eos = config.text_config.vocab_size, config.codec_eos_token_id
        usual = {"do_sample": True, "top_k": 50, "temperature": 0.9, "repetition_penalty": 1.05}
        lengths = {
            "min_new_tokens": models.demo.talker.LEAST_FRAMES,
            "max_new_tokens": models.demo.talker.MOST_FRAMES,
        }
        media = {name: first[name] for name in ("image_grid_thw", "audio_feature_lengths") if name in first}
        forbidden = [token for token in range(size - 1024, size) if token != eos]
        return {
            **made, **media, **lengths, "eos_token_id": eos, "suppress_tokens": forbidden, **(sampling or usual)
        }  # fmt: skip

    def embeds(self, rids: Collection[str], outputs: Outputs, do_sample: bool = True) -> dict[str, torch.Tensor]:
        rids = [rid for rid in rids if outputs[rid]]
        if not rids:
            return {}
        last = [outputs[rid][-1] for rid in rids]
        steps = [min(len(outputs[rid]), len(self.texts[rid])) - 1 for rid in rids]
        embeds, codes = self.talker.talker_mtp(
            torch.tensor([output.token for output in last], dtype=torch.int32),
            None,
            torch.cat([output.hidden[-1][:, -1] for output in last]),
            torch.cat([self.texts[rid][step] for rid, step in zip(rids, steps, strict=True)]),
            do_sample=do_sample,
            generators=[self.runner.generator(rid) for rid in rids],
        )
        for rid, frame in zip(rids, codes, strict=True):
            self.codes[rid].append(frame)
        return {rid: embeds[i].reshape(1, 1, -1) for i, rid in enumerate(rids)}


def run(runner: HfStageRunner, inputs: Mapping[str, dict[str, Any]], embeds: Embeds | None = None) -> Outputs:
    """Run all requests to their ends: they come at their steps, go away for a while, and change places."""
    outputs: Outputs = {rid: [] for rid in inputs}
    for moment in range(100):
        for rid in inputs:
            if COMES[rid] == moment:
                runner.add(rid, **inputs[rid])
            if moment in AWAY.get(rid, ())[:1]:
                runner.preempt(rid)
        rids = [rid for rid in runner if moment not in AWAY.get(rid, ())]
        if moment % 2:
            rids.reverse()
        done = runner.step(rids, embeds=embeds(rids, outputs) if embeds else None)
        assert list(done) == rids
        for rid, output in done.items():
            outputs[rid].append(output)
            if output.finished:
                runner.remove(rid)
        if moment > max(COMES.values()) and not len(runner):
            return outputs
    raise AssertionError("requests without end")


def talk(models: Models, exact: bool) -> Talking:
    runner = HfStageRunner(models.talker, exact=exact, layers=(-1,))
    talking = Talking(models, runner, HfTalker(models.talker, exact=exact))
    inputs = {rid: {**talking.inputs(rid), "seed": models.requests[rid].seed} for rid in COMES}
    run(runner, inputs, talking.embeds)
    return talking


class Forwards:
    """Counts the rows of each forward of a model, as it begins, while it is entered."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        self._model = model

    def __enter__(self) -> list[int]:
        self._hook = self._model.register_forward_pre_hook(self._count, with_kwargs=True)
        return self.rows

    def _count(self, module: Any, args: Any, inputs: Mapping[str, Any]) -> None:
        fed = [inputs[name] for name in ("input_ids", "inputs_embeds", "decoder_input_ids") if name in inputs]
        self.rows.append(next(len(rows) for rows in fed if rows is not None))

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
