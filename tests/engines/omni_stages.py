"""Two stages of a Qwen3-TTS deployment: the genuine chunk adapter, stage processor, requests and queues of vLLM-Omni.

What is ours: the namespace that stands for the engine's configuration, the codec frames (no model runs), and the
scheduler's part in between: which requests are waiting, and that a request with a chunk is scheduled once.

As a program (`python -m tests.engines.omni_stages ENDPOINT`) it is stage 0, for two processes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer
from vllm_omni.request import OmniRequest

#: Seconds after which something hangs.
HANG = 30.0
PROCESSOR = "vllm_omni.model_executor.stage_input_processors.qwen3_tts.talker2code2wav_async_chunk"
#: As a deployment's `extra`.
CODEC = {"codec_chunk_frames": 4, "codec_left_context_frames": 2, "initial_codec_chunk_frames": 2}
#: Begins a line that is for the other process.
TOLD = "stage 0: "
#: Frames by request.
FRAMES = {"A": 11, "B": 7, "C": 24, "D": 1}


def adapter(stage: int, name: str, role: str, **extra: Any) -> OmniChunkTransferAdapter:
    """The chunk adapter of a stage as its scheduler makes it, over the connector of that name."""
    load_general_plugins()
    model = SimpleNamespace(
        stage_id=stage,
        async_chunk=True,
        worker_type="generation",
        max_num_seqs=8,
        stage_connector_config={"name": name, "extra": {**CODEC, **extra, "role": role}},
        custom_process_next_stage_input_func=PROCESSOR if stage == 0 else None,
    )
    return OmniChunkTransferAdapter(
        SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=8))
    )


def request(external: str, stage: int, use: str = "") -> OmniRequest:
    return OmniRequest(
        request_id=f"{external}{use}-at-{stage}",
        external_req_id=external,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
    )


class Sending:
    """Stage 0: a frame a step for each request, handed to the adapter as the scheduler does."""

    def __init__(self, name: str, **extra: Any) -> None:
        self.adapter = adapter(0, name, "sender", **extra)
        self.requests: dict[str, OmniRequest] = {}
        #: What was handed to the connector, by key.
        self.sent: dict[str, Any] = {}
        put = self.adapter.connector.put

        def noting(from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
            done = put(from_stage=from_stage, to_stage=to_stage, put_key=put_key, data=data)
            self.sent[put_key] = data
            return done

        self.adapter.connector.put = noting
        #: Frames handed to the adapter, and those that its save thread is done with.
        self.saved = self.handled = 0
        self._done = threading.Condition()
        send = self.adapter._send_single_request

        def counting(task: dict[str, Any]) -> None:
            try:
                send(task)
            finally:
                with self._done:
                    self.handled += "request" in task
                    self._done.notify_all()

        self.adapter._send_single_request = counting

    def steps(self, frames: dict[str, int], last: bool = True, seed: int = 0, use: str = "") -> None:
        """So many steps for each request; with the last its stream ends."""
        for external, count in frames.items():
            generator = torch.Generator().manual_seed(seed + ord(external[0]))
            found = self.requests.setdefault(external + use, request(external, 0, use))
            for step in range(count):
                found.append_output_token_ids(step)
                found.num_computed_tokens = found.num_tokens
                if last and step == count - 1:
                    found.status = RequestStatus.FINISHED_STOPPED
                frame = torch.randint(1, 1000, (1, 4), generator=generator)
                self.adapter.save_async({"codes.audio": frame}, found)
                self.saved += 1

    def settle(self) -> None:
        """Until the save thread is done with every frame."""
        with self._done:
            assert self._done.wait_for(lambda: self.handled >= self.saved, HANG), "the save thread hangs"


class Receiving:
    """Stage 1: requests wait for chunks; one that has a chunk is scheduled, and waits for the next."""

    def __init__(self, name: str, **extra: Any) -> None:
        self.adapter = adapter(1, name, "receiver", **extra)
        self.waiting, self.running = FCFSRequestQueue(), []
        self.requests: dict[str, OmniRequest] = {}
        #: What came, in order, by external id: (key, data).
        self.got: dict[str, list[tuple[str, Any]]] = {}
        commit = self.adapter._commit_received_chunk

        def noting(of: OmniRequest, result: Any, **more: Any) -> bool:
            self.got.setdefault(of.external_req_id, []).append((more["connector_get_key"], result[0]))
            return commit(of, result, **more)

        self.adapter._commit_received_chunk = noting

    def add(self, external: str, use: str = "") -> OmniRequest:
        found = request(external, 1, use)
        self.requests[found.request_id] = found
        self.waiting.add_request(found)
        return found

    def step(self) -> None:
        """One step of the scheduler's part."""
        self.adapter.restore_queues(self.waiting, self.running, self.requests)
        self.adapter.process_pending_chunks(self.waiting, self.running, scheduler_requests=self.requests)
        ready = [r for r in [*self.waiting, *self.running] if r.request_id in self.adapter.requests_with_ready_chunks]
        new = [r for r in ready if r in self.waiting]
        for found in new:
            self.waiting.remove_request(found)
            found.status = RequestStatus.RUNNING
            self.running.append(found)
        self.adapter.postprocess_scheduler_output(scheduled(new, [r for r in ready if r not in new]), self.requests)

    def until(self, done: Callable[[], object]) -> None:
        until = time.monotonic() + HANG
        while not done():
            assert time.monotonic() < until, f"nothing more comes: {self.got}"
            self.step()

    def to_the_end(self) -> None:
        """Until the stream of every request has ended."""
        self.until(lambda: all(self.adapter.is_done_receiving_chunks(rid) for rid in self.requests))

    def abort(self, found: OmniRequest) -> None:
        """As the scheduler's finish_requests does it."""
        self.adapter.finish_requests(found.request_id, RequestStatus.FINISHED_ABORTED, self.requests)
        del self.requests[found.request_id]
        self.running = [r for r in self.running if r is not found]


def scheduled(new: list[OmniRequest], cached: list[OmniRequest]) -> SchedulerOutput:
    ids = [r.request_id for r in cached]
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(r.request_id, r.prompt_token_ids, [], r.sampling_params, None, ([],), 0, None) for r in new
        ],
        scheduled_cached_reqs=CachedRequestData(ids, set(), [], {}, [None] * len(ids), [0] * len(ids), [0] * len(ids)),
        num_scheduled_tokens={r.request_id: 1 for r in [*new, *cached]},
        total_num_scheduled_tokens=len(new) + len(cached),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[0],
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )


def wire(data: Any) -> str:
    """What vLLM-Omni's own serializer makes of data, as text: a struct and the dict that it becomes are one."""
    return OmniSerializer.serialize(OmniSerializer.deserialize(OmniSerializer.serialize(data))).hex()


def tell(text: str) -> None:
    """A line for the other process, among those that the engine logs."""
    print(f"{TOLD}{text}", flush=True)


def main() -> None:
    """Stage 0 of its own process: waits for a line, sends all, tells what it sent, waits for the next line."""
    stage = Sending("TensorConnector", endpoint=sys.argv[1])
    tell("ready")
    sys.stdin.readline()
    stage.steps(FRAMES)
    stage.settle()
    tell(json.dumps({key: wire(data) for key, data in stage.sent.items()}))
    sys.stdin.readline()
    stage.adapter.shutdown()


if __name__ == "__main__":
    main()
