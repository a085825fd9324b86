"""The direct path in random order: what writers tell, what the broker sends, and what either says late.

Writers tell readers of chunks over a queue of their own, as a socket between the two is one; their Seals come to the
directory later, and so do the readers' words. The readers are the client's own channels.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from dataclasses import replace
from typing import Any

import pytest

from connector.client.inbox import Channel
from connector.client.rid_queue import Arrived, EndMark
from connector.core.directory import effects as ef
from connector.core.directory import events as ev
from connector.core.directory.events import Hold
from connector.core.errors import ReaderDied, RequestAborted

Use = tuple[str, int]


class Writer:
    """Uses of rids, one after the other; what it has said and the directory has not heard."""

    def __init__(self, world: World, session: int, rids: list[str]) -> None:
        self.world, self.rig, self.session, self.rids = world, world.rig, session, rids
        self.says: deque[ev.Event] = deque()
        #: By rid: the numbers of its finishes, the next index, and whom it may tell in which life.
        self.finished: dict[str, list[int]] = defaultdict(list)
        self.next: dict[str, int] = defaultdict(int)
        self.way: dict[str, tuple[int, int]] = {}
        self.stopped: set[str] = set()
        self.aborted: set[str] = set()
        #: Uses of what was put, by the message's number.
        self.sent: dict[int, list[Use]] = {}
        self.heard = 0

    def use(self, rid: str, number: int | None = None) -> Use:
        """The use of the rid that it is in, or was in when it had said so many words."""
        return rid, sum(number is None or one <= number for one in self.finished[rid])

    def put(self, rids: list[str], last: bool) -> None:
        rids = [rid for rid in rids if rid not in self.stopped]
        if not rids:
            return
        rig, block = self.rig, self.rig.room(self.session)
        members = []
        for rid in rids:
            index, use = self.next[rid], self.use(rid)
            members.append(rig.member(rid, index, last=last, tag=f"{rid}/{use[1]}/{index}"))
            self.next[rid] += 1
            self.world.put[use] = self.next[rid]
            if last:
                self.stopped.add(rid)
        told = self._tell(block, members)
        number = rig.number(self.session)
        self.sent[number] = [self.use(rid) for rid in rids]
        seen, edge = rig.seen[self.session], rig.edge
        self.says.append(ev.Sealed(rig.now, self.session, number, seen, edge, block, 64, tuple(members), told))

    def _tell(self, block: Any, members: list[ev.Member]) -> tuple[ev.Told, ...]:
        readers = {self.way[m.rid][0] for m in members if m.rid in self.way}
        number = min(readers, default=0)
        reader = self.world.readers.get(number)
        if reader is None:
            # It has gone: its socket says so.
            self.way = {rid: way for rid, way in self.way.items() if way[0] != number}
            return ()
        if self.world.chance.random() < 0.05:
            # The reader's socket is full.
            rids = [m.rid for m in members if m.rid in self.way]
            self.way = {rid: way for rid, way in self.way.items() if rid not in rids}
            self.says.append(ev.FellBack(self.rig.now, self.session, self.rig.edge, tuple(rids)))
            return ()
        told, spoken = [], []
        for place, member in enumerate(members):
            way = self.way.get(member.rid)
            if way is None or way[0] != number or member.flags:
                continue
            behind = member.index - 1
            told.append(
                ef.Descriptor(self.rig.edge, 0, member.rid, way[1], member.index, 0, 0, block, 64, 64, place,
                              member.manifest, behind)
            )  # fmt: skip
            spoken.append(ev.Told(place, 1, number))
        reader.socket.append((self.session, told))
        return tuple(spoken)

    def again(self, rid: str) -> None:
        """It ends its use of the rid, and begins the next."""
        number = self.rig.number(self.session)
        self.says.append(ev.Finished(self.rig.now, self.session, number, rid, rid in self.aborted))
        self.aborted.discard(rid)
        self.finished[rid].append(number)
        self.next[rid] = 0
        self.way.pop(rid, None)
        self.stopped.discard(rid)

    def hear(self) -> None:
        said = self.rig.said[self.session][self.heard :]
        self.heard += len(said)
        for effect in said:
            if isinstance(effect, ef.Direct):
                for way in effect.ways:
                    if self.use(way.rid, way.applied) == self.use(way.rid):
                        self.way.pop(way.rid, None)
                        if way.session:
                            self.way[way.rid] = (way.session, way.life)
            elif isinstance(effect, ef.StreamFailed):
                use = self.use(effect.rid, effect.applied)
                self.world.broken.add(use)
                if use == self.use(effect.rid):
                    self.stopped.add(effect.rid)
            elif isinstance(effect, ef.Notices):
                for notice in effect.notices:
                    self._stop(notice.rid, notice.applied)
                self.rig.hear(self.session)
            elif isinstance(effect, ef.PutFailed):
                assert isinstance(effect.error, (ReaderDied, RequestAborted)), effect
                self.world.broken.add(self.sent[effect.number][effect.member])

    def _stop(self, rid: str, applied: int) -> None:
        """The rid was aborted when the session had said so much."""
        use = self.use(rid, applied)
        self.world.broken |= {(rid, one) for one in range(use[1] + 1)}
        if use == self.use(rid):
            self.stopped.add(rid)
            self.aborted.add(rid)
            self.way.pop(rid, None)

    def say(self, count: int) -> None:
        for _ in range(min(count, len(self.says))):
            self.rig.handle(self.says.popleft())

    def die(self) -> None:
        """What it sealed and did not say is found in its blocks, by their generation; whom it told is not, and what is
        of a use that it had not said is none of the one before: see broker/unsent.py."""
        applied = self.rig.state.sessions[self.session].applied
        sealed = [event for event in self.says if isinstance(event, ev.Sealed)]
        self.world.broken |= {(rid, use) for rid in self.rids for use in range(self.use(rid)[1] + 1)}
        for event in sorted(sealed, key=lambda one: one.handle.generation):
            number = self.rig.state.sessions[self.session].applied + 1
            strange = any(self.use(m.rid, event.number) != self.use(m.rid, applied) for m in event.members)
            self.rig.handle(replace(event, number=number, told=(), unsaid=True, strange=strange))
        self.rig.die(self.session)
        self.world.reader.writer_ended(self.session)


class Reader:
    """A session with the client's own channel. `socket`: what writers told it and it has not read."""

    def __init__(self, world: World, session: int) -> None:
        self.world, self.rig, self.session = world, world.rig, session
        self.voided: OrderedDict[Hold, int] = OrderedDict()
        self.channel = Channel(world.rig.edge, 0, 1, False, self.voided)
        self.channel.subscribed = self.channel.push = True
        self.socket: deque[tuple[int, list[ef.Descriptor]]] = deque()
        self.held: list[Arrived] = []
        self.gone: set[Hold] = set()
        self.says: deque[ev.Event] = deque()
        self.got: dict[Use, int] = defaultdict(int)
        self.over: set[Use] = set()
        self.last: dict[str, Use] = {}
        self.heard = 0

    def _arrive(self, descriptor: ef.Descriptor) -> None:
        self.world.uses[descriptor.life] = _tag(descriptor)[0]
        back, _ = self.channel.deliver(Arrived.of(descriptor, None))  # type: ignore[arg-type]
        for hold in back:
            if not any(item.hold == hold for item in self.held):
                self.release(hold)

    def release(self, hold: Hold) -> None:
        self.gone.add(hold)
        span = ev.Span(hold.handle, hold.member, 1, hold.reader)
        self.says.append(ev.Released(self.rig.now, self.session, self.rig.number(self.session), (span,)))

    def read_socket(self) -> None:
        if self.socket:
            writer, told = self.socket.popleft()
            for descriptor in told:
                self._arrive(descriptor)
            self.writer_ended(writer)

    def _may_come(self, writer: int) -> bool:
        """Whether more can come of it: it is alive, or what it told was not read."""
        return writer in self.rig.state.sessions or any(one == writer for one, _ in self.socket)

    def writer_ended(self, writer: int) -> None:
        """As Session.has_read."""
        if not self._may_come(writer):
            for hold in [hold for hold, one in self.voided.items() if one == writer]:
                del self.voided[hold]
                self.release(hold)

    def hear(self) -> None:
        said = self.rig.said[self.session][self.heard :]
        self.heard += len(said)
        for effect in said:
            if isinstance(effect, ef.Deliver):
                for descriptor in effect.descriptors:
                    self._arrive(descriptor)
            elif isinstance(effect, ef.Ended):
                self.channel.end(effect.rid, effect.life, effect.behind)
            elif isinstance(effect, ef.StreamFailed):
                self.channel.fail(effect.rid, effect.life, effect.error, effect.behind)
            elif isinstance(effect, ef.Notices):
                for notice in effect.notices:
                    error = RequestAborted("stop")
                    for item in self.channel.break_off(notice.rid, notice.life, error)[0]:
                        self.release(item.hold)
                self.rig.hear(self.session)
            elif isinstance(effect, ef.DropHolds):
                for hold in effect.holds:
                    self._drop(hold, effect.writer)

    def _drop(self, hold: Hold, writer: int) -> None:
        """As receive.py's."""
        known = any(item.hold == hold for item in self.held)
        for item in self.channel.discard(hold):
            self.release(item.hold)
            known = True
        if not known and writer and not self._may_come(writer):
            self.release(hold)
        elif not known:
            self.voided[hold] = writer

    def poll(self) -> None:
        for rid, item in self.channel.poll_all():
            if isinstance(item, Arrived):
                use, index = _tag(item.descriptor)
                assert use not in self.over, "nothing behind END or a failure"
                assert self.last.get(rid, use) <= use, "no way back to an older use"
                assert index == self.got[use], "in order, each once"
                self.last[rid] = use
                self.got[use] += 1
                self.held.append(item)
                hold = item.hold
                span = ev.Span(hold.handle, hold.member, 1, hold.reader)
                self.says.append(ev.Taken(self.rig.now, self.session, (span,)))
            elif isinstance(item, EndMark):
                use = self.world.uses[item.life]
                assert self.got[use] == self.world.put[use], "END behind all that was put"
                self.over.add(use)
            elif item.life in self.world.uses:
                self.over.add(self.world.uses[item.life])
                self.world.broken.add(self.world.uses[item.life])

    def leave(self) -> None:
        """It says all that it has to say, and good-bye; views of what it has taken may be alive."""
        self.say(1000)
        self.rig.leave(self.session, [item.descriptor for item in self.held])
        self.socket.clear()
        self.channel.queues.clear()

    def let_go(self, count: int) -> None:
        for _ in range(min(count, len(self.held))):
            self.release(self.held.pop(0).hold)

    def say(self, count: int) -> None:
        for _ in range(min(count, len(self.says))):
            self.rig.handle(self.says.popleft())

    def has(self) -> list[Hold]:
        """All that it holds, or may come to hold."""
        queued = [item for queue in self.channel.queues.values() for item in queue.items if isinstance(item, Arrived)]
        parked = [
            item
            for queue in self.channel.queues.values()
            for items in (queue.parked or {}).values()
            for item in items
            if isinstance(item, Arrived)
        ]
        # What came by the other way before, and was let go, is known when it comes by this one.
        told = [Hold(d.handle, d.member, d.reader) for _, packet in self.socket for d in packet]
        coming = [hold for hold in told if hold not in self.gone]
        return [*(item.hold for item in [*self.held, *queued, *parked]), *coming]


