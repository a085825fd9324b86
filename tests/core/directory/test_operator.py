"""What an operator sees and does: pages, totals, a look, removal by hand, the story."""

from __future__ import annotations

from typing import Any

from connector.core.directory import effects as ef
from connector.core.directory import holding, listing
from connector.core.directory.events import Hold
from connector.core.errors import InvariantBroken, StreamPoisoned, UnknownRequest


def kinds(errors: list[Any]) -> list[type]:
    return [type(error) for error in errors]


def all_rows(rig: Any, limit: int = 1000, scan: int = 5000, **chosen: Any) -> list[listing.PayloadRow]:
    """Page after page."""
    rows: list[listing.PayloadRow] = []
    cursor = 0
    while True:
        page, cursor = listing.page(rig.state, cursor, 0, limit, listing.Filter(**chosen), scan)
        assert len(page) <= limit
        rows += page
        if not cursor:
            return rows


# -- removal --------------------------------------------------------------------------------------


def test_removal_frees_what_nobody_holds_and_tells_both_ends(rig: Any) -> None:
    writer, operator = rig.join(), rig.join()
    rig.put_all(writer, "a", 3, last=False)
    assert rig.remove(operator, "a") == {"payloads": 3, "held": 0}
    assert rig.used == 0 and kinds(rig.failures(writer)) == [StreamPoisoned]
    reader = rig.reader()
    assert kinds(rig.failures(reader)) == [StreamPoisoned] and rig.read(reader) == []


def test_removal_of_one_chunk_is_no_silent_gap(rig: Any) -> None:
    writer, operator = rig.join(), rig.join()
    rig.put_all(writer, "a", 3)
    assert rig.remove(operator, "a", 1) == {"payloads": 1, "held": 0}
    reader = rig.reader()
    assert [d.index for d in rig.read(reader)] == [0] and kinds(rig.failures(reader)) == [StreamPoisoned]
    assert rig.used == 0


def test_a_held_payload_is_removed_by_its_reader(rig: Any) -> None:
    writer, reader, operator = rig.join(), rig.reader(), rig.join()
    rig.put(writer, "a", last=True)
    (held,) = rig.arrived(reader)
    assert rig.remove(operator, "a") == {"payloads": 0, "held": 1}
    assert [e.holds for e in rig.heard(reader, ef.DropHolds)] == [(rig.hold(held),)] and rig.used == 64
    rig.release(reader, held)
    assert rig.used == 0


def test_force_frees_a_held_payload_at_once(rig: Any) -> None:
    writer, reader, operator = rig.join(), rig.reader(), rig.join()
    rig.put(writer, "a", last=True)
    (held,) = rig.arrived(reader)
    assert rig.remove(operator, "a", force=True) == {"payloads": 1, "held": 0}
    assert rig.used == 0
    rig.release(reader, held)
    assert rig.used == 0


def test_a_removed_payload_is_not_delivered_again(rig: Any) -> None:
    writer, reader, operator = rig.join(), rig.reader(), rig.join()
    rig.put_all(writer, "a", 2)
    rig.remove(operator, "a", 1)
    rig.die(reader)
    successor = rig.reader()
    assert [d.index for d in rig.read(successor)] == [0]


def test_removal_of_what_is_not_there(rig: Any) -> None:
    writer = rig.join()
    rig.put(writer, "a")
    for rid, index in (("b", -1), ("a", 7)):
        assert type(rig.remove(writer, rid, index)) is UnknownRequest
    assert rig.failures(writer) == [] and rig.used == 64


# -- a look ---------------------------------------------------------------------------------------


def test_a_look_holds_the_block_and_nothing_else(rig: Any) -> None:
    writer, reader, operator = rig.join(), rig.reader(), rig.join()
    rig.put(writer, "a", last=True, tag="x")
    shown = rig.inspect(operator, "a")
    assert (shown.reader, shown.manifest) == (-1, b"x")
    assert [d.index for d in rig.read(reader)] == [0]
    assert rig.used == 64 and not rig.state.lives
    rig.release(operator, shown)
    assert rig.is_empty()


def test_a_look_survives_abort_and_ends_with_its_session(rig: Any) -> None:
    writer, operator = rig.join(), rig.join()
    rig.put(writer, "a")
    rig.inspect(operator, "a")
    rig.inspect(operator, "a", 0)
    rig.abort(writer, "a")
    assert rig.used == 64
    rig.die(operator)
    assert rig.is_empty()


def test_a_look_lasts_as_long_as_its_view_when_the_session_has_said_good_bye(rig: Any) -> None:
    """The tensor is alive in a process that goes on; what it does not hold any more goes at once."""
    writer, operator = rig.join(), rig.join()
    for rid in ("seen", "let go"):
        rig.put(writer, rid)
    seen, _ = rig.inspect(operator, "seen"), rig.inspect(operator, "let go")
    for rid in ("seen", "let go"):
        rig.abort(writer, rid)
    rig.leave(operator, [seen])
    assert rig.used == 64 and operator in rig.state.sessions
    rig.release(operator, seen)
    assert rig.is_empty() and operator not in rig.state.sessions


def test_there_is_nothing_to_see_of_void_and_bare_ends(rig: Any) -> None:
    writer, reader, operator = rig.join(), rig.reader(), rig.join()
    rig.put(writer, "end", 0, end=True)
    rig.put(writer, "void", last=True)
    rig.remove(operator, "void")
    assert len(rig.arrived(reader)) == 2
    for rid in ("end", "void", "unknown"):
        assert type(rig.inspect(operator, rid)) is UnknownRequest
    assert not rig.state.sessions[operator].inspecting


# -- pages ----------------------------------------------------------------------------------------


