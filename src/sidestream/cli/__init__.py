"""The command line. Each command imports its modules when it runs, so importing this package takes little time."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command in `sys.argv` and end the process."""
    try:
        from sidestream.cli.app import app

        app(prog_name="sidestream")
    except KeyboardInterrupt:  # raised during the import; a running command handles Ctrl-C itself
        sys.exit(130)
