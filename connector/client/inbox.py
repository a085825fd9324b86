"""What arrived and was not yet taken, by edge, reader and rid (rid_queue.py): in order, each index once.

A failure stays at the front of its rid until it is polled, the rid is finished or begun, or, for a caller by name, a
later life arrives.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from connector.client.rid_queue import Arrived, EndMark, FailMark, Item, RidQueue, TakeWait, life_of
from connector.core.directory.events import Flags, Hold
from connector.core.errors import ConnectorError
from connector.core.names import Edge
from connector.wire import messages as msg

#: Rids whose last life is remembered until finish.
MOST_TAKEN = 4096


class Taken(NamedTuple):
    """What a take got: a payload (`ends`: the stream's last), or None at a bare END."""

    arrived: Arrived | None
    ends: bool


class Channel:
    """One edge as this session reads it. The session's lock guards it."""

    def __init__(
        self, edge: Edge, reader: int, readers: int, resume: bool, voided: OrderedDict[Hold, int] | None = None
    ) -> None:
        """`voided`: payloads that the broker has voided and that have not come yet."""
        self.edge, self.reader, self.readers, self.resume = edge, reader, readers, resume
        self._voided = voided if voided is not None else OrderedDict()
        self.queues: dict[str, RidQueue] = {}
        self.claimed: set[str] = set()
        #: Rids of which nothing came yet, and whose abort is told all the same.
        self.expected: set[str] = set()
        #: Unclaimed rids with something for poll, in the order of arrival.
        self.fresh: OrderedDict[str, None] = OrderedDict()
        self.poll_waits: deque[int] = deque()
        #: The life that was last taken from, by rid: what a finish means. Bounded; the oldest are forgotten.
        self.taken_life: OrderedDict[str, int] = OrderedDict()
        #: Highest life of a rid that this session has finished: what was still on the way of it goes back. And of one
        #: that was read to its end.
        self.finished_life: OrderedDict[str, int] = OrderedDict()
        self.ended_life: OrderedDict[str, int] = OrderedDict()
        self.subscribed = False
        self.push = False

    def subscription(self, request: int) -> msg.Subscribe:
        """The message that makes this session the channel's reader."""
        return msg.Subscribe(request, self.edge, self.reader, self.readers, self.push, self.resume)

    # -- arrivals: each returns what is to be given back, and the requests that were answered ----------

    def deliver(self, arrived: Arrived) -> tuple[list[Hold], list[int]]:
        """A descriptor came. A repetition, or a bare END mark's block, goes back at once."""
        told = arrived.descriptor
        rid, life = told.rid, told.life
        if self._is_finished(rid, life) or life <= self.ended_life.get(rid, 0):
            return [arrived.hold], []
        queue = self.queues.get(rid)
        if queue is None:
            queue = self.queues[rid] = RidQueue()
        back: list[Hold] = []
        early = queue.is_early(life, told.behind)
        if arrived.hold in self._voided:
            del self._voided[arrived.hold]
            back.append(arrived.hold)
            if not early:
                # A hole. An early one never gets its turn, nor does what waits for it.
                queue.pass_over(arrived)
        elif early:
            queue.park((life, told.behind), arrived)
        else:
            self._accept(queue, arrived, back)
        if early:
            return back, []
        if queue.parked:
            self._unpark(queue, back)
        return back, self._arrived(rid, queue)

    def _accept(self, queue: RidQueue, arrived: Arrived, back: list[Hold]) -> None:
        told = arrived.descriptor
        life, flags = told.life, told.flags
        if flags & Flags.END_ONLY:
            back.append(arrived.hold)
        else:
            if queue.items and (told.rid in self.claimed or not self.push):
                self._forget_old_failure(queue, life)
            if queue.accept(arrived):
                back.append(arrived.hold)
        if flags & (Flags.LAST | Flags.END_ONLY) and life > queue.broken_life:
            queue.mark(EndMark(life))

    def _unpark(self, queue: RidQueue, back: list[Hold]) -> None:
        """What waited for what came now."""
        while queue.parked and (waiting := queue.parked.get(queue.newest)):
            place = queue.newest
            for item in waiting:
                if isinstance(item, Arrived):
                    self._accept(queue, item, back)
                else:
                    queue.mark(item)
            queue.parked.pop(place, None)

    def _is_finished(self, rid: str, life: int) -> bool:
        return life <= self.finished_life.get(rid, 0)

    def end(self, rid: str, life: int, behind: int = -1) -> list[int]:
        return self._marked(rid, EndMark(life), behind)

    def fail(self, rid: str, life: int, error: ConnectorError, behind: int = -1) -> list[int]:
        """The stream failed: said behind what came in order before."""
        return self._marked(rid, FailMark(life, error), behind)

    def _marked(self, rid: str, mark: EndMark | FailMark, behind: int) -> list[int]:
        if self._is_finished(rid, mark.life):
            return []
        queue = self.queues.setdefault(rid, RidQueue())
        if mark.life > self.ended_life.get(rid, 0) and queue.is_early(mark.life, behind):
            queue.park((mark.life, behind), mark)
            return []
        queue.mark(mark)
        return self._arrived(rid, queue)

    def has(self, rid: str) -> bool:
        """Whether something of the rid is here that was not taken."""
        queue = self.queues.get(rid)
        return queue is not None and bool(queue.items)

    def expect(self, rid: str) -> None:
        """A new use of the rid: poll tells its abort, although nothing of it has come."""
        if rid not in self.queues:
            self.expected.add(rid)

    def meet(self, rid: str) -> bool:
        """Whether the rid is expected: there is a place then for what poll will tell of it."""
        if rid not in self.expected:
            return False
        self.queues.setdefault(rid, RidQueue())
        return True

    def break_off(self, rid: str, life: int, error: ConnectorError) -> tuple[list[Arrived], list[int]]:
        """An abort, or a payload that failed its check: the error comes instead of all that is there.

        Lives after `life` are not meant. The payloads that were there are returned, to be given back.
        """
        queue = self.queues.get(rid)
        if queue is None:
            return [], []
        dropped = queue.take_lives(life)
        queue.broken_life = max(queue.broken_life, life)
        if not queue.items:
            # What has come of a later life says that this one is over.
            queue.mark(FailMark(life, error))
        return dropped, self._arrived(rid, queue)

    def drop_lives(self, rid: str, life: int) -> list[Arrived]:
        """The lives up to `life` are over, and nobody here asks for them: what is here of them is to be given back."""
        queue = self.queues.get(rid)
        if queue is None:
            return []
        dropped = queue.take_lives(life)
        self._tidy(rid, queue, ended=False)
        return dropped

    @staticmethod
    def _forget_old_failure(queue: RidQueue, life: int) -> None:
        if isinstance(queue.items[0], FailMark) and queue.items[0].life < life:
            queue.items.popleft()

    def _arrived(self, rid: str, queue: RidQueue) -> list[int]:
        """Wake as many of those who wait as there is something for; what is left of an unclaimed rid is for poll."""
        if self.expected:
            self.expected.discard(rid)
        answered: list[int] = []
        while queue.waits and queue.items:
            wait, front = queue.waits[0], queue.items[0]
            if len(answered) >= len(queue.items) and not isinstance(front, FailMark):
                break
            if isinstance(front, EndMark) and not wait.stream:
                queue.items.popleft()
                continue
            wait.answer.give(True)
            answered.append(wait.request)
            queue.waits.popleft()
        if queue.items and rid not in self.claimed:
            self.fresh[rid] = None
        return answered

    # -- callers ----------------------------------------------------------------------------------

    def pop(self, rid: str, stream: bool = True) -> Taken | None:
        """The next payload or, for a stream, a bare END; None if there is neither. Raises the failure."""
        queue = self.queues.get(rid)
        while queue is not None and queue.items:
            front = queue.items[0]
            if isinstance(front, FailMark):
                raise front.raised()
            if isinstance(front, Arrived):
                queue.leaves(front)
            queue.items.popleft()
            if isinstance(front, EndMark):
                self._tidy(rid, queue, ended=True)
                if stream:
                    return Taken(None, True)
                continue
            life = front.descriptor.life
            self._note_taken(rid, life)
            ends = bool(queue.items) and queue.items[0] == EndMark(life)
            if ends:
                queue.items.popleft()
            self._tidy(rid, queue, ended=ends)
            return Taken(front, ends)
        return None

    def _note_taken(self, rid: str, life: int) -> None:
        _remember(self.taken_life, rid, life)

    def wait_for(self, rid: str, wait: TakeWait) -> None:
        self.queues.setdefault(rid, RidQueue()).waits.append(wait)

    def forget_wait(self, rid: str, wait: TakeWait) -> list[int]:
        """The caller went away. If it had been told to look, the next one is."""
        queue = self.queues.get(rid)
        if queue is None:
            return []
        if wait in queue.waits:
            queue.waits.remove(wait)
        answered = self._arrived(rid, queue)
        self._tidy(rid, queue, ended=False)
        return answered

    def _tidy(self, rid: str, queue: RidQueue, ended: bool) -> None:
        if not queue.items:
            self.fresh.pop(rid, None)
        if ended:
            _remember(self.ended_life, rid, queue.closed_life)
            if not queue.waits:
                self.claimed.discard(rid)
        over = ended and queue.newest[0] <= queue.closed_life
        if not queue.items and not queue.waits and not queue.parked and (over or queue.newest == (0, -1)):
            self.queues.pop(rid, None)

    def poll_all(self) -> list[tuple[str, Item]]:
        """Everything for poll, in order; failures are told once. What is behind a failure, of a later life, is for the
        next poll."""
        got: list[tuple[str, Item]] = []
        for rid in list(self.fresh):
            queue = self.queues[rid]
            life, ended = 0, False
            while queue.items:
                item = queue.items[0]
                if type(item) is Arrived:
                    life = item.descriptor.life
                    queue.leaves(item)
                else:
                    ended = True
                queue.items.popleft()
                got.append((rid, item))
                if type(item) is FailMark:
                    break
            if life:
                self._note_taken(rid, life)
            self._tidy(rid, queue, ended)
        return got

    def forget(self, rid: str, aborted: int | None = None) -> tuple[list[Arrived], deque[TakeWait]]:
        """The session has finished the rid: its unread payloads go back, its waiting callers are told.

        The life that it has taken from, and older ones, are meant, or those up to `aborted`; a newer one that arrived
        meanwhile is not.
        """
        queue = self.queues.get(rid)
        taken = self.taken_life.pop(rid, 0)
        self.claimed.discard(rid)
        self.expected.discard(rid)
        there = queue.items if queue is not None else ()
        # 0: it was aborted before there was any life.
        meant = aborted if aborted is not None else taken or min((life_of(item) for item in there), default=0)
        if meant:
            _remember(self.finished_life, rid, max(meant, self.finished_life.get(rid, 0)))
        if queue is None:
            return [], deque()
        unread = queue.take_lives(meant)
        waits, queue.waits = queue.waits, deque()
        if queue.items:
            self.fresh[rid] = None
        else:
            self.fresh.pop(rid, None)
            # What follows of a newer life is told behind what came of it.
            if not queue.parked and queue.newest[0] <= meant:
                del self.queues[rid]
        return unread, waits

    def start_anew(self) -> None:
        """What is known of the old broker's numbers means nothing to the next one."""
        self.taken_life.clear()
        self.finished_life.clear()
        self.ended_life.clear()
        for queue in self.queues.values():
            queue.start_anew()

    def discard(self, hold: Hold) -> list[Arrived]:
        """The broker voids a payload that was not taken yet. What is behind it of its life goes, too, and so does END:
        behind a hole nothing is told but why, which comes next. What is to be given back."""
        for rid, queue in self.queues.items():
            if (parked := queue.unpark(hold)) is not None:
                return [parked]
            place = next((n for n, i in enumerate(queue.items) if isinstance(i, Arrived) and i.hold == hold), None)
            if place is None:
                continue
            items = list(queue.items)
            life = life_of(items[place])
            behind = [item for item in items[place:] if life_of(item) == life]
            for item in behind:
                if isinstance(item, Arrived):
                    queue.leaves(item)
            queue.broken_life = max(queue.broken_life, life)
            queue.items = deque([*items[:place], *(item for item in items[place:] if item not in behind)])
            self._tidy(rid, queue, ended=False)
            return [item for item in behind if isinstance(item, Arrived)]
        return []


def _remember(lives: OrderedDict[str, int], rid: str, life: int) -> None:
    """The oldest are forgotten."""
    lives[rid] = life
    lives.move_to_end(rid)
    while len(lives) > MOST_TAKEN:
        lives.popitem(last=False)
