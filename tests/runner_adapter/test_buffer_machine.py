"""Random steps of requests that come, wait, go and come again, against plain dicts of plain numbers.

Every number that goes in says whose it is: its life's number, and its place in that life. What a map holds at any
time is told by dicts that know nothing of tensors, keys or merging.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from connector import errors
from runner_adapter.buffer import ModelIntermediateBuffer
from runner_adapter.config import TransferConfig
from runner_adapter.merge import MergeRules
from runner_adapter.requests import Requests

#: Each is a beginning of the next one's keys.
RIDS = ["r", "r-24", "r-24-tok"]
CONFIG = TransferConfig.from_mapping(
    {
        "enabled": True,
        "items": ["hidden_states", "ids"],
        "key_templates": {"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"},
    }
)
RULES = MergeRules(accumulated=["ids.tok", "notes"], spans={"embed.decode": ("embed.start", "embed.end")})
NAMES = {"24": "hidden_states.layers[24]", "tok": "ids.tok", "last": "ids.last"}
PROCESSED = "meta.num_processed_tokens"

SOME = st.lists(st.sampled_from(RIDS), unique=True)
SHUFFLED = st.permutations(RIDS)
#: Per chunk: rows of `tok`, whether it has `last`, rows of the span, and how many of those were sent before.
CHUNKS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 2), st.integers(0, 3)), max_size=3)


class Life:
    """What one request's map must hold, and what its sender has sent."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.map: dict[str, list[int]] = {}
        self.made = 0
        self.spanned = 0

    def fresh(self, size: int) -> list[int]:
        self.made += size
        return [self.number * 1000 + at for at in range(self.made - size, self.made)]

    def append(self, name: str, numbers: list[int]) -> None:
        self.map[name] = self.map.get(name, []) + numbers

    def span(self, size: int, back: int) -> tuple[list[int], int, int]:
        """Rows that begin up to `back` places before what was sent, as after a preemption."""
        start = max(0, self.spanned - back)
        end = start + size
        self.map.setdefault("embed.start", [start])
        self.append("embed.decode", [self.row(at) for at in range(self.spanned, end)])
        self.spanned = max(self.spanned, end)
        self.map["embed.end"] = [self.spanned]
        return [self.row(at) for at in range(start, end)], start, end

    def row(self, at: int) -> int:
        return self.number * 1000 + 500 + at


