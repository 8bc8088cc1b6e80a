"""`sidestream serve` as real processes: ends of single processes, and their effect on clients and the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_runner import interrupts_reach_children

from proof.tiny_models import tiny_model_dir
from sidestream.config import WATCHDOG_OPTION
from sidestream.errors import EngineStopped, ProcessFailed
from sidestream.server import ServerOptions, Supervisor, bind, bind_shared
from sidestream_kv.offload.tiers.inspection import Inspection, find_directories

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

__all__ = ["interrupts_reach_children"]

WAIT_S = 240.0
ENDLESS = 30_000
"""Tokens that take minutes."""


def until(happened: Callable[[], Any], *, within_s: float = WAIT_S) -> Any:
    """What `happened` returns, once that is true. Processes are looked at from outside: nothing tells when they
    change.
    """
    deadline = time.monotonic() + within_s
    while not (result := happened()):
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.02)
    return result


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended may still wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int, kind: str) -> list[int]:
    """Child processes of `pid` that run `kind`: "engine_main" or "api_process"."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(OSError):
            if kind in Path(f"/proc/{child}/cmdline").read_text():
                found.append(child)
    return found


def owns(pid: int, connection: socket.socket) -> bool:
    """Whether a process has accepted this connection."""
    (host, port), (_, server_port) = connection.getsockname(), connection.getpeername()
    packed = "".join(f"{int(part):02X}" for part in reversed(host.split(".")))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    ours = f"{packed}:{port:04X}"
    inodes = {f"socket:[{line[9]}]" for line in lines if line[2] == ours and line[1].endswith(f":{server_port:04X}")}
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) in inodes:
                    return True
    return False


class Stream(threading.Thread):
    """A streamed request on a connection of its own. `events` holds what has come; `ended`: how it ended."""

    def __init__(self, connection: http.client.HTTPConnection, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.events: list[dict[str, Any]] = []
        self.num_tokens = 0  # once it has ended
        self.begun = threading.Event()
        self.ended: queue.Queue[str] = queue.Queue()
        self._connection = connection
        self._max_tokens = max_tokens
        self.start()

    def run(self) -> None:
        ended = "cut"
        with contextlib.suppress(
            http.client.HTTPException, OSError, AttributeError
        ):  # the last one: closed while it reads
            fields = {"prompt": "Call me Ishmael. ", "max_tokens": self._max_tokens, "ignore_eos": True}
            body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **fields}
            self._connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            for line in filter(None, map(bytes.strip, self._connection.getresponse())):
                if line == b"data: [DONE]":
                    ended = "done"
                    self.num_tokens = self.events[-1]["usage"]["completion_tokens"]
                    continue
                self.events.append(json.loads(line.removeprefix(b"data: ")))
                if "error" in self.events[-1]:
                    ended = self.events[-1]["error"]["message"]
                self.begun.set()
        self.ended.put(ended)
        self.begun.set()

    def goes_on(self) -> bool:
        """Whether something more comes."""
        came = len(self.events)
        return bool(until(lambda: len(self.events) > came))

    def leave(self) -> None:
        """End the connection as a client that goes away does."""
        self._connection.sock.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass(frozen=True)
class Server:
    """A running `sidestream serve`, its URL once it has said so, and the lines of its log as they come."""

    process: subprocess.Popen[str]
    log: list[str]
    said: list[str]
    readers: list[threading.Thread]
    connections: list[http.client.HTTPConnection]

    @property
    def url(self) -> str:
        return until(lambda: next((found[0] for line in self.said if (found := re.search(r"http://\S+", line))), None))

    @property
    def engine(self) -> int:
        (pid,) = children(self.process.pid, "engine_main")
        return pid

    @property
    def apis(self) -> list[int]:
        return children(self.process.pid, "api_process")

    def connect(self, pid: int | None = None) -> http.client.HTTPConnection:
        """A connection that has been used; `pid`: that API process has accepted it."""
        for _ in range(200):
            connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=WAIT_S)
            self.connections.append(connection)
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            if pid is None or owns(pid, connection.sock):
                return connection
            connection.close()
        raise AssertionError("no connection came to this process: they are not spread")

    def stream(self, pid: int | None = None, max_tokens: int = ENDLESS) -> Stream:
        """A streamed request of which something has come."""
        stream = Stream(self.connect(pid), max_tokens)
        assert stream.begun.wait(WAIT_S) and stream.events
        return stream

    def end(self) -> tuple[int, list[str]]:
        """Wait for its end; its status and its log."""
        status = self.process.wait(WAIT_S)
        for reader in self.readers:
            reader.join()
        return status, self.log