def _tag(descriptor: ef.Descriptor) -> tuple[Use, int]:
    rid, use, index = descriptor.manifest.decode().split("/")
    return (rid, int(use)), int(index)


class World:
    def __init__(self, rig: Any, seed: int) -> None:
        self.rig, self.chance = rig, random.Random(seed)
        #: Chunks of each use, and uses that failed or whose writer died: what is read of them is read in order.
        self.put: dict[Use, int] = {}
        self.broken: set[Use] = set()
        self.uses: dict[int, Use] = {}
        self.sessions = 0
        self.readers: dict[int, Reader] = {}
        self.ended: list[Reader] = []
        self.writers = [self.writer(), self.writer()]
        self.come()

    def join(self, stage: str) -> int:
        self.sessions += 1
        number = 100 + self.sessions
        self.rig.handle(ev.Joined(self.rig.now, number, stage, number, 0, True))
        self.rig.seen[number] = self.rig.state.sessions[number].seen
        return number

    def writer(self) -> Writer:
        session = self.join("writer")
        return Writer(self, session, [f"{session}a", f"{session}b"])

    def go(self, reader: Reader, how: str) -> None:
        if how == "leaves":
            reader.leave()
        else:
            self.rig.die(reader.session)
            for all_of_it in (reader.held, reader.says, reader.socket, reader.channel.queues):
                all_of_it.clear()
        self.ended.append(reader)
        self.come()

    def come(self) -> None:
        session = self.join("reader")
        assert self.rig.subscribe(session) is None
        self.readers = {session: Reader(self, session)}

    @property
    def reader(self) -> Reader:
        return next(iter(self.readers.values()))

    def step(self) -> None:
        chance, writer, reader = self.chance, self.chance.choice(self.writers), self.reader
        some = chance.choice([1, 1, 2, 100])
        what = chance.random()
        if what < 0.3:
            rids = chance.choice([writer.rids, writer.rids[:1], writer.rids[1:]])
            writer.put(rids, last=chance.random() < 0.08)
        elif what < 0.34:
            writer.again(chance.choice(writer.rids))
        elif what < 0.46:
            writer.say(some)
        elif what < 0.55:
            writer.hear()
        elif what < 0.65:
            reader.read_socket()
        elif what < 0.73:
            reader.hear()
        elif what < 0.83:
            reader.poll()
        elif what < 0.9:
            reader.let_go(some)
        elif what < 0.97:
            reader.say(some)
        elif what < 0.985:
            writer.die()
            self.writers = [self.writer() if one is writer else one for one in self.writers]
        elif what < 0.989:
            reader.say(1000)
            rid = chance.choice(writer.rids)
            self.broken |= {use for use in self.put if use[0] == rid}
            self.rig.abort(reader.session, rid)
        else:
            self.go(reader, chance.choice(["leaves", "dies"]))
        if self.ended:
            gone = chance.choice(self.ended)
            gone.let_go(chance.choice([0, 0, 1]))
            gone.say(1)
        self.check_blocks()

    def check_blocks(self) -> None:
        """No block is reused that somebody may read."""
        blocks = self.rig.state.blocks
        for hold in [hold for reader in (self.reader, *self.ended) for hold in reader.has()]:
            block = blocks.get(hold.handle.offset)
            assert block is not None and block.handle == hold.handle, "held, and not kept"

    def note_failures(self) -> None:
        """Those that were said to a reader that died before it heard them, too."""
        for effect in self.rig.effects:
            if isinstance(effect, ef.Deliver):
                self.uses |= {told.life: _tag(told)[0] for told in effect.descriptors}
            elif isinstance(effect, ef.StreamFailed) and effect.life in self.uses:
                self.broken.add(self.uses[effect.life])

    def end(self) -> None:
        for writer in self.writers:
            for rid in writer.rids:
                writer.again(rid)
        for _ in range(60):
            for reader in self.ended:
                reader.let_go(1000)
                reader.say(1000)
            for writer in self.writers:
                writer.say(1000)
                writer.hear()
            for _ in range(len(self.reader.socket) + 1):
                self.reader.read_socket()
            self.reader.hear()
            self.reader.poll()
            self.reader.let_go(1000)
            self.reader.say(1000)
            self.check_blocks()
        self.note_failures()
        everyone = [*self.ended, self.reader]
        for use, count in self.put.items():
            got = max(reader.got[use] for reader in everyone)
            assert got == count or use in self.broken, (use, got, count)
        for session in list(self.rig.state.sessions):
            self.rig.die(session)
        self.rig.tick(1000.0)
        self.rig.tick(1000.0)
        assert self.rig.is_empty() and not self.rig.state.sessions


@pytest.mark.parametrize("window", [3, 256])
def test_every_chunk_comes_once_in_order_by_whatever_way(make_rig: Any, window: int) -> None:
    for seed in range(150):
        world = World(make_rig(window=window, unclaimed_after=500.0), seed)
        for _ in range(120):
            world.step()
        world.end()
