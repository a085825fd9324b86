"""Sockets between two sessions: what a writer tells a reader directly.

The broker makes them and hands each end over. A packet is a list of descriptors (codec.py); nothing else goes over
them.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from connector.client.coming import Coming
from connector.wire.order import most_bytes


class Pair:
    """One end. `session`: the number of the other's."""

    def __init__(self, session: int, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.session = session
        self.stream = stream
        #: Largest frame to send, in bytes.
        self.most = most_bytes(stream.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        self.came: deque[bytes] = deque()
        self.coming = Coming()
        #: All was read, and the other's end is closed, or this one. Before that: the other's end takes nothing more.
        self.ended = self.deaf = False
        self._receive = stream.recv

    def send(self, frame: bytes) -> bool:
        """False if it did not go: the reader reads too slowly for more, or it is gone (`deaf`)."""
        try:
            self.stream.send(frame)
        except OSError as error:
            self.deaf = error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
            return False
        return True

    def receive(self, sizes: Sequence[int]) -> None:
        """So many packets into `came`, or those that are there; see Lifeline.receive_into."""
        came = self.came
        try:
            came.extend(map(self._receive, sizes))
        except BlockingIOError:
            return
        except OSError:
            self.ended = True
        # At its end there is nothing, again and again.
        while came and not came[-1]:
            came.pop()
            self.ended = True

    def close(self) -> None:
        self.ended = True
        self.stream.close()


class Way(NamedTuple):
    """A stream's chunks, in this life, may be told over this pair."""

    pair: Pair
    life: int
