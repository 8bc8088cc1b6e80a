"""What a user sees when something goes wrong: one red line on standard error, and an exit status that says whose fault
it was.

2    an option, a model, a prompt or a directory that cannot be used as asked (SidestreamError; typer's own usage errors
     too)
1    a bug: the traceback is shown; or a process of the command ended by itself: one line says how
130  interrupted
141  whoever read the output has left
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
    """A group whose commands end as this module's table says."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; `--debug` among the group's own options asks for tracebacks."""
        with reported(debug=ctx.params.get("debug", False)):
            return super().invoke(ctx)


@contextlib.contextmanager
def reported(*, debug: bool = False) -> Iterator[None]:
    """Turn what ends the block into a message and `typer.Exit`."""
    try:
        yield
        sys.stdout.flush()  # here, not at the interpreter's end, where nobody could be quiet about a closed pipe
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
    """Print the one red line."""
    remedy = (
        "; this is a bug in Sidestream: run it again with --debug and report what it prints"
        if isinstance(error, _BUGS)
        else ""
    )
    line = Text.assemble(("error: ", "bold red"), f"{error}{remedy}")
    Console(stderr=True).print(line, soft_wrap=True)


def _discard_stdout() -> None:
    """The interpreter flushes standard output once more when it ends; let that succeed."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
