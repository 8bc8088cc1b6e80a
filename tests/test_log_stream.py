"""Logging never blocks a thread, also if the log is not read."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import time

from sidestream.processes.log_stream import JsonFormatter, LogStream

TOLD = re.compile(rb"(\d+) lines of the log were lost here: standard error was not read\n")


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "f", 1, text, (), None)


def test_lines_of_an_unread_log_are_dropped_counted_and_reported() -> None:
    reader, writer = os.pipe()
    handler = LogStream(writer, max_lines=100)
    for number in range(1000):
        handler.emit(_record(f"line {number} " + "x" * 1000))  # ten times the pipe's buffer
    lost = handler.take_lost()
    assert 0 < lost <= 900
    assert handler.take_lost() == 0
    read = b""
    os.set_blocking(reader, False)
    while sum(map(int, TOLD.findall(read))) < lost or handler._written < handler._queued:
        with contextlib.suppress(BlockingIOError):
            read += os.read(reader, 1 << 16)
        time.sleep(0.001)
    assert sum(map(int, TOLD.findall(read))) == lost
    os.close(reader)
    handler.emit(_record("no reader"))
    handler.flush()
    assert handler.take_lost() == 1
    os.close(writer)


def test_lines_are_written_before_the_process_exits() -> None:
    code = (
        "import logging; from sidestream.processes import log_stream; "
        "log_stream.start_logging('INFO'); logging.info('last')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == "INFO:root:last\n"


def test_json_lines_have_the_fields_of_their_record_and_the_exception() -> None:
    reader, writer = os.pipe()
    handler = LogStream(writer)
    handler.setFormatter(JsonFormatter())
    try:
        raise ValueError("odd")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "two\nlines of %s", ("a",), sys.exc_info())
    record.fields = {"status": 500}
    handler.emit(record)
    handler.flush()
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as log:
        (line,) = map(json.loads, log)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert "ValueError: odd" in line.pop("exception")
    assert line == {"level": "ERROR", "logger": "x", "pid": os.getpid(), "message": "two\nlines of a", "status": 500}


def test_the_line_about_lost_lines_is_json_too() -> None:
    reader, writer = os.pipe()
    handler = LogStream(writer, max_lines=0)
    handler.setFormatter(JsonFormatter())
    handler.emit(_record("lost"))
    handler._lines.put("{}\n")  # one that is written
    handler._queued += 1
    handler.flush()
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as log:
        assert "1 lines of the log were lost" in [json.loads(line) for line in log][-1]["message"]


def test_a_server_without_stderr_reports_its_error_on_stdout() -> None:
    command = f"{sys.executable} -m sidestream serve nothing 2>&-"
    ended = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert "error: standard error is closed" in ended.stdout
