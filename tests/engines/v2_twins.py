"""vLLM's V2 runner without an accelerator: its own classes, with twins of ours for what only Triton or CUDA can run.

Genuine: RequestState, InputBatch, ModelState, `execute_model` with all of `finish_requests`, `add_requests`,
`update_requests`, `gather_batch_req_state`, `prepare_inputs` and the call of the model. Twins: the kernels that write
staged values, prepare tokens and positions and take sampled tokens in; sampling, which is greedy here. Not there at
all: attention and its block tables, captured graphs, drafters, tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.cpu_model_runner import _torch_cuda_wrapper
from vllm.v1.worker.gpu import buffer_utils, model_runner
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler

from tests.engines.vllm_steps import ALONE


def apply_write(self: Any) -> None:
    """StagedWriteTensor: what is staged, row by row."""
    begin = 0
    for row, start, end in zip(
        self._staged_write_indices, self._staged_write_starts, self._staged_write_cu_lens, strict=True
    ):
        content = torch.tensor(self._staged_write_contents[begin:end], dtype=self.dtype)
        target = self.gpu[row] if self.gpu.dim() > 1 else self.gpu[row : row + 1]
        target[start : start + len(content)] = content
        begin = end
    self.clear_staged_writes()


def prefill(ids: Any, ahead: Any, idx_mapping: Any, starts: Any, tokens: Any, prefill_len: Any, computed: Any) -> None:
    """Prompt tokens of this step, from those of all requests."""
    for row, slot in enumerate(idx_mapping.tolist()):
        done, begin, end = int(computed[slot]), int(starts[row]), int(starts[row + 1])
        if done < prefill_len[slot]:
            ids[begin:end] = tokens[slot, done : done + end - begin]


def positions(idx_mapping: Any, starts: Any, computed: Any, pos: Any, seq_lens: Any) -> None:
    seq_lens.zero_()
    for row, slot in enumerate(idx_mapping.tolist()):
        done, begin, end = int(computed[slot]), int(starts[row]), int(starts[row + 1])
        pos[begin:end] = torch.arange(done, done + end - begin)
        seq_lens[row] = done + end - begin


def sampled(ids: Any, idx_mapping: Any, last: Any, starts: Any, seq_lens: Any, prefill_len: Any, *_: Any) -> Any:
    """The last sampled token of each request that is past its prompt; where each one's logits are."""
    for row, slot in enumerate(idx_mapping.tolist()):
        if seq_lens[row] > prefill_len[slot]:
            ids[int(starts[row + 1]) - 1] = last[slot, 0]
    return starts[1 : len(idx_mapping) + 1].long() - 1


# All of these modules are the engine's own: no test of this process uses them in another way.
buffer_utils.UvaBuffer = UvaBuffer  # type: ignore[misc]
buffer_utils.StagedWriteTensor.apply_write = apply_write  # type: ignore[method-assign]
model_runner.prepare_prefill_inputs = prefill
model_runner.prepare_pos_seq_lens = positions
model_runner.combine_sampled_and_draft_tokens = sampled
model_runner.DraftTokensHandler = lambda device: None
model_runner.get_pp_group = lambda: ALONE


class _Blocks:
    """No layer has a cache."""

    def append_block_ids(self, *_: Any, **__: Any) -> None: ...
    def apply_staged_writes(self) -> None: ...


class _Graphs:
    """No graph is captured: each batch runs as it is."""

    def dispatch(self, num_reqs: int, num_tokens: int, *_: Any, **__: Any) -> BatchExecutionDescriptor:
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)


class TwinRunner(GPUModelRunner):
    """The genuine runner, and greedy sampling."""

    def prepare_attn(self, input_batch: Any) -> Any:
        return (), torch.zeros(0, len(input_batch.input_ids), dtype=torch.int64)

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | None:
        state, self.execute_model_state = self.execute_model_state, None
        if state is None:
            return None
        batch = state.input_batch
        tokens = self.model.compute_logits(state.hidden_states[batch.logits_indices]).argmax(dim=1)
        out: list[list[int]] = []
        requests = self.req_states
        for row, slot in enumerate(batch.idx_mapping_np.tolist()):
            requests.num_computed_tokens.gpu[slot] += int(batch.num_scheduled_tokens[row])
            done = batch.seq_lens[row] >= requests.prefill_len.np[slot]
            out.append([int(tokens[row])] if done else [])
            if done:
                requests.last_sampled_tokens[slot, 0] = tokens[row]
        return ModelRunnerOutput(batch.req_ids, {rid: i for i, rid in enumerate(batch.req_ids)}, out)


def v2(runner: type[TwinRunner], config: VllmConfig, model: Any) -> Any:
    """A genuine V2 runner with this model, as its `load_model` and `initialize_kv_cache` would leave it."""
    with set_current_vllm_config(config), _torch_cuda_wrapper():
        made = runner(config, torch.device("cpu"))
    made.model = model
    made.model_state = DefaultModelState(config, model, made.encoder_cache, made.device)
    made.decode_query_len = 1
    made.sampler = Sampler(
        made.max_num_reqs, made.vocab_size, made.device, req_states=made.req_states, num_speculative_tokens=1
    )
    made.prompt_logprobs_worker = PromptLogprobsWorker(made.max_num_reqs)
    made.kv_cache_config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[])
    made.attn_groups = []
    made.block_tables = _Blocks()
    made.cudagraph_manager = _Graphs()
    return made
