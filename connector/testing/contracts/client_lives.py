"""Contract of a client, how requests begin and end: finish, begin, flush, close, and a reader that leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import connector
from connector.core import errors
from connector.testing.contracts.facade import PATIENCE, Bench, EdgeFace, NodeFace
from connector.testing.contracts.samples import number, values

VERBS: dict[str, Callable[[NodeFace, EdgeFace], Any]] = {
    "put": lambda node, edge: edge.put("r", {}),
    "put_many": lambda node, edge: edge.put_many({"r": {}}),
    "end": lambda node, edge: edge.end("r"),
    "take": lambda node, edge: edge.take("r", timeout=0),
    "stream": lambda node, edge: list(edge.stream("r", timeout=0)),
    "poll": lambda node, edge: edge.poll(),
    "wait": lambda node, edge: edge.wait(0),
    "expect": lambda node, edge: edge.expect("r"),
    "begin": lambda node, edge: node.begin("r"),
    "finish": lambda node, edge: node.finish("r"),
    "abort": lambda node, edge: node.abort("r"),
    "flush": lambda node, edge: node.flush(),
    "status": lambda node, edge: node.status(),
    "counters": lambda node, edge: node.counters(),
    "edge": lambda node, edge: node.edge("a", "b"),
}


class LifeContract:
    """Needs a fixture `bench`."""

    def test_finish_by_the_writer_destroys_nothing_unread(self, bench: Bench) -> None:
        """It ends the stream behind what was put."""
        out, into = bench.ends()
        out.put(bench.rid, number(0), last=False)
        out.put(bench.rid, number(1), last=False)
        bench.writer.finish(bench.rid)
        found = list(into.stream(bench.rid, timeout=PATIENCE))
        assert values(found) == [0, 1]

    def test_a_finished_request_can_be_used_again(self, bench: Bench) -> None:
        """Another life, from index 0, behind what is left of the first."""
        out, into = bench.ends()
        for life in range(3):
            for i in range(2):
                out.put(bench.rid, number(10 * life + i), last=i == 1)
            bench.writer.finish(bench.rid)
        lives = []
        for life in range(3):
            found = list(into.stream(bench.rid, timeout=PATIENCE))
            assert values(found) == [10 * life, 10 * life + 1]
            assert [payload.index for payload in found] == [0, 1]
            lives.append(found[0].life)
            del found
            bench.reader.finish(bench.rid)
        assert lives == sorted(set(lives))

    def test_finish_by_the_reader_drops_its_unread_share(self, bench: Bench) -> None:
        """Blocks go back; the writer's later chunks of that life find nobody."""
        out, into = bench.ends()
        for i in range(4):
            out.put(bench.rid, number(i), last=False)
        with into.take(bench.rid, timeout=PATIENCE):
            pass
        bench.reader.finish(bench.rid)
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)
        out.put(bench.rid, number(4), last=True)
        bench.writer.flush()
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)

    def test_finish_ends_the_waiting_take_of_this_node(self, bench: Bench) -> None:
        """Gone, by name."""
        _, into = bench.ends()
        waiting = bench.start(lambda: into.take(bench.rid, timeout=PATIENCE))
        bench.until_waiting(bench.reader_stage)
        bench.reader.finish(bench.rid)
        with pytest.raises(errors.Gone) as told:
            waiting.result(PATIENCE)
        assert (told.value.facts["rid"], told.value.facts["edge"]) == (bench.rid, str(into.name))

    def test_a_hole_is_an_error_at_the_reader(self, bench: Bench) -> None:
        """StreamGap behind what came in order; nothing is skipped."""
        out, into = bench.ends()
        out.put(bench.rid, number(0), index=0)
        out.put(bench.rid, number(2), index=2)
        bench.writer.finish(bench.rid)
        found: list[connector.Payload] = []
        with pytest.raises(errors.StreamGap) as told:
            found.extend(into.stream(bench.rid, timeout=PATIENCE))
        assert values(found) == [0]
        facts = told.value.facts
        assert (facts["rid"], facts["edge"], facts["missing"]) == (bench.rid, str(into.name), ["1"])

    def test_poll_tells_a_failure_once(self, bench: Bench) -> None:
        """In `failed`, behind what came in order."""
        out, into = bench.ends()
        into.poll()
        out.put(bench.rid, number(0), index=0)
        out.put(bench.rid, number(2), index=2)
        bench.writer.finish(bench.rid)
        found: list[int] = []
        failed: dict[str, errors.ConnectorError] = {}
        while not failed:
            assert into.wait(PATIENCE)
            arrived = into.poll()
            found += [value for payloads in arrived.values() for value in values(payloads)]
            failed |= arrived.failed
        assert found == [0] and isinstance(failed[bench.rid], errors.StreamGap)
        assert not into.poll()

    def test_begin_starts_a_new_life(self, bench: Bench) -> None:
        """What the writer had open of the rid ends; the next chunk is number 0 of another life."""
        out, into = bench.ends()
        out.put(bench.rid, number(0), last=False)
        bench.writer.begin(bench.rid)
        assert out.put(bench.rid, number(1)).index == 0
        first = list(into.stream(bench.rid, timeout=PATIENCE))
        bench.reader.finish(bench.rid)
        second = list(into.stream(bench.rid, timeout=PATIENCE))
        assert values(first) == [0] and values(second) == [1] and second[0].life > first[0].life

    def test_what_a_leaving_reader_had_not_released_is_delivered_again(self, bench: Bench) -> None:
        """All of it, in order, marked, to the next session that comes as this reader."""
        out = bench.edge(bench.writer)
        gone = bench.node()
        into = bench.edge(gone)
        for i in range(3):
            out.put(bench.rid, number(i), last=i == 2)
        # All of it is there before the reader comes, so that all of it is sent to it at once.
        bench.writer.flush()
        assert into.wait(PATIENCE)
        gone.close()
        found = list(bench.edge(bench.reader).stream(bench.rid, timeout=PATIENCE))
        assert values(found) == [0, 1, 2] and all(payload.redelivered for payload in found)

    def test_a_request_that_was_released_in_part_fails_with_its_reader(self, bench: Bench) -> None:
        """ReaderDied at both ends."""
        out = bench.edge(bench.writer)
        gone = bench.node()
        into = bench.edge(gone)
        for i in range(3):
            out.put(bench.rid, number(i), last=False)
        into.take(bench.rid, timeout=PATIENCE).release()
        bench.eventually(lambda: bench.row()["payloads_released"] == 1)
        gone.close()
        with pytest.raises(errors.ReaderDied) as told:
            bench.edge(bench.reader).take(bench.rid, timeout=PATIENCE)
        assert (told.value.facts["rid"], told.value.facts["edge"]) == (bench.rid, str(out.name))
        bench.writer.status()
        with pytest.raises(errors.ReaderDied):
            out.put(bench.rid, number(3))

    def test_a_reader_with_state_of_its_own_goes_on(self, bench: Bench) -> None:
        """resume=True: only what was not released comes again."""
        out = bench.edge(bench.writer)
        gone = bench.node()
        into = bench.edge(gone, resume=True)
        for i in range(3):
            out.put(bench.rid, number(i), last=i == 2)
        into.take(bench.rid, timeout=PATIENCE).release()
        bench.eventually(lambda: bench.row()["payloads_released"] == 1)
        gone.close()
        found = list(bench.edge(bench.reader, resume=True).stream(bench.rid, timeout=PATIENCE))
        assert values(found) == [1, 2]

    def test_a_writer_that_leaves_before_the_end_fails_its_stream(self, bench: Bench) -> None:
        """WriterDied behind what it put; a stream that it ended is not touched."""
        gone = bench.node(bench.writer_stage)
        out, into = bench.edge(gone), bench.edge(bench.reader)
        out.put(bench.name("open"), number(0), last=False)
        out.put(bench.name("whole"), number(1))
        gone.close()
        found: list[connector.Payload] = []
        with pytest.raises(errors.WriterDied) as told:
            found.extend(into.stream(bench.name("open"), timeout=PATIENCE))
        assert values(found) == [0]
        assert (told.value.facts["rid"], told.value.facts["edge"]) == (bench.name("open"), str(into.name))
        assert values(into.stream(bench.name("whole"), timeout=PATIENCE)) == [1]

    def test_a_writer_that_leaves_before_its_first_chunk_fails_who_expects_it(self, bench: Bench) -> None:
        """Who does not, hears nothing."""
        gone = bench.node(bench.writer_stage)
        out, into = bench.edge(gone), bench.edge(bench.reader)
        into.poll()
        for name in ("expected", "not"):
            out.open(bench.name(name))
        into.expect(bench.name("expected"))
        gone.flush()
        bench.reader.flush()
        gone.close()
        assert into.wait(PATIENCE)
        failed = into.poll().failed
        assert {rid: type(error) for rid, error in failed.items()} == {bench.name("expected"): errors.WriterDied}
        assert failed[bench.name("expected")].facts["edge"] == str(into.name)

    def test_flush_waits_until_the_broker_has_all(self, bench: Bench) -> None:
        """And returns nothing; a second one has nothing to wait for."""
        out, _ = bench.ends()
        tickets = [out.put(bench.rid, number(i), last=i == 99) for i in range(100)]
        bench.writer.flush()
        assert {ticket.result() for ticket in tickets} == {"stored"}
        bench.writer.flush()

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_closed_node_is_of_no_use(self, bench: Bench, verb: str) -> None:
        """ClientClosed from every verb; close itself may be said again."""
        node = bench.node("closing")
        edge = bench.edge(node)
        node.close()
        node.close()
        with pytest.raises(errors.ClientClosed):
            VERBS[verb](node, edge)

    def test_close_sends_what_was_put(self, bench: Bench) -> None:
        """Nothing that put returned for is lost, and each ticket says so."""
        gone = bench.node(bench.writer_stage)
        out = bench.edge(gone)
        tickets = [out.put(bench.rid, number(i), last=i == 99) for i in range(100)]
        gone.close()
        assert [ticket.outcome for ticket in tickets] == ["stored"] * 100
        assert values(bench.edge(bench.reader).stream(bench.rid, timeout=PATIENCE)) == list(range(100))

    def test_close_ends_waiting_calls(self, bench: Bench) -> None:
        """ClientClosed."""
        node = bench.node("waiting")
        into = bench.edge(node)
        waiting = bench.start(lambda: into.take(bench.rid, timeout=PATIENCE))
        bench.until_waiting("waiting")
        node.close()
        with pytest.raises(errors.ClientClosed):
            waiting.result(PATIENCE)

    def test_views_outlive_their_node(self, bench: Bench) -> None:
        """They stay valid after close and are released one by one."""
        node = bench.node()
        out, into = bench.edge(bench.writer), bench.edge(node)
        out.put(bench.rid, number(7))
        out.put(bench.name("before"), number(8))
        view = into.take(bench.rid, timeout=PATIENCE)["n"]
        into.take(bench.name("before"), timeout=PATIENCE).release()
        bench.eventually(lambda: bench.row()["payloads_live"] == 1)
        node.close()
        assert view.tolist() == [7] * 4
        assert bench.row()["payloads_live"] == 1
        del view
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)

    def test_what_is_no_request_is_refused(self, bench: Bench) -> None:
        """InvalidPayload for rid and reason."""
        for call in (
            lambda: bench.writer.begin(""),
            lambda: bench.writer.finish(7),  # type: ignore[arg-type]
            lambda: bench.writer.abort("", "x"),
            lambda: bench.writer.abort(bench.rid, "x" * 5000),
            lambda: bench.writer.abort(bench.rid, None),  # type: ignore[arg-type]
        ):
            with pytest.raises(errors.InvalidPayload):
                call()
