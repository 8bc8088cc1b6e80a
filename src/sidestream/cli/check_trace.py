"""`sidestream check-trace`: runs a PyTorch script and reports races between its CUDA streams."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sidestream.cli.declare import Option

PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
"""Settings of the command: all arguments after the script's name belong to the script."""

Script = Annotated[Path, typer.Argument(metavar="SCRIPT", help="Python file, followed by its own arguments.")]
OnDevice = Annotated[
    str,
    Option("cuda, or cpu to simulate the GPU on the processor.", "D", "cuda if there is a GPU"),
]


def check_trace(context: typer.Context, script: Script, device: OnDevice = "") -> None:
    """Run a PyTorch script and report races between its CUDA streams, and memory that is reused too early.

    The report goes to standard error. Status 0: no finding; 1: findings; 2: no such script or device; 3: the script
    failed.
    """
    from sidestream_order.check_trace import check_script

    judgement = check_script(script, context.args, device=device)
    sys.stdout.flush()
    typer.echo(str(judgement), err=True)
    if judgement.status:
        raise typer.Exit(judgement.status)
