"""The cache process: whom it answers, what it gives them, and when the leases of an engine end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shared_rig import LAYOUT, NUM_SLOTS, Engine, engines_of, keys, running, wait_until

from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.errors import ConfigError
from sidestream_kv.offload import cache_process
from sidestream_kv.offload.cache_process import CacheProcess
from sidestream_kv.offload.tiers import shared_memory
from sidestream_kv.offload.tiers.base import TierContext
from sidestream_kv.offload.tiers.shared_memory import VERSION, Leases, content_of, message, parsed
from sidestream_kv.offload.tiers.stack import TierStack, share_of_rank

MEMORY_BYTES = NUM_SLOTS * LAYOUT.block_bytes

# An engine that holds two slots for writing and has published one block, and stays until it is killed.
ENGINE = """
import sys, time
from pathlib import Path
from shared_rig import Engine
engine = Engine(Path(sys.argv[1]))
engine.store(1)
engine.pool.take_some(2)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The socket of a cache process that has room for two memories."""
    with running(tmp_path / "cache", host_bytes=2 * MEMORY_BYTES):
        yield tmp_path / "cache"


def greeting(path: Path, **fields: object) -> tuple[socket.socket, dict[str, object], list[int]]:
    """The connection, the answer, and the descriptors in it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(str(path))
    wanted = {"description": {"fingerprint": "rig"}, "block_bytes": LAYOUT.block_bytes, "num_bytes": MEMORY_BYTES}
    connection.send(message({"sidestream": "memory", "version": VERSION, **wanted, **fields}))
    data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 1)
    return connection, parsed(data), fds


# ------------------------------------------------------------------ leases of engines that end


def test_a_killed_engine_leaves_its_blocks_and_no_lease(path: Path) -> None:
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        other = Engine(path)
        assert other.found(1) == [1]
        taken = other.pool.take_some(NUM_SLOTS)
        assert len(taken.ids) == NUM_SLOTS - 2  # the others are being written
        taken.release()
        child.send_signal(signal.SIGKILL)
    wait_until(lambda: engines_of(path) == [os.getpid()])
    other.store(5, 6, 7, 8)
    assert other.found(5, 6, 7, 8) == [5, 6, 7, 8]
    other.close()


def test_leases_outlive_a_connection_that_ends_without_a_goodbye(path: Path) -> None:
    connection, _, (fd,) = greeting(path)
    other, _, (other_fd,) = greeting(path)
    assert Leases(fd).write([1]) == []
    connection.close()
    os.close(fd)
    assert len(engines_of(path)) == 2  # it has noticed
    assert Leases(other_fd).write([1]) == [1]
    other.send(b"bye")
    wait_until(lambda: len(engines_of(path)) == 1)
    os.close(other_fd)
    other.close()


def test_an_engine_that_closes_leaves_no_lease_and_no_descriptor(path: Path) -> None:
    before = _num_descriptors()
    closed = [Engine(path) for _ in range(3)]
    for engine in closed:
        engine.write(1)
        engine.pool.close()
        engine.pool.close()
    wait_until(lambda: not engines_of(path))
    last = Engine(path)
    last.store(1, 2, 3, 4)
    last.close()
    wait_until(lambda: not engines_of(path))
    del closed, engine, last
    # That of the memory stays. The cache process closes its end of the last question a moment later.
    wait_until(lambda: _num_descriptors() <= before + 1)


def _num_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


# ------------------------------------------------------------------ memories


def test_each_model_has_a_memory_of_its_own(path: Path) -> None:
    one, other = Engine(path), Engine(path, fingerprint="other")
    one.store(1)
    assert other.found(1) == []
    other.store(1)
    stat = content_of(path)
    assert [(memory["fingerprint"], memory["blocks"]) for memory in stat["memories"]] == [("rig", 1), ("other", 1)]
    assert stat["host_bytes"] == 2 * MEMORY_BYTES
    one.close()
    other.close()


def test_memory_beyond_the_bound_is_refused_while_the_rest_is_in_use(path: Path) -> None:
    one, other = Engine(path), Engine(path, fingerprint="other")
    other.store(7)
    with pytest.raises(ConfigError, match=rf"asks for {MEMORY_BYTES} bytes, but other models use {2 * MEMORY_BYTES}"):
        Engine(path, fingerprint="third")
    one.close()
    wait_until(lambda: not engines_of(path))
    third = Engine(path, fingerprint="third")
    assert other.found(7) == [7]
    assert [memory["fingerprint"] for memory in content_of(path)["memories"]] == ["other", "third"]
    other.close()
    third.close()


