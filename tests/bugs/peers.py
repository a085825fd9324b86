"""Another process for a test: a client of the same broker that runs small pieces of code and answers in JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0


class Peer:
    """A process with `node` (connected), `connector`, `torch` and `bits` at hand; what a piece binds stays."""

    def __init__(self, endpoint: str, stage: str = "peer") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bugs.peers", endpoint, stage],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == {"value": "ready"}

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, code: str, **given: Any) -> Any:
        """Run a piece of code with `given` bound; what it binds to `value` comes back."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"code": code, "given": given}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)

    def end(self, how: int | None = None) -> int:
        """By end of its input, or by a signal; returns the exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if how is not None and self._process.poll() is None:
            self._process.send_signal(how)
        self._process.stdin.close()
        code = self._process.wait(PATIENCE)
        self._process.stdout.close()
        return code

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *told: object) -> None:
        if self._process.returncode is None:
            self.end(signal.SIGKILL if told[0] is not None else None)


def described(payload: Any) -> dict[str, list[Any]]:
    """Key to [dtype, shape, bytes in hex]: what a peer tells of a payload."""
    return {key: [str(t.dtype).removeprefix("torch."), list(t.shape), bits(t).hex()] for key, t in payload.items()}


def bits(tensor: Any) -> bytes:
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b""


def use_after_start(endpoint: str, edge: tuple[str, str], rid: str, inherited: Any) -> None:
    """Target of a multiprocessing child: the parent's node is refused, one of its own works. Exits 0 if so."""
    import connector

    if inherited is not None:
        try:
            inherited.put(rid, {})
        except connector.errors.ForkedClient:
            inherited = None
    with connector.connect(stage="child", endpoint=endpoint) as node:
        taken = node.edge(*edge).take(rid, timeout=PATIENCE)
        fine = inherited is None and taken["n"].tolist() == [1, 2, 3]
        del taken
    # Not os._exit: the exit hooks of the child are what is tried.
    sys.exit(0 if fine else 3)


def _serve(endpoint: str, stage: str) -> None:
    import torch

    import connector

    answers = os.fdopen(os.dup(1), "w")
    # A piece that prints must not be taken for an answer.
    os.dup2(2, 1)
    node = connector.connect(stage=stage, endpoint=endpoint)
    space: dict[str, Any] = {
        "node": node,
        "connector": connector,
        "torch": torch,
        "os": os,
        "described": described,
        "bits": bits,
        "use_after_start": use_after_start,
    }
    print(json.dumps({"value": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        space.update(asked["given"], value=None)
        try:
            exec(asked["code"], space)
            answer = {"value": space["value"]}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    node.close()


if __name__ == "__main__":
    # As itself under its importable name, for the children of multiprocessing.
    from tests.bugs import peers

    peers._serve(*sys.argv[1:])
