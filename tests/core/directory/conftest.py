"""A driver of the directory for its tests: what a well-behaved broker and its clients would say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

from connector.core.directory import Directory, Settings
from connector.core.directory import effects as ef
from connector.core.directory import events as ev
from connector.core.errors import ConnectorError
from connector.core.names import Edge, Handle

E = TypeVar("E", bound=ef.Effect)
KIB = 1024
EDGE = Edge("thinker", "talker")


class Rig:
    """Numbers the messages of each session, audits the tables after every event, keeps what was said to whom."""

    edge = EDGE
    other = Edge("talker", "code2wav")
    third = Edge("encoder", "talker")

    def __init__(self, pool: int = 64 * KIB, **settings: Any) -> None:
        settings.setdefault("max_blocks", 512)
        self.settings = Settings(begin=4096, end=4096 + pool, **settings)
        self.directory = Directory(self.settings)
        self.state = self.directory.state
        self.now = 0.0
        self.said: dict[int, list[ef.Effect]] = defaultdict(list)
        self.effects: list[ef.Effect] = []
        self.numbers: dict[int, int] = defaultdict(int)
        self.seen: dict[int, int] = defaultdict(int)
        self.last: ev.Event | None = None
        self._sessions = 0
        self._requests = 0
        self._read: dict[int, int] = defaultdict(int)

    # -- events ----------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[ef.Effect]:
        """Apply one event; the tables must agree after it."""
        self.last = event
        effects = self.directory.handle(event)
        self.directory.validate()
        self.effects += effects
        for effect in effects:
            if isinstance(effect, ef.ToSession):
                self.said[effect.session].append(effect)
        return effects

    def again(self) -> list[ef.Effect]:
        """The last event once more, as a client that heard no acknowledgement says it."""
        assert self.last is not None
        return self.handle(self.last)

    def number(self, session: int) -> int:
        self.numbers[session] += 1
        return self.numbers[session]

    def request(self) -> int:
        self._requests += 1
        return self._requests

    def tick(self, seconds: float) -> list[ef.Effect]:
        self.now += seconds
        return self.handle(ev.Tick(self.now, 0))

    def join(self, stage: str = "stage", pid: int = 0) -> int:
        """Of a process of its own, if none is named."""
        self._sessions += 1
        self.handle(ev.Joined(self.now, self._sessions, stage, pid or 1000 + self._sessions, 0))
        self.seen[self._sessions] = self.state.sessions[self._sessions].seen
        return self._sessions

    def leave(self, session: int, held: Iterable[ef.Descriptor] = ()) -> list[ef.Effect]:
        return self.handle(ev.Left(self.now, session, tuple(map(self.hold, held))))

    def die(self, session: int) -> list[ef.Effect]:
        return self.handle(ev.Died(self.now, session, "killed"))

    def hear(self, session: int) -> list[ef.Effect]:
        """The client has processed every notice that it was sent."""
        for effect in self.said[session]:
            if isinstance(effect, ef.Notices):
                self.seen[session] = max(self.seen[session], effect.notices[-1].number)
        return self.handle(ev.Heard(self.now, session, self.seen[session]))

    def finish(self, session: int, rid: str, aborted: bool = False) -> list[ef.Effect]:
        return self.handle(ev.Finished(self.now, session, self.number(session), rid, aborted))

    def enter(
        self, session: int, rid: str, *, sends: bool = False, edge: Edge = EDGE, heard: int = 0
    ) -> list[ef.Effect]:
        return self.handle(ev.Entered(self.now, session, self.number(session), edge, rid, sends, heard, "again"))

    def begin(self, session: int, rid: str) -> list[ef.Effect]:
        return self.handle(ev.Began(self.now, session, self.number(session), rid))

    def abort(self, session: int, rid: str, reason: str = "stop", mine: bool = False) -> dict[str, Any]:
        """Aborts and returns the report."""
        effects = self.handle(ev.Aborted(self.now, session, self.number(session), self.request(), rid, reason, mine))
        (done,) = self.of(effects, ef.Done)
        return done.facts

    def remove(
        self, session: int, rid: str, index: int = -1, *, edge: Edge = EDGE, force: bool = False
    ) -> dict[str, Any] | ConnectorError:
        """Removes by hand; the report, or why not."""
        (said,) = self.handle_for(ev.Removed(self.now, session, self.request(), edge, rid, index, force))
        return said.facts if isinstance(said, ef.Done) else said.error

    def inspect(self, session: int, rid: str, index: int = -1, *, edge: Edge = EDGE) -> ef.Descriptor | ConnectorError:
        """Looks at a payload, which is held until it is released; the descriptor, or why not."""
        (said,) = self.handle_for(ev.Inspected(self.now, session, self.request(), edge, rid, index))
        return said.descriptor if isinstance(said, ef.Shown) else said.error

    def handle_for(self, event: Any) -> list[Any]:
        """Applies a request; what answers it."""
        effects = self.handle(event)
        kinds = (ef.Done, ef.Shown, ef.Refused)
        return [e for e in effects if isinstance(e, kinds) and e.request == event.request]

    def cancel(self, session: int, request: int) -> list[ef.Effect]:
        return self.handle(ev.Cancelled(self.now, session, request))

    def resync(self, session: int, *handles: Handle) -> list[ef.Effect]:
        return self.handle(ev.Resynced(self.now, session, handles))

    def stop(self) -> list[ef.Effect]:
        return self.handle(ev.Stopping(self.now, 0))

    # -- writing ---------------------------------------------------------------------------------

    def reserve(
        self, session: int, size: int, edge: Edge = EDGE, timeout: float = 30.0, rid: str | None = None, **more: Any
    ) -> int:
        """Asks for room; the request's number."""
        request = self.request()
        rids = (rid,) if rid is not None else ()
        self.handle(ev.Reserve(self.now, session, request, edge, (size,), self.now + timeout, rids, **more))
        return request

    def ahead(self, session: int, sizes: Iterable[int], edge: Edge = EDGE) -> list[tuple[Handle, int]]:
        effects = self.handle(ev.Reserve(self.now, session, self.request(), edge, tuple(sizes), self.now, (), True))
        (granted,) = self.of(effects, ef.Granted)
        return list(granted.blocks)

    def granted(self, session: int, request: int) -> Handle | None:
        """The block that answered a request, if it was answered so."""
        for effect in self.said[session]:
            if isinstance(effect, ef.Granted) and effect.request == request:
                return effect.blocks[0][0]
        return None

    def refusal(self, session: int, request: int) -> ConnectorError | None:
        for effect in self.said[session]:
            if isinstance(effect, ef.Refused) and effect.request == request:
                return effect.error
        return None

    def room(self, session: int, size: int = 64, edge: Edge = EDGE) -> Handle:
        handle = self.granted(session, self.reserve(session, size, edge))
        assert handle is not None
        return handle

    def give_back(self, session: int, *handles: Handle) -> list[ef.Effect]:
        return self.handle(ev.Returned(self.now, session, self.number(session), handles))

    def member(
        self, rid: str, index: int = 0, *, last: bool = False, end: bool = False, attempt: int = 0,
        readers: int = 1, tag: str = "", nbytes: int = 8,
    ) -> ev.Member:  # fmt: skip
        flags = (ev.Flags.LAST if last else 0) | (ev.Flags.END_ONLY if end else 0)
        return ev.Member(rid, index, attempt, flags, readers, tag.encode(), 0 if end else nbytes)

    def seal(
        self, session: int, handle: Handle, *members: ev.Member, edge: Edge = EDGE, seen: int | None = None
    ) -> list[ef.Effect]:
        known = self.seen[session] if seen is None else seen
        return self.handle(ev.Sealed(self.now, session, self.number(session), known, edge, handle, 64, members))

    def put(
        self, session: int, rid: str, index: int = 0, *, edge: Edge = EDGE, size: int = 64,
        seen: int | None = None, **more: Any,
    ) -> list[ef.Effect]:  # fmt: skip
        """Reserves, writes and seals one payload."""
        handle = self.room(session, size, edge)
        return self.seal(session, handle, self.member(rid, index, **more), edge=edge, seen=seen)

    def put_all(self, session: int, rid: str, count: int, *, last: bool = True, **more: Any) -> None:
        for index in range(count):
            self.put(session, rid, index, last=last and index == count - 1, **more)

    def quick_put(self, session: int, rid: str) -> None:
        """A payload of one chunk, put without an audit of all tables: for tests with thousands."""
        request = self.request()
        for effect in self.directory.handle(ev.Reserve(self.now, session, request, EDGE, (64,), self.now + 600.0)):
            if isinstance(effect, ef.Granted):
                members = (self.member(rid, last=True),)
                number, handle = self.number(session), effect.blocks[0][0]
                sealed = self.directory.handle(
                    ev.Sealed(self.now, session, number, self.seen[session], EDGE, handle, 64, members)
                )
                for said in self.of(sealed, ef.Deliver):
                    self.said[said.session].append(said)

    # -- reading ---------------------------------------------------------------------------------

    def subscribe(
        self, session: int, *, edge: Edge = EDGE, reader: int = 0, readers: int = 1, push: bool = True,
        resume: bool = False,
    ) -> ConnectorError | None:  # fmt: skip
        request = self.request()
        self.handle(ev.Subscribed(self.now, session, request, edge, reader, readers, push, resume))
        return self.refusal(session, request)

    def reader(self, stage: str = "talker", **more: Any) -> int:
        """A session that has subscribed."""
        session = self.join(stage)
        assert self.subscribe(session, **more) is None
        return session

    def claim(self, session: int, rid: str, *, edge: Edge = EDGE, reader: int = 0) -> list[ef.Effect]:
        return self.handle(ev.Claimed(self.now, session, edge, reader, rid))

    def wait(self, session: int, rid: str, *, timeout: float = 5.0, edge: Edge = EDGE, reader: int = 0) -> int:
        """A caller waits for the next chunk; the request's number."""
        request = self.request()
        self.handle(ev.Awaited(self.now, session, request, edge, reader, rid, self.now + timeout))
        return request

    def quick_release(self, session: int) -> None:
        """What arrived is released, without an audit."""
        holds = tuple(map(self.hold, self.arrived(session)))
        self.directory.handle(ev.Released(self.now, session, self.number(session), self.spans(holds)))

    def awaiting(self, session: int, rid: str) -> ev.Awaited:
        return ev.Awaited(self.now, session, self.request(), EDGE, 0, rid, self.now + 600.0)

    def arrived(self, session: int) -> list[ef.Descriptor]:
        """Descriptors that came since the last call, in order."""
        said = self.said[session][self._read[session] :]
        self._read[session] = len(self.said[session])
        return [d for effect in said if isinstance(effect, ef.Deliver) for d in effect.descriptors]

    def held(self, session: int, rid: str) -> list[ef.Descriptor]:
        """Descriptors of the rid that the session was ever sent."""
        return [d for effect in self.heard(session, ef.Deliver) for d in effect.descriptors if d.rid == rid]

    def hold(self, descriptor: ef.Descriptor) -> ev.Hold:
        return ev.Hold(descriptor.handle, descriptor.member, descriptor.reader)

    @staticmethod
    def spans(holds: Iterable[ev.Hold]) -> tuple[ev.Span, ...]:
        return tuple(ev.Span(hold.handle, hold.member, 1, hold.reader) for hold in holds)

    def take(self, session: int, *descriptors: ef.Descriptor) -> list[ef.Effect]:
        return self.handle(ev.Taken(self.now, session, self.spans(map(self.hold, descriptors))))

    def release(self, session: int, *descriptors: ef.Descriptor) -> list[ef.Effect]:
        holds = tuple(map(self.hold, descriptors))
        return self.handle(ev.Released(self.now, session, self.number(session), self.spans(holds)))

    def read(self, session: int) -> list[ef.Descriptor]:
        """Takes and releases until nothing more comes."""
        got: list[ef.Descriptor] = []
        while new := self.arrived(session):
            self.take(session, *new)
            self.release(session, *new)
            got += new
        return got

    # -- looking ---------------------------------------------------------------------------------

    @staticmethod
    def of(effects: Iterable[ef.Effect], kind: type[E]) -> list[E]:
        return [effect for effect in effects if isinstance(effect, kind)]

    def heard(self, session: int, kind: type[E]) -> list[E]:
        """All of a kind that was ever said to the session."""
        return self.of(self.said[session], kind)

    def failures(self, session: int) -> list[ConnectorError]:
        """Stream failures said to the session, as reader or as writer."""
        return [effect.error for effect in self.heard(session, ef.StreamFailed)]

    def put_failures(self, session: int) -> list[ConnectorError]:
        return [effect.error for effect in self.heard(session, ef.PutFailed)]

    @property
    def used(self) -> int:
        return self.state.allocator.used

    def is_empty(self) -> bool:
        """Nothing of any request is left."""
        streams = any(edge.streams for edge in self.state.edges.values())
        return not (self.used or self.state.lives or streams or self.state.shelf)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture(scope="session")
def make_rig() -> Callable[..., Rig]:
    """Makes a rig with settings of its own."""
    return Rig
