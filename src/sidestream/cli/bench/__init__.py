"""`sidestream bench`: measures figures and checks their bounds. Most figures are ratios to a baseline that users could
run themselves, such as transformers' `generate`. The baseline is measured in the same run.
"""

from __future__ import annotations

import typer

from sidestream.cli.bench import commands
from sidestream.cli.bench.serving.command import serve
from sidestream.cli.declare import Command, Group

app = typer.Typer(cls=Group, help="Measure this machine; each figure is printed with its bound.", no_args_is_help=True)
commands.register(app)
app.command("serve", cls=Command)(serve)

__all__ = ["app"]