def metrics(connection: http.client.HTTPConnection) -> dict[str, float]:
    """What `/metrics` says there, without the common prefix."""
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line[0] != "#")
    return {name.removeprefix("sidestream_"): float(value) for name, _, value in pairs}


def is_idle(connection: http.client.HTTPConnection) -> bool:
    """Whether no request runs or holds a block."""
    now = metrics(connection)
    return now["requests_running"] == now["blocks_used"] == 0


@contextlib.contextmanager
def serving(model: Path, *options: object, faults: Path | None = None) -> Iterator[Server]:
    """`sidestream serve`; `faults`: a directory with a sitecustomize.py, which every process runs first. No process is
    left.
    """
    command = [sys.executable, "-m", "sidestream", "serve", model, "--port", 0, "--kv-memory", "32MiB", "--threads", 1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if faults is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(faults), *filter(None, [os.environ.get("PYTHONPATH")])])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([str(part) for part in [*command, *options]], **pipes, text=True, env=environment) as process:
        server = Server(process, [], [], [], [])
        for stream, lines in ((process.stderr, server.log), (process.stdout, server.said)):
            reader = threading.Thread(target=_keep_lines, args=(stream, lines), daemon=True)
            reader.start()
            server.readers.append(reader)
        before: list[int] = []
        try:
            yield server
        finally:
            with contextlib.suppress(OSError):
                before = [*children(process.pid, "engine_main"), *children(process.pid, "api_process")]
            process.kill()
            until(lambda: not any(map(lives, before)))
            for reader in server.readers:
                reader.join()
            for connection in server.connections:
                connection.close()


def _keep_lines(stream: Any, lines: list[str]) -> None:
    for line in stream:
        lines.append(line.rstrip("\n"))  # others read meanwhile


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("models") / "tiny", seed=1, max_position_embeddings=1 << 15)


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[Server]:
    """A server with two API processes, for tests that leave it as they found it."""
    with serving(tiny, "--api-processes", 2) as server:
        assert server.url
        yield server


def test_any_api_process_shows_the_metrics_of_all_processes(shared: Server) -> None:
    for pid in shared.apis:
        assert shared.stream(pid, max_tokens=4).ended.get(timeout=WAIT_S) == "done"
        malformed = shared.connect(pid).sock
        malformed.sendall(b"\0\r\n\r\n")
        while malformed.recv(1 << 16):
            pass
    for pid in shared.apis:
        told = metrics(shared.connect(pid))
        assert told['requests_total{finish_reason="length"}'] == 2
        assert told['connections_refused_total{reason="malformed"}'] == 2


def print_stacks(pid: int, log: list[str]) -> None:
    before = len(log)
    os.kill(pid, signal.SIGUSR1)
    until(lambda: any("Current thread" in line for line in log[before:]))


def test_signals_to_processes_other_than_the_supervisor_affect_no_request(shared: Server) -> None:
    streams = [shared.stream(pid, max_tokens=50) for pid in shared.apis]
    processes = [shared.engine, *shared.apis]
    for pid in processes:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    for pid in (shared.process.pid, *processes):
        print_stacks(pid, shared.log)  # one after another: their pieces would mix within lines
    assert [stream.ended.get(timeout=WAIT_S) for stream in streams] == ["done", "done"]
    assert [stream.num_tokens for stream in streams] == [50, 50]
    assert [shared.engine, *shared.apis] == processes


