"""The command line. Each command imports its modules when it runs, so importing this package is cheap."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that `sys.argv` asks for; ends the process."""
    try:
        from sidestream.cli.app import app

        app(prog_name="sidestream")
    except KeyboardInterrupt:  # while importing; a running command has its own way
        sys.exit(130)
