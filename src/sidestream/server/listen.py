"""Binds the server's sockets: a port or a Unix socket. The sockets do not listen yet."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from sidestream.errors import ConfigError
from sidestream.server.api_keys import read_keys
from sidestream.server.audit import open_audit_log
from sidestream.server.batch_store import BatchStore
from sidestream.server.connections import connection_limit
from sidestream.server.options import ServerOptions
from sidestream.server.tls import tls_context
from sidestream.server.tracing import check_tracing

_SOCKET_MODE = 0o660  # programs of the same group may connect, such as a reverse proxy


def bind(options: ServerOptions) -> socket.socket:
    """Bind the address; called before the model is loaded, so that an address in use fails early.

    Until `serve` listens on the socket, the kernel refuses connections, so load balancers see that the server is not
    ready. Closing a Unix socket removes its file. Raises ConfigError, also if the limit of open files is too low, or a
    TLS certificate, the file of API keys, the audit log, the directory of batches or tracing cannot be used.
    """
    connection_limit(options)
    tls_context(options)
    if options.api_keys is not None:  # later, a wrong file opens nothing, or changes nothing
        read_keys(options.api_keys)
    if options.otlp_traces_endpoint is not None:
        check_tracing(options.otlp_traces_endpoint)
    if options.batch_directory is not None:
        BatchStore(Path(options.batch_directory), options.max_batch_directory_bytes)
    if options.audit_log is not None:
        try:
            os.close(open_audit_log(options.audit_log))
        except OSError as fault:
            raise ConfigError(f"audit_log is {options.audit_log}: {fault.strerror}; give another path") from fault
    if options.uds is not None:
        return _bind_unix(Path(options.uds))
    host, port = options.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return _bind_tcp(family, host, port, reuse=False)
    except OSError as failure:
        if failure.errno != errno.EADDRINUSE:
            raise _cannot_listen(host, port, failure) from failure
    # Old connections in TIME_WAIT may hold the port, so the second try reuses the address. The first try does not: two
    # sockets that both reuse the address can be bound at the same time, and if another server holds the port, this
    # server would fail only after its model is loaded.
    try:
        return _bind_tcp(family, host, port, reuse=True)
    except OSError as failure:
        raise _cannot_listen(host, port, failure) from failure


def bind_shared(listener: socket.socket, count: int) -> list[socket.socket]:
    """A list of `count` listeners at the same address; the first item is `listener`. The kernel spreads connections
    over them.

    For a Unix socket, all items of the list are the same object. The caller closes every item; closing a socket again
    has no effect.
    """
    if count == 1:
        return [listener]  # without SO_REUSEPORT, so that no other process can bind the address
    if listener.family == socket.AF_UNIX:
        return [listener] * count
    # Set only after the first bind; otherwise a second server would silently share the address.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    others = [bind_same_address(listener) for _ in range(count - 1)]
    for bound in (listener, *others):  # from now on, no second server can bind the address
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return [listener, *others]


def bind_same_address(listener: socket.socket) -> socket.socket:
    """Bind one more socket to the listener's address."""
    other = socket.socket(listener.family, socket.SOCK_STREAM, listener.proto)
    if listener.family == socket.AF_INET6:
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other.bind(listener.getsockname())
    return other


def _bind_tcp(family: socket.AddressFamily, host: str, port: int, *, reuse: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY by this
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def _cannot_listen(host: str, port: int, failure: OSError) -> ConfigError:
    reasons = {
        errno.EADDRINUSE: "another program listens there: stop it, or choose another port",
        errno.EACCES: "this user may not use that port: choose a port of 1024 or more",
        errno.EADDRNOTAVAIL: "this machine does not have that address: use 127.0.0.1, or 0.0.0.0 for all interfaces",
    }
    other = f"{failure.strerror or failure}: use an address of this machine, such as 127.0.0.1"
    return ConfigError(f"cannot listen on {host}:{port}: {reasons.get(failure.errno or 0, other)}")


class _UnixSocket(socket.socket):
    """A Unix socket bound to a path. `close` removes the file, unless another server has replaced it."""

    def __init__(self, path: Path) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = path.absolute()  # the process may change its working directory
        self._inode: int | None = None

    def bind_path(self) -> None:
        """Bind and set the file's mode. No client can connect before the socket listens."""
        self.bind(str(self._path))
        self._inode = self._path.lstat().st_ino
        self._path.chmod(_SOCKET_MODE)

    def close(self) -> None:
        inode, self._inode = self._inode, None
        if inode is not None:
            with contextlib.suppress(OSError):  # the file, or its directory, is gone already
                if self._path.lstat().st_ino == inode:
                    self._path.unlink()
        super().close()


def _bind_unix(path: Path) -> socket.socket:
    try:
        with _locked(path.absolute().parent):
            _remove_stale(path)
            bound = _UnixSocket(path)
            try:
                bound.bind_path()
            except BaseException:
                bound.close()
                raise
            return bound
    except OSError as failure:
        folder = path.absolute().parent
        reasons = {
            errno.ENOENT: f"the directory {folder} does not exist: create it, or give another path",
            errno.ENOTDIR: f"{folder} is not a directory: give a path in a directory",
            errno.EACCES: f"this user may not write to {folder}: give a path in another directory",
            errno.EROFS: f"{folder} is read-only: give a path in another directory",
            errno.ENAMETOOLONG: "the path is too long: give a shorter one",
        }
        other = f"{failure.strerror or failure}: give another path"
        raise ConfigError(
            f"cannot listen on the Unix socket {path}: {reasons.get(failure.errno or 0, other)}"
        ) from failure


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the directory: without the lock, two servers that find the same stale file would remove each other's new
    socket.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a server that was killed. Raises ConfigError for any other file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"cannot listen on the Unix socket {path}: a file that is not a socket is there: "
            "remove it, or give another path"
        )
    # A datagram socket cannot connect to a stream socket. The error is ECONNREFUSED only if no process has bound the
    # path; a bound socket that does not listen yet (its server loads the model) gives another error.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise ConfigError(
                f"cannot listen on the Unix socket {path}: another program uses it: stop it, or give another path"
            )
    path.unlink()
