"""Wrong input names the nearest right one; a fault is one line and a status, never a traceback unless asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from command_runner import Run
from typer.testing import CliRunner

from sidestream.cli.app import app
from sidestream.cli.declare import _FIELDS, with_option_names
from sidestream.cli.errors import Commands
from sidestream.errors import ConfigError, InvariantError, ProcessFailed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--prot", "1"], "--port"),
        (["generate", "--max-token", "1"], "--max-tokens"),
        (["chat", "--offload-hots", "1"], "--offload-host"),
        (["serv"], "Did you mean 'serve'?"),
        (["models", "prepar"], "Did you mean 'prepare'?"),
    ],
)
def test_an_error_about_an_unknown_option_or_command_names_the_nearest_one(
    run: Run, arguments: list[str], said: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--tail-apart", "--separate-tail-chunk"),
        ("--no-tail-apart", "--no-separate-tail-chunk"),
        ("--max-slowdown", "--max-draft-slowdown"),
    ],
)
def test_the_old_name_of_an_option_gives_its_new_name(run: Run, old: str, new: str) -> None:
    result = run("serve", "no-such-model", old, "1")
    assert (result.exit_code, result.output) == (2, f"error: no option {old}: it is {new} now\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "bfloat"], "no dtype bfloat; did you mean bfloat16?"),
        (["--kv-cache-dtype", "int8"], "no --kv-cache-dtype int8; known: auto, fp8"),
        (["--kv-memory", "much"], "--kv-memory is 'much': give a size such as 512MiB or 4GiB"),
        (["--chunk-tokens", "100"], "--chunk-tokens is 100: it must be a multiple of --block-tokens (16)"),
        (["--max-running", "0"], "--max-running is 0: it must be a whole number of 1 or more"),
        (["--offload-disk", "kv", "--offload-host", "0"], "goes through host memory: give --offload-host a size"),
        (["--threads", "0"], "--threads is 0: it must be a whole number of 1 or more"),
        (["--offload-disk-capacity", "1GiB"], "--offload-disk-capacity is 1GiB, but nothing is kept on disk"),
        (["--offload-write-policy", "all"], "--offload-write-policy is all, but nothing is kept on disk"),
        (["--offload-disk", "kv", "--offload-write-policy", "most"], "--offload-write-policy is 'most': give all or"),
        (["--load-deadline", "3"], "--load-deadline is 3, but offload is off"),
        (["--offload-kv-dtype", "int8"], "--offload-kv-dtype is int8, but offload is off"),
        (["--offload-host", "1GiB", "--offload-kv-dtype", "fp8"], "--offload-kv-dtype is 'fp8': give auto or int8"),
        (["--offload-host", "1GiB", "--load-deadline", "nan"], "--load-deadline is nan: give a positive number"),
        (["--temperature", "nan"], "--temperature is nan: it must be a number in [0.0, 100.0]"),
        (["--max-tokens", "-1"], "--max-tokens is -1: it must be a whole number in [1, "),
        (["--max-tokens", str(1 << 40)], "--max-tokens is 1099511627776: it must be"),
        (["--stop", ""], "--stop holds an empty string"),
        (["--system", "Be brief."], "--system is given without --chat"),
        (["--prompt-file", "f"], "--prompt and --prompt-file f are both given"),
    ],
)
def test_a_value_out_of_bounds_is_refused_before_loading(run: Run, arguments: list[str], said: str) -> None:
    result = run("generate", "no-such-model", "--prompt", "x", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert said in result.output
    assert result.output.count("\n") == 1


_WRONG_MODEL = """
import socket, sys
from sidestream.cli.app import app
def getaddrinfo(*args):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
socket.getaddrinfo = getaddrinfo
slow = {"asyncio", "httpx", "huggingface_hub.utils", "torch", "transformers"}
try:
    app(sys.argv[1:])
