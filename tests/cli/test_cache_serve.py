"""`sidestream cache serve` as a process, with servers that are killed, and that outlive it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_runner import WAIT_S, Run, serving
from shared_rig import engines_of, running, wait_until

from sidestream_kv.offload.tiers.shared_memory import content_of

PROMPT = "Call me Ishmael. " * 8


@contextlib.contextmanager
def _cache_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sidestream", "cache", "serve", "--socket", str(path), "--host-memory", "16MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            assert f"listens at {path}" in child.stderr.readline()
            yield child
        finally:
            child.kill()


def _completion(client: httpx.Client) -> Any:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=asked).json()


def _host_tokens(reply: Any) -> int:
    tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["host"]
    return tokens


@pytest.mark.slow  # two servers and a cache process
def test_a_killed_engine_finds_its_host_tier_when_it_starts_again(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    options = ("--offload-host", "8MiB", "--offload-shared-memory", path, "--served-model-name", "tiny")
    with _cache_process(path) as cache:
        with serving(tiny, *options) as (server, client, _):
            first = _completion(client)
            assert _host_tokens(first) == 0
            wait_until(lambda: content_of(path)["memories"][0]["blocks"] >= len(PROMPT) // 17 - 1)
            (engine,) = engines_of(path)
            os.kill(engine, signal.SIGKILL)
            server.wait(WAIT_S)
        wait_until(lambda: not engines_of(path))
        with serving(tiny, *options) as (server, client, _):
            again = _completion(client)
            assert _host_tokens(again) > 0.8 * again["usage"]["prompt_tokens"]
            assert again["choices"][0]["text"] == first["choices"][0]["text"]
            cache.send_signal(signal.SIGTERM)
            assert cache.wait(WAIT_S) == 0
            assert not path.exists()
            assert _completion(client)["choices"][0]["text"] == first["choices"][0]["text"]
            server.send_signal(signal.SIGINT)
            assert "the cache process at" in server.communicate(timeout=WAIT_S)[1]
            assert server.returncode == 0


def test_stat_shows_what_a_cache_process_holds(run: Run, tmp_path: Path) -> None:
    with running(tmp_path / "cache", host_bytes=4096):
        assert run("cache", "stat", tmp_path / "cache").stdout == "most bytes: 4096\n"
        assert '"memories": []' in run("cache", "stat", tmp_path / "cache", "--json").stdout


def test_a_server_does_not_start_without_its_cache_process(run: Run, tiny: Path, tmp_path: Path) -> None:
    result = run("generate", tiny, "--prompt", "Hi", "--offload-shared-memory", tmp_path / "cache")
    assert result.exit_code == 2
    assert f"no cache process listens at {tmp_path / 'cache'}" in result.stderr
    several = run("generate", tiny, "-p", "Hi", "--offload-shared-memory", tmp_path, "--tensor-parallel", 2)
    assert "--offload-shared-memory cannot be used with 2 ranks" in several.stderr