def ints(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def told(found: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: tensor.flatten().tolist() for name, tensor in found.items()}


class Steps(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests = Requests()
        self.buffer = ModelIntermediateBuffer(CONFIG, rules=RULES)
        self.lives: dict[str, Life] = {}
        self.numbers = count(1)
        self.ended: set[str] = set()
        #: Who has received in this step.
        self.received: set[str] = set()
        self.counts = {"merged": 0, "dropped_finished": 0, "refused": 0}
        self.handed_out: list[tuple[Mapping[str, torch.Tensor], dict[str, list[int]]]] = []

    # -- steps -----------------------------------------------------------------------------------

    @rule(finished=SOME, new=SOME, order=SHUFFLED, idle=SOME)
    def step(self, finished: list[str], new: list[str], order: list[str], idle: list[str]) -> None:
        """Any mixture: aborted before it was seen, finished and new at once, preempted, resumed, in any batch order."""
        staying = self.lives.keys() - set(finished)
        batch = [rid for rid in order if (rid in staying or rid in new) and rid not in idle]
        change = self.requests.step(finished=finished, new=new, scheduled=batch)
        self.buffer.finish(change.removed)
        for rid in finished:
            self.lives.pop(rid, None)
            self.ended.add(rid)
        for rid in change.added:
            self.buffer.add(rid)
            assert rid not in self.lives
            self.lives[rid] = Life(next(self.numbers))
            self.ended.discard(rid)
        for rid in change.resegmented:
            self.segment(self.lives[rid], rid)
        assert self.lives.keys() == staying | set(new)
        assert set(change.waiting) == self.lives.keys() - set(batch)
        self.received = set()

    def segment(self, life: Life, rid: str) -> None:
        tokens, last = life.fresh(2), life.fresh(1)
        self.buffer.new_segment(rid, {"ids": {"tok": ints(tokens), "last": ints(last)}})
        life.append("ids.tok", tokens)
        life.map |= {"ids.last": last, PROCESSED: [0]}
        self.counts["merged"] += 1

    @rule(order=SHUFFLED, chunks=st.lists(CHUNKS, min_size=3, max_size=3))
    def receive(self, order: list[str], chunks: list[list[tuple[int, bool, int, int]]]) -> None:
        """For live ones, scheduled or not, for those that have received in this step, for finished and unknown ones."""
        arrived: dict[str, list[dict[str, torch.Tensor]]] = {}
        failing = set()
        for rid, sizes in zip(order, chunks, strict=True):
            life = self.lives.get(rid)
            if life is None:
                arrived[rid] = [{f"{rid}-24": ints([0])}]
                failing |= set() if rid in self.ended else {rid}
                self.counts["dropped_finished" if rid in self.ended else "refused"] += 1
            elif rid in self.received:
                arrived[rid] = [{f"{rid}-tok": ints([0])}]
                failing.add(rid)
                self.counts["refused"] += 1
            elif sizes:
                arrived[rid] = [self.chunk(life, rid, *size) for size in sizes]
                self.received.add(rid)
                self.counts["merged"] += 1
        assert self.buffer.receive(self.requests.steps, arrived).keys() == failing

    def chunk(self, life: Life, rid: str, tokens: int, has_last: bool, spanned: int, back: int) -> dict[str, Any]:
        layer, tok, last = life.fresh(1), life.fresh(tokens), life.fresh(1)
        life.map[NAMES["24"]] = layer
        life.append(NAMES["tok"], tok)
        payload = {f"{rid}-24": ints(layer), f"{rid}-tok": ints(tok)}
        if has_last:
            life.map[NAMES["last"]] = last
            payload[f"{rid}-last"] = ints(last)
        rows, start, end = life.span(spanned, back)
        ends = {f"{rid}-embed.start": torch.tensor(start), f"{rid}-embed.end": torch.tensor(end)}
        return {**payload, f"{rid}-embed.decode": ints(rows), **ends}

    # -- hooks -----------------------------------------------------------------------------------

    @rule(rid=st.sampled_from(RIDS), echo=st.booleans())
    def hook(self, rid: str, echo: bool) -> None:
        """An update of its own, and perhaps all that the hook was given once more."""
        life = self.lives.get(rid)
        if life is None:
            return
        notes, audio = life.fresh(1), life.fresh(2)
        given = self.buffer.nested(rid) if echo else {}
        self.buffer.merge(rid, {**given, "codes": {"audio": ints(audio)}, "notes": ints(notes)})
        life.append("notes", notes)
        life.map["codes.audio"] = audio
        self.counts["merged"] += 1

    @rule(rid=st.sampled_from(RIDS), wrong=st.sampled_from([{"x": 1}, {"notes": torch.tensor(1)}, {"x": {}}]))
    def refused(self, rid: str, wrong: dict[str, Any]) -> None:
        """Nothing of it stays. Without a life it is unknown, or dropped."""
        update = {"codes": {"audio": ints([0])}, **wrong}
        if rid not in self.lives and rid in self.ended:
            self.buffer.merge(rid, update)
            self.counts["dropped_finished"] += 1
            return
        self.counts["refused"] += 1
        kind = errors.InvalidPayload if rid in self.lives else errors.UnknownRequest
        try:
            self.buffer.merge(rid, update)
        except kind as error:
            assert error.facts["rid"] == rid
        else:
            raise AssertionError("it was taken")

    @precondition(lambda self: any("notes" in life.map for life in self.lives.values()))
    @rule(rid=st.sampled_from(RIDS))
    def refused_in_the_end(self, rid: str) -> None:
        """Rows that can be appended, beside some that cannot: none of them is."""
        if "notes" in getattr(self.lives.get(rid), "map", {}):
            self.counts["refused"] += 1
            try:
                self.buffer.merge(rid, {"ids": {"tok": ints([0])}, "notes": torch.ones(1)})
            except errors.InvalidPayload as error:
                assert error.facts["name"] == "notes"
            else:
                raise AssertionError("it was taken")

    # -- looks -----------------------------------------------------------------------------------

    @precondition(lambda self: self.lives)
    @rule(rid=st.sampled_from(RIDS))
    def hand_out(self, rid: str) -> None:
        if rid in self.lives:
            shown = self.buffer[rid]
            self.handed_out.append((shown, told(shown)))

    @invariant()
    def every_map_is_its_own_lifes(self) -> None:
        """The whole of it: no row lost, doubled, out of order, or another's."""
        assert {rid: told(self.buffer.names(rid)) for rid in self.buffer} == {
            rid: life.map for rid, life in self.lives.items()
        }
        for rid, life in self.lives.items():
            shown = told(self.buffer[rid])
            for part, name in NAMES.items():
                assert shown.get(f"{rid}-{part}") == life.map.get(name)

    @invariant()
    def what_was_handed_out_has_not_changed(self) -> None:
        assert all(told(shown) == before for shown, before in self.handed_out)

    @invariant()
    def the_tables_agree(self) -> None:
        self.requests.validate()
        self.buffer.validate()
        assert set(self.requests) == set(self.buffer) == self.lives.keys()
        assert self.buffer.counters == self.counts

    def teardown(self) -> None:
        """When all have finished, nothing is left of any."""
        self.buffer.finish(self.requests.step(finished=list(self.lives)).removed)
        assert len(self.requests) == len(self.buffer) == 0
        assert not self.buffer._held and not self.requests._live and not self.requests._active


def test_random_steps_leave_every_map_with_its_own_rows() -> None:
    run_state_machine_as_test(
        Steps,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
        ),
    )
