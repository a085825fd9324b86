"""Contract of a client, what is put: order, tickets, steps, room, and what is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import connector
from connector.arena import tensors
from connector.core import errors
from connector.testing.contracts.facade import PATIENCE, Bench
from connector.testing.contracts.samples import number, same, values

torch = tensors.torch

BAD_PUTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "an empty rid": ("", {}, {}),
    "a rid that is no str": (7, {}, {}),
    "a rid of None": (None, {}, {}),
    "a rid that is too long": ("r" * 1025, {}, {}),
    "a rid with a lone surrogate": ("\ud800", {}, {}),
    "a payload that is a list": ("r", [torch.zeros(1)], {}),
    "a payload that is a tensor": ("r", torch.zeros(1), {}),
    "a payload of None": ("r", None, {}),
    "a key that is no str": ("r", {1: torch.zeros(1)}, {}),
    "a key that is too long": ("r", {"k" * 1025: torch.zeros(1)}, {}),
    "a value that is a list": ("r", {"k": [1.0]}, {}),
    "a value that is a number": ("r", {"k": 1}, {}),
    "a value of None": ("r", {"k": None}, {}),
    "a nested payload": ("r", {"k": {"inner": torch.zeros(1)}}, {}),
    "an index below 0": ("r", {}, {"index": -1}),
    "an index that is a bool": ("r", {}, {"index": True}),
    "an index that is text": ("r", {}, {"index": "0"}),
    "an index out of range": ("r", {}, {"index": 2**31}),
    "an attempt below 0": ("r", {}, {"attempt": -1}),
    "no readers": ("r", {}, {"readers": 0}),
    "too many readers": ("r", {}, {"readers": 1025}),
    "a time-out below 0": ("r", {}, {"timeout": -1}),
    "a time-out that is no number": ("r", {}, {"timeout": float("nan")}),
    "a time-out that is text": ("r", {}, {"timeout": "1"}),
}


class PutContract:
    """Needs a fixture `bench`."""

    def test_a_full_payload_arrives_whole_and_names_itself(self, bench: Bench) -> None:
        """One chunk, which ends its stream; keys in their order."""
        out, into = bench.ends()
        sent = {"z": torch.randn(3, 2), "a": torch.arange(5), "": torch.tensor(True)}
        ticket = out.put(bench.rid, sent)
        taken = into.take(bench.rid, timeout=PATIENCE)
        same(taken, sent)
        assert (ticket.rid, ticket.edge, ticket.index) == (bench.rid, out.name, 0)
        assert (taken.rid, taken.edge, taken.index, taken.attempt) == (bench.rid, out.name, 0, 0)
        assert taken.last and not taken.redelivered and taken.life > 0

    def test_an_empty_payload_is_a_payload(self, bench: Bench) -> None:
        """`{}` is taken like any other, and leaves nothing behind."""
        out, into = bench.ends()
        out.put(bench.rid, {})
        taken = into.take(bench.rid, timeout=PATIENCE)
        assert dict(taken) == {} and taken.last
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)

    def test_chunks_count_up_until_last(self, bench: Bench) -> None:
        """Without an index a chunk is the stream's next one."""
        out, into = bench.ends()
        tickets = [out.put(bench.rid, number(i), last=i == 3) for i in range(4)]
        assert [ticket.index for ticket in tickets] == [0, 1, 2, 3]
        found = list(into.stream(bench.rid, timeout=PATIENCE))
        assert values(found) == [0, 1, 2, 3]
        assert [(p.index, p.last) for p in found] == [(0, False), (1, False), (2, False), (3, True)]

    def test_chunks_arrive_in_the_order_of_their_index(self, bench: Bench) -> None:
        """Whatever the order in which they were put."""
        out, into = bench.ends()
        for index in (2, 0, 3, 1):
            out.put(bench.rid, number(index), index=index, last=index == 3)
        assert values(into.stream(bench.rid, timeout=PATIENCE)) == [0, 1, 2, 3]

    def test_end_alone_ends_the_stream(self, bench: Bench) -> None:
        """It is no payload; its ticket tells the number of chunks."""
        out, into = bench.ends()
        out.put(bench.rid, number(0), last=False)
        out.put(bench.rid, number(1), last=False)
        assert out.end(bench.rid).index == 2
        found = list(into.stream(bench.rid, timeout=PATIENCE))
        assert values(found) == [0, 1]
        bench.eventually(lambda: bench.row()["payloads_sealed"] == 2)

    def test_a_stream_of_no_chunks_ends(self, bench: Bench) -> None:
        """END first: a stream of nothing."""
        out, into = bench.ends()
        assert out.end(bench.rid).index == 0
        assert list(into.stream(bench.rid, timeout=PATIENCE)) == []

    def test_behind_the_end_nothing_is_put(self, bench: Bench) -> None:
        """StreamEnded for the next chunk, AlreadyPut for one that is there; both at once, by name."""
        out, _ = bench.ends()
        out.put(bench.rid, number(0))
        for refused, options in (
            (errors.StreamEnded, {}),
            (errors.StreamEnded, {"index": 1}),
            (errors.AlreadyPut, {"index": 0}),
        ):
            with pytest.raises(refused) as told:
                out.put(bench.rid, number(1), **options)
            assert told.value.facts["rid"] == bench.rid and told.value.facts["edge"] == str(out.name)
        with pytest.raises(errors.StreamEnded):
            out.end(bench.rid)

    def test_a_ticket_tells_stored(self, bench: Bench) -> None:
        """Once the broker has it; flush waits for that."""
        out, _ = bench.ends()
        ticket = out.put(bench.rid, number(1))
        bench.writer.flush()
        assert ticket.done() and ticket.result() == "stored" and ticket.error is None

    def test_a_higher_attempt_replaces_what_no_reader_was_told_of(self, bench: Bench) -> None:
        """The ticket says so, and the reader gets the new one alone."""
        out, into = bench.ends()
        out.put(bench.rid, number(1), index=0, last=False)
        again = out.put(bench.rid, number(2), index=0, attempt=1, last=True)
        bench.writer.flush()
        assert again.result() == "replaced"
        found = list(into.stream(bench.rid, timeout=PATIENCE))
        assert values(found) == [2] and found[0].attempt == 1

    def test_a_higher_attempt_is_ignored_once_a_reader_has_it(self, bench: Bench) -> None:
        """Each index once."""
        out, into = bench.ends()
        out.put(bench.rid, number(1), index=0, last=False)
        first = into.take(bench.rid, timeout=PATIENCE)
        again = out.put(bench.rid, number(2), index=0, attempt=1)
        out.put(bench.rid, number(3), last=True)
        bench.writer.flush()
        assert again.result() == "ignored"
        assert values([first, *into.stream(bench.rid, timeout=PATIENCE)]) == [1, 3]

    def test_another_payload_of_the_same_attempt_is_refused(self, bench: Bench) -> None:
        """AlreadyPut in the ticket, raised by flush once, and the stream goes on."""
        out, into = bench.ends()
        out.put(bench.rid, number(1), index=0)
        twice = out.put(bench.rid, number(2), index=0)
        with pytest.raises(errors.AlreadyPut) as told:
            bench.writer.flush()
        assert told.value.facts | {"rid": bench.rid, "edge": str(out.name), "index": 0} == told.value.facts
        with pytest.raises(errors.AlreadyPut):
            twice.result()
        out.put(bench.rid, number(3), last=True)
        bench.writer.flush()
        assert values(into.stream(bench.rid, timeout=PATIENCE)) == [1, 3]

    def test_the_next_put_raises_a_refusal_that_nobody_was_told_of(self, bench: Bench) -> None:
        """And only that one; a ticket that was asked told it already."""
        out, _ = bench.ends()
        out.put(bench.rid, number(1), index=0)
        out.put(bench.rid, number(2), index=0)
        bench.writer.status()
        with pytest.raises(errors.AlreadyPut):
            out.put(bench.rid, number(3))
        out.put(bench.rid, number(3))
        bench.writer.flush()

    def test_a_step_is_one_chunk_of_each_request(self, bench: Bench) -> None:
        """put_many: the next index of each rid, and END for those in `last`."""
        out, into = bench.ends()
        a, b = bench.name("a"), bench.name("b")
        out.put_many({a: number(0), b: number(10)})
        tickets = out.put_many({b: number(11), a: number(1)}, last={a})
        assert {rid: ticket.index for rid, ticket in tickets.items()} == {a: 1, b: 1}
        out.put_many({b: number(12)}, last=True)
        assert values(into.stream(a, timeout=PATIENCE)) == [0, 1]
        assert values(into.stream(b, timeout=PATIENCE)) == [10, 11, 12]
        assert out.put_many({}) == {}

    def test_a_step_with_one_bad_member_puts_nothing(self, bench: Bench) -> None:
        """The error names the member's rid and key."""
        out, into = bench.ends()
        good, bad = bench.name("good"), bench.name("bad")
        text: Any = "text"
        with pytest.raises(errors.InvalidPayload) as told:
            out.put_many({good: number(0), bad: {"k": text}})
        assert told.value.facts == {"rid": bad, "edge": str(out.name), "key": "k"}
        with pytest.raises(errors.InvalidPayload) as told:
            out.put_many({good: number(0)}, last={"other"})
        assert told.value.facts["rid"] == "other"
        with pytest.raises(errors.UnknownRequest):
            into.take(good, timeout=0)

    def test_the_source_is_free_as_soon_as_put_returns(self, bench: Bench) -> None:
        """The copy is made: what the next step writes there is never sent."""
        out, into = bench.ends()
        source = torch.zeros(4096, dtype=torch.int64)
        for i in range(50):
            source.fill_(i)
            out.put(bench.rid, {"n": source}, last=i == 49)
            source.fill_(-1)
        assert values(into.stream(bench.rid, timeout=PATIENCE)) == list(range(50))

    @pytest.mark.parametrize("name", BAD_PUTS)
    def test_a_put_that_cannot_be_right_is_refused(self, bench: Bench, name: str) -> None:
        """InvalidPayload, a UsageError, before anything is sent."""
        rid, payload, options = BAD_PUTS[name]
        rid = bench.rid if rid == "r" else rid
        out, _ = bench.ends()
        sent: Callable[[], Any] = lambda: out.put(rid, payload, **options)  # noqa: E731
        with pytest.raises(errors.InvalidPayload) as told:
            sent()
        assert isinstance(told.value, errors.UsageError)
        if rid == bench.rid and payload != {}:
            assert told.value.facts["rid"] == bench.rid and told.value.facts["edge"] == str(out.name)
        assert str(out.name) not in bench.writer.counters()["edges"]

    def test_a_tensor_that_is_not_carried_is_refused_by_name(self, bench: Bench) -> None:
        """Rid, edge, key, dtype and layout."""
        out, _ = bench.ends()
        with pytest.raises(errors.UnsupportedTensor) as told:
            out.put(bench.rid, {"fine": torch.zeros(1), "thin": torch.eye(3, dtype=torch.float64).to_sparse()})
        facts = told.value.facts
        assert (facts["rid"], facts["edge"], facts["key"]) == (bench.rid, str(out.name), "thin")
        assert (facts["dtype"], facts["layout"]) == ("float64", "sparse_coo")

    def test_what_can_never_fit_is_refused_at_once(self, bench: Bench) -> None:
        """PayloadTooLarge with size and limit; the stream is as it was."""
        out, into = bench.ends()
        pool = bench.writer.status()["pool_bytes"]
        huge = {"k": torch.zeros(1, dtype=torch.uint8).expand(pool + 1)}
        with pytest.raises(errors.PayloadTooLarge) as told:
            out.put(bench.rid, huge)
        facts = told.value.facts
        assert facts["rid"] == bench.rid and facts["edge"] == str(out.name)
        assert facts["size"] > facts["limit"] and facts["limit"] <= pool
        out.put(bench.rid, number(1))
        assert values([into.take(bench.rid, timeout=PATIENCE)]) == [1]

    def test_a_full_pool_refuses_after_the_deadline_and_says_who_holds_it(self, bench: Bench) -> None:
        """PoolFull, also a TimeoutError; what was put before is untouched."""
        out, into = bench.ends()
        pool = bench.writer.status()["pool_bytes"]
        big = {"n": torch.ones(pool // 32, dtype=torch.int64)}
        for index in range(3):
            out.put(bench.rid, big, index=index)
        with pytest.raises(TimeoutError) as told:
            out.put(bench.rid, big, index=3, timeout=0.05)
        assert isinstance(told.value, errors.PoolFull)
        facts = told.value.facts
        assert facts["rid"] == bench.rid and facts["edge"] == str(out.name) and facts["size"] > pool // 4
        assert any(str(out.name) in row for row in facts["by_edge"])
        out_again = out.put(bench.rid, number(9, 8), index=3, last=True)
        assert [len(p["n"]) for p in into.stream(bench.rid, timeout=PATIENCE)] == [pool // 32] * 3 + [8]
        assert isinstance(out_again, connector.Ticket)

    def test_a_put_waits_for_room(self, bench: Bench) -> None:
        """It goes through as soon as a reader lets a block go."""
        out, into = bench.ends()
        pool = bench.writer.status()["pool_bytes"]
        big = {"n": torch.ones(pool // 32, dtype=torch.int64)}
        for index in range(3):
            out.put(bench.rid, big, index=index)
        bench.writer.flush()
        late = bench.start(lambda: out.put(bench.rid, big, index=3, last=True, timeout=PATIENCE))
        bench.until_waiting(bench.writer_stage, "waiting_puts")
        assert len(list(map(len, into.stream(bench.rid, timeout=PATIENCE)))) == 4
        late.result(PATIENCE)
        bench.writer.flush()
        assert late.result().result() == "stored"
