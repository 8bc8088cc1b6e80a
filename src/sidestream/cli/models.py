"""`sidestream models`: the models that can be fetched by name."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sidestream.cli.declare import Command, Group
from sidestream.cli.loading import prepare_model
from sidestream.cli.options import DEMO_MODEL, AsJson
from sidestream.cli.train import train_mtp

app = typer.Typer(
    cls=Group, help="List the models that can be fetched by name; prepare a model.", invoke_without_command=True
)


@app.callback()
def list_models(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the models that can be fetched by name, and where they are stored.

    Commands also take a directory in transformers' format in place of a name.
    """
    if ctx.invoked_subcommand is not None:
        return
    rows = _rows()
    if as_json:
        print(json.dumps({"models": rows}, indent=2))
    else:
        _print_table(rows)


@app.command(cls=Command)
def prepare(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `sidestream models` lists.")] = DEMO_MODEL,
    as_json: AsJson = False,
) -> None:
    """Fetch and convert a model now, so that later commands start without delay."""
    from sidestream.models.catalog import prepared

    already = prepared(name) is not None  # raises for an unknown name
    prepare_model(name)
    path = str(prepared(name))
    print(
        json.dumps({"name": name, "path": path})
        if as_json
        else f"{name} {'was already' if already else 'is now'} prepared in {path}"
    )


app.command("train-mtp", cls=Command)(train_mtp)


def _rows() -> list[dict[str, object]]:
    from sidestream.models.catalog import CATALOG, prepared

    return [
        {
            "name": model.name,
            "description": model.description,
            "licence": model.licence,
            "source": model.source,
            "download_bytes": model.download_bytes,
            "path": str(path) if (path := prepared(model.name)) is not None else None,
        }
        for model in CATALOG.values()
    ]


def _print_table(rows: list[dict[str, object]]) -> None:
    console = Console()
    table = Table("name", "licence", "download", "prepared", box=None, header_style="bold", pad_edge=False)
    for row in rows:
        size = f"{int(str(row['download_bytes'])) / 1e6:.0f} MB"
        table.add_row(
            str(row["name"]), str(row["licence"]), size, "[green]yes[/green]" if row["path"] else "[yellow]no[/yellow]"
        )
    console.print(table)
    for row in rows:
        where = (
            f"in {shlex.quote(str(row['path']))}"
            if row["path"]
            else f"fetch it with: sidestream models prepare {row['name']}"
        )
        console.print(f"\n{row['name']}: {row['description']}\n  {where}", style="dim", soft_wrap=True, highlight=False)
