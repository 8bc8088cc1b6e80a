"""Tables of options that make a config: a row for each option, whose type and default are those of the config's field.

    _OPTIONS = Table(ServerOptions, Row("port", "N", "Port to listen on."), ...)

    @declared(_OPTIONS)
    def server_options(**given: Any) -> ServerOptions:
        return ServerOptions(**_OPTIONS.fields_of(given))

The command line shows the rows as the function's parameters: see `options.options_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from sidestream.cli.declare import Function, Option


@dataclass(frozen=True, slots=True)
class Row:
    """One option. A size is given as a text, and a field with several values as an option that is given several times.

    absent    text in `--help` about the default; False: no text; True: the default itself
    name      name of the option, if it differs from the field's name (which may contain a unit or be a plural)
    kind      type of the option's value, if it differs from the field's
    negated   whether an option without a value has a form `--no-NAME`
    """

    field: str
    metavar: str
    help: str
    absent: str | bool = True
    name: str = ""
    kind: Any = None
    negated: bool = True
    envvar: str | None = None


class Table:
    """The options that make one config.

    panel    group of options in `--help`
    prefix   of the names of options whose row has none
    is_part  the config is a part of another one, and its fields have their defaults unless their options are given
    """

    def __init__(
        self, config: type, *rows: Row, panel: str | None = None, prefix: str = "", is_part: bool = False
    ) -> None:
        self.rows = rows
        self._config = config
        self._panel = panel
        self._prefix = prefix
        self._is_part = is_part

    def fields_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the config's fields, from those of the options; fields keep their default without one."""
        values = {row.field: given.get(self._name(row)) for row in self.rows}
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None
        }

    def parameters(self) -> Iterator[inspect.Parameter]:
        """The parameters of a command."""
        types = get_type_hints(self._config)
        defaults = {field.name: field.default for field in fields(self._config)}
        for row in self.rows:
            name, kind = self._name(row), row.kind or types[row.field]
            kind = str if row.metavar == "SIZE" else list[str] if kind == tuple[str, ...] else kind
            if self._is_part or row.metavar == "SIZE" or kind == list[str]:
                kind = kind | None
            about = Option(row.help, row.metavar, row.absent, row.negated, row.envvar, self._panel)
            default = None if NoneType in get_args(kind) else defaults[row.field]
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, about.named(name, kind)],
            )

    def _name(self, row: Row) -> str:
        return row.name or self._prefix + row.field


def declared(*tables: Table) -> Callable[[Function], Function]:
    """Decorator for a function whose keyword arguments are the options of these tables."""

    def decorate(function: Function) -> Function:
        parameters = [parameter for table in tables for parameter in table.parameters()]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return function

    return decorate
