"""The client's end of the lifeline, which carries small frames, too, and the session lock that speaks for this process
without a pidfd."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque

from connector.arena import locks
from connector.core.endpoint import lifeline_path, session_lock_path
from connector.core.errors import BrokerLost
from connector.wire.message import SPEAKS
from connector.wire.order import LINE_BYTES, most_bytes, send_over

#: Of one frame: the most bytes of it, room for a descriptor that comes with it, and flags.
ONE_FRAME, _ROOM, _FLAGS = (LINE_BYTES,), (socket.CMSG_SPACE(4),), (socket.MSG_CMSG_CLOEXEC,)
#: What recvmsg returns.
Packet = tuple[bytes, list[tuple[int, int, bytes]], int, object]


def passed(packet: Packet) -> list[socket.socket]:
    """The sockets that came with a packet."""
    found = []
    for level, kind, data in packet[1]:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found += [socket.socket(fileno=fd) for fd in array.array("i", data[: len(data) // 4 * 4])]
    return found


class Lifeline:
    """Open for as long as the session lives. A forked child inherits the stream but never the lock."""

    def __init__(self, run_dir: str, token: bytes, timeout: float) -> None:
        """Raises BrokerLost with the path tried if no broker answers within `timeout` seconds."""
        self._lock_path = session_lock_path(run_dir, token.hex())
        self._lock_fd = -1
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._receive = self.stream.recvmsg
        #: Largest frame that `send` takes.
        self.most = most_bytes(self.stream.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        self.stream.settimeout(timeout)
        path = lifeline_path(run_dir)
        try:
            self.stream.connect(path)
            # Before the lock file is made: killed in between, the broker must know which file to remove.
            self.stream.sendall(token + SPEAKS)
            self._lock_fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            # Whatever the umask: the broker, which may be of our group only, must be able to look at the lock.
            os.fchmod(self._lock_fd, 0o640)
            locks.take(self._lock_fd)
            if self.stream.recv(1) != b"\x01":
                raise BrokerLost("the broker closed the lifeline: it does not accept this user", path=path)
        except OSError as error:
            self.close()
            raise BrokerLost(f"no broker answers: {_reason(error)}", path=path) from error
        except BrokerLost:
            self.close()
            raise
        self.stream.setblocking(False)

    def receive_into(self, came: deque[Packet]) -> None:
        """Append the next frame if there is one, as (bytes, ancillary data, …), with no bytes once the broker's end is
        closed.

        From the socket into the deque in one call: a signal's handler that raises in this thread cannot lose a frame.
        """
        try:
            came.extend(map(self._receive, ONE_FRAME, _ROOM, _FLAGS))
        except BlockingIOError:
            return
        except OSError:
            came.append((b"", [], 0, None))

    def send(self, frame: bytes) -> bool:
        """False if there is no room now. What cannot be sent because the broker is gone counts as sent."""
        return send_over(self.stream.send, frame)

    def close(self) -> None:
        self.stream.close()
        if self._lock_fd >= 0:
            # A stopping broker removes the same files.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._lock_path)
            locks.drop(self._lock_fd)
            os.close(self._lock_fd)
            self._lock_fd = -1


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it accepted nothing in time"
    if isinstance(error, BlockingIOError):
        return "more processes than it can queue are connecting at once"
    return error.strerror or str(error)
