"""`python -m bench`, in a checkout of the repository: measures figures and checks their bounds. Most figures are
divided by those of a baseline that users could run themselves, such as transformers' `generate`. The baseline is
measured in the same run.
"""

from __future__ import annotations

import typer

from bench import commands
from bench.serving.command import serve
from sidestream.cli.declare import Command, named
from sidestream.cli.errors import Commands
from sidestream.cli.options import Debug

app = typer.Typer(
    cls=Commands,
    help="Measure this machine; each figure is printed with its bound.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _global_options(debug: Debug = False) -> None:
    """Declare the global option, which `Commands` reads."""


commands.register(app)
app.command("serve", cls=Command)(named(serve))

if __name__ == "__main__":
    app(prog_name="python -m bench")
