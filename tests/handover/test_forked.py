"""An Outbox where it cannot be used: in a child made by fork, and once its node is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import connector
from connector import errors
from runner_adapter.outbox import Outbox
from tests.handover.links import CONFIG, FROM, TO, Link, ids

ROOT = Path(__file__).resolve().parents[2]
#: Sends are more than those that may be under way; flush and what follows waits for none of them.
FORK = """
import os, sys
import connector
from connector import errors
from tests.handover.links import CONFIG, FROM, TO, ids
from runner_adapter import Outbox

with connector.connect(stage=FROM, embedded=True, pool="8MiB", log_level="error") as node:
    outbox = Outbox(node, node.edge(FROM, TO), CONFIG, background=bool(int(sys.argv[1])))
    outbox.send(0, {"r": ids(0)})
    outbox.flush()
    child = os.fork()
    if child == 0:
        calls = [
            *[lambda step=step: outbox.send(step, {"r": ids(step), "t": ids(step)}) for step in range(1, 12)],
            lambda: outbox.resend("r", 0, ids(9), attempt=1),
            lambda: outbox.begin("s"),
            lambda: outbox.failures(),
            lambda: outbox.flush(),
            lambda: outbox.finish("r"),
        ]
        for call in calls:
            try:
                call()
            except errors.ForkedClient:
                continue
            os._exit(3)
        if outbox.sent("t"):
            os._exit(4)
        outbox.close()
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outbox.send(1, {"r": ids(1)}, last=["r"])
    outbox.flush()
    with connector.connect(stage=TO, endpoint=node.endpoint) as reader:
        found = [payload["r-thinker_input_ids"].tolist() for payload in reader.edge(FROM, TO).stream("r", timeout=60)]
    outbox.close()
    print(code, found)
"""


BROKER = {"put_timeout": 2.0}
RIDS = ["r"]


@pytest.mark.parametrize("background", [0, 1], ids=["inline", "background"])
def test_a_forked_child_is_refused_and_waits_for_nothing(background: int) -> None:
    """The thread that puts is its parent's, which goes on."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(background)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "7 [[0], [1]]\n", done.stderr


@pytest.mark.parametrize("background", [False, True], ids=["inline", "background"])
def test_of_a_closed_node_nothing_is_sent_and_what_failed_is_told(pair: Link, background: bool) -> None:
    node = connector.connect(stage=FROM, endpoint=pair.endpoint)
    outbox = Outbox(node, node.edge(FROM, TO), CONFIG, background=background)
    outbox.send(1, {"r": ids(1), "bad": {"ids.thinker_input_ids": 3}})  # type: ignore[dict-item]
    outbox.flush()
    node.close()
    for call in (lambda: outbox.send(2, {"r": ids(2)}), outbox.flush):
        with pytest.raises(errors.ClientClosed):
            call()
    assert outbox.sent("r") == 1
    with pytest.raises(errors.ClientClosed):
        outbox.finish("r")
    assert {rid: type(error) for rid, error in outbox.failures().items()} == {"bad": errors.InvalidPayload}
    outbox.close()
