"""The audit log: its lines, and files that cannot be written."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from proof.fake_backend import QUEUE_S, FakeBackend, Script
from sidestream.errors import ConfigError
from sidestream.server import ServerOptions, audit, bind
from sidestream.types import CachedTokens

from .serving import serving, warned


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_request_has_one_line_without_its_texts(tmp_path: Path) -> None:
    file, keys = tmp_path / "audit.jsonl", tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "team"\nkey = "sk"\n')
    backend = FakeBackend(Script("secret answer", cached=CachedTokens(device=1, disk=3)))
    with serving(backend, audit_log=str(file), api_keys=str(keys)) as served:
        served.http.headers["authorization"] = "Bearer sk"
        assert served.text(prompt="secret prompt", max_tokens=5, request_id="r1").status_code == 200
        assert served.chat(stream=True, model="other").status_code == 404
        served.http.get("/health")
        served.http.headers["authorization"] = "Bearer wrong"
        assert served.http.get("/v1/models?a=1").status_code == 401
    first, second, third = lines(file)
    assert first.pop("queue_s") == QUEUE_S
    assert 0 < first.pop("ttft_s") <= first.pop("duration_s") and first.pop("time").endswith("+00:00")
    assert first == {
        "request_id": "r1",
        "key": "team",
        "method": "POST",
        "endpoint": "/v1/completions",
        "model": "fake",
        "status": 200,
        "outcome": "ok",
        "prompt_tokens": 13,
        "output_tokens": 5,
        "cached_tokens": {"device": 1, "host": 0, "disk": 3},
    }
    assert (second["status"], second["outcome"], second["ttft_s"]) == (404, "model_not_found", None)
    assert (third["key"], third["status"], third["endpoint"]) == (None, 401, "/v1/models")
    assert "secret" not in file.read_text() and file.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_fails_no_request_and_is_counted_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "audit.jsonl"
    with serving(audit_log=str(file)) as served:
        monkeypatch.setattr(audit, "open_audit_log", lambda path: os.open("/dev/full", os.O_WRONLY))
        assert [served.text().status_code for _ in range(3)] == [200] * 3
        until = time.monotonic() + 10
        while served.backend.metrics.value("audit_lines_lost_total") < 3 and time.monotonic() < until:
            served.http.get("/metrics")
        assert served.backend.metrics.value("audit_lines_lost_total") == 3
        monkeypatch.undo()
        served.text(request_id="later")
    assert [line["request_id"] for line in lines(file)] == ["later"]
    (said,) = [line for line in warned(caplog) if "--audit-log" in line]
    assert "No space left on device" in said


def test_a_file_that_was_moved_away_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with serving(audit_log=str(file)) as served:
        served.text()
        until = time.monotonic() + 10
        while not file.stat().st_size and time.monotonic() < until:
            time.sleep(0.01)
        file.rename(tmp_path / "old.jsonl")
        served.text()
    assert len(lines(file)) == len(lines(tmp_path / "old.jsonl")) == 1


def test_lines_beyond_the_bound_are_lost_and_no_request_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = threading.Event()
    monkeypatch.setattr(audit, "_MAX_LINES", 2)
    append = audit.AuditLog._append
    monkeypatch.setattr(audit.AuditLog, "_append", lambda log, line: going_on.wait(10) and append(log, line))
    file = tmp_path / "audit.jsonl"
    with serving(audit_log=str(file)) as served:
        assert [served.text().status_code for _ in range(6)] == [200] * 6
        going_on.set()
    assert served.backend.metrics.value("audit_lines_lost_total") == 6 - len(lines(file)) >= 2


def test_an_incomplete_line_is_ended_before_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = audit.AuditLog(str(tmp_path / "audit.jsonl"), "fake", lambda *more: None)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    with pytest.raises(OSError, match="No space"):
        log._append(b'{"a":1}\n')
    monkeypatch.undo()
    log._append(b'{"b":1}\n')
    log.close()
    assert (tmp_path / "audit.jsonl").read_bytes() == b'{"a\n{"b":1}\n'


def test_a_file_that_cannot_be_opened_is_an_error_before_the_server_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; give another path"):
        bind(ServerOptions(port=0, audit_log=str(tmp_path / "none" / "audit.jsonl")))
