"""Prints a command's error as one red line on standard error, and sets the exit status.

2    an invalid option, model, prompt or directory (SidestreamError, and typer's usage errors)
1    a bug (any other exception, shown with its traceback), or a child process that ended unexpectedly
130  interrupted by Ctrl-C
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
from sidestream_kv.device.thread_limits import refused_threads_named

_BUGS = (InvariantError, RaceError)


class Commands(Group):
    """A group of commands that exit with the statuses above."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. With the group's option `--debug`, errors are shown with their traceback."""
        with reported(debug=ctx.params.get("debug", False)):
            return super().invoke(ctx)


@contextlib.contextmanager
def reported(*, debug: bool = False) -> Iterator[None]:
    """Turn expected exceptions of the block into a message and `typer.Exit`."""
    try:
        with refused_threads_named():
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
    console = Console(stderr=True) if sys.stderr is not None else Console()  # a shell's 2>&- closes standard error
    console.print(line, soft_wrap=True)


def _discard_stdout() -> None:
    """Redirect standard output to /dev/null, so that the interpreter can flush it at its exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
