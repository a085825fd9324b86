"""The genuine vLLM on a machine without an accelerator: its scheduler, and its runners over a model of ours.

What is ours: the model, which has no attention, so that no kernel of the engine is needed; and the process groups of
one rank. V2 needs more: see v2_twins.py. Steps are the scheduler's own, preemption and streaming input included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker import gpu_model_runner as omni_model_runner

from runner_adapter.adapters.vllm import SchedulerMixin, V2RunnerMixin
from runner_adapter.config import AdapterConfig, TransferConfig
from runner_adapter.runner import RunnerAdapter

VOCABULARY, WIDTH, BLOCK = 256, 16, 16
#: A decoder that the engine knows; none of it but these sizes is used.
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip
#: What stages here hand over.
TRANSFER = TransferConfig.from_mapping(
    {
        "enabled": True,
        "items": ["hidden_states", "ids"],
        "key_templates": {"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"},
    }
)
#: The one rank of a group.
ALONE = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0, ranks=[0])
gpu_model_runner.get_pp_group = omni_model_runner.get_pp_group = lambda: ALONE


def settings(**model: Any) -> VllmConfig:
    """The engine's settings; `model`: those of its ModelConfig."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_CONFIG))
        own = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128, "enforce_eager": True, **model}
        made = ModelConfig(model=folder, **own)
    # vLLM-Omni's, which has a ModelConfig of its own for it.
    made.async_chunk = True
    scheduling = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=128,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.5, enable_prefix_caching=False)
    cache.kv_cache_layout = "NHD"
    return VllmConfig(
        model_config=made, scheduler_config=scheduling, cache_config=cache, device_config=DeviceConfig("cpu")
    )


class StageModel(torch.nn.Module):
    """Its embeds are the ids, plus 1000; hidden states twice the ids; the next token is the last id, plus 1. In a
    request's map it counts its steps, and keeps its last hidden state.

    `seen`: what forward was given, a step each. `found`: what preprocess was, by rid. `raises`: by rid, what it raises.
    """

    has_preprocess = True
    has_postprocess = True
    requires_raw_input_tokens = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.raises: dict[str, Exception] = {}

    def embed_input_ids(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids.float()[:, None].repeat(1, WIDTH)

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
        rid = info.pop("request_id")
        if rid in self.raises:
            raise self.raises[rid]
        self.found.append((rid, info))
        steps = info.get("meta", {}).get("steps", torch.tensor(0))
        return input_ids, self.embed_input_ids(input_ids) + 1000, {"meta": {"steps": steps + 1}}

    def forward(
        self, input_ids: Any, positions: torch.Tensor, intermediate_tensors: Any, inputs_embeds: Any, **more: Any
    ) -> Any:
        ids = None if input_ids is None else input_ids.tolist()
        embeds = None if inputs_embeds is None else inputs_embeds.clone()
        self.seen.append({"ids": ids, "positions": positions.tolist(), "embeds": embeds, **more})
        rows = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return 2 * (rows - 1000 if self.has_preprocess else rows)

    def postprocess(self, hidden: torch.Tensor, multimodal_outputs: Any, **info: Any) -> Any:
        return {"hidden_states": {"last": hidden[-1]}}

    def compute_logits(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = torch.zeros(len(hidden), VOCABULARY)
        last = (hidden[:, 0] / 2).long()
        return logits.scatter_(1, ((last + 1) % VOCABULARY)[:, None], 1.0)


class PlainModel(StageModel):
    """Without hooks: a map holds what its request is brought."""

    has_preprocess = False
    has_postprocess = False


def v1(runner: type[CPUModelRunner], config: VllmConfig, model: Any) -> Any:
    """A genuine V1 runner with this model, no layer of which has a cache."""
    with set_current_vllm_config(config):
        made = runner(config, torch.device("cpu"))
        made.model = model
        made.initialize_kv_cache(KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[]))
    return made


class EndingScheduler(SchedulerMixin, Scheduler):
    pass


class EndingAsyncScheduler(SchedulerMixin, AsyncScheduler):
    pass


class Loop:
    """A genuine scheduler that feeds a runner, as the engine's core does; `blocks`: of its cache, which holds 16 tokens
    each. `late`: steps may be scheduled before the tokens of the last one are there. Without an accelerator the runner
    has no half of that: it has its tokens when it returns.

    `brings`: by rid, the fields of the request when the scheduler calls it new. `outputs`: the clients' tokens by rid.
    """

    def __init__(self, runner: Any, *, blocks: int = 64, v2: bool = False, late: bool = False) -> None:
        config = runner.vllm_config
        config.scheduler_config.async_scheduling = late
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        kind = EndingAsyncScheduler if late else EndingScheduler
        self.scheduler = kind(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        self.scheduler.use_v2_model_runner = v2
        self.runner = runner
        self.brings: dict[str, Mapping[str, Any]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Any] = {}

    @property
    def adapter(self) -> RunnerAdapter:
        return self.runner.adapter

    def add(
        self,
        rid: str,
        *prompt: int,
        tokens: int = 16,
        stop: Sequence[int] = (),
        resumable: bool = False,
        extra: Any = None,
        **brings: Any,
    ) -> None:
        """A new request, or the next part of its input; it ends after so many `tokens`, or with one of `stop`."""
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, stop_token_ids=list(stop), extra_args=extra, ignore_eos=True
        )
        self.scheduler.add_request(Request(rid, list(prompt), params, None, resumable=resumable))
        self.brings[rid] = brings

    def abort(self, rid: str) -> None:
        self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)

    def schedule(self, cached: Mapping[str, Any] | None = None) -> SchedulerOutput:
        """The next step; `cached`: what a chunk adapter attaches to requests that run."""
        output = self.scheduler.schedule()
        for request in output.scheduled_new_reqs:
            for field, value in self.brings.get(request.req_id, {}).items():
                setattr(request, field, value)
        if cached is not None:
            output.scheduled_cached_reqs.additional_information = dict(cached)
        return output

    def run(self, output: SchedulerOutput) -> Any:
        with set_current_vllm_config(self.runner.vllm_config):
            done = self.runner.execute_model(output)
            return self.runner.sample_tokens(None) if done is None else done

    def update(self, output: SchedulerOutput, done: Any) -> None:
        done = done.get_output() if callable(getattr(done, "get_output", None)) else done
        for told in self.scheduler.update_from_output(output, done).values():
            for one in told.outputs:
                self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = one

    def step(self, cached: Mapping[str, Any] | None = None) -> SchedulerOutput:
        output = self.schedule(cached)
        self.update(output, self.run(output))
        self.runner.adapter.validate()
        return output


