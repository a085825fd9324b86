"""What waits to be sent to each session. A stuck session costs its own messages, nothing else.

ROUTER_MANDATORY makes a full pipe an error instead of a silent loss: what did not go stays here and is
tried again. The protocol bounds what a session can be owed (window, one ping, one batch of notices);
only answers to its own requests could pile up, and those are cut at a limit and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import zmq

from connector.wire import codec
from connector.wire import messages as msg

#: Answers to requests beyond this many waiting messages of one session are dropped and counted.
MOST_WAITING = 4096
#: Approximate size of one frame; a longer queue is sent as several.
FRAME_MESSAGES = 512

_ANSWERS = (msg.Answer, msg.Failure, msg.Rows, msg.Shown)


class Outbox:
    """Queues by token, flushed once a turn of the loop."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self._waiting: dict[bytes, list[msg.Message]] = {}
        #: Tokens whose pipe was full at the last try.
        self.blocked: set[bytes] = set()
        self.dropped = 0
        self.unreachable = 0

    def put(self, token: bytes, message: msg.Message) -> None:
        queue = self._waiting.setdefault(token, [])
        if len(queue) >= MOST_WAITING and isinstance(message, _ANSWERS):
            self.dropped += 1
            return
        queue.append(message)

    def touch(self, token: bytes) -> None:
        """An envelope is due although it may hold no message: its counter acknowledges."""
        self._waiting.setdefault(token, [])

    def flush(self, ack_of: Callable[[bytes], int], tokens: Iterable[bytes] | None = None) -> None:
        """Send what is waiting. `ack_of(token)`: its numbered messages that were applied."""
        for token in list(self._waiting if tokens is None else tokens):
            queue = self._waiting.get(token)
            if queue is not None and self._send(token, queue, ack_of(token)):
                del self._waiting[token]

    def _send(self, token: bytes, queue: list[msg.Message], ack: int) -> bool:
        """True if nothing is left to send."""
        sent_any = False
        while queue or not sent_any:
            part = queue[:FRAME_MESSAGES]
            # Only the last frame acknowledges: what was refused must be known before what was applied.
            counter = ack if len(part) == len(queue) else 0
            try:
                self._router.send_multipart([token, codec.encode(counter, part)], zmq.NOBLOCK)
            except zmq.Again:
                self.blocked.add(token)
                return False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                # No such peer now: it comes back with Hello and says what it has, or it is dead.
                self.unreachable += 1
                self.blocked.discard(token)
                queue.clear()
                return True
            sent_any = True
            del queue[: len(part)]
        self.blocked.discard(token)
        return True

    def forget(self, token: bytes) -> None:
        self._waiting.pop(token, None)
        self.blocked.discard(token)
