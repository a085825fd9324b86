"""Two real processes over gloo: whoever reads, both get the same at the same step, errors too."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import connector
from connector import Polled, errors
from runner_adapter.inbox import Bystander, Inbox
from runner_adapter.ranks import BroadcastInbox, EachRank
from tests.handover.links import FROM, TO, Link, keyed, link

ROOT = Path(__file__).parents[2]
#: Seconds until a rank that does not answer is a hang. A guard, never a measure.
HANG = 60.0
#: What a pull without news gives.
NOTHING = {"payloads": {}, "ended": [], "failed": {}}
# Before the look at what a test leaves.
pytestmark = pytest.mark.usefixtures("broadcasting", "reading")


class Ranks:
    """Two processes that run `rank` below; each word goes to both, unless one is named."""

    def __init__(self, *arguments: str) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.handover.test_ranks", str(rank), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(2)
        ]

    def heard(self, only: int | None = None) -> list[Any]:
        found = []
        for rank, process in enumerate(self.processes):
            if only in (None, rank):
                assert process.stdout is not None
                assert select.select([process.stdout], [], [], HANG)[0], f"rank {rank} hangs"
                found.append(json.loads(process.stdout.readline() or '"ended"'))
        return found

    def say(self, *words: str, only: int | None = None) -> list[Any]:
        for rank, process in enumerate(self.processes):
            if only in (None, rank):
                assert process.stdin is not None
                process.stdin.write(json.dumps(words) + "\n")
                process.stdin.flush()
        return self.heard(only)

    def both(self, *words: str) -> Any:
        """The answer, which is the same of both."""
        first, second = self.say(*words)
        assert first == second
        return first

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(HANG)
            finally:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


@contextmanager
def ranks(kind: str, endpoint: str) -> Iterator[Ranks]:
    """Ranks that read, by "broadcast" or "each", the edge to a stage of that name."""
    with tempfile.TemporaryDirectory() as folder:
        made = Ranks(kind, endpoint, f"{folder}/store")
        try:
            assert made.heard() == ["ready", "ready"]
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def broadcasting(endpoint: str) -> Iterator[Ranks]:
    with ranks("broadcast", endpoint) as made:
        yield made


@pytest.fixture(scope="module")
def reading(endpoint: str) -> Iterator[Ranks]:
    with ranks("each", endpoint) as made:
        yield made


class Stage:
    """The side that puts; when `put` or `abort` returns, every rank has heard of it."""

    def __init__(self, sender: Link, ranks: Ranks, edge_to: str) -> None:
        self.sender, self.ranks = sender.sender, ranks
        self.edge = self.sender.edge(FROM, edge_to, readers=2 if edge_to == "each" else 1)

    def put(self, rid: str, payload: dict[str, torch.Tensor], last: bool = False) -> None:
        self.edge.put(rid, payload, last=last)
        self.settle()

    def settle(self) -> None:
        self.sender.status()
        self.ranks.say("settle")


@pytest.fixture(params=["broadcasting", "reading"])
def stage(request: pytest.FixtureRequest, endpoint: str) -> Iterator[Stage]:
    """Each of both kinds."""
    with link(endpoint) as sender:
        edge_to = {"broadcasting": "broadcast", "reading": "each"}[request.param]
        yield Stage(sender, request.getfixturevalue(request.param), edge_to)


@pytest.fixture
def each(reading: Ranks, endpoint: str) -> Iterator[Stage]:
    with link(endpoint) as sender:
        yield Stage(sender, reading, "each")


def words(rid: str, *numbers: int) -> dict[str, Any]:
    return {f"{rid}-thinker_input_ids": ["torch.int64", list(numbers)]}


def test_all_ranks_get_the_same_at_the_same_step(stage: Stage) -> None:
    """Rids, chunks and their order; END once."""
    made, put = stage.ranks, stage.put
    put("a", keyed("a", 1))
    put("b", keyed("b", 2), last=True)
    put("a", keyed("a", 3, 4))
    assert made.both("pull", "a") == {"payloads": {"a": [words("a", 1), words("a", 3, 4)]}, "ended": [], "failed": {}}
    put("a", keyed("a", 5), last=True)
    step = made.both("pull", "b", "a")
    assert step == {
        "payloads": {"b": [words("b", 2)], "a": [words("a", 5)]},
        "ended": ["a", "b"],
        "failed": {},
    }
    assert list(step["payloads"]) == ["b", "a"]
    assert made.both("pull", "a", "b") == NOTHING
    made.both("finish", "a", "b")


def test_bits_dtypes_and_shapes_are_the_same_at_all_ranks(stage: Stage) -> None:
    made, put = stage.ranks, stage.put
    payload = {
        "bf16": torch.tensor([[1.5, -0.0]], dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 3),
        "f64": torch.tensor([0.1, 1e300], dtype=torch.float64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "c64": torch.tensor([1 + 2j]),
    }
    put("r", payload, last=True)
    (found,) = made.both("pull", "r")["payloads"]["r"]
    assert found == {key: [str(t.dtype), _listed(t)] for key, t in payload.items()}
    assert list(found) == list(payload)
    made.both("finish", "r")


def test_requests_wait_until_their_step_comes(stage: Stage) -> None:
    """Those that no step has told the ranks of, and those whose payload is still to come."""
    made, put = stage.ranks, stage.put
    assert made.both("waiting", "x", "y") == ["x", "y"]
    put("x", keyed("x", 1), last=True)
    assert made.both("waiting", "x", "y") == ["y"]
    assert made.both("pull", "y") == NOTHING
    assert made.both("pull", "x")["payloads"] == {"x": [words("x", 1)]}
    made.both("finish", "x", "y")


def test_a_failure_of_the_sender_reaches_all_ranks(stage: Stage) -> None:
    made, put = stage.ranks, stage.put
    put("r", keyed("r", 1))
    stage.sender.abort("r", "no more")
    stage.settle()
    step = made.both("pull", "r")
    assert step["failed"]["r"][:2] == ["RequestAborted", "the request was aborted"]
    assert step["failed"]["r"][2]["reason"] == "no more"
    assert made.both("pull", "r") == NOTHING
    made.both("finish", "r")


def test_what_failed_before_it_began_is_told_at_all_ranks_until_it_is_finished(stage: Stage) -> None:
    """By the sender. What did not is not named."""
    made = stage.ranks
    stage.put("r", keyed("r", 1), last=False)
    stage.put("s", keyed("s", 1), last=True)
    stage.sender.abort("r", "no more")
    stage.settle()
    assert [made.both("failing", "r", "s", "t") for _ in range(2)] == [{}, {}], "nobody has looked yet"
    assert made.both("waiting", "r", "s") == []
    assert [made.both("failing", "r", "s", "t") for _ in range(2)] == [{"r": "RequestAborted"}] * 2
    made.say("finish", "r", "s")
    assert made.both("failing", "r", "s") == {}


def test_what_failed_at_one_rank_before_it_began_failed_at_all(each: Stage) -> None:
    made = each.ranks
    each.put("r", keyed("r", 1), last=False)
    made.both("waiting", "r")
    made.say("fail", "r", only=1)
    assert made.say("failing", "r") == [{"r": "PeerFailed"}, {"r": "Broken"}]
    each.sender.abort("r")
    made.say("finish", "r")


def test_a_rid_that_is_finished_and_new_starts_clean_at_all_ranks(stage: Stage) -> None:
    made, put = stage.ranks, stage.put
    put("r", keyed("r", 1))
    made.both("finish", "r")
    stage.sender.finish("r")
    put("r", keyed("r", 2), last=True)
    assert made.both("pull", "r")["payloads"] == {"r": [words("r", 2)]}
    made.both("finish", "r")


def test_the_abort_of_any_rank_is_of_the_use_that_it_is_in(stage: Stage) -> None:
    """Also of a rank that reads nothing itself: the sender has begun the next."""
    made, put = stage.ranks, stage.put
    for rank in (0, 1):
        made.both("begin", "r")
        put("r", keyed("r", 1), last=True)
        assert made.both("pull", "r")["payloads"] == {"r": [words("r", 1)]}
        stage.sender.finish("r")
        put("r", keyed("r", 2), last=True)
        made.say("abort", "r", only=rank)
        made.both("finish", "r")
        made.both("begin", "r")
        stage.settle()
        assert made.both("pull", "r") == {"payloads": {"r": [words("r", 2)]}, "ended": ["r"], "failed": {}}
        made.both("finish", "r")
        stage.sender.finish("r")
        stage.settle()


def test_what_one_rank_lacks_waits_at_the_other(each: Stage) -> None:
    """Readers of their own hear at different times: the step gets what both have, and END when both have it."""
    made, put = each.ranks, each.put
    put("r", keyed("r", 1))
    assert made.both("pull", "other") == NOTHING
    made.say("poll", "nothing", only=1)
    put("r", keyed("r", 2), last=True)
    assert made.both("pull", "r") == {"payloads": {"r": [words("r", 1)]}, "ended": [], "failed": {}}
    assert made.both("pull", "r") == NOTHING
    made.say("poll", "real", only=1)
    assert made.both("pull", "r") == {"payloads": {"r": [words("r", 2)]}, "ended": ["r"], "failed": {}}
    made.both("finish", "r")


def test_a_request_waits_while_one_rank_waits_for_it(each: Stage) -> None:
    made = each.ranks
    made.say("poll", "nothing", only=1)
    each.put("r", keyed("r", 1), last=True)
    assert made.both("waiting", "r", "s") == ["r", "s"]
    made.say("poll", "real", only=1)
    assert made.both("waiting", "r", "s") == ["s"]
    made.both("finish", "r")


def test_a_request_that_failed_for_one_rank_fails_for_all(each: Stage) -> None:
    """With nothing of what came before: what one rank lost, the others do not use either."""
    made = each.ranks
    for rid in ("r", "s"):
        each.put(rid, keyed(rid, 1), last=True)
    made.say("fail", "r", only=1)
    first, second = made.say("pull", "r", "s")
    assert first["payloads"] == second["payloads"] == {"s": [words("s", 1)]}
    assert first["ended"] == second["ended"] == ["s"]
    assert [step["failed"]["r"][0] for step in (first, second)] == ["PeerFailed", "Broken"]
    assert made.both("pull", "r") == NOTHING
    made.both("finish", "r", "s")


@pytest.mark.parametrize(
    ("kind", "at", "mode", "expected"),
    [
        ("broadcasting", 0, "refused", ["BrokerLost", "BrokerLost"]),
        ("broadcasting", 0, "broken", ["ZeroDivisionError", "InvariantBroken"]),
        ("reading", 1, "refused", ["PeerFailed", "BrokerLost"]),
        ("reading", 0, "broken", ["ZeroDivisionError", "PeerFailed"]),
    ],
)
def test_a_rank_that_cannot_read_leaves_nobody_waiting(
    request: pytest.FixtureRequest, kind: str, at: int, mode: str, expected: list[str]
) -> None:
    """A refusal, and what is none."""
    made: Ranks = request.getfixturevalue(kind)
    made.say("poll", mode, only=at)
    assert [answer["error"] for answer in made.say("pull", "r")] == expected
    assert [answer["error"] for answer in made.say("waiting", "r")] == expected
    made.say("poll", "real", only=at)
    assert made.both("pull", "r") == NOTHING


@pytest.mark.parametrize("kind", ["broadcasting", "reading"])
def test_a_rank_whose_wait_fails_says_so_in_the_next_pull(request: pytest.FixtureRequest, kind: str) -> None:
    """Where all ranks meet: one that raised before would leave the others there."""
    made: Ranks = request.getfixturevalue(kind)
    made.say("poll", "refused", only=0)
    assert made.say("wait")[0] is True
    assert [answer["error"] for answer in made.say("pull", "r")][0] == "BrokerLost"
    made.say("poll", "real", only=0)
    assert made.both("pull", "r") == NOTHING


def test_rank_0_has_the_inbox_and_no_other(broadcasting: Ranks) -> None:
    assert [answer["error"] for answer in broadcasting.say("swap")] == ["UsageError", "UsageError"]


# -- a rank ---------------------------------------------------------------------------------------


def _listed(tensor: torch.Tensor) -> Any:
    return [str(value) for value in tensor.tolist()] if tensor.is_complex() else tensor.tolist()


class _Rank:
    def __init__(self, number: int, kind: str, endpoint: str) -> None:
        self.number = number
        self.node = connector.connect(stage=TO, endpoint=endpoint)
        self.inbox: Inbox | None = None
        readers = 2 if kind == "each" else 1
        self.edge = self.node.edge(FROM, kind, reader=number % readers, readers=readers)
        if kind == "each" or number == 0:
            self.inbox = Inbox(self.node, self.edge)
        self.shared: BroadcastInbox | EachRank
        if kind == "each" and self.inbox is not None:
            self.shared = EachRank(self.inbox)
        else:
            self.shared = BroadcastInbox(self.inbox or Bystander(self.node, self.edge))

    def do_settle(self) -> None:
        self.node.status()

    def do_pull(self, *rids: str) -> Any:
        arrived = self.shared.pull(rids)
        return {
            "payloads": {
                rid: [{key: [str(t.dtype), _listed(t)] for key, t in payload.items()} for payload in payloads]
                for rid, payloads in arrived.payloads.items()
            },
            "ended": sorted(arrived.ended),
            "failed": {rid: [type(e).__name__, e.message, e.facts] for rid, e in arrived.failed.items()},
        }

    def do_waiting(self, *rids: str) -> list[str]:
        return sorted(self.shared.waiting(rids))

    def do_failing(self, *rids: str) -> dict[str, str]:
        return {rid: type(error).__name__ for rid, error in self.shared.failing(rids).items()}

    def do_wait(self) -> bool:
        return self.shared.wait(0.0)

    def do_begin(self, rid: str) -> None:
        self.shared.begin(rid)

    def do_abort(self, rid: str) -> None:
        self.node.abort(rid, mine=True)

    def do_finish(self, *rids: str) -> None:
        for rid in rids:
            self.shared.finish(rid)

    def do_fail(self, rid: str) -> None:
        self.shared.fail(rid, errors.Broken("this rank's copy is bad", rid=rid))

    def do_poll(self, mode: str) -> None:
        """What comes of the next polls: what has come, nothing, a refusal, or what is none. A refusal of waits, too."""
        for verb in ("poll", "wait"):
            vars(self.edge).pop(verb, None)
        if mode == "refused":
            vars(self.edge)["wait"] = lambda timeout: _refuse()
        if mode != "real":
            vars(self.edge)["poll"] = lambda: {"nothing": Polled, "refused": _refuse, "broken": _break}[mode]()

    def do_swap(self) -> None:
        BroadcastInbox(None if self.number == 0 else Inbox(self.node, self.node.edge("x", "y")))


def _refuse() -> Polled:
    raise errors.BrokerLost("the broker is away")


def _break() -> Polled:
    raise ZeroDivisionError


def rank(number: str, kind: str, endpoint: str, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(number), world_size=2)
    this = _Rank(int(number), kind, endpoint)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        word, *rids = json.loads(line)
        try:
            answer = getattr(this, f"do_{word}")(*rids)
        except Exception as error:
            answer = {"error": type(error).__name__}
        print(json.dumps(answer, default=str), flush=True)
    this.node.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(*sys.argv[1:])
