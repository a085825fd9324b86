"""Where a broker is found: the run directory and the paths in it. Pure: nothing here touches the file system.

Both ends compute these paths with the functions below, so that they can differ only in the run directory.
"""

from __future__ import annotations

from collections.abc import Mapping

from connector.core.errors import ConfigError, ProtocolViolation

#: Longest path a UNIX socket can be bound to, in bytes (sockaddr_un.sun_path less its final NUL).
MAX_SOCKET_PATH_BYTES = 107

_SOCKET = "/broker.sock"
_LIFELINE = "/lifeline.sock"
_LOCK = "/broker.lock"
_IPC = "ipc://"
#: Longest token, in hex digits; far below the 255 bytes of a file name.
_MAX_TOKEN_DIGITS = 128


def default_run_dir(uid: int, env: Mapping[str, str]) -> str:
    """The run directory when nothing names one: root's, the login's, or one in /tmp with the uid in its name.

    An empty or relative $XDG_RUNTIME_DIR counts as unset, as the XDG specification says.
    """
    if uid == 0:
        return "/run/tensor-connector"
    login = env.get("XDG_RUNTIME_DIR", "")
    if login.startswith("/"):
        return login.rstrip("/") + "/tensor-connector"
    return f"/tmp/tensor-connector-{uid}"


def check_run_dir(path: object) -> str:
    """`path` without trailing slashes, if its sockets can be bound: absolute, UTF-8, short enough.

    ConfigError otherwise, with path, size and limit in bytes.
    """
    if not isinstance(path, str):
        raise ConfigError(f"a run directory must be a str, not {type(path).__name__}", path=repr(path)[:80])
    if "://" in path:
        raise ConfigError("a run directory is a path on this node, not an address; TCP is not offered", path=path)
    if not path.startswith("/"):
        raise ConfigError("a run directory must be an absolute path", path=path)
    found = path.rstrip("/")
    if found == "" or "\0" in found:
        raise ConfigError("this path cannot be a run directory", path=path)
    try:
        size = len((found + _LIFELINE).encode())
    except UnicodeEncodeError:
        raise ConfigError("a run directory must have a UTF-8 form", path=ascii(path)) from None
    if size > MAX_SOCKET_PATH_BYTES:
        # The longest of the two socket names decides, so that no broker starts and fails at its second socket.
        raise ConfigError(
            f"the run directory is too long: with {_LIFELINE} it has {size} bytes, "
            f"and a socket's path at most {MAX_SOCKET_PATH_BYTES}",
            path=found,
            size=size,
            limit=MAX_SOCKET_PATH_BYTES,
        )
    return found


def parse_endpoint(text: object) -> str:
    """The run directory that an endpoint names: `/run/x` or `ipc:///run/x/broker.sock`; ConfigError on others."""
    if not isinstance(text, str):
        raise ConfigError(f"an endpoint must be a str, not {type(text).__name__}", endpoint=repr(text)[:80])
    if text.startswith(_IPC):
        path = text.removeprefix(_IPC)
        if not path.endswith(_SOCKET):
            raise ConfigError(f"an ipc endpoint is written ipc://RUN_DIR{_SOCKET}", endpoint=text)
        return check_run_dir(path.removesuffix(_SOCKET))
    if "://" in text:
        raise ConfigError("only endpoints on this node are offered: a run directory or ipc://", endpoint=text)
    if text.endswith(_SOCKET):
        raise ConfigError(
            "this names the socket; name the run directory it is in",
            endpoint=text,
            nearest=text.removesuffix(_SOCKET),
        )
    return check_run_dir(text)


def socket_path(run_dir: str) -> str:
    """Path of the broker's ROUTER socket; its ZeroMQ address is `ipc://` and this."""
    return run_dir + _SOCKET


def lifeline_path(run_dir: str) -> str:
    """Path of the broker's lifeline, an AF_UNIX SOCK_SEQPACKET socket."""
    return run_dir + _LIFELINE


def lock_path(run_dir: str) -> str:
    """Path of the lock that the broker of this run directory holds."""
    return run_dir + _LOCK


def session_lock_path(run_dir: str, token_hex: str) -> str:
    """Path of a session's lock. The token must be lower-case hex digits, so that it can name no other file.

    ProtocolViolation otherwise: a token comes from the wire.
    """
    if not token_hex or len(token_hex) > _MAX_TOKEN_DIGITS or token_hex.strip("0123456789abcdef"):
        raise ProtocolViolation(
            "a session's token must be lower-case hex digits", token=ascii(token_hex)[:80], limit=_MAX_TOKEN_DIGITS
        )
    return f"{run_dir}/sessions/{token_hex}.lock"
