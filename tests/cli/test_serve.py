"""The server as a process: what it says, and how it ends."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from command_runner import WAIT_S, Run, serving

from proof.disk_slots import DiskSlots

pytestmark = pytest.mark.slow


def _check_example(lines: list[str]) -> None:
    """The command that it prints asks this server."""
    example = " ".join(lines[1:]).replace("\\ ", "")
    shown = subprocess.run(example, shell=True, capture_output=True, text=True, check=True).stdout
    assert json.loads(shown)["model"] == "tiny"


def _chat(**fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Call me Ishmael. " * 4}]
    return {"model": "tiny", "messages": messages, "ignore_eos": True, **fields}


def test_an_interrupt_drains_and_stores_kv_and_timeline_and_all_log_json(tiny: Path, tmp_path: Path) -> None:
    kv, timeline = tmp_path / "kv", tmp_path / "timeline.json"
    options = ("--offload-disk", kv, "--offload-host", "8MiB", "--timeline", timeline, "--served-model-name", "tiny")
    with serving(tiny, *options, "--log-format", "json") as (child, client, lines):
        assert lines[0].startswith("tiny is ready at http://127.0.0.1:")
        _check_example(lines)
        assert client.post("/v1/chat/completions", json=_chat(max_tokens=8)).status_code == 200
        child.send_signal(signal.SIGINT)
        log = child.communicate(timeout=WAIT_S)[1]
        assert child.returncode == 0
    for event in ("loading", "serving on", "draining 0 requests", "all requests have finished", f"storing KV in {kv}"):
        assert event in log
    assert "stopped" in log
    assert DiskSlots(kv).slots
    assert json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]
    logged = [json.loads(line) for line in log.splitlines()]
    assert len({line["pid"] for line in logged}) == 3
    request = [line for line in logged if "request_id" in line][-1]
    assert (request["status"], request["output_tokens"], request["path"]) == (200, 8, "/v1/chat/completions")


def test_a_unix_socket_named_in_a_config_file_is_served_and_removed(tiny: Path, tmp_path: Path) -> None:
    path, config = tmp_path / "it's one", tmp_path / "serve.yaml"
    config.write_text(
        f'model: {tiny}\nuds: "{path}"\nkv-memory: 32MiB\nthreads: 1\nserved_model_name: tiny\nroot-path: /llm\n'
    )
    command = [sys.executable, "-m", "sidestream", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            lines = [child.stdout.readline().rstrip("\n") for _ in range(3)]
            assert lines[0] == f"tiny is ready at http://localhost, on the Unix socket {path}"
            _check_example(lines)
            child.send_signal(signal.SIGINT)
            log = child.communicate(timeout=WAIT_S)[1]
        finally:
            child.kill()
    assert (child.returncode, path.exists()) == (0, False)
    assert f"serving on http://localhost, Unix socket {path}" in log


def test_the_second_signal_aborts_running_requests(tiny: Path) -> None:
    options = ("--single-process", "--served-model-name", "tiny", "--drain-seconds", 3600, "--api-key", "k")
    key = {"Authorization": "Bearer k"}
    with (
        serving(tiny, *options) as (child, client, lines),
        client.stream("POST", "/v1/chat/completions", json=_chat(stream=True), headers=key) as reply,
    ):
        assert '-H "Authorization: Bearer $SIDESTREAM_API_KEY"' in lines[1]
        pieces = reply.iter_lines()
        next(pieces)
        child.send_signal(signal.SIGHUP)  # drains like SIGTERM
        _wait_for_line(child, "draining 1 requests")
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.RemoteProtocolError):
            list(pieces)
        assert child.wait(WAIT_S) == 0
        assert child.stderr is not None
        assert "unfinished requests were aborted" in child.stderr.read()


def _wait_for_line(child: subprocess.Popen[str], part: str) -> None:
    assert child.stderr is not None
    while part not in (line := child.stderr.readline()):
        assert line, f"the process ended without {part!r}"


def test_a_signal_while_kv_is_stored_ends_the_server_at_once() -> None:
    program = (
        "import functools, signal\n"
        "from sidestream.cli.serve import _quit_at_once\n"
        "from sidestream.processes.signals import on_stop_signal\n"
        "clean_up = lambda: print('cleaned up', flush=True)\n"
        "with on_stop_signal(functools.partial(_quit_at_once, clean_up)):\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('still here')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGTERM, "cleaned up\n", "quit at once\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", 70000), "--port is 70000: it must be a whole number in [0, 65535]"),
        (("--api-key", "a b"), "--api-key must be one or more printable ASCII characters"),
        (("--max-body", "big"), "--max-body is 'big': give a size"),
        (("--drain-seconds", -1), "--drain-seconds is -1.0: give a number of seconds, 0 or more"),
        (
            ("--uds", "/tmp/s", "--port", 8000),
            "--uds is '/tmp/s' and --port is 8000: give a Unix socket or an address, not both",
        ),
        (("--ssl-keyfile", "k"), "--ssl-keyfile is k without --ssl-certfile"),
        (("--max-hint-ttl", -1), "--max-hint-ttl is -1.0: give a number of seconds"),
        (("--watchdog-timeout", 0), "--watchdog-timeout is 0.0: give a number of seconds"),
        (("--stall-timeout", 0), "--stall-timeout is 0: no reply could be sent"),
        (("--max-connections", 0), "--max-connections is 0: it must be a whole number in [1, 1048576]"),
        (("--api-processes", 65), "--api-processes is 65: give a whole number in [1, 64]"),
        (("--api-processes", 0), "--api-processes is 0: give a whole number in [1, 64]"),
        (
            ("--api-processes", 2, "--single-process"),
            "--api-processes is 2 and --single-process is on: give only one of the two",
        ),
        (("--kv-events", "tcp://*"), "--kv-events is 'tcp://*': give tcp://ADDRESS:PORT"),
        (("--kv-events-replay", "tcp://*:1"), "--kv-events-replay is tcp://*:1, but no KV events are published"),
        (("--kv-events-topic", "kv"), "--kv-events-topic is kv, but no KV events are published"),
        (("--kv-events", "tcp://*:5557", "--kv-events-encoding", "maps"), "no encoding maps; did you mean map?"),
        (
            ("--allowed-origins", "*", "--allowed-origins", "http://a/"),
            "--allowed-origins has 'http://a/': give an origin as browsers send it",
        ),
        (("--served-model-name", "sql", "--lora-modules", "sql=DIR"), "'sql' is the model itself: give the adapter"),
    ],
)
def test_a_bad_option_is_refused_before_loading(run: Run, tiny: Path, options: tuple[object, ...], said: str) -> None:
    result = run("serve", tiny, *options)
    assert result.exit_code == 2
    assert said in result.output
    assert "loading" not in result.output


def test_an_address_that_cannot_be_bound_is_refused_before_loading(run: Run, tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = run("serve", tiny, "--port", port)
    foreign = run("serve", tiny, "--host", "192.0.2.1")
    for result, said in (
        (in_use, f"127.0.0.1:{port}: another program listens there: stop it, or choose another port"),
        (foreign, "192.0.2.1:8000: this machine does not have that address"),
    ):
        assert result.exit_code == 2
        assert f"cannot listen on {said}" in result.output
        assert "loading" not in result.output


def test_an_error_about_a_missing_extra_has_its_install_command(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sidestream.server

    monkeypatch.setattr(sidestream, "server", sidestream.server)  # put back after the test, with the modules
    for name in [name for name in sys.modules if name.startswith("sidestream.server")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ["starlette", *(name for name in sys.modules if name.startswith("starlette."))]:
        monkeypatch.setitem(sys.modules, name, None)
    result = run("serve", tiny)
    assert result.exit_code == 2
    assert "the server needs the package starlette: pip install 'sidestream[server]'" in result.output
