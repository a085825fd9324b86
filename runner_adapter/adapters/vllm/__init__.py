"""vLLM: mixins that give its model runners, V1 and V2, the adapter's buffer and hand-over (version 0.30).

See docs/engine-vllm.md. Nothing here loads vLLM: the mixins stand before its classes, whoever joins them loads it.
"""

from __future__ import annotations

from runner_adapter.adapters.vllm.scheduling import SchedulerMixin
from runner_adapter.adapters.vllm.v1 import V1RunnerMixin
from runner_adapter.adapters.vllm.v2 import V2RunnerMixin

__all__ = ["SchedulerMixin", "V1RunnerMixin", "V2RunnerMixin"]
