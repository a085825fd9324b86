"""vLLM-Omni: a connector plug-in, for the engine's own factory and base class (version 0.30).

The entry point `vllm.general_plugins` calls `register` in every process of the engine; a deployment then names
`TensorConnector` in its YAML. See docs/engine-vllm-omni.md.
"""

from __future__ import annotations

import logging
from importlib import util
from typing import Any

log = logging.getLogger(__name__)

NAME = "TensorConnector"


def register() -> None:
    """Tell vLLM-Omni's factory of TensorConnector. May be called again; does nothing without vLLM-Omni."""
    if util.find_spec("vllm_omni") is None:
        log.debug("vLLM-Omni is not installed: %s is not registered", NAME)
        return
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    if NAME not in OmniConnectorFactory.list_registered_connectors():
        OmniConnectorFactory.register_connector(NAME, __getattr__(NAME))


def __getattr__(name: str) -> Any:
    """TensorConnector, on first use: its base class loads vLLM-Omni."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runner_adapter.adapters.vllm_omni.plugin import TensorConnector

    return TensorConnector
