"""Declares command options: their full name, the placeholder of the value in `--help`, and the parser of the value.

typer can derive all three, but the results depend on its version: one version used an option's metavar as the option's
name, and the messages for an invalid number differ as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

Number = TypeVar("Number", int, float)


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


class _FlagHelp:
    """Shows the option `--help` without a type, like the options that `flag` declares."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class Command(_FlagHelp, TyperCommand):
    """The class of all commands."""


class Group(_FlagHelp, TyperGroup):
    """The class of all groups of commands."""
