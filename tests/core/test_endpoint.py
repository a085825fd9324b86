"""Run directories and the paths in them: both ends must agree, and no path may be too long for a socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.core import endpoint
from connector.core.errors import ConfigError, ProtocolViolation

LONGEST_SUFFIX = len("/lifeline.sock")


@pytest.mark.parametrize(
    ("uid", "env", "expected"),
    [
        (0, {"XDG_RUNTIME_DIR": "/run/user/0"}, "/run/tensor-connector"),
        (7, {"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/tensor-connector"),
        (7, {"XDG_RUNTIME_DIR": "/run/user/7/"}, "/run/user/7/tensor-connector"),
        (7, {}, "/tmp/tensor-connector-7"),
        (7, {"XDG_RUNTIME_DIR": ""}, "/tmp/tensor-connector-7"),
        (7, {"XDG_RUNTIME_DIR": "relative"}, "/tmp/tensor-connector-7"),
    ],
)
def test_default_run_dir(uid: int, env: dict[str, str], expected: str) -> None:
    """Root, a login with a runtime directory, and one without."""
    assert endpoint.default_run_dir(uid, env) == expected


def test_two_users_without_a_login_get_two_directories() -> None:
    """A directory that another user left must not block this one."""
    assert endpoint.default_run_dir(7, {}) != endpoint.default_run_dir(8, {})


def test_paths_stand_in_the_run_directory() -> None:
    """The four names of docs/architecture.md."""
    assert endpoint.socket_path("/r") == "/r/broker.sock"
    assert endpoint.lifeline_path("/r") == "/r/lifeline.sock"
    assert endpoint.lock_path("/r") == "/r/broker.lock"
    assert endpoint.session_lock_path("/r", "0a" * 16) == f"/r/sessions/{'0a' * 16}.lock"


@pytest.mark.parametrize("token", ["", "../x", "0A", "0a/", "0a\n", "٣", "0" * 129, "x"])
def test_a_token_that_is_not_hex_names_no_file(token: str) -> None:
    """A token comes from the wire: it must not reach out of the directory."""
    with pytest.raises(ProtocolViolation):
        endpoint.session_lock_path("/r", token)


@pytest.mark.parametrize(
    ("text", "run_dir"),
    [
        ("/run/x", "/run/x"),
        ("/run/x///", "/run/x"),
        ("ipc:///run/x/broker.sock", "/run/x"),
        ("/run/ü x", "/run/ü x"),
    ],
)
def test_endpoints_that_are_taken(text: str, run_dir: str) -> None:
    """A run directory, or the ipc address of the socket in it."""
    assert endpoint.parse_endpoint(text) == run_dir


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "run/x",
        "./x",
        "~/x",
        "tcp://127.0.0.1:5555",
        "tcp://*:5555",
        "ipc://run/x/broker.sock",
        "ipc:///run/x",
        "ipc:///broker.sock",
        "ipc://@abstract",
        "inproc://x",
        "/run/x/broker.sock",
        "/run/\0x",
        "/run/\udcff",
        "/run/tcp://x",
        b"/run/x",
        None,
    ],
)
def test_endpoints_that_are_refused(text: object) -> None:
    """Anything else is the caller's error, at once."""
    with pytest.raises(ConfigError):
        endpoint.parse_endpoint(text)


def test_a_socket_given_as_run_directory_is_answered_with_the_directory() -> None:
    """The near miss is named."""
    with pytest.raises(ConfigError) as refusal:
        endpoint.parse_endpoint("/run/x/broker.sock")
    assert refusal.value.facts["nearest"] == "/run/x"


@pytest.mark.parametrize("character", ["a", "ü", "語", "😀"])
def test_the_limit_counts_bytes(character: str) -> None:
    """The longest directory that passes gives a socket of exactly 107 bytes at most; one more character is refused."""
    width = len(character.encode())
    room = endpoint.MAX_SOCKET_PATH_BYTES - LONGEST_SUFFIX - 1
    fits = "/" + character * (room // width)
    assert endpoint.check_run_dir(fits) == fits
    with pytest.raises(ConfigError) as refusal:
        endpoint.check_run_dir(fits + character)
    assert refusal.value.facts["limit"] == 107
    assert refusal.value.facts["size"] > 107
    assert fits + character in str(refusal.value)


def test_the_kernel_takes_the_longest_path_and_no_longer(tmp_path: Path) -> None:
    """The limit is the system's: what passes the check can be bound, and one byte more cannot."""
    room = endpoint.MAX_SOCKET_PATH_BYTES - LONGEST_SUFFIX - len(str(tmp_path)) - 1
    run_dir = tmp_path / ("d" * room)
    run_dir.mkdir()
    path = endpoint.lifeline_path(endpoint.check_run_dir(str(run_dir)))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(path)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unbound,
        pytest.raises(OSError, match="AF_UNIX path too long"),
    ):
        unbound.bind(path + "xx")


@given(st.text(max_size=120))
def test_any_text_is_a_run_directory_or_a_config_error(text: str) -> None:
    """What passes is absolute, short enough, stable, and the same by either way of writing it."""
    try:
        run_dir = endpoint.parse_endpoint("/" + text)
    except ConfigError:
        return
    assert run_dir.startswith("/") and not run_dir.endswith("/")
    assert len(endpoint.lifeline_path(run_dir).encode()) <= endpoint.MAX_SOCKET_PATH_BYTES
    assert endpoint.check_run_dir(run_dir) == run_dir
    assert endpoint.parse_endpoint("ipc://" + endpoint.socket_path(run_dir)) == run_dir
