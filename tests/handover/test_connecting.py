"""connect_adapter: a stage joined to its neighbours as its section of a stage file says, alone or in two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import connector
from connector import errors
from runner_adapter import BroadcastInbox, EachRank, Inbox, RunnerAdapter, StepPlan, TransferConfig, connect_adapter
from tests.handover.links import CONFIG, FROM, IDS, TO, ids, keyed

ROOT = Path(__file__).parents[2]
#: Seconds until a rank that does not answer is a hang. A guard, never a measure.
HANG = 60.0
NEXT = "code2wav"
STEPS = 3
FILE = """
stages:
  - stage_id: 0
    engine_args:
      transfer_config: &transfer
        enabled: true
        items: [ids]
        key_templates: {{ids: "{{rid}}-{{id_type}}"}}
      runner_adapter: {{background_send: {background}}}
  - stage_id: 1
    engine_args:
      transfer_config: *transfer
      runner_adapter: {{ranks: {ranks}, migration_phase: 3}}
"""


def write(folder: Path, *, background: bool = False, ranks: str = "broadcast") -> Path:
    file = folder / "stages.yaml"
    file.write_text(FILE.format(background=str(background).lower(), ranks=ranks))
    return file


def step(adapter: RunnerAdapter, **of: Any) -> StepPlan:
    adapter.begin_step(scheduled=["r"], **of)
    return StepPlan.make(["r"], {"r": 1})


@pytest.mark.parametrize("background", [False, True])
def test_a_stage_file_says_how_a_stage_hands_over(endpoint: str, tmp_path: Path, background: bool) -> None:
    file = write(tmp_path, background=background)
    with (
        connect_adapter(object(), file, 0, stage=FROM, sends=TO, endpoint=endpoint) as thinker,
        connect_adapter(object(), file, 1, stage=TO, reads=FROM, endpoint=endpoint) as talker,
        connector.connect(stage="onlooker", endpoint=endpoint) as onlooker,
    ):
        assert thinker.outbox is not None and thinker.outbox.background is background
        assert (int(thinker.phase), int(talker.phase)) == (2, 3)
        assert isinstance(talker.inbox, Inbox) and talker.outbox is None
        plan = step(thinker, new=["r"])
        thinker.send(plan, torch.zeros(1, 4), beside={"r": ids(7)}, last=["r"])
        thinker.outbox.flush()
        step(talker, new=["r"])
        while not talker.receive().ended:
            onlooker.status()
            step(talker)
        assert talker.buffer["r"]["r-thinker_input_ids"].tolist() == [7]
        talker.fail("r", ValueError("away"))
        assert isinstance(thinker.failures(), dict)
    stages = {row["stage"] for row in _sessions(endpoint)}
    assert stages.isdisjoint({FROM, TO, "onlooker"}), "closed with its adapter"


def _sessions(endpoint: str) -> list[dict[str, Any]]:
    with connector.connect(stage="look", endpoint=endpoint) as look:
        return list(look.status("sessions")["sessions"])


def test_a_stage_is_between_others_or_at_one_end(endpoint: str) -> None:
    with pytest.raises(errors.UsageError, match="reads from one before"):
        connect_adapter(object(), CONFIG, stage=TO, endpoint=endpoint)


def test_a_stage_s_own_hidden_states_stay(endpoint: str) -> None:
    """All id types are to leave, and no hidden states: the text output is none of the ids, whatever it is called."""
    config = TransferConfig.from_mapping(
        {"enabled": True, "items": ["ids"], "key_templates": {"ids": "{rid}-{id_type}"}}
    )
    with (
        connect_adapter(object(), config, stage=FROM, sends=TO, endpoint=endpoint) as thinker,
        connector.connect(stage=TO, endpoint=endpoint) as talker,
    ):
        plan = step(thinker, new=["r"])
        thinker.send(plan, (torch.zeros(1, 4), {0: torch.zeros(1, 4)}), beside={"r": ids(7)}, last=["r"])
        payloads = list(talker.edge(FROM, TO).stream("r", timeout=HANG))
        assert [list(payload) for payload in payloads] == [["r-thinker_input_ids"]]
        assert thinker.failures() == {}


def test_a_stage_that_can_hand_nothing_on_is_told_of(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, by the stage that sends; a stage that only reads has nothing to hand on."""
    caplog.set_level("WARNING", "runner_adapter")
    for config in (TransferConfig.disabled(), CONFIG):
        connect_adapter(object(), config, stage=FROM, sends=TO, endpoint=endpoint).close()
        connect_adapter(object(), config, stage=TO, reads=FROM, endpoint=endpoint).close()
    told = f"the transfer_config of stage {FROM} lets nothing leave: {TO} is handed nothing, and waits"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_a_stage_that_cannot_be_made_leaves_no_node(endpoint: str) -> None:
    class Model:
        has_preprocess = True

    with pytest.raises(errors.UsageError, match="has no such method"):
        connect_adapter(Model(), CONFIG, stage=TO, reads=FROM, sends=NEXT, endpoint=endpoint)
    assert TO not in {row["stage"] for row in _sessions(endpoint)}


@pytest.mark.parametrize("how", ["broadcast", "each"])
def test_the_file_says_which_ranks_read(endpoint: str, tmp_path: Path, how: str) -> None:
    """Two real processes: both get what the stage before sends, and one of them hands on."""
    file = write(tmp_path, ranks=how)
    arguments = (str(file), endpoint, str(tmp_path / "store"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.handover.test_connecting", str(rank), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        readers = 2 if how == "each" else 1
        with connector.connect(stage=FROM, endpoint=endpoint) as before:
            edge = before.edge(FROM, TO, readers=readers)
            for number in range(STEPS):
                edge.put("r", keyed("r", number), last=number == STEPS - 1)
            with connector.connect(stage=NEXT, endpoint=endpoint) as after:
                payloads = list(after.edge(TO, NEXT).stream("r", timeout=HANG))
            told = [json.loads(rank.communicate(timeout=HANG)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    kind = {"broadcast": "BroadcastInbox", "each": "EachRank"}[how]
    assert told == [{"inbox": kind, "sends": True, "last": [2]}, {"inbox": kind, "sends": False, "last": [2]}]
    assert [payload["r-thinker_input_ids"].tolist() for payload in payloads] == [[9]]


def rank(number: str, file: str, endpoint: str, store: str) -> None:
    """A rank of the talker: it reads until the input has ended, and hands on one payload."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(number), world_size=2)
    group = dist.group.WORLD
    with connect_adapter(
        object(), file, 1, stage=TO, reads=FROM, sends=NEXT, endpoint=endpoint, group=group
    ) as adapter:
        plan = step(adapter, new=["r"])
        while not adapter.receive().ended:
            plan = step(adapter)
        adapter.send(plan, torch.zeros(1, 4), beside={"r": {IDS: torch.tensor([9])}}, last=["r"])
        assert isinstance(adapter.inbox, BroadcastInbox | EachRank)
        told = {
            "inbox": type(adapter.inbox).__name__,
            "sends": adapter.outbox is not None,
            "last": adapter.buffer["r"]["r-thinker_input_ids"].tolist(),
        }
        adapter.begin_step(finished=["r"])
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(*sys.argv[1:])
