"""The class that vLLM-Omni's factory makes. Imported by `register` only: it needs vLLM-Omni."""

from __future__ import annotations

from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

from runner_adapter.adapters.vllm_omni.bridge import OmniBridge


class TensorConnector(OmniBridge, OmniConnectorBase):
    """`name: TensorConnector` in a deployment's YAML; see OmniBridge for its settings and what it raises."""


# The chunk adapter cleans up after an aborted request only if its connector is a SharedMemoryConnector: it then calls
# cleanup() with each key that it put. Here that means what it means there, so we say that we are one; nothing of it is
# inherited.
SharedMemoryConnector.register(TensorConnector)
