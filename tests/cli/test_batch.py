"""A file of requests in OpenAI's batch format, its answers, and the second run after the first one's end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_runner import Run

from proof.fake_backend import FakeBackend, Script
from sidestream.errors import ConfigError, EngineStopped, InvariantError, QueueFull
from sidestream.server import ServerOptions
from sidestream.server.batch_files import Answers, read_requests
from sidestream.types import Health

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


class Engine(FakeBackend):
    """Stands for an AsyncLLM."""

    def __init__(self, *script: Script | Callable[[str], Script]) -> None:
        super().__init__(*script)
        self.room, self.closed = 1024 + 4, False

    async def close(self) -> None:
        self.closed = True

    async def _hold(self, request_name: str) -> None:
        with contextlib.suppress(TimeoutError):  # after it, the request is answered, and its test fails
            await asyncio.wait_for(super()._hold(request_name), 10)


class Files:
    """The command's two files, and runs of the command with an engine."""

    def __init__(self, directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.target = directory / "in.jsonl", directory / "out.jsonl"
        self._run, self._monkeypatch = run, monkeypatch

    def ask(self, *bodies: dict[str, Any], url: str = "/v1/completions") -> None:
        """Add requests `0`, `1`, …"""
        with self.source.open("a", encoding="utf-8") as file:
            for number, body in enumerate(bodies, self.source.read_text().count("\n")):
                file.write(json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body}) + "\n")

    def answer(self, engine: Engine | None, *options: object) -> Any:
        def start(kind: str, *arguments: object, **more: object) -> Engine:
            assert engine is not None, "an engine was started"
            return engine

        self._monkeypatch.setattr("sidestream.cli.batch_sending.start", start)
        self._monkeypatch.setattr("sidestream.cli.batch_sending.prepare_model", lambda model: None)
        return self._run("batch", self.source, self.target, *options)

    def answers(self) -> dict[str, dict[str, Any]]:
        """The answers by id; each line has one, and no id has two."""
        lines = [json.loads(line) for line in self.target.read_text(encoding="utf-8").splitlines(keepends=True)]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines) == len({line["id"] for line in lines})
        return found


@pytest.fixture
def files(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Files:
    made = Files(tmp_path, run, monkeypatch)
    made.source.touch()
    return made


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"model": "fake", "prompt": f"prompt {number}"} for number in range(count)]


def test_every_endpoint_answers_as_the_server_does_errors_included(files: Files) -> None:
    files.ask(CHAT, {**CHAT, "model": "gpt-4o"}, {**CHAT, "bogus": 1}, url="/v1/chat/completions")
    files.ask({"model": "fake", "prompt": "Hi"})
    files.ask({"model": "fake", "input": "Hi"}, url="/v1/responses")
    files.ask({**CHAT, "max_tokens": 5}, url="/v1/messages")
    files.ask({**CHAT, "stream": True}, url="/v1/chat/completions")
    files.ask(CHAT, url="/pause")
    result = files.answer(engine := Engine())
    found = files.answers()
    statuses = [found[str(number)]["response"]["status_code"] for number in range(6)]
    assert (result.exit_code, statuses, engine.closed) == (0, [200, 404, 400, 200, 200, 200], True)
    assert found["0"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello, world"
    assert found["0"]["response"]["request_id"].startswith("req-")
    assert found["1"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert found["5"]["response"]["body"]["type"] == "message"
    assert [found[name]["error"]["code"] for name in ("6", "7")] == ["invalid_request", "invalid_url"]
    assert f"{files.target} has all 8 answers; 4 are errors" in result.output


def test_answered_requests_are_not_asked_again_and_a_cut_line_is(files: Files) -> None:
    files.ask(*prompts(3))
    files.answer(Engine())
    lines = files.target.read_bytes().splitlines(keepends=True)
    cut = json.loads(lines[2])["custom_id"]
    for end in (3, len(lines[2]) - 1):
        files.target.write_bytes(b"".join(lines[:2]) + lines[2][:end])
        result = files.answer(engine := Engine())
        assert engine.prompts == [f"prompt {cut}"]
        assert f"{files.target} has all 3 answers, 2 of them from an earlier run; 0 are errors" in result.output
        assert set(files.answers()) == {"0", "1", "2"}
    before = files.target.read_bytes()
    assert files.answer(None).exit_code == 0  # nothing is left, so no engine starts
    assert files.target.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"custom_id": "0", "url"', "line 2 is not a request with a custom_id"),
        (b'{"url": "/v1/completions"}', "line 2 is not a request with a custom_id"),
        (b'{"custom_id": ""}', "line 2: custom_id is empty"),
        (b'{"custom_id": "0"}', "line 2: custom_id '0' is given twice"),
        (b'{"custom_id": "a\xff"}', "line 2 is not a request with a custom_id"),
    ],
)
def test_lines_without_their_own_id_are_refused_before_the_start(files: Files, line: bytes, said: str) -> None:
    files.ask(*prompts(1))
    files.source.write_bytes(files.source.read_bytes() + line)
    result = files.answer(None)
    assert (result.exit_code, files.target.exists()) == (2, False)
    assert said in result.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a precious text", "line 1 is not an answer of a batch"),
        ('{"custom_id": "0"}\n', "line 1 is not an answer of a batch"),
        ('{"custom_id": "of another file", "response": null}\n', "answers 'of another file', which is not asked"),
        ('{"custom_id": "0", "response": null}\n' * 2, "line 2 answers '0', which is not asked, or answered above"),
    ],
)
def test_a_file_with_anything_but_answers_is_refused_unchanged(files: Files, text: str, said: str) -> None:
    files.ask(*prompts(1))
    files.target.write_text(text)
    result = files.answer(None)
    assert (result.exit_code, files.target.read_text()) == (2, text)
    assert said in result.output


