"""Options have the same names, the same help and the same messages, whatever version of typer declares them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from command_runner import Run
from typer.models import OptionInfo
from typer.testing import CliRunner

import sidestream
import sidestream_kv
from bench.__main__ import app as bench
from proof.__main__ import app as proof
from sidestream.cli.app import app
from sidestream.cli.declare import RARE, Option
from sidestream.config import EngineConfig, KVEventsConfig, OffloadConfig, SpeculativeConfig
from sidestream.server import ServerOptions

# An option's name is its parameter's, but where Python has taken the name.
_OTHER_NAMES = {"as_json": "--json", "features": "--with"}


@dataclass(frozen=True)
class _Command:
    program: typer.Typer
    path: tuple[str, ...]
    function: Callable[..., Any]

    def options(self) -> dict[str, tuple[Any, OptionInfo]]:
        """Of each parameter that is an option: its type, and how it is declared."""
        found = {}
        for name, parameter in inspect.signature(self.function, eval_str=True).parameters.items():
            kind, *declared = get_args(parameter.annotation) or (parameter.annotation,)
            assert not any(isinstance(one, Option) for one in declared), f"{self.path}: decorate it with `named`"
            if declared and isinstance(declared[0], OptionInfo):
                found[name] = (kind, declared[0])
        return found


def _commands(program: typer.Typer, tree: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[_Command]:
    if tree.registered_callback is not None and tree.registered_callback.callback is not None:
        yield _Command(program, path, tree.registered_callback.callback)
    for command in tree.registered_commands:
        assert command.callback is not None
        if not command.hidden:
            yield _Command(program, (*path, command.name or command.callback.__name__), command.callback)
    for group in tree.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(program, group.typer_instance, (*path, str(group.name)))


_ALL = [found for program in (app, bench, proof) for found in _commands(program, program)]
_SERVE = next(found for found in _ALL if found.program is app and found.path == ("serve",))


def _in_tree(command: _Command) -> Any:
    found: Any = typer.main.get_command(command.program)
    for name in command.path:
        found = found.commands[name]
    return found


def _invoke(command: _Command, *arguments: str, columns: int = 200) -> Any:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(command.program, [*command.path, *arguments])


def _help(command: _Command, columns: int = 200) -> str:
    hidden = any(getattr(parameter, "hidden", False) for parameter in _in_tree(command).params)
    return str(_invoke(command, "--help-all" if hidden else "--help", columns=columns).output)


def test_every_option_is_declared_and_given_by_its_own_name() -> None:
    for command in _ALL:
        parameters = {parameter.name: parameter for parameter in _in_tree(command).params}
        for name, (_, option) in command.options().items():
            declared = str(option.default)  # in Annotated, the first positional argument of typer.Option is the name
            spelling, found = _OTHER_NAMES.get(name, f"--{name.replace('_', '-')}"), parameters[name]
            assert declared.partition("/")[0] == spelling, command.path
            assert spelling in found.opts, command.path
            assert all(one == one.lower() for one in found.opts + found.secondary_opts), command.path


def test_help_shows_no_type_for_a_flag_and_a_default_in_one_pair_of_brackets() -> None:
    for command in _ALL:
        shown = _help(command)
        assert "--help" in shown, command.path
        assert not [word for word in ("bool", "[default: (", "[[", "]]") if word in shown.lower()], command.path


def test_a_number_that_cannot_be_read_is_named_with_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.testing._get_command", functools.cache(typer.main.get_command))  # built once
    for command in _ALL:
        for name, (kind, _) in command.options().items():
            spelling = f"--{name.replace('_', '-')}"
            for number, value, said in (
                (int, "1.5", "'1.5' is not a whole number"),
                (float, "abc", "'abc' is not a number"),
            ):
                if {kind, *get_args(kind)} & {number, list[number]}:  # type: ignore[valid-type]
                    result = _invoke(command, spelling, value)
                    assert result.exit_code == 2
                    assert f"Invalid value for '{spelling}': {said}" in result.output


def test_help_gives_the_meaning_of_an_absent_value(run: Run) -> None:
    shown = run("serve", "--help-all").output
    assert "Chunked prefill: tokens per chunk. Default: 256 on a CPU, 8192 on a GPU." in shown
    assert "Address to listen on; 0.0.0.0 for all addresses. Default: 127.0.0.1." in shown
    assert "[default: 10.0]" in shown


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_help_shows_option_names_whole_in_a_terminal_of_any_width(columns: int) -> None:
    shown = _help(_SERVE, columns)  # the command with the longest names
    assert not [parameter.opts[0] for parameter in _in_tree(_SERVE).params if parameter.opts[0] not in shown]


def test_help_omits_rare_options_and_prints_their_number(run: Run) -> None:
    shown, everything = run("serve", "--help").output, run("serve", "--help-all").output
    options = [parameter.opts[0] for parameter in _in_tree(_SERVE).params if parameter.opts[0].startswith("--")]
    hidden = [name for name in options if f" {name} " not in shown]
    assert set(hidden) <= RARE and len(options) - len(hidden) <= 30
    assert all(f" {name} " in everything for name in options)
    assert f"--help-all shows {len(hidden)} more options." in shown
    assert "--help-all" not in everything
    assert {name for found in _ALL for parameter in _in_tree(found).params for name in parameter.opts} >= RARE


def test_lines_of_the_log_that_name_a_field_name_its_option_first() -> None:
    """Lines of the log are also read where the command line is not known: in API processes and the engine's process."""
    configs = (EngineConfig, OffloadConfig, KVEventsConfig, SpeculativeConfig, ServerOptions)
    fields = "|".join(field.name for config in configs for field in dataclasses.fields(config) if "_" in field.name)
    levels = ("info", "warning", "error", "critical")
    bare = re.compile(rf"(?<!in Python )\b({fields})\b(?!\.json)")
    lines = [
        (path.name, text.value)
        for package in (sidestream, sidestream_kv)
        for path in Path(package.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in levels
        if isinstance(call.func.value, ast.Name) and call.func.value.id in ("log", "logger")
        for text in ast.walk(call)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    ]
    assert len(lines) > 50
    assert not [line for line in lines if bare.search(line[1])]