def test_a_stopped_api_process_delays_no_other_and_completes_its_replies_later(shared: Server) -> None:
    stopped, other = shared.apis
    waiting, connected = shared.stream(stopped, max_tokens=300), shared.connect(other)
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert Stream(connected, max_tokens=600).ended.get(timeout=WAIT_S) == "done"
        assert waiting.ended.empty()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert waiting.ended.get(timeout=WAIT_S) == "done"
    assert waiting.num_tokens == 300


def test_a_killed_api_process_loses_only_its_own_clients_and_is_restarted(shared: Server) -> None:
    killed, other = shared.apis
    lost, kept = shared.stream(killed), shared.stream(other)
    watching = shared.connect(other)
    completed = metrics(watching).get('requests_total{finish_reason="length"}', 0)
    os.kill(killed, signal.SIGKILL)
    assert lost.ended.get(timeout=WAIT_S) == "cut"
    until(lambda: metrics(watching)["requests_running"] == 1)
    (successor,) = until(lambda: set(shared.apis) - {killed, other})
    for _ in range(20):  # those that come meanwhile do not wait for it
        assert owns(other, shared.connect().sock)
    assert kept.goes_on()
    until(lambda: len([line for line in shared.log if "serving on" in line]) == 3)
    assert shared.stream(successor, max_tokens=3).ended.get(timeout=WAIT_S) == "done"
    assert metrics(shared.connect(successor))['requests_total{finish_reason="length"}'] == completed + 1
    kept.leave()
    until(lambda: is_idle(shared.connect()))
    (said,) = [line for line in shared.log if "has ended" in line]
    assert (
        f"API process {killed} has ended: it was killed by SIGKILL; "
        "its clients have lost their connections; another one starts" in said
    )


def test_clients_of_a_killed_engine_get_an_error_and_the_server_ends(tiny: Path) -> None:
    with serving(tiny, "--api-processes", 1) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        streams = [server.stream() for _ in range(3)]
        processes = [server.engine, *server.apis]
        os.kill(server.engine, signal.SIGKILL)
        assert {stream.ended.get(timeout=WAIT_S) for stream in streams} == {
            "the engine is failed: the engine's process has ended"
        }
        health = client.get("/health")
        assert (health.status_code, health.json()["detail"]) == (503, "the engine's process has ended")
        refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "Hello", "max_tokens": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopped")
        status, log = server.end()
    assert status == 1
    assert log[-1] == "error: the engine's process has ended: it was killed by SIGKILL"
    assert sum("SIGKILL" in line for line in log) == 1
    assert not any("storing KV" in line or "Traceback" in line for line in log)
    assert not any(map(lives, processes))


FAILING_ENGINE = """
import atexit, os, sys, time
if any("engine_main" in argument for argument in sys.orig_argv):
    from sidestream.engine.loop import StepLoop
    step = StepLoop.step
    def failing(loop):
        if os.path.exists({flag!r}):
            raise RuntimeError("injected")
        return step(loop)
    StepLoop.step = failing
    atexit.register(time.sleep, 5.0)
"""


