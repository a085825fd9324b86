"""Lifelines: one AF_UNIX connection per session, by which the kernel vouches for a client process.

The client connects, sends its token and gets one byte back. From then on the broker knows uid, pid and,
where the kernel gives one, a pidfd; and if the client said so, small frames go both ways (wire/order.py).
A session is over when the pidfd says that the process ended, or when the stream ended *and* the session's lock is
free: a process gives both up only when it ends, or when none of its views is alive. Never a
claimed pid, never a time-out.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from connector.arena import locks
from connector.broker.rundir import RunDir
from connector.core.endpoint import lifeline_path, session_lock_path
from connector.wire.message import SPEAKS, TOKEN_BYTES
from connector.wire.order import LINE_BYTES, most_bytes, send_over

log = logging.getLogger("connector.broker")

#: getsockopt: a pidfd of the peer (Linux 6.5 and later).
SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")
LISTEN = select.EPOLLIN | select.EPOLLRDHUP
#: Frames read from one lifeline before the next one's turn.
TURN = 64
#: Connections that may be open without having given a token; beyond it the oldest is closed.
MOST_SILENT = 256


@dataclass(slots=True)
class Lifeline:
    """A client process as the kernel shows it."""

    stream: socket.socket
    pid: int
    uid: int
    pidfd: int
    token: bytes = b""
    #: Frames go over it, of at most so many bytes.
    speaks: bool = False
    most: int = LINE_BYTES
    #: The loop wakes when there is room again.
    waits: bool = False
    ended: bool = False

    def send(self, frame: bytes, passed: socket.socket | None = None) -> bool:
        """False if its process reads too slowly for more now. To one that is gone everything counts as sent. `passed`
        goes with the frame."""
        if passed is None:
            return send_over(self.stream.send, frame)
        return send_over(lambda data: socket.send_fds(self.stream, [data], [passed.fileno()]), frame)

    def close(self) -> None:
        self.stream.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Lifelines:
    """All lifelines, behind one epoll descriptor that the loop polls."""

    def __init__(self, run_dir: RunDir, allow: frozenset[int], heard: Callable[[bytes, bytes], None]) -> None:
        """`heard(token, frame)` is called for each frame, in order."""
        self._run_dir = run_dir
        self._allow = allow
        self._heard = heard
        #: One byte more than a frame may have: a longer one is seen to be too long.
        self._room = bytearray(LINE_BYTES + 1)
        path = lifeline_path(run_dir.path)
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self._listener.bind(path)
        run_dir.own(path)
        self._listener.listen(256)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._by_fd: dict[int, Lifeline] = {}
        self._by_token: dict[bytes, Lifeline] = {}
        #: Stream ended: looked at again until the session's lock is free, or a pidfd speaks.
        self._doubtful: dict[bytes, Lifeline] = {}
        #: Connections without a token yet, oldest first.
        self._silent: dict[int, Lifeline] = {}
        self.woken: set[int] = set()
        self._roomless: set[bytes] = set()
        self.refused = 0
        self._paused = False

    def find(self, token: bytes) -> Lifeline | None:
        return self._by_token.get(token)

    def watch(self, fd: int) -> None:
        """Let the loop wake for another descriptor."""
        self._epoll.register(fd, select.EPOLLIN)

    def poll(self, timeout: float = 0.0) -> Iterator[tuple[bytes, str]]:
        """Wait up to `timeout` seconds; (token, how) of each process proven dead. Lets newcomers in and hears frames on
        the way. `woken`: the watched descriptors that are ready."""
        self.woken.clear()
        for fd, _ in self._epoll.poll(timeout):
            if fd in self._by_fd:
                yield from self._look(fd, self._by_fd[fd])
            elif fd == self._listener.fileno():
                self._accept()
            else:
                self.woken.add(fd)
        if self._doubtful:
            yield from self.doubtful()

    def doubtful(self) -> Iterator[tuple[bytes, str]]:
        """Those whose stream ended: over once their lock is free."""
        for token, line in list(self._doubtful.items()):
            if not locks.probe(session_lock_path(self._run_dir.path, token.hex())):
                del self._doubtful[token]
                yield token, f"pid {line.pid}: lifeline ended and lock free"

    def await_room(self, tokens: set[bytes]) -> None:
        """Wake when there is room again on the lifelines of these, and for no other's room."""
        for token in (*self._roomless, *tokens):
            line = self._by_token.get(token)
            if line is not None and not line.ended and line.waits is not (token in tokens):
                line.waits = token in tokens
                self._epoll.modify(line.stream, LISTEN | (select.EPOLLOUT if line.waits else 0))
        self._roomless = tokens & self._by_token.keys()

    def forget(self, token: bytes) -> None:
        """The session is gone: its descriptors and its lock file go, too."""
        self._doubtful.pop(token, None)
        line = self._by_token.pop(token, None)
        if line is not None:
            self._drop(line)
        path = session_lock_path(self._run_dir.path, token.hex())
        if not locks.probe(path) and os.path.lexists(path):
            os.unlink(path)

    def close(self) -> None:
        everyone = [*self._by_token.values(), *self._by_fd.values()]
        for line in {id(line): line for line in everyone}.values():
            self._drop(line)
        self._by_token.clear()
        self._epoll.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._pause(error)
            return
        stream.setblocking(False)
        pid, uid, _ = _CREDENTIALS.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in self._allow and self._run_dir.gid is None:
            self.refused += 1
            stream.close()
            return
        most = most_bytes(stream.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        line = Lifeline(stream, pid, uid, _pidfd(stream, pid), most=most)
        self._by_fd[stream.fileno()] = self._silent[stream.fileno()] = line
        self._epoll.register(stream, LISTEN)
        if len(self._silent) > MOST_SILENT:
            # A client sends its token as it connects: who says nothing must not use up the descriptors.
            self.refused += 1
            self._drop(next(iter(self._silent.values())))

    def _pause(self, error: OSError) -> None:
        """No descriptor is left: newcomers wait in the backlog. Polled on, the listener would be ready for ever."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log.error(
            "a client waits outside: raise the limit of open files",
            extra={"facts": {"error": error.strerror, "limit": limit, "lifelines": len(self._by_token)}},
        )
        self._epoll.unregister(self._listener)
        self._paused = True

    def _resume(self) -> None:
        """A descriptor was closed: let the next one in."""
        if self._paused:
            self._paused = False
            self._epoll.register(self._listener, select.EPOLLIN)

    def _look(self, fd: int, line: Lifeline) -> Iterator[tuple[bytes, str]]:
        if fd == line.pidfd:
            if not _is_ready(fd, select.POLLIN):
                # It spoke of an older descriptor of this number, closed since the loop woke.
                return
            self._epoll.unregister(fd)
            del self._by_fd[fd]
            # Its last words come first.
            while not line.ended and self._read(line):
                continue
            self._doubtful.pop(line.token, None)
            yield line.token, f"pid {line.pid}: process ended"
            return
        for _ in range(TURN):
            if not self._read(line):
                return

    def _read(self, line: Lifeline) -> bool:
        """One packet of a lifeline; False if there is none more."""
        try:
            count = line.stream.recv_into(self._room)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            count = 0
        if not count:
            self._stream_ended(line)
            return False
        data = bytes(memoryview(self._room)[:count])
        if line.speaks:
            self._heard(line.token, data)
            # What was heard may have been its good-bye.
            return line.stream.fileno() >= 0
        token = data.removesuffix(SPEAKS) if len(data) == TOKEN_BYTES + len(SPEAKS) else data
        if not line.token and len(token) == TOKEN_BYTES and self._is_free(token, line):
            self._register(line, token, len(data) > TOKEN_BYTES)
            return not line.ended
        # Not a token, or one that is taken: this is no client of ours.
        self.refused += 1
        if not line.token:
            self._drop(line)
            return False
        return True

    def _is_free(self, token: bytes, newcomer: Lifeline) -> bool:
        """Whether the token is nobody's, or the newcomer's own: it gave its first stream up before we answered."""
        known = self._by_token.get(token)
        if known is None:
            return True
        if (known.pid, known.uid) != (newcomer.pid, newcomer.uid) or not _at_end(known):
            return False
        while not known.ended and self._read(known):
            continue
        self._doubtful.pop(token, None)
        del self._by_token[token]
        self._drop(known)
        return True

    def _register(self, line: Lifeline, token: bytes, speaks: bool) -> None:
        line.token, line.speaks = token, speaks
        self._by_token[token] = line
        del self._silent[line.stream.fileno()]
        if line.pidfd >= 0:
            self._by_fd[line.pidfd] = line
            self._epoll.register(line.pidfd, select.EPOLLIN)
        try:
            line.stream.send(b"\x01")
        except (BrokenPipeError, ConnectionResetError):
            self._stream_ended(line)

    def _stream_ended(self, line: Lifeline) -> None:
        self._epoll.unregister(line.stream)
        del self._by_fd[line.stream.fileno()]
        self._silent.pop(line.stream.fileno(), None)
        line.ended = True
        if not line.token:
            line.close()
            self._resume()
        else:
            self._doubtful[line.token] = line

    def _drop(self, line: Lifeline) -> None:
        self._silent.pop(line.stream.fileno(), None)
        for fd in (line.stream.fileno(), line.pidfd):
            if fd >= 0 and self._by_fd.pop(fd, None) is not None:
                self._epoll.unregister(fd)
        line.close()
        self._resume()


def _at_end(line: Lifeline) -> bool:
    """Whether the client's end is closed, noticed or not; frames may still lie there."""
    return line.ended or _is_ready(line.stream.fileno(), select.POLLRDHUP)


def _is_ready(fd: int, events: int) -> bool:
    poller = select.poll()
    poller.register(fd, events)
    return bool(poller.poll(0))


def _pidfd(stream: socket.socket, pid: int) -> int:
    """A pidfd of the peer, -1 if there is none to be had (old kernel, other pid namespace)."""
    try:
        return stream.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