def test_an_engine_gets_the_memory_that_another_has_made(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = Engine(path)
    config = OffloadConfig(host=MEMORY_BYTES // 2, shared_memory=path)
    device = CpuDevice(compute_threads=1)
    stack = TierStack.open(config, device, TierContext(LAYOUT, "rig"))
    assert stack.host.num_slots == NUM_SLOTS
    assert f"(not {MEMORY_BYTES // 2}, because another engine has made it)" in caplog.text
    stack.close()
    device.close()
    first.close()


def test_an_engine_that_does_not_start_leaves_its_memory(path: Path) -> None:
    config, device = OffloadConfig(host=MEMORY_BYTES, shared_memory=path, tiers={"none": {}}), CpuDevice()
    with pytest.raises(ConfigError, match="no tier none"):
        TierStack.open(config, device, TierContext(LAYOUT, "rig"))
    wait_until(lambda: not engines_of(path))
    device.close()


# ------------------------------------------------------------------ refusals


def test_an_engine_says_that_no_cache_process_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no cache process listens at .*: start one: sidestream cache serve"):
        Engine(tmp_path / "none")


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"version": VERSION + 1}, f"it speaks version {VERSION}, and the engine {VERSION + 1}"),
        ({"version": None}, f"it speaks version {VERSION}, and the engine None"),
        ({"sidestream": "other"}, "it does not understand the greeting"),
        ({"block_bytes": 0}, "it does not understand the greeting"),
        ({"num_bytes": "1GiB"}, "it does not understand the greeting"),
    ],
)
def test_a_wrong_greeting_is_refused_by_name(path: Path, fields: dict[str, object], refusal: str) -> None:
    connection, answer, fds = greeting(path, **fields)
    assert refusal in str(answer["refused"])
    assert fds == []
    assert content_of(path)["memories"] == []
    connection.close()


@pytest.mark.parametrize("data", [b"\xff", b"[1]", b"{"])
def test_what_is_no_greeting_is_refused(path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        connection.send(data)
        assert b"refused" in connection.recv(1 << 16)


def test_an_engine_that_says_nothing_holds_up_no_other(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        Engine(path).close()


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        (message({"version": VERSION + 1}), f"speaks version {VERSION + 1}, but this version of Sidestream speaks"),
        (message({"version": VERSION, "num_slots": 4, "client": 1}), "is no cache process of Sidestream"),
        (b"HTTP/1.1 400 Bad Request", "is no cache process of Sidestream"),
        (b"", "is no cache process of Sidestream"),
    ],
)
def test_a_wrong_answer_is_refused(tmp_path: Path, answer: bytes, refusal: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "cache"))
        listener.listen()
        with ThreadPoolExecutor(1) as threads, pytest.raises(ConfigError, match=refusal):
            threads.submit(_answer_once, listener, answer)
            Engine(tmp_path / "cache")


def _answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        connection.send(answer)


def test_the_memory_of_another_user_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "peer_of", lambda _: (1, os.geteuid() + 1))
    with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid() + 1}, but this process runs as"):
        Engine(path)


def test_another_user_gets_no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_process, "peer_of", lambda _: (1, os.geteuid() + 1))
    with pytest.raises(ConfigError):
        Engine(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_engine_whose_end_cannot_be_noticed_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_process, "peer_of", lambda _: (0, os.geteuid()))
    with pytest.raises(ConfigError, match=r"it cannot see process 0.*: run both in one PID namespace"):
        Engine(path)


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shared_memory cannot be used with 2 ranks"):
        share_of_rank(OffloadConfig(shared_memory=tmp_path), 0, 2)


def test_a_shared_memory_needs_a_host_tier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shared_memory is for the host tier: give offload host a size"):
        OffloadConfig(host=0, shared_memory=tmp_path)


# ------------------------------------------------------------------ the process


def test_a_second_cache_process_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=f"a cache process listens at {path} already"):
        CacheProcess(path, host_bytes=MEMORY_BYTES)
    Engine(path).close()


def test_the_socket_of_a_killed_cache_process_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(tmp_path / "cache"))
    with running(tmp_path / "cache"):
        Engine(tmp_path / "cache").close()
    assert not (tmp_path / "cache").exists()


def test_more_memory_than_the_machine_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_process, "available_bytes", lambda: 4096)
    with pytest.raises(ConfigError, match="host_memory is 4097 bytes, this machine has 4096 bytes available: give"):
        CacheProcess(tmp_path / "cache", host_bytes=4097)
    with pytest.raises(ConfigError, match="host_memory is 0 bytes"):
        CacheProcess(tmp_path / "cache", host_bytes=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["none/cache", "c" * 120, "file"])
def test_a_path_without_a_socket_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"no socket can be made at .*: give a path"):
        CacheProcess(tmp_path / name, host_bytes=MEMORY_BYTES)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_stopped_process_can_be_stopped_again(tmp_path: Path) -> None:
    with running(tmp_path / "cache") as process:
        engine = Engine(tmp_path / "cache")
        engine.store(1)
    process.stop()
    assert engine.pool.match(keys(1)) == [0]
    engine.close()
