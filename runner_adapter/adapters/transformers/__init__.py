"""Models of the transformers library as a stage's engine: many requests a step, each as if generate() had it alone."""

from __future__ import annotations

from runner_adapter.adapters.transformers.stage import HfStageRunner, RowOutput
from runner_adapter.adapters.transformers.talker import HfTalker

__all__ = ["HfStageRunner", "HfTalker", "RowOutput"]
