"""The ratios that this project answers for, by name, and the limits of the machine that it was tuned on."""

from __future__ import annotations

from connector.bench.figures import Rule

RULES = (
    Rule("chunk_p50_vs_ring_sem", "p50_us", "connector", "chunk", "p50_us", "ring_sem", "chunk"),
    Rule("chunk_p50_vs_zmq_hop", "p50_us", "connector", "chunk", "p50_us", "zmq_hop", "chunk"),
    Rule("chunk_p99_vs_ring_sem", "p99_us", "connector", "chunk", "p99_us", "ring_sem", "chunk"),
    Rule("chunk_p50_vs_vllm_omni", "p50_us", "connector", "chunk", "p50_us", "vllm_omni", "chunk"),
    Rule("chunks_per_s_16_vs_zmq", "per_s", "connector", "sustained16", "per_s", "zmq_hop", "sustained16"),
    Rule("step_us_per_chunk_vs_ring", "us_each", "connector", "step", "us_each", "ring_sem", "sustained"),
    Rule("prefill_vs_memcpy", "p50_us", "connector", "prefill", "p50_us", "memcpy", "prefill"),
    Rule("large_vs_memcpy", "p50_us", "connector", "large", "p50_us", "memcpy", "large"),
    Rule("large_vs_vllm_omni", "p50_us", "connector", "large", "p50_us", "vllm_omni", "large"),
    Rule("cpu_us_per_chunk_vs_vllm_omni", "cpu_us", "connector", "sustained16", "cpu_us", "vllm_omni", "sustained16"),
)

#: µs of the limits on the machines that the project's figures are of; docs/performance.md describes the last.
#: They are of one kind, and yet what wakes from idle takes three times as long on one as on another (the ring
#: 35 to 180 µs): what stands here lies in between.
STORED = {
    "memcpy_large_us": 26_000.0,
    "memcpy_prefill_us": 1000.0,
    "ring_sem_chunk_us": 85.0,
    "zmq_hop_chunk_us": 260.0,
}