except SystemExit as end:
    print(end.code, *sorted(slow & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("command", "model", "offline", "said"),
    [
        (["generate", "--prompt", "x"], "smollm2-135m-instuct", "0", "did you mean smollm2-135m-instruct?"),
        (["serve"], "/no/such", "0", "there is no such directory"),
        (["chat"], "no/such-model", "1", "the hub cannot be reached (HF_HUB_OFFLINE is set)"),
        (["serve"], "no/such-model", "0", "the hub cannot be reached (huggingface.co: Name or service not known)"),
    ],
)
def test_a_wrong_model_is_refused_quickly(
    command: list[str], model: str, offline: str, said: str, tmp_path: Path
) -> None:
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and name not in ("HF_ENDPOINT", "TRANSFORMERS_OFFLINE")
    }
    ended = subprocess.run(
        [sys.executable, "-c", _WRONG_MODEL, command[0], model, *command[1:]],
        env={**environ, "HF_HUB_OFFLINE": offline, "HF_HUB_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in ended.stderr
    assert ended.stdout == "2\n"


@pytest.mark.parametrize(("command", "given"), [("serve", "--model=x"), ("generate", "--model"), ("chat", "--model")])
def test_a_model_given_like_an_option_is_shown_as_the_argument(run: Run, command: str, given: str) -> None:
    result = run(command, given, "x")
    assert result.exit_code == 2
    assert f"error: give MODEL without --model: sidestream {command} MODEL" in result.output
    assert "--draft-model" not in result.output


def test_option_names_do_not_replace_parts_of_paths_or_plain_words() -> None:
    parameters = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    assert with_option_names("kv_memory is 1: raise kv_memory, or max_running", parameters) == (
        "--kv-memory is 1: raise --kv-memory, or --max-running"
    )
    for text in (
        "/tmp/kv_memory/model: the host and the port",
        "generation_config.json: top_k is 3",
        "'kv_memory' stays",
    ):
        assert with_option_names(text, parameters) == text


def test_a_field_with_an_option_of_another_name_gets_that_name() -> None:
    parameters = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    options = {option for parameter in parameters for option in parameter.opts}
    for field, name in _FIELDS.items():
        assert f"--{name.replace('_', '-')}" in options
        assert with_option_names(f"{field} is 3", parameters) == f"--{name.replace('_', '-')} is 3"


def test_a_timeline_that_could_not_be_written_is_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    into_nothing = run("generate", "no-such-model", "--prompt", "x", "--timeline", tmp_path / "none" / "t.json")
    onto_a_directory = run("generate", "no-such-model", "--prompt", "x", "--timeline", tmp_path)
    assert "is not a writable directory" in into_nothing.output
    assert "is a directory: give the path of a file" in onto_a_directory.output


def _ending_with(failure: BaseException) -> typer.Typer:
    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @app.callback()
    def options(debug: bool = False) -> None: ...

    @app.command()
    def fail() -> None:
        raise failure

    return app


def test_a_config_error_prints_one_line_with_exit_status_2() -> None:
    result = CliRunner().invoke(_ending_with(ConfigError("the port is [taken]")), ["fail"])
    assert (result.exit_code, result.output) == (2, "error: the port is [taken]\n")


def test_a_failed_process_prints_one_line_with_exit_status_1() -> None:
    result = CliRunner().invoke(
        _ending_with(ProcessFailed("the engine's process has ended: it was killed by SIGKILL")), ["fail"]
    )
    assert (result.exit_code, result.output) == (1, "error: the engine's process has ended: it was killed by SIGKILL\n")


def test_debug_shows_the_traceback_with_the_same_status() -> None:
    result = CliRunner().invoke(_ending_with(ConfigError("no")), ["--debug", "fail"])
    assert result.exit_code == 2
    assert "Traceback" in result.output


def test_the_environment_can_ask_for_tracebacks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTREAM_DEBUG", "1")
    assert "Traceback" in run("generate", "--prompt", "x", "--dtype", "bfloat").output


def test_an_invariant_error_is_reported_as_a_bug_in_sidestream() -> None:
    assert "a bug in Sidestream" in CliRunner().invoke(_ending_with(InvariantError("released twice")), ["fail"]).output


def test_an_interrupt_prints_no_line_and_exits_with_130() -> None:
    result = CliRunner().invoke(_ending_with(KeyboardInterrupt()), ["fail"])
    assert (result.exit_code, result.output) == (130, "")


def test_any_other_exception_keeps_its_traceback() -> None:
    assert isinstance(CliRunner().invoke(_ending_with(ZeroDivisionError()), ["fail"]).exception, ZeroDivisionError)


_LATE_WRITER = """
import sys, typer
from sidestream.cli.errors import reported
sys.stdin.read()                     # until the reader of our output has left
try:
    with reported():
        print("nobody reads this")
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


def test_a_closed_output_pipe_is_no_error() -> None:
    buffered = {
        name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"
    }  # the output is written at the end
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _LATE_WRITER], **pipes, env=buffered) as child:  # type: ignore[call-overload]
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        child.stdout.close()
        child.stdin.close()
        assert child.stderr.read() == b""
        assert child.wait() == 141
