"""Declares command options: their full name, the placeholder of the value in `--help`, and the parser of the value.

typer can derive all three, but the results depend on its version: one version used an option's metavar as the option's
name, and the messages for an invalid number differ as well.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from sidestream.config import RENAMED
from sidestream.errors import ConfigError, SidestreamError
from sidestream_kv.config import renamed_option

Number = TypeVar("Number", int, float)
Function = TypeVar("Function", bound=Callable[..., Any])

RARE = frozenset(
    [
        "--single-process",
        "--replica",
        "--log-format",
        "--api-keys",
        "--audit-log",
        "--batch-directory",
        "--max-batch-directory",
        "--otlp-traces-endpoint",
        "--admin-key",
        "--root-path",
        "--page",
        "--ssl-ca-certs",
        "--max-buffered",
        "--head-timeout",
        "--body-timeout",
        "--stall-timeout",
        "--max-connections",
        "--max-connections-per-address",
        "--tool-call-parser",
        "--reasoning-parser",
        "--explain-cache",
        "--max-choices",
        "--max-hint-ttl",
        "--max-stored-responses",
        "--max-stored",
        "--drain-seconds",
        "--watchdog-timeout",
        "--kv-events-replay",
        "--kv-events-topic",
        "--kv-events-encoding",
        "--load-deadline",
        "--offload-tiers",
        "--offload-shared-memory",
        "--offload-write-policy",
        "--salt",
        "--repack",
        "--lora-modules",
        "--max-loras",
        "--max-lora-rank",
        "--state-memory",
        "--state-interval",
        "--block-tokens",
        "--chunk-tokens",
        "--token-budget",
        "--separate-tail-chunk",
        "--eager",
        "--batch-invariant",
        "--max-drafts",
        "--max-draft-slowdown",
        "--self-check",
        "--kv-cache-dtype",
        "--offload-kv-dtype",
        "--check-order",
        "--timeline",
    ]
)
"""Options that `--help` leaves out and `--help-all` shows: their defaults are right for nearly everybody."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option that has the name of its parameter: `rounds: Annotated[int, Option("Number of rounds.")] = 5`. The
    decorator `named` declares it.

    metavar   placeholder of the value in `--help`
    absent    text in `--help` about the default; False: no text; True: the default itself
    negated   whether an option without a value has a form `--no-NAME`
    panel     group of options in `--help`
    """

    help: str
    metavar: str = "N"
    absent: str | bool = True
    negated: bool = False
    envvar: str | None = None
    panel: str | None = None

    def named(self, name: str, kind: Any) -> Any:
        """The declaration of the option of a parameter with this name and type."""
        spelled, kinds = f"--{name.replace('_', '-')}", {kind, *get_args(kind)}
        if self.negated and bool in kinds:
            spelled += f"/--no-{name.replace('_', '-')}"
        parse = whole if kinds & {int, list[int]} else number if float in kinds else None
        metavar = "" if bool in kinds else self.metavar
        return option(spelled, metavar, self.help, self.absent, parse, envvar=self.envvar, panel=self.panel)


def named(command: Function) -> Function:
    """Decorator for a command: declare each `Option` with the name and the type of its parameter."""

    def declare(parameter: inspect.Parameter) -> inspect.Parameter:
        kind, *declared = get_args(parameter.annotation) or (parameter.annotation,)
        if not declared or not isinstance(declared[0], Option):
            return parameter
        annotation: Any = Annotated[kind, declared[0].named(parameter.name, kind)]
        return parameter.replace(annotation=annotation)

    parameters = [declare(each) for each in inspect.signature(command, eval_str=True).parameters.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def option(
    name: str,
    metavar: str,
    help: str,  # noqa: A002 - typer's own name
    show_default: bool | str = True,
    parse: Callable[[Any], Any] | None = None,
    *,
    short: tuple[str, ...] = (),
    **settings: Any,
) -> Any:
    """Declare an option with a value.

    show_default   True: show the parameter's default in `--help`; a string: show this text, for a default of None
    parse          `whole` or `number` for numeric values
    settings       further arguments of typer.Option; `panel` is the group of options in `--help`
    """
    return typer.Option(
        name,
        *short,
        metavar=metavar,
        help=_with_default(help, show_default),
        show_default=show_default is True,
        parser=parse,
        rich_help_panel=settings.pop("panel", None),
        hidden=name.partition("/")[0] in RARE,
        **settings,
    )


def flag(
    name: str,
    help: str,  # noqa: A002 - typer's own name
    show_default: bool | str = True,
    **settings: Any,
) -> Any:
    """Declare an option without a value: "--name", or "--name/--no-name" if it can be switched off."""
    return option(name, "", help, show_default, **settings)  # with metavar None, `--help` would show the type


def _with_default(text: str, default: bool | str) -> str:
    """Append the default as a sentence, because typer would print a string default in two pairs of brackets."""
    return f"{text} Default: {default}." if isinstance(default, str) else text


def whole(value: Any) -> int:
    """Parse a whole number. Raises typer.BadParameter; typer adds the option's name."""
    return _read(int, value, "a whole number")


