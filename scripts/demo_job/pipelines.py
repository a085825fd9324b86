"""What the demo can run: two pipelines, their stages and edges, and the requests put to them.

Nothing here imports a model: this is what the arguments are checked against.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import torch
from transport import Station

#: The reader behind the last stage: the demo's own process.
SINK = "main"


@dataclass(frozen=True)
class Request:
    """One request: `says` is the text to speak, or the kind of prompt for a model without a tokenizer."""

    rid: str
    says: str
    seed: int
    #: Of a model that generates: the thinker's tokens, and the fewest and the most steps of the talker.
    text_tokens: int = 24
    frames: tuple[int, int] = (40, 56)


@dataclass
class Outcome:
    """A request's result: `wav` float32 [samples], `codes` int64 [groups, frames] where the model has codes."""

    wav: torch.Tensor
    codes: torch.Tensor | None = None


@dataclass
class Reference:
    """The one-process run: outcomes by rid, and digests by edge and rid where the run has payloads at all."""

    outcomes: dict[str, Outcome]
    digests: dict[str, dict[str, list[str]]] = field(default_factory=dict)


class Model(Protocol):
    """What a pipeline's module offers."""

    STAGES: Mapping[str, Callable[[Station, list[Request], Path], None]]

    def prepare(self, folder: Path) -> None:
        """Write what the stages load into `folder`."""

    def check(self, text: str) -> str | None:
        """Why `text` cannot be spoken, or None; only where the pipeline speaks."""

    def reference(self, requests: list[Request], folder: Path) -> Reference:
        """The same requests in this process, without the connector."""


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages; payloads run down `stages` and on to SINK."""

    name: str
    about: str
    module: str
    stages: tuple[str, ...]
    samples_per_second: int
    #: Whether it speaks a text; else it has no tokenizer.
    speaks: bool

    @property
    def edges(self) -> list[str]:
        """FROM:TO of every edge, in the order of flow."""
        return [f"{a}:{b}" for a, b in zip(self.stages, (*self.stages[1:], SINK), strict=True)]

    def load(self) -> Model:
        """Import the model's module: onnxruntime or transformers comes with it, so seconds may pass."""
        return cast(Model, importlib.import_module(self.module))


PIPELINES = {
    p.name: p
    for p in (
        Pipeline(
            "hibari",
            "trained English text to speech (hibari-tts, ONNX); a chunk is one sentence",
            "hibari_stages",
            ("text", "acoustic", "vocoder"),
            24_000,
            speaks=True,
        ),
        Pipeline(
            "qwen3-omni-tiny",
            "Qwen3-Omni's architecture, tiny and with random weights; a chunk is one decode step",
            "omni_stages",
            ("thinker", "talker", "code2wav"),
            24_000,
            speaks=False,
        ),
    )
}

TEXTS = (
    "Good morning. The broker hands each tensor to the next stage, and it must not change a single bit.",
    "One sentence is enough for a short answer.",
    "First, the text becomes phonemes. Then a network draws the spectrum. "
    "At last, the vocoder turns it into sound. Four sentences, four chunks!",
    "Are you still there? On the 3rd of March, 250 people asked for the same thing at 7:30 pm.",
)
KINDS = ("text", "image+audio")


def make_requests(pipeline: Pipeline, count: int, text: str | None) -> list[Request]:
    """`count` requests of different content and seed, or the one that speaks `text`."""
    if text is not None:
        return [Request(f"{pipeline.name}-1", text, 7)]
    says = TEXTS if pipeline.name == "hibari" else KINDS
    return [Request(f"{pipeline.name}-{i + 1}", says[i % len(says)], 7 + i) for i in range(count)]