def test_a_second_command_with_the_same_answers_is_refused(files: Files) -> None:
    files.ask(*prompts(1))
    with Answers(files.target):
        result = files.answer(None)
    assert (result.exit_code, files.target.read_bytes()) == (2, b"")
    assert "is written by another command" in result.output


def test_a_full_disk_ends_the_command_and_leaves_whole_lines(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.ask(*prompts(4))
    write, left = os.write, [1000]

    def limited(file: int, data: bytes) -> int:
        if os.fstat(file).st_ino != files.target.stat().st_ino:
            return write(file, data)
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    result = files.answer(engine := Engine())
    kept = len(files.answers())
    assert (result.exit_code, 0 < kept < 4, engine.closed) == (2, True, True)
    assert f"cannot be written: No space left on device; it keeps its {kept} answers" in result.output
    monkeypatch.undo()
    assert files.answer(again := Engine()).exit_code == 0
    assert len(again.prompts) == 4 - kept
    assert len(files.answers()) == 4


@pytest.mark.parametrize("failure", [EngineStopped("lost"), InvariantError("lost")])
def test_a_failed_engine_ends_the_command_and_answers_nothing(
    files: Files, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidestream.cli.batch_sending._PAUSES_S", (0,))
    files.ask(*prompts(3))

    def script(prompt: str) -> Script:
        if prompt == "prompt 0":
            return Script()
        engine.status = Health("failed", "its process was killed")
        return Script(refuse=failure)

    engine = Engine(script)
    result = files.answer(engine, "--concurrency", 1)
    assert (result.exit_code, set(files.answers())) == (1, {"0"})
    assert "its process was killed" in result.output
    assert "run the same command again" in result.output


def test_an_engine_that_hangs_ends_the_command(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.cli.batch_sending._HEALTH_EVERY_S", 0.01)
    files.ask(*prompts(1))
    engine = Engine(Script(hold_after=1))
    engine.status = Health("stalled", "no answer for 120 s")
    result = files.answer(engine)
    assert (result.exit_code, files.target.read_bytes(), len(engine.aborted)) == (1, b"", 1)
    assert "no answer for 120 s" in result.output


def test_a_request_that_a_busy_engine_refuses_is_sent_again(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.cli.batch_sending._PAUSES_S", (0, 0, 0))
    files.ask(*prompts(2))
    refused: list[str] = []

    def script(prompt: str) -> Script:
        if prompt == "prompt 0" and len(refused) < 2:
            refused.append(prompt)
            return Script(refuse=QueueFull("full"))
        return Script(refuse=QueueFull("full")) if prompt == "prompt 1" else Script()

    files.answer(engine := Engine(script))
    statuses = {name: line["response"]["status_code"] for name, line in files.answers().items()}
    assert statuses == {"0": 200, "1": 429}
    assert engine.prompts.count("prompt 1") == 3


def test_an_interrupt_aborts_requests_and_tells_how_to_go_on(files: Files) -> None:
    files.ask(*prompts(3))

    def script(prompt: str) -> Script:
        if prompt == "prompt 2":
            os.kill(os.getpid(), signal.SIGINT)
            return Script(hold_after=1)
        return Script()

    engine = Engine(script)
    result = files.answer(engine, "--concurrency", 1)
    assert (result.exit_code, len(engine.aborted), engine.closed) == (130, 1, True)
    assert "interrupted: " in result.output
    assert "has 2 of 3 answers; run the same command again" in result.output
    assert set(files.answers()) == {"0", "1"}


def test_a_few_more_requests_than_the_engine_runs_are_read_at_once(files: Files) -> None:
    files.ask(*prompts(30))
    engine = Engine(Script(hold_after=1))
    original, most = engine._hold, []

    async def hold(name: str) -> None:
        most.append(len(engine.prompts))
        if len(most) == 8:
            engine.release()
        if len(most) < 8:
            await original(name)

    engine._hold = hold  # type: ignore[method-assign]
    assert files.answer(engine).exit_code == 0
    assert most[7] == 8  # four slots and four requests that wait: the others were not sent before one had ended
    assert len(files.answers()) == 30


def test_a_file_of_requests_is_read_as_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a"}\n\nnot a request\n')
    requests = read_requests(tmp_path / "in.jsonl")
    assert next(requests)[1].custom_id == "a"
    with pytest.raises(ConfigError, match="line 3 is not a request"):
        next(requests)


@pytest.fixture
def served() -> Iterator[tuple[FakeBackend, str]]:
    """A server with a key in a thread. Its engine answers ten requests and holds the others."""
    import queue
    import threading

    from sidestream.server import RunningServer, serve

    backend = FakeBackend(lambda prompt: Script(hold_after=None if len(backend.prompts) <= 10 else 1))
    ready: queue.Queue[RunningServer] = queue.Queue()
    options = ServerOptions(port=0, api_key="secret", drain_s=1.0)
    thread = threading.Thread(target=serve, args=(backend, options), kwargs={"on_ready": ready.put}, daemon=True)
    thread.start()
    running = ready.get(timeout=60)
    yield backend, running.url
    running.stop()
    thread.join(60)


def test_a_killed_command_goes_on_where_it_was(files: Files, served: tuple[FakeBackend, str]) -> None:
    backend, url = served
    files.ask(*prompts(24))
    command = [sys.executable, "-m", "sidestream", "batch", str(files.source), str(files.target), "--url", f"{url}/v1"]
    with subprocess.Popen([*command, "--api-key", "secret", "--concurrency", "4"]) as child:
        try:
            backend.wait_until(lambda engine: len(engine.held) == 4, timeout_s=60)
        finally:
            child.kill()
    assert len(files.answers()) == 10
    backend.wait_until(lambda engine: len(engine.aborted) == 4)
    backend.prompts.clear()
    backend._script = lambda prompt: Script()
    assert files.answer(None, "--url", url, "--api-key", "secret").exit_code == 0
    assert len(backend.prompts) == 14
    assert len(files.answers()) == 24


def test_a_request_whose_connection_is_lost_is_sent_again(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.cli.batch_sending._PAUSES_S", (0, 0))
    files.ask(*prompts(1))
    post, lost = httpx.AsyncClient.post, [True]

    async def unreliable(self: httpx.AsyncClient, *arguments: Any, **more: Any) -> httpx.Response:
        if lost and lost.pop():
            raise httpx.ReadError("reset")
        return await post(self, *arguments, **more)

    monkeypatch.setattr(httpx.AsyncClient, "post", unreliable)
    assert files.answer(Engine()).exit_code == 0
    assert files.answers()["0"]["response"]["status_code"] == 200


def test_a_server_that_refuses_or_is_gone_answers_nothing(files: Files, served: tuple[FakeBackend, str]) -> None:
    files.ask(*prompts(2))
    wrong_key = files.answer(None, "--url", served[1], "--api-key", "guess")
    gone = files.answer(None, "--url", "http://127.0.0.1:1")
    assert (wrong_key.exit_code, gone.exit_code, files.target.read_bytes()) == (2, 1, b"")
    assert "missing or wrong API key" in wrong_key.output
    assert "http://127.0.0.1:1 does not answer" in gone.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--concurrency", "0"), "--concurrency is 0: give a whole number in [1, 4096]"),
        (("--url", "localhost:8000"), "--url is 'localhost:8000' (no scheme or no host): give one such as http://"),
        (("--url", "http://x:99999"), "--url is 'http://x:99999' (its port is 99999, not 1 to 65535): give one such"),
        (("--url", "http://x", "--kv-memory", "1GiB"), "--url is given with a model or options of an engine"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(files: Files, options: tuple[str, ...], said: str) -> None:
    files.ask(*prompts(1))
    result = files.answer(None, *options)
    assert result.exit_code == 2
    assert said in result.output


def test_files_of_requests_that_cannot_be_read_twice_are_refused(run: Run, tmp_path: Path) -> None:
    for source, said in (("/dev/null", "is not a regular file"), (tmp_path / "none", "cannot be read: No such file")):
        result = run("batch", source, tmp_path / "out.jsonl")
        assert (result.exit_code, said in result.output) == (2, True)


@pytest.mark.slow
def test_a_killed_engine_loses_no_answer(tiny: Path, files: Files) -> None:
    body = {"model": tiny.name, "prompt": "Call me", "max_tokens": 200, "ignore_eos": True}
    files.ask(*[body] * 8)
    command = [sys.executable, "-m", "sidestream", "batch", files.source, files.target, tiny]
    command += ["--kv-memory", "32MiB", "--threads", "1", "--max-running", "2", "--concurrency", "2"]
    with subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True) as child:
        try:
            while not (files.target.exists() and files.target.read_bytes().count(b"\n") >= 2):
                assert child.poll() is None
                time.sleep(0.02)  # beside the process that is waited for
            (engine,) = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
            os.kill(int(engine), signal.SIGKILL)
            _, log = child.communicate(timeout=150)
        finally:
            child.kill()
    assert (child.returncode, 2 <= len(files.answers()) < 8) == (1, True)
    assert "the engine's process has ended: it was killed by SIGKILL" in log
    assert subprocess.run([str(part) for part in command], check=False).returncode == 0
    assert [line["response"]["status_code"] for line in files.answers().values()] == [200] * 8
