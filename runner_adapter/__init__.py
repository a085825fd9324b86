"""What a model runner does around its stages: one map of tensors per request, filled, gathered and handed on.

    from runner_adapter import Inbox, Outbox, RunnerAdapter, StepPlan, TransferConfig

docs/runner-adapter.md is the room's page, docs/use-with-your-runner.md shows a step. Names are loaded on first use:
the pure ones, such as TransferConfig, load no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner_adapter.buffer import ModelIntermediateBuffer
    from runner_adapter.config import AdapterConfig, TransferConfig
    from runner_adapter.connecting import connect_adapter
    from runner_adapter.hooks import Hooks
    from runner_adapter.inbox import Arrived, Bystander, Inbox
    from runner_adapter.kwargs import forward_kwargs, read_kwargs
    from runner_adapter.legacy import decode
    from runner_adapter.maps import BatchMaps, gather
    from runner_adapter.merge import MergeRules
    from runner_adapter.naming import Naming, flatten, nest
    from runner_adapter.outbox import Outbox
    from runner_adapter.outputs import StageOutput, cut
    from runner_adapter.overlay import PromptOverlay, accept, accept_cached, mirror
    from runner_adapter.phases import Phase
    from runner_adapter.plan import Row, StepPlan
    from runner_adapter.ranks import BroadcastInbox, EachRank
    from runner_adapter.requests import Requests, StepChange
    from runner_adapter.runner import Received, RunnerAdapter
    from runner_adapter.staging import DeviceRows, RowSpec, Staged
    from runner_adapter.talker import Talker
    from runner_adapter.values import as_tensor, as_value

#: Name -> its module in this package.
_HOMES = {
    "AdapterConfig": "config",
    "Arrived": "inbox",
    "BatchMaps": "maps",
    "BroadcastInbox": "ranks",
    "Bystander": "inbox",
    "DeviceRows": "staging",
    "EachRank": "ranks",
    "Hooks": "hooks",
    "Inbox": "inbox",
    "MergeRules": "merge",
    "ModelIntermediateBuffer": "buffer",
    "Naming": "naming",
    "Outbox": "outbox",
    "Phase": "phases",
    "PromptOverlay": "overlay",
    "Received": "runner",
    "Requests": "requests",
    "Row": "plan",
    "RowSpec": "staging",
    "RunnerAdapter": "runner",
    "StageOutput": "outputs",
    "Staged": "staging",
    "StepChange": "requests",
    "StepPlan": "plan",
    "Talker": "talker",
    "TransferConfig": "config",
    "accept": "overlay",
    "accept_cached": "overlay",
    "as_tensor": "values",
    "as_value": "values",
    "connect_adapter": "connecting",
    "cut": "outputs",
    "decode": "legacy",
    "flatten": "naming",
    "forward_kwargs": "kwargs",
    "gather": "maps",
    "mirror": "overlay",
    "nest": "naming",
    "read_kwargs": "kwargs",
}

__all__ = [
    "AdapterConfig",
    "Arrived",
    "BatchMaps",
    "BroadcastInbox",
    "Bystander",
    "DeviceRows",
    "EachRank",
    "Hooks",
    "Inbox",
    "MergeRules",
    "ModelIntermediateBuffer",
    "Naming",
    "Outbox",
    "Phase",
    "PromptOverlay",
    "Received",
    "Requests",
    "Row",
    "RowSpec",
    "RunnerAdapter",
    "StageOutput",
    "Staged",
    "StepChange",
    "StepPlan",
    "Talker",
    "TransferConfig",
    "accept",
    "accept_cached",
    "as_tensor",
    "as_value",
    "connect_adapter",
    "cut",
    "decode",
    "flatten",
    "forward_kwargs",
    "gather",
    "mirror",
    "nest",
    "read_kwargs",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'runner_adapter' has no attribute {name!r}")
    return getattr(importlib.import_module(f"runner_adapter.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