def number(value: Any) -> float:
    """Parse a number. Raises typer.BadParameter; typer adds the option's name."""
    return _read(float, value, "a number")


def _read(kind: Callable[[Any], Number], value: Any, expected: str) -> Number:
    try:
        return kind(value)
    except ValueError:
        raise typer.BadParameter(f"{str(value)!r} is not {expected}") from None


# With fewer columns, the table of typer cuts the names of options.
_TABLE_COLUMNS = 110


class _Help:
    """Help that shows no type for `--help`, and is a plain list in a narrow terminal, so that no name is cut."""

    rich_markup_mode: Any

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        mode = self.rich_markup_mode
        if shutil.get_terminal_size().columns < _TABLE_COLUMNS:
            self.rich_markup_mode = None
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            self.rich_markup_mode = mode


class Command(_Help, TyperCommand):
    """The class of all commands. Errors name the command's options, not the fields of Python's configs."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the number of options that it leaves out."""
        if hidden := self._hidden():
            self.epilog = f"--help-all shows {len(hidden)} more options."
        super().format_help(ctx, formatter)

    def _hidden(self) -> list[Any]:
        return [parameter for parameter in self.params if getattr(parameter, "hidden", False)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Raises ConfigError for an argument that is given like an option."""
        if "--help-all" in args and (hidden := self._hidden()):
            for parameter in hidden:
                parameter.hidden = False
            args = ["--help"]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # the class NoSuchOption lies in other modules in other versions of typer
            wrong = getattr(error, "option_name", None)
            for parameter in self.params:
                if parameter.param_type_name == "argument" and wrong == f"--{parameter.name}":
                    metavar = parameter.metavar or str(parameter.name).upper()
                    raise ConfigError(f"give {metavar} without {wrong}: {ctx.command_path} {metavar}") from None
            if wrong is not None and (new := _new_option(wrong)) is not None:
                raise ConfigError(renamed_option(wrong, new)) from None
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Errors of Sidestream get the names of the command's options."""
        try:
            return super().invoke(ctx)
        except SidestreamError as error:
            if error.args:
                error.args = (with_option_names(str(error), self.params), *error.args[1:])
            raise


# Fields of configs whose option has another name: see `options.engine_config` and `server_options`.
_FIELDS = {
    "compute_threads": "threads",
    "load_deadline_s": "load_deadline",
    "offload host": "offload_host",
    "offload disk_capacity": "offload_disk_capacity",
    "write_policy": "offload_write_policy",
    "shared_memory": "offload_shared_memory",
    "kv_dtype": "offload_kv_dtype",
    "kv_events endpoint": "kv_events",
    "kv_events replay_endpoint": "kv_events_replay",
    "max_body_bytes": "max_body",
    "head_timeout_s": "head_timeout",
    "body_timeout_s": "body_timeout",
    "stall_timeout_s": "stall_timeout",
    "drain_s": "drain_seconds",
    "max_hint_ttl_s": "max_hint_ttl",
    "watchdog_timeout_s": "watchdog_timeout",
}


def _new_option(old: str) -> str | None:
    """The new name of a renamed option, `--no-` included; None: it was not renamed."""
    negation = "no-" if old.startswith("--no-") else ""
    new = RENAMED.get(old.removeprefix(f"--{negation}").replace("-", "_"))
    return None if new is None else f"--{negation}{new.replace('_', '-')}"


def with_option_names(message: str, options: Sequence[Any]) -> str:
    """The message with `--kv-memory` in place of `kv_memory`. A name of one word is replaced only where it is the
    subject, as in `temperature is nan`, because it may also be a plain word.
    """
    spelled = {option.name: option.opts[0] for option in options if option.param_type_name == "option"}
    spelled |= {field: spelled[name] for field, name in _FIELDS.items() if name in spelled}
    for name in sorted(spelled, key=len, reverse=True):
        if name.isalpha():
            message = re.sub(rf"(^|(?<= and )){name}(?= (is|has|holds) )", spelled[name], message)
        else:
            message = re.sub(rf"(?<![\w./'\"-]){name}(?![\w/'\"-]|\.\w)", spelled[name], message)
    return message


class Group(_Help, TyperGroup):
    """The class of all groups of commands."""
