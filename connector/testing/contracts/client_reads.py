"""Contract of a client, what is read: waiting and its errors, streams, polling, views and copies, several readers."""

from __future__ import annotations

from typing import Any

import pytest

import connector
from connector.arena import tensors
from connector.core import errors
from connector.testing.contracts.facade import PATIENCE, Bench
from connector.testing.contracts.samples import number, values

torch = tensors.torch

BAD_TIMES: list[Any] = [-1, float("nan"), float("inf"), "1", None, True]


class ReadContract:
    """Needs a fixture `bench`."""

    def test_nothing_known_of_a_request_names_near_ones(self, bench: Bench) -> None:
        """UnknownRequest at the deadline, also a TimeoutError."""
        out, into = bench.ends()
        out.put(bench.name("request-17"), number(1))
        bench.writer.flush()
        with pytest.raises(TimeoutError) as told:
            into.take(bench.name("request-71"), timeout=0)
        assert isinstance(told.value, errors.UnknownRequest)
        facts = told.value.facts
        assert facts["near"] == [bench.name("request-17")]
        assert (facts["rid"], facts["edge"]) == (bench.name("request-71"), str(into.name))

    def test_an_open_request_with_nothing_there_is_not_yet(self, bench: Bench) -> None:
        """NotYet names the index that is waited for, what lies behind it, and who writes."""
        out, into = bench.ends()
        out.put(bench.rid, number(0), index=0)
        out.put(bench.rid, number(2), index=2)
        bench.writer.flush()
        with into.take(bench.rid, timeout=PATIENCE):
            pass
        with pytest.raises(errors.NotYet) as told:
            into.take(bench.rid, timeout=0)
        facts = told.value.facts
        assert (facts["rid"], facts["edge"], facts["waiting_for"]) == (bench.rid, str(into.name), 1)
        assert facts["there_already"] == ["2"] and bench.writer_stage in facts["writers"][0]

    def test_a_request_that_is_open_on_another_edge_is_not_yet(self, bench: Bench) -> None:
        """NotYet says where it was seen."""
        out = bench.edge(bench.writer, replica=1)
        into = bench.edge(bench.reader)
        out.put(bench.rid, number(0), last=False)
        bench.writer.flush()
        with pytest.raises(errors.NotYet) as told:
            into.take(bench.rid, timeout=0)
        assert told.value.facts["seen_on"] == [str(out.name)]

    def test_an_ended_request_is_gone(self, bench: Bench) -> None:
        """Gone once all of it was taken, while views live and after."""
        out, into = bench.ends()
        out.put(bench.rid, number(0))
        taken = into.take(bench.rid, timeout=PATIENCE)
        with pytest.raises(errors.Gone) as told:
            into.take(bench.rid, timeout=0)
        assert (told.value.facts["rid"], told.value.facts["edge"]) == (bench.rid, str(into.name))
        taken.release()
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)
        with pytest.raises(errors.Gone):
            into.take(bench.rid, timeout=0)

    def test_a_stream_that_ended_without_a_payload_is_gone(self, bench: Bench) -> None:
        """take does not return END."""
        out, into = bench.ends()
        out.end(bench.rid)
        bench.writer.flush()
        with pytest.raises(errors.Gone):
            into.take(bench.rid, timeout=0)

    def test_a_take_waits_for_its_put(self, bench: Bench) -> None:
        """It is answered by the put, not by a look from time to time."""
        out, into = bench.ends()
        waiting = bench.start(lambda: into.take(bench.rid, timeout=PATIENCE))
        bench.until_waiting(bench.reader_stage)
        out.put(bench.rid, number(5))
        assert values([waiting.result(PATIENCE)]) == [5]
        assert all(not row["waiting_takes"] for row in bench.writer.status("sessions")["sessions"])

    def test_no_wait_is_left_at_the_broker(self, bench: Bench) -> None:
        """A take of what lies there already ends its wait, too."""
        out, into = bench.ends()
        for i in range(20):
            out.put(bench.name(f"r{i}"), number(i))
            bench.writer.flush()
            into.take(bench.name(f"r{i}"), timeout=PATIENCE)
        rows = bench.reader.status("sessions")["sessions"]
        assert [row["waiting_takes"] for row in rows if row["stage"] == bench.reader_stage] == [0]

    def test_waiting_takes_of_one_request_are_answered_once_each(self, bench: Bench) -> None:
        """Two callers, two chunks; nobody gets both, nobody none."""
        out, into = bench.ends()
        waiting = [bench.start(lambda: into.take(bench.rid, timeout=PATIENCE)) for _ in range(2)]
        bench.until_waiting(bench.reader_stage, count=2)
        out.put(bench.rid, number(1), last=False)
        out.put(bench.rid, number(2), last=True)
        assert sorted(values(future.result(PATIENCE) for future in waiting)) == [1, 2]

    def test_a_stalled_stream_can_be_taken_up_again(self, bench: Bench) -> None:
        """NotYet ends the iterator; another one goes on with the next chunk."""
        out, into = bench.ends()
        out.put(bench.rid, number(0), last=False)
        found: list[connector.Payload] = []
        with pytest.raises(errors.NotYet):
            found.extend(into.stream(bench.rid, timeout=0.2))
        out.put(bench.rid, number(1), last=True)
        found.extend(into.stream(bench.rid, timeout=PATIENCE))
        assert values(found) == [0, 1]

    def test_a_stream_pins_no_chunk_that_its_caller_let_go(self, bench: Bench) -> None:
        """Blocks go back while the stream is open."""
        out, into = bench.ends()
        for i in range(5):
            out.put(bench.rid, number(i), last=False)
        chunks = into.stream(bench.rid, timeout=PATIENCE)
        for _ in range(5):
            next(chunks)
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)
        out.end(bench.rid)
        assert list(chunks) == []

    def test_poll_returns_what_has_arrived(self, bench: Bench) -> None:
        """By rid, in order, with those that are complete in `ended`; empty is false."""
        out, into = bench.ends()
        assert not into.poll() and not into.wait(0)
        a, b = bench.name("a"), bench.name("b")
        out.put(a, number(0), last=False)
        out.put(b, number(10))
        out.put(a, number(1), last=True)
        found: dict[str, list[int]] = {}
        ended: set[str] = set()
        while ended != {a, b}:
            assert into.wait(PATIENCE)
            arrived = into.poll()
            assert arrived and not arrived.failed
            ended |= arrived.ended
            for rid, payloads in arrived.items():
                found.setdefault(rid, []).extend(values(payloads))
        assert found == {a: [0, 1], b: [10]}
        assert not into.poll()

    def test_poll_tells_a_bare_end(self, bench: Bench) -> None:
        """In `ended`, without a payload."""
        out, into = bench.ends()
        into.poll()
        out.end(bench.rid)
        assert into.wait(PATIENCE)
        arrived = into.poll()
        assert dict(arrived) == {} and arrived.ended == {bench.rid} and arrived

    def test_a_claimed_request_never_appears_in_poll(self, bench: Bench) -> None:
        """Once taken by name, all of it is."""
        out, into = bench.ends()
        into.poll()
        mine, other = bench.name("mine"), bench.name("other")
        out.put(mine, number(0), last=False)
        with into.take(mine, timeout=PATIENCE):
            pass
        out.put(mine, number(1), last=True)
        out.put(other, number(2))
        seen: set[str] = set()
        while other not in seen:
            assert into.wait(PATIENCE)
            seen |= set(into.poll())
        assert seen == {other}
        assert values([into.take(mine, timeout=PATIENCE)]) == [1]

    def test_views_hold_their_block_and_copies_do_not(self, bench: Bench) -> None:
        """copy=True: released at once, and the values stay."""
        out, into = bench.ends()
        out.put(bench.name("view"), number(1))
        view = into.take(bench.name("view"), timeout=PATIENCE)["n"]
        out.put(bench.name("copy"), number(2))
        copy = into.take(bench.name("copy"), timeout=PATIENCE, copy=True)["n"]
        bench.writer.flush()
        bench.eventually(lambda: bench.row()["payloads_released"] == 1)
        assert bench.row()["payloads_live"] == 1
        assert (int(view[0]), int(copy[0])) == (1, 2)
        del view
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)

    def test_a_payload_is_a_mapping_that_says_what_is_missing(self, bench: Bench) -> None:
        """KeyError names rid, edge and the keys that are there."""
        out, into = bench.ends()
        out.put(bench.rid, {"a": torch.zeros(2), "b": torch.ones(3)})
        taken = into.take(bench.rid, timeout=PATIENCE)
        assert list(taken) == ["a", "b"] and len(taken) == 2 and "a" in taken and "c" not in taken
        with pytest.raises(KeyError) as told:
            taken["c"]
        assert all(word in str(told.value) for word in ("'c'", f"{bench.rid}[0]", str(into.name), "a, b"))
        assert "a: float32[2]" in repr(taken)

    def test_leaving_a_payload_lets_its_block_go(self, bench: Bench) -> None:
        """As a context manager; a view that was kept stays valid and pins it."""
        out, into = bench.ends()
        out.put(bench.rid, number(3))
        with into.take(bench.rid, timeout=PATIENCE) as taken:
            kept = taken["n"][1:]
        assert len(taken) == 0
        bench.reader.status()
        assert bench.row()["payloads_live"] == 1 and kept.tolist() == [3, 3, 3]
        del kept
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)

    def test_an_error_inside_the_block_is_not_masked(self, bench: Bench) -> None:
        """The caller's own exception comes out, and the block goes back once nobody has its tensors."""
        out, into = bench.ends()
        out.put(bench.rid, number(3))
        with pytest.raises(ZeroDivisionError), into.take(bench.rid, timeout=PATIENCE) as taken:
            _ = taken["n"].sum() / (1 // 0)
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)

    def test_every_reader_gets_everything(self, bench: Bench) -> None:
        """readers=2: freed after the last one, each index once a reader."""
        out = bench.edge(bench.writer, readers=2)
        first = bench.edge(bench.reader, reader=0, readers=2)
        second = bench.edge(bench.node(), reader=1, readers=2)
        for i in range(3):
            out.put(bench.rid, number(i), last=i == 2)
        assert values(first.stream(bench.rid, timeout=PATIENCE, copy=False)) == [0, 1, 2]
        bench.eventually(lambda: bench.row()["payloads_live"] == 3)
        assert values(second.stream(bench.rid, timeout=PATIENCE, copy=False)) == [0, 1, 2]
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)

    def test_several_readers_own_what_they_take(self, bench: Bench) -> None:
        """By default each has a copy of its own to write to; copy=False pins the block."""
        out = bench.edge(bench.writer)
        out.put(bench.rid, number(1), readers=2)
        first = bench.edge(bench.reader, reader=0, readers=2).take(bench.rid, timeout=PATIENCE)
        first["n"].add_(41)
        second = bench.edge(bench.node(), reader=1, readers=2).take(bench.rid, timeout=PATIENCE, copy=False)
        assert first["n"].tolist() == [42] * 4 and second["n"].tolist() == [1] * 4
        assert bench.row()["payloads_live"] == 1
        second.release()
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)

    def test_another_number_of_readers_is_refused_at_once(self, bench: Bench) -> None:
        """ReadersMismatch for the reader, whether it came before the stream or after it."""
        out, into = bench.edge(bench.writer), bench.edge(bench.reader, reader=0, readers=2)
        late, early = bench.name("late"), bench.name("early")
        waiting = bench.start(lambda: into.take(late, timeout=PATIENCE))
        bench.until_waiting(bench.reader_stage)
        out.put(late, number(0))
        out.put(early, number(0))
        bench.writer.flush()
        with pytest.raises(errors.ReadersMismatch) as told:
            waiting.result(PATIENCE)
        assert (told.value.facts["rid"], told.value.facts["edge"]) == (late, str(into.name))
        with pytest.raises(errors.ReadersMismatch) as told:
            into.take(early, timeout=PATIENCE)
        assert (told.value.facts["readers"], told.value.facts["opened_for"]) == (2, 1)

    def test_a_chunk_for_another_number_of_readers_poisons_its_stream(self, bench: Bench) -> None:
        """The ticket, the next put and the reader get it."""
        out, into = bench.ends()
        out.put(bench.rid, number(0), last=False)
        wrong = out.put(bench.rid, number(1), last=False, readers=3)
        bench.writer.status()
        with pytest.raises(errors.ReadersMismatch):
            out.put(bench.rid, number(2), last=False)
        with pytest.raises(errors.ReadersMismatch):
            wrong.result()
        found: list[connector.Payload] = []
        with pytest.raises(errors.ReadersMismatch):
            found.extend(into.stream(bench.rid, timeout=PATIENCE))
        assert values(found) == [0]

    def test_a_reader_is_one_live_session(self, bench: Bench) -> None:
        """ReaderTaken for a second one; once the first has left, the second may come."""
        out, into = bench.ends()
        into.poll()
        other = bench.edge(bench.node())
        for _ in range(2):
            with pytest.raises(errors.ReaderTaken) as told:
                other.take(bench.rid, timeout=0)
            assert told.value.facts["edge"] == str(into.name)
        with pytest.raises(errors.ReaderTaken):
            other.poll()
        bench.reader.close()
        out.put(bench.rid, number(1))
        assert values([other.take(bench.rid, timeout=PATIENCE)]) == [1]

    def test_edges_and_replicas_do_not_mix(self, bench: Bench) -> None:
        """The same rid on two replicas is two streams of one life."""
        for replica in (0, 1):
            bench.edge(bench.writer, replica).put(bench.rid, number(replica), last=False)
        found = [bench.edge(bench.reader, replica).take(bench.rid, timeout=PATIENCE) for replica in (1, 0)]
        assert values(found) == [1, 0] and found[0].life == found[1].life

    @pytest.mark.parametrize("bad", BAD_TIMES, ids=repr)
    def test_a_time_out_is_a_number_of_seconds(self, bench: Bench, bad: Any) -> None:
        """InvalidPayload for anything else; nothing is subscribed or claimed by it."""
        _, into = bench.ends()
        for call in (
            lambda: into.take(bench.rid, timeout=bad),
            lambda: list(into.stream(bench.rid, timeout=bad)),
            lambda: into.wait(bad),
        ):
            with pytest.raises(errors.InvalidPayload) as told:
                call()
            assert "timeout" in told.value.facts

    @pytest.mark.parametrize(("reader", "readers"), [(1, 1), (-1, 1), (0, 0), (0, True), (0, 1025)])
    def test_a_reader_is_one_of_its_number(self, bench: Bench, reader: int, readers: int) -> None:
        """InvalidPayload when the edge is made."""
        with pytest.raises(errors.InvalidPayload):
            bench.edge(bench.reader, reader=reader, readers=readers)

    @pytest.mark.parametrize(("stages", "replica"), [(("", "b"), 0), (("a:b", "c"), 0), (("a", "b"), -1), ((1, 2), 0)])
    def test_an_edge_is_two_names_and_a_number(self, bench: Bench, stages: Any, replica: int) -> None:
        """InvalidPayload when the edge is made."""
        with pytest.raises(errors.InvalidPayload):
            bench.reader.edge(stages[0], stages[1], replica)
