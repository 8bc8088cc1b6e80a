"""`sidestream top` from a recorded stream: what it prints, what it says when there is none, and how it ends.

`live_stream.txt` has three samples of a server of the demo model with `--kv-memory 24MiB --offload-host 200MiB
--speculative ngram`, while a prompt came back from host memory.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_runner import Run
from rich.console import Console

from sidestream.cli.top_view import Screen, seconds, size_of

STREAM = (Path(__file__).parent / "live_stream.txt").read_bytes()
SAMPLES = [json.loads(line.removeprefix(b"data: ")) for line in STREAM.splitlines() if line]
WAIT_S = 30.0


class Server(ThreadingHTTPServer):
    """Answers every request alike. `asked`: path and key of each."""

    daemon_threads = True

    def __init__(self, body: bytes, status: int, kind: str) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.body, self.status, self.kind = body, status, kind
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["authorization"]))
        self.send_response(self.server.status)
        self.send_header("content-type", self.server.kind)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(self.server.body)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def replaying(body: bytes = STREAM, status: int = 200, kind: str = "text/event-stream") -> Iterator[Server]:
    with Server(body, status, kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def picture(*samples: dict[str, Any], width: int = 100) -> str:
    console, screen = Console(width=width), Screen("http://x")
    for sample in samples:
        screen.add(sample)
    with console.capture() as shown:
        console.print(screen)
    return shown.get()


def test_one_sample_is_printed_as_text(run: Run) -> None:
    with replaying() as server:
        result = run("top", server.url, "--once")
    assert result.exit_code == 0
    for part in (
        f"smollm2-135m-instruct  {server.url}  ok",
        "0 running, 0 waiting, ended: 4 length",
        "24 MiB of 24 MiB",
        "of 200 MiB",
        "wait 409 ms",
        "ngram: accept length 3.00, 21 of 33 accepted",
        "48 prompt tokens, 1.1 MiB of KV, about 214 ms of prefill",
    ):
        assert part in result.output, part


def test_one_sample_is_printed_as_json(run: Run) -> None:
    with replaying() as server:
        result = run("top", server.url, "--json")
    assert (result.exit_code, json.loads(result.output)) == (0, SAMPLES[0])


def test_the_stream_is_asked_for_below_the_servers_prefix_with_the_key(run: Run) -> None:
    with replaying() as server:
        run("top", f"{server.url}/llm/v1", "--json", "--api-key", "k")
        run("top", server.url.removeprefix("http://"), "--json")
        assert server.asked == [("/llm/metrics/stream", "Bearer k"), ("/metrics/stream", None)]


@pytest.mark.parametrize(
    ("status", "kind", "body", "said"),
    [
        (401, "application/json", b"{}", "refused the key: give --api-key, or set SIDESTREAM_API_KEY"),
        (404, "application/json", b"{}", "has no live figures (status 404 for /metrics/stream): it is another kind"),
        (200, "text/html", b"<html>", "or was started with --no-page"),
        (503, "application/json", b'{"error": {"message": "32 viewers watch"}}', "32 viewers watch"),
        (200, "text/event-stream", b"", "has ended the stream"),
        (200, "text/event-stream", b"data: {not JSON\n\n", "sends no live figures of this version"),
        (200, "text/event-stream", b'data: {"error": {"message": "it drains"}}\n\n', "it drains"),
        (200, "text/event-stream", b'data: {"health": {"status": "failed"}}\n\n', "the engine is failed"),
    ],
)
def test_a_server_without_the_stream_is_named_in_one_line(
    run: Run, status: int, kind: str, body: bytes, said: str
) -> None:
    with replaying(body, status, kind) as server:
        result = run("top", server.url, "--once")
    assert result.exit_code == 2 and said in result.output and server.url in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://x", "'ftp://x' is no URL of a server: give one such as http://127.0.0.1:8000"),
        ("http://x:99999", "is no URL of a server"),
        ("http://[::1", "is no URL of a server"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9 does not answer"),
    ],
)
def test_a_wrong_url_is_refused(run: Run, url: str, said: str) -> None:
    result = run("top", url, "--once")
    assert result.exit_code == 2 and said in result.output


def test_without_a_terminal_one_of_the_options_for_one_sample_is_asked_for(run: Run) -> None:
    result = run("top", "http://127.0.0.1:9")
    assert result.exit_code == 2 and "give --once for one sample, or --json" in result.output


@contextmanager
def at_a_terminal(server: Server) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The command at a pseudo-terminal: our end of it, and the process."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "sidestream", "top", server.url]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as child:
        os.close(theirs)
        try:
            yield ours, child
        finally:
            child.kill()
            os.close(ours)


def _read_until(descriptor: int, pattern: str) -> str:
    shown, deadline = "", time.monotonic() + WAIT_S
    while re.search(pattern, shown) is None:
        assert time.monotonic() < deadline and select.select([descriptor], [], [], WAIT_S)[0], shown[-4000:]
        shown += os.read(descriptor, 4096).decode("utf-8", "replace")
    return shown


def test_the_screen_waits_for_a_server_that_ended_and_ctrl_c_restores_the_terminal() -> None:
    with replaying() as server, at_a_terminal(server) as (terminal, child):
        seen = _read_until(terminal, "not connected: .* has ended")
        assert "\x1b[?1049h" in seen and "1 running" in seen
        _read_until(terminal, "  ok ")  # it has connected again
        child.send_signal(signal.SIGINT)
        _read_until(terminal, r"\x1b\[\?1049l")
        assert child.wait(WAIT_S) == 130


def test_the_screen_ends_when_the_server_begins_to_refuse_the_key() -> None:
    with replaying() as server, at_a_terminal(server) as (terminal, child):
        _read_until(terminal, "not connected: .* has ended")
        server.status = 401
        seen = _read_until(terminal, "error: ")
        assert "\x1b[?1049l" in seen and child.wait(WAIT_S) == 2


def _with_spans(spans: list[Any], now_us: int = 10_000_000) -> dict[str, Any]:
    return SAMPLES[0] | {"timeline": {"now_us": now_us, "spans": spans}}


def _line(shown: str, name: str) -> str:
    return next(line for line in shown.splitlines() if line.startswith(name))[13:]


def test_a_track_shows_how_busy_its_stream_was() -> None:
    spans = [["compute", "decode 1", 6_000_000, 2_000_000], ["load-0", "load 4 blocks", 9_000_000, 10]]
    waits = [["engine", "wait for the step", 6_000_000, 4_000_000]]
    shown = picture(_with_spans([*spans, *waits]), width=93)
    assert _line(shown, "compute").rstrip() == "█" * 40
    assert _line(shown, "load").rstrip() == " " * 60 + "▁"
    assert not _line(shown, "engine").strip()


def test_spans_of_a_server_before_its_restart_are_not_shown() -> None:
    old = [["compute", "decode 1", 6_000_000, 4_000_000]]
    shown = picture(_with_spans(old), _with_spans([], 1_000_000), _with_spans([], 10_000_000))
    assert "█" not in _line(shown, "compute")


def test_a_mean_that_is_not_measured_now_stays_the_last_one() -> None:
    idle = SAMPLES[0] | {"last": dict.fromkeys(SAMPLES[0]["last"], None)}
    assert "first token after 2.4 s" in picture(SAMPLES[0], idle)


def test_figures_of_an_engine_that_does_not_answer_are_marked_with_their_age() -> None:
    assert "the engine does not answer: figures of 7.0 s ago" in picture(SAMPLES[0] | {"age_s": 7.0})


def test_a_reason_of_the_health_is_shown() -> None:
    health = {"status": "ok", "detail": "disk: no space left", "paused": False}
    assert "ok, disk: no space left" in picture(SAMPLES[0] | {"health": health})


def test_values_are_shown_with_units_of_their_size() -> None:
    assert [seconds(value) for value in (None, 0.0, 2.5e-5, 0.0421, 3.25)] == [
        "–",
        "0.0 s",
        "25 µs",
        "42.1 ms",
        "3.2 s",
    ]
    assert [size_of(value) for value in (0, 1500, 20 << 20, 3 << 30)] == ["0 B", "1.5 KiB", "20 MiB", "3.0 GiB"]


def test_a_tier_shows_what_its_loads_saved_and_lost_and_that_it_is_turned_down() -> None:
    disk = {"blocks": 7, "bytes": 0, "room_bytes": None, "works": True}
    disk |= {"saved_s": 12.0, "lost_s": 1.5, "turned_down": True}
    shown = picture(SAMPLES[0] | {"tiers": {"disk": disk}}, width=140)
    assert "7 blocks; turned down; saved 12.0 s, lost 1.5 s" in shown
