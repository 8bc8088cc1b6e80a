"""Listening on a Unix socket in place of a port."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from proof.fake_backend import FakeBackend
from sidestream.errors import ConfigError
from sidestream.server import ServerOptions, bind

from .serving import serving, warned

VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"  # /health is answered beyond all limits


@contextlib.contextmanager
def _bound(path: Path) -> Any:
    with bind(ServerOptions(uds=str(path))) as listener:
        yield listener


def _refused(path: Path, because: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        bind(ServerOptions(uds=str(path)))
    assert str(refusal.value) == f"cannot listen on the Unix socket {path}: {because}"


def test_requests_are_served_over_a_unix_socket_whose_file_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(uds=str(path)) as served:
        assert (served.running.url, served.running.uds) == ("http://localhost", str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert served.chat().json()["choices"][0]["message"]["content"] == "Hello, world"
    assert not path.exists()


def test_a_relative_socket_path_is_removed_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with _bound(Path("s")):
        monkeypatch.chdir("/")
    assert not (tmp_path / "s").exists()


def test_the_unix_socket_refuses_connections_until_the_server_listens(tmp_path: Path) -> None:
    with _bound(tmp_path / "s"), socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
        early.connect(str(tmp_path / "s"))


def test_the_socket_file_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.exists()
    with serving(uds=str(path)) as served:
        assert served.chat().status_code == 200
    assert not path.exists()


def test_a_socket_on_which_another_server_listens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        _refused(path, "another program uses it: stop it, or give another path")
    assert path.exists()


def test_a_socket_of_a_server_that_still_loads_its_model_is_refused(tmp_path: Path) -> None:
    with _bound(tmp_path / "s"):
        _refused(tmp_path / "s", "another program uses it: stop it, or give another path")
        assert (tmp_path / "s").exists()


def test_a_server_removes_no_file_that_replaced_its_own(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with _bound(path):
        path.rename(tmp_path / "old")
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_a_file_that_is_no_socket_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("notes")
    _refused(path, "a file that is not a socket is there: remove it, or give another path")
    assert path.read_text() == "notes"


def test_an_error_about_a_missing_directory_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    _refused(folder / "s", f"the directory {folder} does not exist: create it, or give another path")
    (tmp_path / "file").write_text("")
    _refused(tmp_path / "file" / "s", f"{tmp_path / 'file'} is not a directory: give a path in a directory")


def test_an_error_about_an_unwritable_directory_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind_as_another_user(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", bind_as_another_user)  # root may write anywhere
    _refused(tmp_path / "s", f"this user may not write to {tmp_path}: give a path in another directory")


def test_a_path_that_is_too_long_is_refused_with_its_limit(tmp_path: Path) -> None:
    longest = str(tmp_path / "s")
    longest += "é" * ((107 - len(longest)) // 2)
    longest += "x" * (107 - len(os.fsencode(longest)))
    with _bound(Path(longest)):
        pass
    with pytest.raises(ConfigError, match="108 bytes: the path of a Unix socket has at most 107; give a shorter one"):
        ServerOptions(uds=longest + "x")


@pytest.mark.parametrize("address", [{"host": "127.0.0.1"}, {"port": 8000}, {"port": 0}])
def test_a_socket_together_with_an_address_is_refused(address: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give a Unix socket or an address, not both"):
        ServerOptions(uds="/tmp/s", **address)


@pytest.mark.parametrize("path", ["", "\0abstract"])
def test_a_path_without_a_file_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="give the path of a Unix socket"):
        ServerOptions(uds=path)


def test_connections_are_limited_by_user_and_logged_by_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(uds=str(tmp_path / "s"), max_connections_per_address=1) as served, served.connect() as held:
        held.sendall(VERSION)
        assert held.recv(12) == b"HTTP/1.1 200"
        with served.connect() as second:
            second.sendall(VERSION)
            reply = second.recv(1 << 16)
        assert b"HTTP/1.1 503 " in reply
        assert f"user {os.getuid()} holds 1 connections already".encode() in reply
        assert served.refused("address_limit") == 1
    (line,) = warned(caplog)
    assert line.startswith(f"cut the connection of process {os.getpid()} of user {os.getuid()}: ")


def test_a_unix_socket_without_a_key_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeBackend(), uds=str(tmp_path / "s")):
        pass
    assert not warned(caplog)
