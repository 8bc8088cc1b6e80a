"""The command line. Each command imports its modules when it runs, so the import of this package is cheap."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command in `sys.argv`; ends the process."""
    try:
        from sidestream.cli.app import app

        app(prog_name="sidestream")
    except KeyboardInterrupt:  # during the import; a running command handles it itself
        sys.exit(130)
