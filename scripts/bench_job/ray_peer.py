"""Ray as a system of the benchmark: payloads put into its object store, and references handed on by its own queue.

The first stage that opens, the last reader, starts a cluster of this machine alone; the others join it as drivers.
Between two drivers a reference goes through an actor: `ray.util.queue.Queue`, a list with the reference in it.
Tensors go as NumPy arrays, which Ray's store keeps without a copy at the reader; as tensors they would be pickled.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hosting import Hosted

from connector.bench.payloads import Tensors
from connector.bench.systems import Place
from connector.bench.workloads import Workload

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
# It can be reached from other machines, so that only those get in who have the token; the stages open one after
# another, and their temporary folder is the run's.
_token = Path(tempfile.gettempdir(), "ray.token")
if not _token.exists():
    _token.write_text(secrets.token_hex(32))
os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"] = "token", str(_token)
try:
    import ray
    from ray.util.queue import Queue
except ImportError as error:
    raise ImportError(f"scripts/setup-peers installs it ({error})") from error

#: Bytes of its object store: the payloads of a whole run, and room for those that are not yet collected.
STORE = 3 << 30
#: Seconds without a payload after which a run is given up.
PATIENCE = 60.0
_SPACE = "bench"


class _Side:
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def close(self, given_up: bool = False) -> None:
        return


class _Writer(_Side):
    needs_fresh = False
    spans: list[int] | None = None

    def put(self, stream: int, payload: Tensors) -> None:
        arrays = {key: (str(tensor.dtype), _as_array(tensor)) for key, tensor in payload.items()}
        # Its `put`, without waiting for the actor's answer.
        self._queue.actor.put.remote([ray.put(arrays)], None)

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        for stream, payload in enumerate(payloads):
            self.put(stream, payload)

    def acked(self, count: int) -> None:
        return


class _Reader(_Side):
    def get(self) -> list[Tensors]:
        (reference,) = self._queue.get(timeout=PATIENCE)
        return [{key: _as_tensor(dtype, array) for key, (dtype, array) in ray.get(reference).items()}]

    def close(self, given_up: bool = False) -> None:
        """Both have it; it is this side's to end."""
        self._queue.shutdown(force=True)


def _as_array(tensor: torch.Tensor) -> Any:
    """NumPy has no bfloat16."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _as_tensor(dtype: str, array: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        # The store's memory is read-only.
        warnings.simplefilter("ignore")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "torch.bfloat16" else tensor


class _Ray:
    stays = False

    def __init__(self) -> None:
        self._hosted: Hosted | None = None

    def _join(self, place: Place) -> None:
        if self._hosted is None:
            self._hosted = Hosted(place.folder, "ray")
            # It takes SIGTERM for itself, and prints a trace before it ends the process.
            handler = signal.getsignal(signal.SIGTERM)
            address = self._hosted.join(lambda: _start(place.folder))
            if not ray.is_initialized():
                ray.init(address=address, namespace=_SPACE, logging_level="ERROR", log_to_driver=False)
            signal.signal(signal.SIGTERM, handler)

    def writer(self, place: Place, workload: Workload) -> _Writer:
        self._join(place)
        actor = ray.get_actor(place.name, namespace=_SPACE)
        queue = Queue.__new__(Queue)
        queue.maxsize, queue.actor = 0, actor
        return _Writer(queue)

    def reader(self, place: Place, workload: Workload) -> _Reader:
        self._join(place)
        return _Reader(Queue(actor_options={"name": place.name, "num_cpus": 0}))

    def leave(self) -> None:
        if self._hosted is None:
            return
        if ray.is_initialized() and not self._hosted.host:
            ray.shutdown()
        self._hosted.leave(ray.shutdown)
        self._hosted = None


def _start(folder: str) -> str:
    context = ray.init(
        num_cpus=2, object_store_memory=STORE, include_dashboard=False, namespace=_SPACE,
        logging_level="ERROR", log_to_driver=False, _temp_dir=f"{folder}/ray",
    )  # fmt: skip
    address: str = context.address_info["gcs_address"]
    return address


CLUSTER = _Ray()
