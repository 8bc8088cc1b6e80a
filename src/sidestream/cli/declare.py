"""How an option is declared: its name in full, its value's name in help, and how its value is read.

typer could derive all of these, but each of its versions does so in its own way: one took an option's metavar for its
name, and the message for a bad number differs and may leave the value out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

Number = TypeVar("Number", int, float)


def option(
    name: str,
    *short: str,
    metavar: str,
    help: str,  # noqa: A002 - typer's own word
    show_default: bool | str = True,
    parse: Callable[[Any], Any] | None = None,
    envvar: str | None = None,
    panel: str | None = None,
    callback: Callable[..., Any] | None = None,
    is_eager: bool = False,
) -> Any:
    """An option that takes a value. `parse` is `whole` or `number` where the value is one.

    `show_default` as a text is what `--help` says where the default is None.
    """
    return typer.Option(
        name,
        *short,
        metavar=metavar,
        help=_with_default(help, show_default),
        show_default=show_default is True,
        parser=parse,
        envvar=envvar,
        rich_help_panel=panel,
        callback=callback,
        is_eager=is_eager,
    )


def flag(
    name: str,
    *,
    help: str,  # noqa: A002 - typer's own word
    show_default: bool | str = True,
    envvar: str | None = None,
    panel: str | None = None,
    callback: Callable[..., Any] | None = None,
    is_eager: bool = False,
) -> Any:
    """An option without a value: "--name", or "--name/--no-name" where it can be switched off."""
    return typer.Option(
        name,
        metavar="",  # without it, help shows a flag's type
        help=_with_default(help, show_default),
        show_default=show_default is True,
        envvar=envvar,
        rich_help_panel=panel,
        callback=callback,
        is_eager=is_eager,
    )


def _with_default(text: str, default: bool | str) -> str:
    """A sentence: typer would put a default that is a text into brackets twice."""
    return f"{text} Default: {default}." if isinstance(default, str) else text


def whole(value: Any) -> int:
    """The value of an option that takes a whole number. Raises typer.BadParameter, to which typer adds the option's
    name.
    """
    return _read(int, value, "a whole number")


def number(value: Any) -> float:
    """The value of an option that takes a number. Raises typer.BadParameter, to which typer adds the option's name."""
    return _read(float, value, "a number")


def _read(kind: Callable[[Any], Number], value: Any, expected: str) -> Number:
    try:
        return kind(value)
    except ValueError:
        raise typer.BadParameter(f"{str(value)!r} is not {expected}") from None


class _FlagHelp:
    """Adds `--help` as `flag` declares options: without a type."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class Command(_FlagHelp, TyperCommand):
    """The class of every command."""


class Group(_FlagHelp, TyperGroup):
    """The class of every group of commands."""
