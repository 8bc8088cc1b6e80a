"""`--config`: options in a YAML file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from command_runner import Run

from sidestream.cli.app import app
from sidestream.cli.declare import Command
from sidestream.cli.errors import Commands
from sidestream.cli.serve import serve

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "serve.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


class _Seen:
    """A command with the options of `serve` that notes its values in place of serving."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[str, Any] = {}

        def note(**values: Any) -> None:
            self.values = values

        note.__signature__ = inspect.signature(serve, eval_str=True)  # type: ignore[attr-defined]
        note.__annotations__ = {
            name: one.annotation for name, one in inspect.signature(serve, eval_str=True).parameters.items()
        }
        tree = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
        tree.command("serve", cls=Command)(note)
        tree.command("other", cls=Command)(lambda: None)
        monkeypatch.setattr(app, "registered_commands", tree.registered_commands)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> _Seen:
    return _Seen(monkeypatch)


def test_every_option_of_serve_is_read_from_the_file_as_its_type(run: Run, write: Write, seen: _Seen) -> None:
    examples = {bool: True, int: 3, float: 0.5, str: "text", Path: "text", list: ["a", "b"]}
    lines, expected = [], {}
    for name, parameter in inspect.signature(serve, eval_str=True).parameters.items():
        if name == "config":
            continue
        kind = get_args(parameter.annotation)[0]
        kinds = [one for one in get_args(kind) or (kind,) if one is not type(None)]
        base = next((one for one in examples if one in kinds or getattr(kinds[0], "__origin__", None) is one), str)
        value = "debug" if name == "log_level" else examples[base]
        lines.append(f"{name.replace('_', '-')}: {str(value).lower() if base is bool else value}")
        expected[name] = Path(str(value)) if base is Path else value
        if list[Path] in kinds:
            expected[name] = [Path("a"), Path("b")]
    result = run("serve", "--config", write("\n".join(lines)))
    assert result.exit_code == 0, result.output
    assert {name: seen.values[name] for name in expected} == expected


def test_one_directory_of_several_needs_no_list(run: Run, write: Write, seen: _Seen) -> None:
    assert run("serve", "--config", write("offload-disk: kv")).exit_code == 0
    assert seen.values["offload_disk"] == [Path("kv")]


def test_the_command_line_overrides_the_environment_and_both_the_file(
    run: Run, write: Write, seen: _Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        "model: filed\nport: 1\nhead_timeout: 2\nseparate-tail-chunk: true\n"
        "allowed-origins: ['http://filed']\napi-key: filed\n"
    )
    monkeypatch.setenv("SIDESTREAM_API_KEY", "environment")
    given = ("given", "--port", 3, "--no-separate-tail-chunk", "--allowed-origins", "http://given")
    assert run("serve", *given, "--config", path).exit_code == 0
    assert (seen.values["model"], seen.values["port"], seen.values["head_timeout"]) == ("given", 3, 2.0)
    assert (seen.values["separate_tail_chunk"], seen.values["allowed_origins"]) == (False, ["http://given"])
    assert seen.values["api_key"] == "environment"


def test_an_empty_file_changes_nothing(run: Run, write: Write, seen: _Seen) -> None:
    assert run("serve", "--config", write("# nothing yet\n")).exit_code == 0
    assert (seen.values["host"], seen.values["max_choices"]) == (None, 128)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv-memry: 2GiB", "sets kv-memry to '2GiB': no option kv-memry; did you mean kv-memory?"),
        ("tail-apart: true", "sets tail-apart to True: no option tail-apart: it is separate-tail-chunk now"),
        (
            "no-separate-tail-chunk: true",
            "sets no-separate-tail-chunk to True: no option no-separate-tail-chunk; did you mean separate-tail-chunk?",
        ),
        ("config: other.yaml", "sets config to 'other.yaml': no option config"),
        ("7: x", "sets 7 to 'x': no option 7"),
        ("port: 1\nport: 2", "sets port twice (1 and 2): remove one"),
        ("kv-memory: 1GiB\nkv_memory: 2GiB", "sets kv_memory twice ('1GiB' and '2GiB'): remove one"),
        ("api-key: a\napi_key: b", "sets api_key twice (a value that is not shown and a value that is not shown)"),
        ("port: x", "sets port to 'x': it must be a whole number"),
        ("port: 1.5", "sets port to 1.5: it must be a whole number"),
        ("port: true", "sets port to True: it must be a whole number"),
        ("head-timeout: soon", "sets head-timeout to 'soon': it must be a number"),
        ("kv-memory: 1024", "sets kv-memory to 1024: it must be a text: put it in quotes, or leave it out"),
        ("kv-memory:", "sets kv-memory to None: it must be a text"),
        ("speculative: off", "sets speculative to False: it must be a text"),
        ("eager: 1", "sets eager to 1: it must be true or false"),
        ("allowed-origins: http://a", "sets allowed-origins to 'http://a': it must be a list of texts"),
        ("allowed-origins: [1]", "sets allowed-origins to [1]: it must be a list of texts"),
        ("log-level: loud", "sets log-level to 'loud': it must be one of debug, info, warning, error"),
        ("api-key: 83", "sets api-key to a value that is not shown: it must be a text"),
        ("- port", "holds no options: write lines such as kv-memory: 2GiB"),
        (
            "port: [",
            "is not valid YAML: while parsing a flow node expected the node content, "
            "but found '<stream end>' in \"the file\", line 1",
        ),
        ("timeline: 2026-13-45", "is not valid YAML: month must be in 1..12"),
        ("port: !!python/object:os.system 1", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_a_bad_line_is_refused_with_file_key_value_and_remedy(run: Run, write: Write, text: str, said: str) -> None:
    path = write(text)
    result = run("serve", "no-such-model", "--config", path)
    assert result.exit_code == 2
    assert f"error: {path} {said}" in result.output
    assert "loading" not in result.output


def test_an_error_about_an_unreadable_config_file_names_it(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert (
        f"cannot read the config file {missing}: No such file or directory; give a YAML file"
        in run("serve", "--config", missing).output
    )
    assert f"cannot read the config file {tmp_path}: Is a directory" in run("serve", "--config", tmp_path).output
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("salt: é".encode("latin-1"))
    result = run("serve", "--config", latin)
    assert (result.exit_code, f"{latin} is not UTF-8: invalid byte at position 6" in result.output) == (2, True)


def test_values_from_the_file_are_checked_like_those_of_the_command_line(run: Run, write: Write) -> None:
    result = run("serve", "no-such-model", "--config", write("port: 70000"))
    assert "port is 70000: it must be a whole number in [0, 65535]" in result.output


def test_an_error_in_the_config_file_quotes_no_line_of_it(run: Run, write: Write) -> None:
    assert "secret" not in run("serve", "--config", write("api-key: secret\nport: [\n")).output


def test_help_explains_the_file(run: Run) -> None:
    shown = " ".join(run("serve", "--help").output.split())
    assert "--config reads options from a file" in shown
