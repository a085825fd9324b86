"""Contract of a client, aborts: who hears of them, what they free, and what comes after."""

from __future__ import annotations

import pytest

from connector.core import errors
from connector.testing.contracts.facade import PATIENCE, Bench
from connector.testing.contracts.samples import number, values


class AbortContract:
    """Needs a fixture `bench`."""

    def test_an_abort_ends_a_request_everywhere_and_reports(self, bench: Bench) -> None:
        """How many payloads and bytes it freed, and how many a reader still has."""
        out, into = bench.ends()
        for i in range(3):
            out.put(bench.rid, number(i), last=False)
        view = into.take(bench.rid, timeout=PATIENCE)["n"]
        bench.writer.flush()
        report = bench.writer.abort(bench.rid, "the user left")
        assert report["held"] >= 1 and report["payloads"] + report["held"] == 3
        assert report["bytes"] == 32 * report["payloads"]
        bench.reader.status()
        with pytest.raises(errors.RequestAborted) as told:
            into.take(bench.rid, timeout=PATIENCE)
        assert told.value.facts["reason"] == "the user left"
        assert view.tolist() == [0, 0, 0, 0]
        del view
        bench.eventually(lambda: bench.row()["payloads_live"] == 0)

    def test_an_abort_of_nothing_reports_nothing(self, bench: Bench) -> None:
        """It is no error."""
        report = bench.writer.abort(bench.name("never heard of"))
        assert (report["payloads"], report["bytes"], report["held"]) == (0, 0, 0)

    def test_an_abort_reaches_who_waits(self, bench: Bench) -> None:
        """RequestAborted, with rid, edge and reason, at a take and at poll."""
        out, into = bench.ends()
        waiting = bench.start(lambda: into.take(bench.rid, timeout=PATIENCE))
        bench.until_waiting(bench.reader_stage)
        bench.writer.abort(bench.rid, "why not")
        with pytest.raises(errors.RequestAborted) as told:
            waiting.result(PATIENCE)
        facts = told.value.facts
        assert (facts["rid"], facts["edge"], facts["reason"]) == (bench.rid, str(into.name), "why not")
        into.poll()
        out.put(bench.name("other"), number(0), last=False)
        assert into.wait(PATIENCE)
        bench.writer.abort(bench.name("other"))
        failed: dict[str, errors.ConnectorError] = {}
        while not failed:
            assert into.wait(PATIENCE)
            failed |= into.poll().failed
        assert isinstance(failed[bench.name("other")], errors.RequestAborted)

    @pytest.mark.parametrize("verb", ["finish", "begin"])
    def test_after_an_abort_puts_raise_until_the_request_is_opened_again(self, bench: Bench, verb: str) -> None:
        """In every session that saw it; finish or begin makes it a new request."""
        out, into = bench.ends()
        out.put(bench.rid, number(0), last=False)
        bench.writer.flush()
        bench.reader.abort(bench.rid, "enough")
        bench.reader.finish(bench.rid)
        bench.reader.flush()
        bench.writer.status()
        for call in (
            lambda: out.put(bench.rid, number(1)),
            lambda: out.end(bench.rid),
            lambda: out.put_many({bench.name("other"): number(0), bench.rid: number(1)}),
        ):
            with pytest.raises(errors.RequestAborted) as told:
                call()
            facts = told.value.facts
            assert (facts["rid"], facts["edge"], facts["reason"]) == (bench.rid, str(out.name), "enough")
        getattr(bench.writer, verb)(bench.rid)
        out.put(bench.rid, number(2))
        assert values([into.take(bench.rid, timeout=PATIENCE)]) == [2]
        with pytest.raises(errors.UnknownRequest):
            into.take(bench.name("other"), timeout=0)

    @pytest.mark.parametrize("how", ["take", "poll"])
    def test_a_reader_that_finishes_an_aborted_request_gets_all_of_the_next(self, bench: Bench, how: str) -> None:
        """It had got nothing of the aborted one; the next is under way when it finishes."""
        out, into = bench.ends()
        if how == "take":
            waiting = bench.start(lambda: into.take(bench.rid, timeout=PATIENCE))
            bench.until_waiting(bench.reader_stage)
        else:
            into.poll()
        bench.writer.abort(bench.rid, "the first")
        bench.reader.status()
        if how == "take":
            with pytest.raises(errors.RequestAborted):
                waiting.result(PATIENCE)
        bench.writer.finish(bench.rid)
        out.put(bench.rid, number(1), last=False)
        bench.writer.flush()
        bench.reader.status()
        bench.reader.finish(bench.rid)
        out.put(bench.rid, number(2), last=True)
        bench.writer.flush()
        assert values(into.stream(bench.rid, timeout=0)) == [1, 2]

    def test_poll_tells_the_abort_of_an_expected_request_of_which_nothing_came(self, bench: Bench) -> None:
        """Once; and neither of one that is not expected, nor one that came before."""
        _, into = bench.ends()
        into.poll()
        bench.writer.abort(bench.rid, "of a former use")
        bench.reader.status()
        for rid in (bench.rid, bench.name("finished")):
            into.expect(rid)
        bench.reader.finish(bench.name("finished"))
        bench.reader.status()
        assert not into.wait(0)
        for rid in (bench.name("stranger"), bench.name("finished"), bench.rid):
            bench.writer.abort(rid, "no use")
        for _ in range(2):
            # A batch of notices waits until the one before it was heard.
            bench.reader.status()
        arrived = into.poll()
        assert {rid: error.facts["reason"] for rid, error in arrived.failed.items()} == {bench.rid: "no use"}
        assert not arrived.ended and not arrived.keys()
        bench.writer.abort(bench.rid, "again")
        bench.reader.status()
        assert not into.poll()

    def test_an_expected_request_comes_as_any_other(self, bench: Bench) -> None:
        """What ended before its abort is told as its end alone."""
        out, into = bench.ends()
        into.poll()
        into.expect(bench.rid)
        out.put(bench.rid, number(1), last=True)
        assert into.wait(PATIENCE)
        arrived = into.poll()
        assert values(arrived[bench.rid]) == [1] and arrived.ended == {bench.rid}
        bench.writer.abort(bench.rid)
        bench.reader.status()
        assert not into.poll()

    def test_the_session_that_aborts_has_seen_it(self, bench: Bench) -> None:
        """Its next put raises at once."""
        out, _ = bench.ends()
        out.put(bench.rid, number(0), last=False)
        bench.writer.abort(bench.rid, "mine")
        with pytest.raises(errors.RequestAborted):
            out.put(bench.rid, number(1))

    def test_a_put_that_meets_an_abort_on_the_way_is_not_delivered(self, bench: Bench) -> None:
        """It raises, or its ticket holds RequestAborted; the reader never sees it."""
        out, into = bench.ends()
        for i in range(20):
            rid = bench.name(f"r{i}")
            out.put(rid, number(0), last=False)
            bench.writer.flush()
            bench.reader.abort(rid)
            with pytest.raises(errors.RequestAborted):
                out.put(rid, number(1), last=True)
                bench.writer.flush()
            with pytest.raises(errors.RequestAborted):
                into.take(rid, timeout=0)
        assert bench.row()["payloads_live"] == 0

    def test_an_abort_ends_a_put_that_waits_for_room(self, bench: Bench) -> None:
        """RequestAborted, not the deadline."""
        out, _ = bench.ends()
        pool = bench.writer.status()["pool_bytes"]
        for index in range(3):
            out.put(bench.name("full"), number(0, pool // 32), index=index)
        late = bench.start(lambda: out.put(bench.name("late"), number(0, pool // 32), timeout=PATIENCE))
        bench.until_waiting(bench.writer_stage, "waiting_puts")
        bench.reader.abort(bench.name("late"))
        with pytest.raises(errors.RequestAborted) as told:
            late.result(PATIENCE)
        assert told.value.facts["rid"] == bench.name("late")
        assert bench.reader.abort(bench.name("full"))["payloads"] == 3

    def test_who_expects_a_request_that_was_aborted_before_is_told(self, bench: Bench) -> None:
        """If it was to come on this edge, and nobody has begun it since."""
        out, into = bench.ends()
        into.poll()
        for name in ("aborted", "again"):
            out.open(bench.name(name))
            bench.writer.abort(bench.name(name), "no first token", mine=True)
            bench.reader.status()
        out.open(bench.name("again"))
        bench.writer.flush()
        for name in ("again", "aborted"):
            into.expect(bench.name(name))
        assert into.wait(PATIENCE)
        failed = into.poll().failed
        assert failed.keys() == {bench.name("aborted")} and "no first token" in str(failed[bench.name("aborted")])
        out.put(bench.name("again"), number(1))
        assert into.wait(PATIENCE)
        assert values(into.poll()[bench.name("again")]) == [1]

    def test_to_expect_a_request_again_takes_nothing_of_what_came_of_it(self, bench: Bench) -> None:
        """Neither its failure, which nobody has polled yet, nor a payload."""
        out, into = bench.ends()
        into.poll()
        for name in ("fails", "comes"):
            into.expect(bench.name(name))
        bench.reader.flush()
        out.put(bench.name("comes"), number(1))
        bench.writer.abort(bench.name("fails"), "no first token")
        bench.writer.finish(bench.name("fails"))
        out.open(bench.name("fails"))
        for _ in range(2):
            bench.writer.status()
            bench.reader.status()
        for name in ("fails", "comes"):
            into.expect(bench.name(name))
        arrived = into.poll()
        assert values(arrived[bench.name("comes")]) == [1]
        assert {rid: error.facts["reason"] for rid, error in arrived.failed.items()} == {
            bench.name("fails"): "no first token"
        }

    def test_a_reason_that_has_no_utf_8_form_is_told_escaped(self, bench: Bench) -> None:
        """Such as the name of a file that is in some error's text."""
        _, into = bench.ends()
        into.expect(bench.rid)
        into.poll()
        bench.writer.abort(bench.rid, "cannot open 'caf\udce9'")
        assert into.wait(PATIENCE)
        assert into.poll().failed[bench.rid].facts["reason"] == "cannot open 'caf\\udce9'"

    def test_an_abort_of_something_else_under_the_same_id_is_no_abort_of_this(self, bench: Bench) -> None:
        """It came on another edge."""
        out, into = bench.ends()
        into.poll()
        other = bench.writer.edge(bench.name("elsewhere"), bench.name("further"))
        other.put(bench.rid, number(0), last=False)
        bench.writer.abort(bench.rid)
        bench.reader.status()
        into.expect(bench.rid)
        bench.reader.flush()
        bench.writer.finish(bench.rid)
        out.put(bench.rid, number(1))
        assert into.wait(PATIENCE)
        polled = into.poll()
        assert polled.failed == {} and values(polled[bench.rid]) == [1]

    def test_no_end_is_told_behind_a_hole(self, bench: Bench) -> None:
        """The abort's notice waits behind another; what it voids goes before."""
        out, into = bench.ends()
        into.poll()
        ends: set[tuple[int, ...]] = set()
        for turn in range(40):
            rid = bench.name(f"r{turn}")
            out.open(rid)
            out.put(rid, number(0), last=False)
            out.put(rid, number(1), last=True)
            bench.writer.abort(rid, mine=True)
            bench.writer.finish(rid)
            got: list[int] = []
            polled = into.poll()
            while rid not in polled.ended | polled.failed.keys():
                got += values(polled.get(rid, []))
                assert into.wait(PATIENCE)
                polled = into.poll()
            got += values(polled.get(rid, []))
            if rid in polled.ended:
                ends.add(tuple(got))
            bench.reader.finish(rid)
            del polled
        assert ends <= {(0, 1)}
