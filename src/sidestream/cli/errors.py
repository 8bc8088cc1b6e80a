"""Error messages of the commands, one red line on standard error, and their exit statuses.

2    an invalid option, model, prompt or directory (SidestreamError, and typer's usage errors)
1    a bug (shown with its traceback), or the unexpected end of a child process (shown in one line)
130  interrupted
141  the reader of the output has closed the pipe
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from sidestream.cli.declare import Group
from sidestream.errors import InvariantError, ProcessFailed, RaceError, SidestreamError

_BUGS = (InvariantError, RaceError)


class Commands(Group):
    """A group whose commands exit with this module's statuses."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the group's option `--debug` shows tracebacks."""
        with reported(debug=ctx.params.get("debug", False)):
            return super().invoke(ctx)


@contextlib.contextmanager
def reported(*, debug: bool = False) -> Iterator[None]:
    """Turn exceptions in the block into a message and `typer.Exit`."""
    try:
        yield
        sys.stdout.flush()  # otherwise a closed pipe would print a traceback at the interpreter's exit
    except SidestreamError as error:
        if debug:
            traceback.print_exc()
        else:
            show_error(error)
        raise typer.Exit(1 if isinstance(error, ProcessFailed) else 2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        _discard_stdout()
        raise typer.Exit(141) from None


def show_error(error: SidestreamError) -> None:
    """Print the error as one red line."""
    remedy = (
        "; this is a bug in Sidestream: run it again with --debug and report what it prints"
        if isinstance(error, _BUGS)
        else ""
    )
    line = Text.assemble(("error: ", "bold red"), f"{error}{remedy}")
    Console(stderr=True).print(line, soft_wrap=True)


def _discard_stdout() -> None:
    """Redirect standard output, so that the interpreter's last flush succeeds."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