def test_a_failed_engine_stores_its_kv_ends_the_server_and_is_its_last_log_line(tiny: Path, tmp_path: Path) -> None:
    """The API process has lost its engine, and ends after two seconds; the engine's process takes five. Meanwhile no
    other API process starts.
    """
    flag, kv = tmp_path / "fail", tmp_path / "kv"
    (tmp_path / "sitecustomize.py").write_text(FAILING_ENGINE.format(flag=str(flag)))
    tiers = ("--offload-disk", kv, "--offload-host", "8MiB", "--offload-write-policy", "all")
    with (
        serving(tiny, "--api-processes", 1, *tiers, faults=tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
    ):
        stream = server.stream()
        until(lambda: len(stream.events) > 40)  # more than a block is complete
        flag.touch()
        assert stream.ended.get(timeout=WAIT_S).startswith("internal error; the server's log has it under")
        health = until(lambda: (reply := client.get("/health")).status_code == 503 and reply.json())
        assert health == {"status": "failed", "detail": "RuntimeError: injected"}
        status, log = server.end()
    assert status == 1
    assert log[-1] == "error: the engine's process has ended: the engine failed: RuntimeError: injected"
    assert sum("the engine failed and stops serving" in line for line in log) == 1
    assert not any("another one starts" in line for line in log)
    (directory,) = find_directories(kv)
    assert Inspection(directory).verify().good > 0


HANGING_END = """
import sys, threading
if any("engine_main" in argument for argument in sys.orig_argv):
    from sidestream.engine.loading import LoadedEngine
    LoadedEngine.close = lambda engine, drain_s: threading.Event().wait()
"""


def test_a_second_signal_while_kv_is_stored_ends_all_processes(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING_END)
    with serving(tiny, "--api-processes", 1, faults=tmp_path) as server:
        assert server.url
        processes = [server.engine, *server.apis]
        server.process.send_signal(signal.SIGINT)
        until(lambda: any(line.endswith("stopping; interrupt again to quit at once") for line in server.log))
        until(lambda: any(line.endswith("closing") for line in server.log))
        server.process.send_signal(signal.SIGTERM)
        status, log = server.end()
    assert status == 128 + signal.SIGTERM
    assert log[-1].endswith("CRITICAL quit at once")
    assert not any(map(lives, processes))


HANGING_ENGINE = """
import os, sys
if any(argument == "serve" for argument in sys.orig_argv):
    from sidestream.client import process
    process._SILENCE_S = 0.5
"""


def test_a_stopped_engine_process_is_noticed_and_delays_shutdown_only_briefly(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING_ENGINE)
    options = ("--api-processes", 1, "--watchdog-timeout", 1)
    with (
        serving(tiny, *options, faults=tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
    ):
        connection = server.connect()
        assert metrics(connection)["metrics_age_seconds"] < 1
        engine, stalled = server.engine, f"the engine's process has not answered for more than 1 s ({WATCHDOG_OPTION})"
        os.kill(engine, signal.SIGSTOP)
        health = until(lambda: (reply := client.get("/health")).status_code == 503 and reply.json())
        assert health == {"status": "stalled", "detail": stalled}
        assert metrics(connection)["metrics_age_seconds"] > 1
        refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "Hello"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, f"the engine is stalled: {stalled}")
        until(lambda: any(stalled in line for line in server.log))
        os.kill(engine, signal.SIGCONT)
        until(lambda: client.get("/health").status_code == 200)
        until(lambda: any(line.endswith("it answers again") for line in server.log))
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        status, log = server.end()
    assert status == 1
    assert log[-1] == (
        "error: the engine's process ended before it stored all complete blocks: "
        "it did not answer for 0.5 s and was killed"
    )
    assert not lives(engine)


HANGING_END_IN_ONE_PROCESS = """
import sys, threading
if "--single-process" in sys.orig_argv:
    from sidestream.engine import Engine
    from sidestream.processes import child
    child.CLOSE_S = 0.5
    Engine.close = lambda engine, drain_s: threading.Event().wait()
"""


def test_a_single_process_ends_after_a_bound_if_its_engine_does_not_close(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING_END_IN_ONE_PROCESS)
    with serving(tiny, "--single-process", faults=tmp_path) as server:
        assert server.url
        server.process.send_signal(signal.SIGTERM)
        status, log = server.end()
    assert status == 1
    assert "error: the engine did not close within 0.5 s, because thread sidestream-engine hangs" in log[-1]


def test_api_processes_share_responses_and_a_killed_supervisor_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving(tiny, "--api-processes", 2) as server:
        assert server.url
        connections = [server.connect(pid) for pid in until(lambda: len(server.apis) == 2 and server.apis)]
        previous = None
        for connection in [*connections, *connections]:
            body = {"model": "tiny", "input": "hi", "max_output_tokens": 2, "previous_response_id": previous}
            connection.request("POST", "/v1/responses", json.dumps(body), {"content-type": "application/json"})
            response = json.loads(connection.getresponse().read())
            previous = response["id"]
        (directory,) = tmp_path.glob("sidestream-responses-*")
        assert (directory.stat().st_mode & 0o777, len(list(directory.iterdir()))) == (0o700, 4)
        server.stream()
        processes = [server.engine, *server.apis]
        server.process.kill()
        until(lambda: not directory.exists(), within_s=10.0)
        until(lambda: not any(map(lives, processes)), within_s=10.0)


def test_limits_of_a_key_hold_for_all_api_processes_and_outlive_one(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "secret"\nrequests_per_minute = 3\n')
    with serving(tiny, "--api-processes", 2, "--api-keys", keys) as server:
        assert server.url
        pids = until(lambda: len(server.apis) == 2 and server.apis)
        headers = {"content-type": "application/json", "x-api-key": "secret"}

        def ask(pid: int) -> int:
            connection = server.connect(pid)
            connection.request("POST", "/tokenize", json.dumps({"prompt": "hi"}), headers)
            reply = connection.getresponse()
            reply.read()
            return reply.status

        assert [ask(pid) for pid in (*pids, *pids)] == [200, 200, 200, 429]
        os.kill(pids[0], signal.SIGKILL)
        (successor,) = until(lambda: set(server.apis) - set(pids))
        until(lambda: len([line for line in server.log if "serving on" in line]) == 3)
        assert ask(successor) == 429


def test_a_batch_goes_on_after_kills_of_an_api_process_and_of_the_server(tiny: Path, tmp_path: Path) -> None:
    options = ("--api-processes", 2, "--batch-directory", tmp_path)
    bodies = [{"model": "tiny", "prompt": f"prompt {n}", "max_tokens": 300, "ignore_eos": True} for n in range(80)]
    asked = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": b} for n, b in enumerate(bodies)]

    def count() -> int:
        return sum(path.read_bytes().count(b"\n") for path in (tmp_path / "batches").glob("*.answers"))

    def runs(pid: int) -> bool:
        return any(str(file.readlink()).endswith(".answers") for file in Path(f"/proc/{pid}/fd").iterdir())

    with serving(tiny, *options) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        files = {"file": "\n".join(map(json.dumps, asked)).encode()}
        file = client.post("/v1/files", data={"purpose": "batch"}, files=files).json()
        batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        name = client.post("/v1/batches", json=batch).json()["id"]
        first = until(count)
        (runner,) = filter(runs, server.apis)
        os.kill(runner, signal.SIGKILL)
        second = until(lambda: (found := count()) > first and found)
    assert first < second <= count() < len(asked)
    with serving(tiny, *options) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        ended = until(lambda: (one := client.get(f"/v1/batches/{name}").json())["status"] == "completed" and one)
        found = client.get(f"/v1/files/{ended['output_file_id']}/content").content.splitlines()
    assert sorted(int(json.loads(line)["custom_id"]) for line in found) == list(range(len(asked)))


def test_a_signal_during_startup_ends_all_processes(tiny: Path) -> None:
    with serving(tiny, "--api-processes", 2) as server:
        until(lambda: children(server.process.pid, "engine_main"))
        processes = [server.engine, *server.apis]
        server.process.send_signal(signal.SIGTERM)
        ended, log = server.end()
    assert ended == 128 + signal.SIGTERM
    assert not any("Traceback" in line or "error" in line for line in log)
    assert len(processes) == 3
    until(lambda: not any(map(lives, processes)), within_s=10.0)


ALL_API_PROCESSES_BUT_ONE_HANG = """
import os, sys, threading
if any("api_process" in argument for argument in sys.orig_argv):
    from sidestream.processes import child
    end_with_owner = child.end_with_owner
    def hanging(descriptor):
        end_with_owner(descriptor)
        try:
            os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            threading.Event().wait()
    child.end_with_owner = hanging
"""


def test_a_signal_between_the_starts_of_api_processes_drains(tiny: Path, tmp_path: Path) -> None:
    """A shell ignores SIGINT in all background jobs of a script."""
    (tmp_path / "sitecustomize.py").write_text(ALL_API_PROCESSES_BUT_ONE_HANG.format(flag=str(tmp_path / "first")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with serving(tiny, "--api-processes", 2, faults=tmp_path) as server:
        until(lambda: any("serving on" in line for line in server.log))
        server.process.send_signal(signal.SIGINT)
        status, log = server.end()
    assert status == 0
    assert any("draining 0 requests" in line for line in log)
    assert any("all requests have finished" in line for line in log)


OWNER = """
from sidestream import AsyncLLM
AsyncLLM({model!r}, kv_memory="32MiB", compute_threads=1)
"""


def test_no_engine_outlives_a_killed_owner_even_one_that_still_imports(tiny: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER.format(model=str(tiny))]) as owner:
        (engine,) = until(lambda: owner.poll() or children(owner.pid, "engine_main"))
        owner.kill()
        until(lambda: not lives(engine), within_s=20.0)


class _Engine:
    """As an EngineProcess to a supervisor; nothing is behind its connections."""

    def __init__(self, ended: str | None = None, *, closed_itself: bool = False) -> None:
        self._ended, self._closed_itself = ended, closed_itself

    def ended(self) -> str | None:
        return self._ended

    def closed_itself(self) -> bool:
        return self._closed_itself

    def failure(self) -> str:
        return "a step failed"

    def attach(self) -> socket.socket:
        if self._ended is not None:
            raise EngineStopped("it has ended")
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours


@contextlib.contextmanager
def _supervisor(count: int) -> Iterator[Supervisor]:
    options = ServerOptions(port=0)
    with Supervisor(
        bind_shared(bind(options), count), options, log_level=30, log_format=("%(message)s", "")
    ) as supervisor:
        yield supervisor


NO_API_PROCESS = """
import os, sys
if any("api_process" in argument for argument in sys.orig_argv):
    os.write(2, b"a try")
    os._exit(3)
"""


def test_api_processes_that_cannot_start_end_the_server_after_three_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_API_PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = "API processes ended 3 times soon after their start: it exited with status 3; its messages are above"
    with _supervisor(1) as supervisor, pytest.raises(ProcessFailed, match=said):
        supervisor.run(_Engine(), on_ready=lambda running: None)  # type: ignore[arg-type]
    assert capfd.readouterr().err.count("a try") == 3


def test_a_failed_engine_that_does_not_end_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_API_PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("sidestream.server.supervisor._EXIT_S", 0.2)
    with (
        _supervisor(1) as supervisor,
        pytest.raises(ProcessFailed, match="the engine failed, and its process does not end: a step failed"),
    ):
        supervisor.run(_Engine(closed_itself=True), on_ready=lambda running: None)  # type: ignore[arg-type]
    assert capfd.readouterr().err.count("a try") == 1


def test_an_engine_that_ends_before_api_processes_serve_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.server.supervisor.GRACE_S", 0.1)
    with (
        _supervisor(2) as supervisor,
        pytest.raises(ProcessFailed, match="the engine's process has ended: it was killed by SIGKILL"),
    ):
        supervisor.run(_Engine("it was killed by SIGKILL"), on_ready=lambda running: None)  # type: ignore[arg-type]


def test_a_port_bound_by_processes_that_do_not_listen_yet_is_in_use() -> None:
    for reuse in (0, 1):  # 1: connections of an earlier server were still there
        first = socket.socket()
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        first.bind(("127.0.0.1", 0))
        with contextlib.ExitStack() as sockets:
            for one in bind_shared(first, 3):
                sockets.enter_context(one)
            with pytest.raises(Exception, match="another program listens there"):
                bind(ServerOptions(port=first.getsockname()[1]))


def test_an_api_process_does_not_load_torch(shared: Server) -> None:
    def has_torch(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    assert has_torch(shared.engine)
    assert not any(map(has_torch, shared.apis))
