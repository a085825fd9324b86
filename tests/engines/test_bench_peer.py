"""The benchmark beside vLLM-Omni's genuine connector, with little of everything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from connector.bench import job

ROOT = Path(__file__).resolve().parents[2]
PEERS = {"vllm_omni": "omni_peer:ADAPTER", "vllm_omni_tight": "omni_peer:TIGHT"}


def test_both_ways_of_the_peer_hand_over_every_payload_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench_job"))
    counts = {"chunk": 5, "sustained16": 64, "step": 128}
    before = set(os.listdir("/dev/shm"))
    result = job.run(job.Length(1, counts, (), 0.0), PEERS, list(counts), {}, lambda text: None)
    assert not result.missing
    assert {(row.system, row.workload) for row in result.rows} >= {(peer, name) for peer in PEERS for name in counts}
    assert {"chunk_p50_vs_vllm_omni", "cpu_us_per_chunk_vs_vllm_omni"} <= result.ratios.keys()
    assert set(os.listdir("/dev/shm")) <= before
