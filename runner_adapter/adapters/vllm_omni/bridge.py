"""vLLM-Omni's connector contract over a broker. `register` joins it with the engine's base class."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any

from connector import errors
from runner_adapter.adapters.vllm_omni import codec, hub
from runner_adapter.adapters.vllm_omni.keys import Place

#: Seconds that a put waits for room, or for a broker that is away.
PUT_TIMEOUT = 30.0


class OmniBridge:
    """One connector as vLLM-Omni 0.30 makes and calls it (`OmniConnectorBase`); its threads may share it.

    `config` is the YAML's `extra`, flat. Read here: `endpoint` (default: as `connector.connect` finds the broker),
    `put_timeout` in seconds, `stage_id`. The rest is the models' (`codec_chunk_frames` and the like).

    Raises ConfigError for a wrong setting, BrokerLost if no broker answers: the factory fails the stage with it.
    """

    #: The KV manager hands over one device tensor then; it is copied straight into shared memory.
    supports_raw_data = True

    # What close() and __del__ find in a connector that was never made.
    _hub: hub.Hub | None = None

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.stage_id = _number(config, "stage_id", -1, whole=True)
        self._put_timeout = _number(config, "put_timeout", PUT_TIMEOUT)
        endpoint = config.get("endpoint")
        if endpoint is not None and not isinstance(endpoint, str):
            raise errors.ConfigError("endpoint must be a run directory", given=repr(endpoint)[:80])
        self._endpoint: str | None = endpoint
        self._lock = threading.Lock()
        self._counts = {"puts": 0, "gets": 0, "bytes_transferred": 0, "failed_puts": 0}
        self._hub = hub.join(endpoint, self._stage, self)

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Hand `data` to the edge under the key: (True, bytes, None) when the broker has it, never False.

        A put that fails raises, with the key: what is worth another try is tried for `put_timeout` seconds first.
        Raises InvalidPayload, AlreadyPut (the key is unread), StreamPoisoned (an earlier chunk was lost), PoolFull,
        PoolDeadlock, PayloadTooLarge, UnsupportedTensor, RequestAborted, BrokerLost, ClientClosed.
        """
        joined = self._joined()
        try:
            size = joined.put(_place(from_stage, to_stage, put_key), data, self._put_timeout)
        except errors.ConnectorError as error:
            self._count(failed_puts=1)
            if "key" not in error.facts:
                raise error.anew(key=put_key) from error
            raise
        self._count(puts=1, bytes_transferred=size)
        return True, size, None

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """The key's data and size, once; None if it is not there (yet). Does not wait; `metadata` is others'.

        The data is plain and owned: dicts, lists, numbers, texts, bytes, arrays and CPU tensors.
        Raises, once each: ProtocolViolation (what the key held is no payload of vLLM-Omni's), RequestAborted, Broken,
        Unclaimed; after those the key holds nothing. And InvalidPayload (the key is no text), BrokerLost, ClientClosed.
        """
        return self._get(from_stage, to_stage, get_key, 0.0)

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """As get, but waits until `deadline` (time.monotonic) for what is not there yet."""
        return self._get(from_stage, to_stage, get_key, max(deadline - time.monotonic(), 0.0))

    def abandon_get(self, get_key: str) -> None:
        """Nobody asks for the key any more: the claim for it is dropped, with what came for it."""
        self._joined().drop(get_key)

    def cleanup(self, request_id: str) -> None:
        """End what this very key holds, unread or not, on every edge. vLLM-Omni calls it for each chunk of a request
        that was aborted. Raises InvalidPayload (the key is no text), BrokerLost, ClientClosed."""
        joined = self._joined()
        joined.drop(_text(request_id))
        joined.sender.clean(request_id)

    def reap_consumed(self) -> None:
        """Forget claims that came to nothing. The save loop calls it ten times a second, and a raise would end it."""
        if self._hub is not None:
            self._hub.tidy()

    def health(self) -> dict[str, Any]:
        """`status` and why; the endpoint, and what this connector has done. Asks the broker, for 2 s at most."""
        with self._lock:
            counts = dict(self._counts)
        try:
            node = self._joined().node
            node.status()
        except errors.ConnectorError as error:
            return {"status": "unhealthy", "reason": str(error), "endpoint": self._endpoint, **counts}
        return {"status": "healthy", "endpoint": node.endpoint, **counts}

    def close(self) -> None:
        """Leave; the process's last connector leaves the broker. Nothing unread is destroyed. Idempotent."""
        left, self._hub = self._hub, None
        if left is not None:
            hub.leave(left, self)

    def __del__(self) -> None:
        """The collector must not wait. What was not closed ends with its hub, once nobody holds that."""

    @property
    def _stage(self) -> str:
        # The KV manager's connectors are made without a stage.
        return f"omni-{self.stage_id}" if self.stage_id >= 0 else "omni"

    def _joined(self) -> hub.Hub:
        joined = self._hub
        if joined is None:
            raise errors.ClientClosed("the connector was closed", stage=self._stage)
        if joined.pid != os.getpid():
            # A forked child: its parent's hub is its parent's.
            joined = self._hub = hub.join(self._endpoint, self._stage, self)
        return joined

    def _get(self, from_stage: str, to_stage: str, key: str, seconds: float) -> tuple[Any, int] | None:
        found = self._joined().take(_place(from_stage, to_stage, key), seconds)
        if found is None:
            return None
        try:
            data, size = codec.decode(found.payload, key), codec.size_of(found.payload)
        finally:
            # Unreadable or not, it is consumed: another try would find the same.
            found.done()
        self._count(gets=1)
        return data, size

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count


def _place(from_stage: object, to_stage: object, key: object) -> Place:
    return Place(str(from_stage), str(to_stage), _text(key))


def _text(key: object) -> str:
    """5 and "5" would be one rid, and what was put under one be got under the other."""
    if not isinstance(key, str):
        raise errors.InvalidPayload("a key is text", key=repr(key)[:80], type=type(key).__name__)
    return key


def _number(config: dict[str, Any], name: str, default: float, whole: bool = False) -> Any:
    value = config.get(name, default)
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or (not whole and value < 0):
        raise errors.ConfigError(
            f"{name} must be {'an int' if whole else 'a number of seconds'}", given=repr(value)[:80]
        )
    return value