def with_adapter(
    runner: Any,
    *,
    blocks: int = 64,
    late: bool = False,
    phase: int = 2,
    transfer: TransferConfig | None = None,
    **own: Any,
) -> Loop:
    """The runner with an adapter, and the scheduler that feeds it."""
    options = {"form": "nested", "settings": AdapterConfig(migration_phase=phase), **own}
    runner.use_adapter(RunnerAdapter(runner.model, transfer, **options))
    loop = Loop(runner, blocks=blocks, v2=isinstance(runner, V2RunnerMixin), late=late)
    # In its first step the scheduler learns whether the runner reads.
    loop.step()
    return loop


def foreign(mixin: type, engine: object, overridden: set[str]) -> set[str]:
    """Names of a mixin that the engine has too, though the mixin does not mean to override them; and the other way
    round."""
    own = {name for kind in mixin.__mro__[:-1] for name in vars(kind) if not name.startswith("__")}
    return (own & {*dir(engine)}) ^ overridden


def numbers(maps: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as lists, so that maps compare."""
    read: Callable[[Any], Any] = lambda value: value.tolist() if isinstance(value, torch.Tensor) else value  # noqa: E731
    return {key: numbers(value) if isinstance(value, Mapping) else read(value) for key, value in maps.items()}


def rows(model: StageModel) -> list[tuple[Any, ...]]:
    """The last forward's rows: (rid, span, generated tokens, the steps that its map counts, the last id there)."""
    given = model.seen[-1]
    found = []
    for rid, span, generated, one in zip(
        given["request_ids"],
        given["request_token_spans"],
        given["generated_len"],
        given["model_intermediate_buffer"],
        strict=True,
    ):
        steps, last = one.get("meta", {}).get("steps"), one.get("hidden_states", {}).get("last")
        found.append(
            (rid, span, generated, None if steps is None else int(steps), None if last is None else last[0] / 2)
        )
    return found


def made(counts: Mapping[str, int], *, new: Any = (), cached: Any = (), **more: Any) -> SchedulerOutput:
    """A step that no scheduler made. `new`: (rid, prompt); `cached`: (rid, computed, generated)."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict(counts)
    output.total_num_scheduled_tokens = sum(counts.values())
    output.num_common_prefix_blocks = [0]
    params = SamplingParams(temperature=0.0)
    output.scheduled_new_reqs = [
        NewRequestData(rid, prompt, [], params, None, ([1],), 0, None, prefill_token_ids=prompt) for rid, prompt in new
    ]
    running = output.scheduled_cached_reqs
    for rid, computed, generated in cached:
        running.req_ids.append(rid)
        running.new_block_ids.append(None)
        running.num_computed_tokens.append(computed)
        running.num_output_tokens.append(generated)
    for name, value in more.items():
        setattr(output, name, value)
    return output
