"""`sidestream models`: the models that can be fetched by name."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sidestream.cli.declare import Command, Group, Option, named
from sidestream.cli.loading import prepare_model
from sidestream.cli.options import DEMO_MODEL, AsJson, Model
from sidestream.cli.train import train_mtp
from sidestream.config import KV_CACHE_DTYPES

app = typer.Typer(
    cls=Group,
    help="List the models that can be fetched by name; prepare or check one.",
    invoke_without_command=True,
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


@app.command(cls=Command)
@named
def check(
    model: Model,
    device: Annotated[str, Option("cpu, cuda, or auto: cuda if a GPU is usable.", "DEVICE")] = "auto",
    dtype: Annotated[str, Option("auto, float32, float16 or bfloat16.", "TYPE")] = "auto",
    kv_cache_dtype: Annotated[str, Option("fp8: KV in 8 bits.", "|".join(KV_CACHE_DTYPES))] = "auto",
    tensor_parallel: Annotated[int, Option("Number of ranks.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Say whether a model is served, how, and what memory it needs. Reads its config and the headers of its files.

    A model that is not served is an error that gives the reason. What the weights compute is checked when they are
    loaded.
    """
    from sidestream.models.catalog import resolve
    from sidestream.models.facts import facts_of
    from sidestream_kv.device.choice import torch_device

    chosen = torch_device(device)
    path = model if Path(model).is_dir() else resolve(model)  # a config alone is enough, and of a file, the directory
    facts = facts_of(path, dtype=dtype, device=chosen, ranks=tensor_parallel, kv_cache_dtype=kv_cache_dtype)
    free = _free_bytes(chosen)
    if as_json:
        print(json.dumps({"model": model, "device": chosen.type, "free_bytes": free, **dataclasses.asdict(facts)}))
        return
    kind = f"{facts.kind}, the text part of {facts.text_of}" if facts.text_of else facts.kind
    stored = f"quantised by {facts.quantisation}, else {facts.stored}" if facts.quantisation else facts.stored
    size = "of unknown size: its files are not here" if facts.weights_bytes is None else _gib(facts.weights_bytes)
    lies_in = "" if facts.kv_cache_dtype == facts.dtype else f", in {facts.kv_cache_dtype}"
    rows = [
        ("kind", f"{kind}; up to {facts.max_positions:,} tokens"),
        ("weights", f"{size}, stored as {stored}"),
        ("computes in", f"{facts.dtype}, {facts.reason}"),
        ("KV", f"{facts.token_bytes:,} bytes a token, so 1 GiB has {(1 << 30) // facts.token_bytes:,} tokens{lies_in}"),
    ]
    if facts.packed_bytes is not None:
        rows.append(("products", escape(_products(facts))))
    if facts.state_bytes:
        rows.append(("state", f"{facts.state_bytes:,} bytes a request"))
    if facts.weights_bytes is not None and free is not None:
        share = facts.weights_bytes // tensor_parallel + facts.copies_bytes
        room = max(0, free - share) // facts.token_bytes
        fits = f"room for the KV of {room:,} tokens" if share < free else f"too little for the weights, {_gib(share)}"
        rows.append((f"{chosen.type} memory", f"{_gib(free)} free: {fits}"))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[green]served[/green]: {model}")
    for name, text in rows:
        console.print(f"  {name:<12} {text}")


app.command("train-mtp", cls=Command)(named(train_mtp))


def _products(facts: Any) -> str:
    """How the products with the weights of a GGUF file are computed."""
    if not facts.stays_packed:
        return (
            "with plain weights, which are computed while the model loads; on a CPU and one rank, "
            f"pip install 'sidestream[gguf]' keeps them packed in {_gib(facts.packed_bytes)}"
        )
    shared = "by ggml, with the packed weights; they are mapped from the file, and processes share them"
    if not facts.copies_bytes:
        return shared
    return f"{shared}; repacked copies for decode take {_gib(facts.copies_bytes)} more, with --no-repack none"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _free_bytes(device: Any) -> int | None:
    """Memory that weights and KV can take on this device; None: unknown."""
    from sidestream_kv.device.kinds import on_host
    from sidestream_kv.device.machine import available_bytes

    if on_host(device):
        return available_bytes()
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


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
