"""Random lives of two writers and three readers against a plain record of what was put and what was said."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from connector.core.directory import effects as ef
from connector.core.directory import lots
from connector.core.directory.events import Flags
from connector.core.directory.tombs import is_unheard
from connector.core.errors import ReaderDied, Unclaimed

RIDS = st.sampled_from(["a", "b"])
WRITERS = st.integers(0, 1)
#: (edge's place, reader, readers): one edge with one reader, one with two.
SLOTS = [(0, 0, 1), (1, 0, 2), (1, 1, 2)]
READERS = st.integers(0, 2)


@dataclass
class Put:
    """One payload that was accepted."""

    slot: tuple[int, str, int]
    index: int
    attempt: int
    #: The putting session, and how often it had begun anew with the rid.
    use: tuple[int, int]
    end: bool
    void: bool = False


@dataclass
class Seen:
    """What one reader session was told of one rid on its edge, by life."""

    indices: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    failed: set[int] = field(default_factory=set)
    newest: int = 0
    #: Lives up to here were finished, begun over, or aborted.
    done: int = 0


class Lives(RuleBasedStateMachine):
    """`puts` is the truth: a dict of tag -> Put; everything delivered is looked up in it."""

    make: Any

    @initialize()
    def start(self) -> None:
        self.rig = self.make(pool=2048, max_blocks=24, window=5, claim_window=3, max_notices=3, unclaimed_after=100.0)
        self.edges = [self.rig.edge, self.rig.other]
        self.puts: dict[str, Put] = {}
        self.lives: dict[tuple[str, int, int], int] = {}
        self.uses: dict[tuple[int, str], int] = defaultdict(int)
        self.next: dict[tuple[int, int, str, int], int] = defaultdict(int)
        self.seen: dict[tuple[int, str], Seen] = defaultdict(Seen)
        self.told_before: set[tuple[int, int, str, int]] = set()
        self.inbox: dict[int, list[ef.Descriptor]] = defaultdict(list)
        self.cursor: dict[int, int] = defaultdict(int)
        self.given_up: set[tuple[int, str, int]] = set()
        self.tags = 0
        self.writers = [self.rig.join("writer"), self.rig.join("writer")]
        self.readers = [0, 0, 0]

    # -- the record ------------------------------------------------------------------------------

    def look(self) -> None:
        """Check everything that was said to the readers since the last look."""
        for slot, session in enumerate(self.readers):
            said = self.rig.said[session][self.cursor[session] :]
            self.cursor[session] += len(said)
            for effect in said:
                if isinstance(effect, ef.Deliver):
                    for descriptor in effect.descriptors:
                        self.delivered(slot, session, descriptor)
                elif isinstance(effect, ef.Ended):
                    self.ended(self.seen[(session, effect.rid)], effect.life, effect.count)
                elif isinstance(effect, ef.StreamFailed) and effect.reader >= 0:
                    self.failed(slot, session, effect)

    def delivered(self, slot: int, session: int, d: ef.Descriptor) -> None:
        place, reader, _ = SLOTS[slot]
        put, seen = self.puts[d.manifest.decode()], self.seen[(session, d.rid)]
        assert (d.edge, d.reader) == (self.edges[place], reader)
        assert (put.slot[:2], put.index, put.attempt) == ((place, d.rid), d.index, d.attempt), "the bytes are its own"
        assert not put.void, "nothing of an aborted life, and nothing that was replaced"
        assert d.life > seen.done, "nothing of a life that the reader has left"
        assert d.life >= seen.newest and d.life not in seen.failed, "no way back to an older life"
        assert seen.ends[d.life] == 0, "nothing behind the END"
        assert self.lives.setdefault((d.rid, *put.use), d.life) == d.life, "one use of a rid is in one life"
        seen.newest = d.life
        seen.indices[d.life].append(d.index)
        assert seen.indices[d.life] == list(range(len(seen.indices[d.life]))), "in order, each once"
        again = (slot, d.life, d.rid, d.index)
        assert bool(d.flags & Flags.REDELIVERED) == (again in self.told_before), "marked if the index was told before"
        self.told_before.add(again)
        if d.flags & (Flags.LAST | Flags.END_ONLY):
            self.ended(seen, d.life, d.index + (0 if d.flags & Flags.END_ONLY else 1))
        self.inbox[session].append(d)

    def ended(self, seen: Seen, life: int, count: int) -> None:
        """One END, behind all chunks."""
        seen.ends[life] += 1
        assert seen.ends[life] == 1 and len([i for i in seen.indices[life] if i < count]) == count

    def failed(self, slot: int, session: int, effect: ef.StreamFailed) -> None:
        """Said once; all that came in order was said before, unless the reader's own share was lost."""
        seen = self.seen[(session, effect.rid)]
        assert effect.life not in seen.failed and not seen.ends[effect.life]
        seen.failed.add(effect.life)
        if not isinstance(effect.error, (ReaderDied, Unclaimed)):
            missing = len(seen.indices[effect.life])
            assert (SLOTS[slot][0], effect.rid, effect.life, missing) not in self.owed()

    def owed(self) -> set[tuple[int, str, int, int]]:
        """(edge, rid, life, index) of all that was put and is not void, as far as its life is known."""
        return {(*put.slot, put.index) for put in self.puts.values() if not put.void}

    # -- writers ---------------------------------------------------------------------------------

    @rule(w=WRITERS, place=st.integers(0, 1), rid=RIDS, skip=st.sampled_from([0, 0, 0, 0, 1, -1, -2]),
          attempt=st.sampled_from([0, 0, 0, 1, 2]), mark=st.sampled_from(["", "", "", "last", "end"]),
          again=st.booleans())  # fmt: skip
    def put(self, w: int, place: int, rid: str, skip: int, attempt: int, mark: str, again: bool) -> None:
        self.put_many(w, place, [rid], skip, attempt, mark, again)

    @rule(w=WRITERS, place=st.integers(0, 1), again=st.booleans())
    def put_step(self, w: int, place: int, again: bool) -> None:
        self.put_many(w, place, ["a", "b"], 0, 0, "", again)

    def put_many(self, w: int, place: int, rids: list[str], skip: int, attempt: int, mark: str, again: bool) -> None:
        session, edge, readers = self.writers[w], self.edges[place], place + 1
        request = self.rig.reserve(session, 128, edge)
        handle = self.rig.granted(session, request)
        if handle is None:
            self.rig.cancel(session, request)
            self.look()
            return
        tags, members, puts = [], [], []
        for rid in rids:
            self.tags += 1
            use = self.uses[(session, rid)]
            index = max(0, self.next[(session, place, rid, use)] + skip)
            tags.append(f"t{self.tags}")
            puts.append(Put((place, rid, 0), index, attempt, (session, use), mark == "end"))
            last, end = mark == "last", mark == "end"
            members.append(
                self.rig.member(rid, index, last=last, end=end, attempt=attempt, readers=readers, tag=tags[-1])
            )
        self.puts |= dict(zip(tags, puts, strict=True))
        before = self.live()
        effects = self.rig.seal(session, handle, *members, edge=edge)
        self.settle_puts(effects, tags, puts, before)
        self.look()
        if again:
            assert all(isinstance(effect, ef.Acked) for effect in self.rig.again())

    def settle_puts(self, effects: list[ef.Effect], tags: list[str], puts: list[Put], before: dict[str, Any]) -> None:
        """What was refused, ignored or replaced is void; the rest counts from the life that it is in."""
        out = {e.member for e in effects if isinstance(e, ef.PutFailed)}
        out |= {e.member for e in effects if isinstance(e, ef.PutNoted) and e.outcome == "ignored"}
        now = self.live()
        for number, (tag, put) in enumerate(zip(tags, puts, strict=True)):
            chunk = now.get(tag)
            put.void = number in out or chunk is None
            assert not (number in out and chunk is not None), "what was refused is not kept"
            if chunk is not None:
                put.slot = (*put.slot[:2], chunk.stream.life.number)
                key = (put.use[0], self.edges.index(chunk.stream.edge), put.slot[1], put.use[1])
                self.next[key] = max(self.next[key], put.index + 1)
        for tag, old in before.items():
            if tag not in now and self.was_replaced(old, now):
                self.puts[tag].void = True

    def live(self) -> dict[str, Any]:
        """Live payloads by their tag."""
        state = self.rig.state
        shelf = [chunk for block in state.shelf.after(0, state.serial) for chunk in lots.look(block)]
        return {chunk.manifest.decode(): chunk for chunk in shelf}

    def was_replaced(self, old: Any, now: dict[str, Any]) -> bool:
        return any(c.stream is old.stream and c.index == old.index and c is not old for c in now.values())

    @rule(w=WRITERS, rid=RIDS)
    def writer_finishes(self, w: int, rid: str) -> None:
        self.uses[(self.writers[w], rid)] += 1
        self.rig.finish(self.writers[w], rid)
        self.look()

    @rule(w=WRITERS, rid=RIDS)
    def writer_begins(self, w: int, rid: str) -> None:
        self.uses[(self.writers[w], rid)] += 1
        self.rig.begin(self.writers[w], rid)
        self.look()

    @rule(w=WRITERS, rid=RIDS)
    def writer_enters(self, w: int, rid: str) -> None:
        self.rig.enter(self.writers[w], rid, sends=True)
        self.look()

    @rule(w=WRITERS, how=st.sampled_from(["die", "leave"]))
    def writer_goes(self, w: int, how: str) -> None:
        getattr(self.rig, how)(self.writers[w])
        self.look()
        self.writers[w] = self.rig.join("writer")

    @rule(w=WRITERS, rid=RIDS, by_reader=st.booleans())
    def abort(self, w: int, rid: str, by_reader: bool) -> None:
        live = [session for session in self.readers if session]
        session = live[0] if by_reader and live else self.writers[w]
        self.look()
        for put in self.puts.values():
            put.void = put.void or put.slot[1] == rid
        for writer in self.writers:
            self.uses[(writer, rid)] += 1
        newest = self.rig.state.life_number
        self.rig.abort(session, rid)
        for reader in self.readers:
            self.seen[(reader, rid)].done = newest
        self.look()

    @rule(w=WRITERS, rid=RIDS, by=st.sampled_from([0, 1, 2, None]))
    def abort_its_own(self, w: int, rid: str, by: int | None) -> None:
        """Of the use that the session is in; the others go on."""
        session = (self.readers[by] if by is not None else 0) or self.writers[w]
        self.look()
        before = {life.number: life for life in self.rig.state.lives.get(rid, ())}
        self.rig.abort(session, rid, mine=True)
        gone = before.keys() - {life.number for life in self.rig.state.lives.get(rid, ())}
        assert not any(session in before[number].finished_by for number in gone), "none that it has finished"
        for put in self.puts.values():
            put.void = put.void or (put.slot[1] == rid and put.slot[2] in gone)
        for writer in self.writers:
            if any(writer in before[number].senders for number in gone):
                self.uses[(writer, rid)] += 1
        self.look()

    # -- readers ---------------------------------------------------------------------------------

    @rule(slot=READERS, push=st.sampled_from([True, True, False]))
    def reader_comes(self, slot: int, push: bool) -> None:
        if self.readers[slot]:
            return
        place, reader, readers = SLOTS[slot]
        self.readers[slot] = self.rig.join("reader")
        error = self.rig.subscribe(
            self.readers[slot], edge=self.edges[place], reader=reader, readers=readers, push=push
        )
        assert error is None
        self.look()

    @rule(slot=READERS, rid=RIDS, timeout=st.sampled_from([1.0, 50.0]))
    def wait(self, slot: int, rid: str, timeout: float) -> None:
        if self.readers[slot]:
            place, reader, _ = SLOTS[slot]
            self.rig.wait(self.readers[slot], rid, timeout=timeout, edge=self.edges[place], reader=reader)
            self.look()

    @rule(slot=READERS, data=st.data(), verb=st.sampled_from(["take", "release", "release"]), again=st.booleans())
    def use(self, slot: int, data: st.DataObject, verb: str, again: bool) -> None:
        session = self.readers[slot]
        inbox = self.inbox[session]
        if not session or not inbox:
            return
        some = data.draw(st.lists(st.sampled_from(range(len(inbox))), min_size=1, max_size=4, unique=True))
        chosen = [inbox[i] for i in some]
        getattr(self.rig, verb)(session, *chosen)
        if again:
            self.rig.again()
        if verb == "release":
            self.inbox[session] = [d for d in inbox if d not in chosen]
        self.look()

    @rule(slot=READERS, rid=RIDS)
    def reader_finishes(self, slot: int, rid: str) -> None:
        """The life that it is in is over for it; a newer one, pushed but not touched, is not."""
        session = self.readers[slot]
        if not session:
            return
        state = self.rig.state.sessions[session]
        others = (life for life in self.rig.state.lives.get(rid, ()) if session not in life.finished_by)
        meant = state.past.get(rid) or state.bound.get(rid) or next(others, None)
        if is_unheard(state, rid) or (rid in state.thrown_out and rid not in state.past):
            # What it finishes is the life that was aborted.
            meant = None
        self.rig.finish(session, rid)
        if meant is not None:
            seen = self.seen[(session, rid)]
            seen.done = max(seen.done, meant.number)
        self.look()

    @rule(slot=READERS, rid=RIDS)
    def reader_enters(self, slot: int, rid: str) -> None:
        if self.readers[slot]:
            self.rig.enter(self.readers[slot], rid)
            self.look()

    @rule(slot=READERS, how=st.sampled_from(["die", "leave", "leave with a view"]))
    def reader_goes(self, slot: int, how: str) -> None:
        session = self.readers[slot]
        if not session:
            return
        held = self.inbox[session][:1] if how == "leave with a view" else []
        if held:
            self.rig.take(session, *held)
            self.look()
        self.readers[slot] = 0
        if how == "die":
            self.rig.die(session)
        else:
            self.rig.leave(session, held)
        if held and session in self.rig.state.sessions:
            self.rig.release(session, *held)
        self.look()

    # -- time ------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 6.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        """Streams that nobody comes for fail and are forgotten, maybe with nobody left to be told."""
        self.note_failed()
        self.rig.tick(seconds)
        self.note_failed()
        self.look()

    def note_failed(self) -> None:
        for place, edge in enumerate(self.edges):
            for streams in self.rig.state.edge(edge).streams.values():
                self.given_up |= {(place, s.rid, s.life.number) for s in streams if s.failure is not None}

    @rule(w=WRITERS)
    def writer_hears(self, w: int) -> None:
        self.rig.hear(self.writers[w])
        self.look()

    @precondition(lambda self: any(self.readers))
    @rule()
    def readers_hear(self) -> None:
        for session in self.readers:
            if session:
                self.rig.hear(session)
        self.look()

    # -- the end ---------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.drain()
        for session in list(self.rig.state.sessions):
            self.rig.die(session)
        for _ in range(3):
            self.rig.tick(1000.0)
        state = self.rig.state
        assert self.rig.is_empty() and not state.tombstones and not state.graves and not state.sessions
        assert not state.reserved_bytes and not any(edge.waiters for edge in state.edges.values())
        assert len(state.timers) == 1, "only the heartbeat is left"

    def drain(self) -> None:
        """All writers finish and all readers read on: each gets all that it is owed."""
        for session in self.writers:
            for rid in ("a", "b"):
                self.rig.finish(session, rid)
        for slot in range(3):
            self.reader_comes(slot, True)
        for _ in range(100):
            self.readers_hear()
            for slot, session in enumerate(self.readers):
                self.drain_one(slot, session)
            if any(self.inbox[session] for session in self.readers):
                continue
            # Who entered a use, and has read all of it, gets nothing of the next before it has finished.
            entered = [(slot, rid) for slot in range(3) for rid in ("a", "b") if self.is_in(slot, rid)]
            if not entered:
                break
            for slot, rid in entered:
                self.reader_finishes(slot, rid)
        self.look()
        for slot, session in enumerate(self.readers):
            place = SLOTS[slot][0]
            for put in self.puts.values():
                self.check_got(session, place, put)

    def is_in(self, slot: int, rid: str) -> bool:
        """Whether the reader said that it is in the use that it is in, or was thrown out of."""
        session = self.readers[slot]
        known = self.rig.state.sessions[session]
        lives = (known.bound.get(rid), known.thrown_out.get(rid))
        return any(life is not None and session in life.entered for life in lives)

    def drain_one(self, slot: int, session: int) -> None:
        place, reader, _ = SLOTS[slot]
        for rid in ("a", "b"):
            self.rig.claim(session, rid, edge=self.edges[place], reader=reader)
        self.look()
        got, self.inbox[session] = self.inbox[session], []
        if got:
            self.rig.take(session, *got)
            self.rig.release(session, *got)
            self.look()

    def check_got(self, session: int, place: int, put: Put) -> None:
        """A payload that is owed was delivered to the reader, or its slot before it, or its stream failed."""
        if put.void or put.slot[0] != place:
            return
        _, rid, life = put.slot
        if put.slot in self.given_up:
            return
        seen = self.seen[(session, rid)]
        told = any(s == SLOTS.index(self.slot_of(session)) and (lf, r, i) == (life, rid, put.index)
                   for s, lf, r, i in self.told_before)  # fmt: skip
        assert told or life <= seen.done or life in seen.failed or self.stream_failed(place, rid, life)

    def slot_of(self, session: int) -> tuple[int, int, int]:
        return SLOTS[self.readers.index(session)]

    def stream_failed(self, place: int, rid: str, life: int) -> bool:
        """The stream failed while this reader was not there, or it had finished the life in a session before."""
        edge = self.edges[place]
        failed = [e for e in self.rig.effects if isinstance(e, ef.StreamFailed)]
        if any((e.edge, e.rid, e.life) == (edge, rid, life) for e in failed):
            return True
        return any(seen.done >= life for (_, other), seen in self.seen.items() if other == rid)


def test_every_reader_sees_each_index_once_in_order(make_rig: Any) -> None:
    """And at the end, when all have died and all time has passed, nothing is left."""

    class Machine(Lives):
        make = make_rig

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )
