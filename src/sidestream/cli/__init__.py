"""The command line. Each command imports its modules when it runs, so importing this package takes little time."""

from __future__ import annotations

import contextlib
import sys

from sidestream.processes.signals import on_stop_signal


def main() -> None:
    """Run the command in `sys.argv` and end the process."""
    serves = "serve" in sys.argv[1:3]  # an option such as --debug may come first
    try:
        # A stop signal during the start unwinds the stack, so that the started processes end.
        with on_stop_signal(lambda number: sys.exit(128 + number)) if serves else contextlib.nullcontext():
            from sidestream.cli.app import app

            app(prog_name="sidestream")
    except KeyboardInterrupt:  # raised during the import; a running command handles Ctrl-C itself
        sys.exit(130)