def test_pages_show_five_thousand_payloads_each_once(make_rig: Any) -> None:
    """Also while others come and go between two pages."""
    rig = make_rig(pool=8 << 20, max_blocks=10_000)
    writer = rig.join()
    for number in range(5000):
        rig.quick_put(writer, f"r{number}")
    last = rig.state.serial
    seen: list[str] = []
    cursor = 0
    while True:
        page, cursor = listing.page(rig.state, cursor, last, 300, listing.Filter(), 1000)
        seen += [row.rid for row in page]
        if not cursor:
            break
        rig.quick_put(writer, f"late{cursor}")
    assert seen == [f"r{number}" for number in range(5000)]
    assert len(all_rows(rig)) == len(rig.state.shelf) > 5000


def test_a_page_looks_at_no_more_than_its_limit(make_rig: Any) -> None:
    """A filter that matches nothing gives a cursor, not a stall."""
    rig = make_rig(pool=1 << 20, max_blocks=10_000)
    writer = rig.join()
    for number in range(100):
        rig.quick_put(writer, f"r{number}")
    rows, cursor = listing.page(rig.state, 0, 0, 10, listing.Filter(rid="r99"), 40)
    assert rows == [] and cursor == 40
    assert [row.rid for row in all_rows(rig, scan=40, rid="r99")] == ["r99"]


def test_payloads_far_apart_are_found_without_the_way_between(rig: Any) -> None:
    """An old payload and one a hundred million payloads later."""
    writer = rig.join()
    rig.put(writer, "old")
    rig.state.serial = 10**15
    rig.put(writer, "new")
    assert [row.rid for row in all_rows(rig)] == ["old", "new"]


def test_filters(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "x-1", last=True)
    rig.put(writer, "x-2", last=True)
    rig.put(writer, "y-1", edge=rig.other)
    rig.take(reader, rig.arrived(reader)[0])
    assert [row.rid for row in all_rows(rig, rid_prefix="x-")] == ["x-1", "x-2"]
    assert [row.rid for row in all_rows(rig, edge=rig.other)] == ["y-1"]
    assert [row.rid for row in all_rows(rig, state="taken")] == ["x-1"]
    assert [row.rid for row in all_rows(rig, state="delivered")] == ["x-2"]
    assert [row.rid for row in all_rows(rig, state="sealed")] == ["y-1"]
    rig.abort(writer, "x-2")
    assert [row.rid for row in all_rows(rig, state="void")] == ["x-2"]


def test_a_row_says_who_wrote_and_who_holds(rig: Any) -> None:
    writer, reader = rig.join("thinker"), rig.reader("talker", reader=1, readers=2)
    rig.tick(1.0)
    rig.put(writer, "a", 0, readers=2, attempt=3, nbytes=5)
    rig.tick(2.5)
    (row,) = all_rows(rig)
    assert (row.writer, row.holders) == (f"thinker (pid {1000 + writer})", [f"1: talker (pid {1000 + reader})"])
    assert (row.age, row.attempt, row.nbytes, row.readers, row.length) == (2.5, 3, 5, 2, 64)
    rig.die(writer)
    assert all_rows(rig)[0].writer == f"thinker (pid {1000 + writer}), gone"


def test_totals_agree_with_the_rows(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 4)
    rig.put(writer, "b", 0, edge=rig.other)
    rig.put(writer, "b", 1, edge=rig.other, end=True)
    rig.release(reader, rig.arrived(reader)[0])
    rows: list[listing.PayloadRow] = all_rows(rig)
    totals: dict[str, Any] = listing.totals(rig.state)
    edges: list[dict[str, Any]] = [listing.edge_row(rig.state, edge) for edge in rig.state.edges]
    assert totals["payloads"] == len(rows) == 5
    assert sum(row["payloads_live"] for row in edges) == sum(not row.flags & 2 for row in rows) == 4
    assert totals["used_bytes"] == sum(row["bytes_used"] + row["bytes_reserved"] for row in edges)
    assert totals["used_bytes"] == sum({row.offset: row.length for row in rows}.values())
    assert totals["payloads_sealed"] - totals["payloads_released"] == 4


def test_a_suspects_bytes_are_shown_as_quarantined(make_rig: Any) -> None:
    rig = make_rig(heartbeat=5.0, suspect_after=10.0)
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True, nbytes=33)
    for _ in range(3):
        rig.tick(5.0)
        rig.hear(writer)
    assert listing.totals(rig.state)["quarantined_bytes"] == 33
    row = listing.session_row(rig.state, rig.state.sessions[reader])
    assert (row["state"], row["held_bytes"], row["held_payloads"]) == ("suspect", 33, 1)


def test_the_story_of_a_payload(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put_all(writer, "a", 2)
    rig.read(reader)
    whats = [line.what for line in rig.directory.story("a", rig.edge, 0)]
    assert whats == ["sealed", "delivered", "taken", "released"]
    assert rig.directory.story("b") == [] and rig.directory.story("a", rig.other) == []


def test_the_story_reaches_back_a_fixed_way(make_rig: Any) -> None:
    rig = make_rig(story=3)
    writer = rig.join()
    rig.put_all(writer, "a", 5, last=False)
    assert [line.index for line in rig.directory.story("a")] == [2, 3, 4]


def test_the_audit_finds_a_table_that_was_changed_from_outside(rig: Any) -> None:
    writer, reader = rig.join(), rig.reader()
    rig.put(writer, "a", last=True)
    ((chunk, number),) = holding.all_of(rig.state, rig.state.sessions[reader])
    assert holding.hold_of(chunk, number) == Hold(chunk.block.handle, 0, 0)
    chunk.block.outstanding += 1
    try:
        rig.directory.validate()
    except InvariantBroken as error:
        assert error.facts["due"] == 1
    else:
        raise AssertionError("the audit saw nothing")
