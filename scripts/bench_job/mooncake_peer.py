"""Mooncake Store over TCP as a system of the benchmark: put into the writer's segment, got into the reader's buffer.

The first stage that opens, the last reader, starts its master and ends it. That an object is there is told over
ZeroMQ, since the store has no way to wait. Objects go when a run ends, since each is leased for seconds after a get.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import torch
import zmq
from hosting import Hosted

from connector.bench.payloads import Tensors
from connector.bench.systems import Place
from connector.bench.workloads import Workload

#: In an order in which each finds those that it needs.
LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
#: What a writer gives to the store: the payloads of a whole run.
SEGMENT = 3 << 30
HEAD, ALIGNED = 512, 64
#: Seconds for the master to start.
PATIENCE = 20.0
_DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.int64": torch.int64}
_PR_SET_PDEATHSIG = 1

# Else it takes the address of some other interface.
os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
#: Where scripts/setup-peers unpacks what Debian's packages have.
_unpacked = Path(sys.prefix, "lib", "unpacked")


def _load() -> Any:
    for name in LIBRARIES:
        if (file := _unpacked / name).exists():
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore


try:
    _Store = _load()
except (ImportError, OSError) as error:
    how = "; it needs libibverbs.so.1 (Debian and Ubuntu: apt install libibverbs1)" if "ibverbs" in str(error) else ""
    raise ImportError(f"scripts/setup-peers installs it ({error}){how}") from error


def _checked(code: int, what: str) -> None:
    if code < 0:
        raise RuntimeError(f"the peer's {what} gave {code}")


class _Master:
    """Its server, which ends with this process."""

    def __init__(self, folder: str) -> None:
        import mooncake.store

        ports = [_free_port() for _ in range(3)]
        command = [
            str(Path(mooncake.store.__file__).with_name("mooncake_master")),
            f"--rpc_port={ports[0]}",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={ports[1]}",
            f"--metrics_port={ports[2]}",
            "--enable_metric_reporting=false",
        ]
        before = os.environ.get("LD_LIBRARY_PATH", "")
        environment = {**os.environ, "LD_LIBRARY_PATH": f"{_unpacked}:{before}", "GLOG_log_dir": folder}
        self._process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip
        for port in ports[:2]:
            self._wait_for(port)
        self.address = json.dumps([f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}/metadata"])

    def _wait_for(self, port: int) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            if self._process.poll() is not None:
                raise ImportError(f"mooncake_master ends at once, with {self._process.returncode}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class _Side:
    """A registered buffer with a slot for each payload that may be under way, and the socket that tells of objects."""

    def __init__(self, store: Any, place: Place, workload: Workload, kind: int) -> None:
        self._store, self._name = store, place.name
        most = HEAD + workload.nbytes + ALIGNED * len(workload.shapes)
        self._slot = -(-most // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slots = workload.window + 1
        self._map = mmap.mmap(-1, self._slot * self._slots)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _checked(store.register_buffer(self._address, len(self._map)), "register_buffer")
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._endpoint = f"ipc://{place.folder}/{place.name}"
        self._next = 0

    def _turn(self) -> int:
        at = self._next % self._slots * self._slot
        self._next += 1
        return at

    def close(self, given_up: bool = False) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._store.unregister_buffer(self._address)


class _Writer(_Side):
    needs_fresh = False
    spans: list[int] | None = None

    def __init__(self, store: Any, place: Place, workload: Workload) -> None:
        super().__init__(store, place, workload, zmq.PUSH)
        self._socket.connect(self._endpoint)

    def put(self, stream: int, payload: Tensors) -> None:
        at = self._turn()
        meta, size = [], HEAD
        for key, tensor in payload.items():
            meta.append((key, str(tensor.dtype), tuple(tensor.shape), size))
            ctypes.memmove(self._address + at + size, tensor.data_ptr(), tensor.nbytes)
            size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        head = msgpack.packb(meta)
        self._map[at : at + 4 + len(head)] = struct.pack("<I", len(head)) + head
        key = f"{self._name}_{self._next}"
        _checked(self._store.put_from(key, self._address + at, size), "put_from")
        self._socket.send(msgpack.packb((key, size)))

    def put_step(self, payloads: Sequence[Tensors]) -> None:
        for stream, payload in enumerate(payloads):
            self.put(stream, payload)

    def acked(self, count: int) -> None:
        return

    def close(self, given_up: bool = False) -> None:
        self._store.remove_by_regex(f"^{self._name}_", force=True)
        super().close(given_up)


class _Reader(_Side):
    def __init__(self, store: Any, place: Place, workload: Workload) -> None:
        super().__init__(store, place, workload, zmq.PULL)
        self._socket.bind(self._endpoint)

    def get(self) -> list[Tensors]:
        key, size = msgpack.unpackb(self._socket.recv())
        at = self._turn()
        _checked(self._store.get_into(key, self._address + at, size), "get_into")
        (length,) = struct.unpack_from("<I", self._map, at)
        found: dict[str, torch.Tensor] = {}
        for name, dtype, shape, offset in msgpack.unpackb(self._map[at + 4 : at + 4 + length]):
            count = 1
            for dim in shape:
                count *= dim
            whole = torch.frombuffer(self._map, dtype=_DTYPES[dtype], count=count, offset=at + offset)
            found[name] = whole.view(shape)
        return [found]


class _Mooncake:
    stays = False

    def __init__(self) -> None:
        self._store: Any = None
        self._master: _Master | None = None
        self._hosted: Hosted | None = None

    def _join(self, place: Place, segment: int) -> Any:
        """`segment`: bytes that this process gives to the store; it can become a giver once."""
        if self._store is None:
            _hush(place.folder)
            self._hosted = Hosted(place.folder, "mooncake")
            master, metadata = json.loads(self._hosted.join(lambda: self._start(place.folder)))
            self._store = _Store()
            _checked(-abs(self._store.setup("127.0.0.1", metadata, segment, 64 << 20, "tcp", "", master)), "setup")
        return self._store

    def _start(self, folder: str) -> str:
        self._master = _Master(folder)
        return self._master.address

    def writer(self, place: Place, workload: Workload) -> _Writer:
        return _Writer(self._join(place, SEGMENT), place, workload)

    def reader(self, place: Place, workload: Workload) -> _Reader:
        # A stage in the middle opens its reader first and writes, too.
        return _Reader(self._join(place, SEGMENT if place.target == "bench-middle" else 0), place, workload)

    def leave(self) -> None:
        if self._store is not None:
            self._store.close()
        if self._hosted is not None:
            self._hosted.leave(self._end)
        self._store = self._hosted = self._master = None

    def _end(self) -> None:
        if self._master is not None:
            self._master.end()


@cache
def _hush(folder: str) -> None:
    """Its library logs to the process's standard error whatever it is told; what Python has to say goes on there."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    log = os.open(Path(folder, "mooncake.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)


STORE = _Mooncake()
