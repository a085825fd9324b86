"""What the ratios have to be, and are meant to become. A ratio that is not here has nothing to hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Must(NamedTuple):
    """`must` holds on every change; `aim` is wanted. `least`: the figure is to be at least so much, not at most."""

    must: float
    aim: float
    least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.must if self.least else value <= self.must

    def reached(self, value: float) -> bool:
        return value >= self.aim if self.least else value <= self.aim


#: By the ratio's name. The first two are those of the direct path; BROKER_PATH has what holds without it.
MUSTS: Mapping[str, Must] = {
    "chunk_p50_vs_ring_sem": Must(1.8, 1.3),
    "chunk_p50_vs_zmq_hop": Must(1.1, 0.75),
    "chunk_p99_vs_ring_sem": Must(2.5, 1.5),
    "chunk_p50_vs_vllm_omni": Must(0.35, 0.22),
    "chunks_per_s_16_vs_zmq": Must(1.0, 1.5, least=True),
    "step_us_per_chunk_vs_ring": Must(1.0, 0.4),
    "prefill_vs_memcpy": Must(1.6, 1.45),
    "large_vs_memcpy": Must(1.15, 1.05),
    "large_vs_vllm_omni": Must(0.04, 0.035),
    "broker_cpu_us_per_chunk": Must(10, 5),
    "cpu_us_per_chunk_vs_vllm_omni": Must(0.4, 0.25),
    "growth_broker_cpu_100k_vs_10": Must(1.2, 1.1),
    "idle_cpu_percent": Must(1, 0.2),
    "broker_bytes_per_live_payload": Must(2048, 1024),
}
BROKER_PATH: Mapping[str, float] = {"chunk_p50_vs_ring_sem": 2.7, "chunk_p50_vs_zmq_hop": 1.6}
