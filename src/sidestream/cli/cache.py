"""`sidestream cache`: directories of disk tiers, also while engines use them; the cache process."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sidestream.cli.declare import Command, Group, Option, named
from sidestream.cli.options import AsJson, Logging, LogLevel
from sidestream.errors import ConfigError

_MOST_DAYS = 36_500
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A disk directory, as given to --offload-disk.")]

app = typer.Typer(
    cls=Group, help="Look at the directory of a disk tier, verify it, or delete it; keep host memory for engines."
)


@app.command(cls=Command)
@named
def serve(
    socket: Annotated[Path, Option("Socket at which engines ask for memory: their --offload-shared-memory.", "PATH")],
    host_memory: Annotated[str, Option("Most memory for blocks, of all models together.", "SIZE")],
    log_level: Logging = LogLevel.INFO,
) -> None:
    """Own host memory for KV, which engines of this machine map and share, and which outlives them: an engine that
    starts again finds its host tier as it was.

    An engine takes --offload-host of it: `sidestream serve MODEL --offload-host 16GiB --offload-shared-memory PATH`.
    The command ends with Ctrl-C or SIGTERM. Engines that run then keep what they have.
    """
    from sidestream.cli.loading import start_logging
    from sidestream.processes.signals import on_stop_signal
    from sidestream_kv.config import parse_bytes
    from sidestream_kv.offload.cache_process import CacheProcess

    start_logging(log_level)
    process = CacheProcess(socket, host_bytes=parse_bytes(host_memory, option="host_memory"))
    with on_stop_signal(lambda number: process.stop()):
        process.run()


@app.command(cls=Command)
def ls(directory: Directory, as_json: AsJson = False) -> None:
    """List the directories of tiers in DIR (of ranks, for example), with their blocks."""
    from sidestream_kv.errors import ConfigError
    from sidestream_kv.offload.tiers.inspection import Inspection, find_directories

    rows = []
    for path in find_directories(directory):
        try:
            rows.append(dataclasses.asdict(Inspection(path).stat()))
        except ConfigError as error:
            rows.append({"path": str(path), "error": str(error)})
    if as_json:
        print(json.dumps({"directories": rows}, indent=2))
        return
    table = Table("directory", "blocks", "of", "bytes on disk", "last use", "in use")
    for row in rows:
        if "error" in row:
            table.add_row(str(row["path"]), str(row["error"]))
        else:
            table.add_row(
                str(row["path"]),
                f"{row['blocks']:,}",
                f"{row['capacity_blocks']:,}",
                f"{row['disk_bytes']:,}",
                _time(row["last_used_s"]),
                "yes" if row["in_use"] else "no",
            )
    Console().print(table)


@app.command(cls=Command)
def stat(
    directory: Annotated[Path, typer.Argument(metavar="DIR|SOCKET", help="A disk directory, or a cache process.")],
    as_json: AsJson = False,
) -> None:
    """Count the blocks and bytes of one directory, or of a cache process."""
    from sidestream_kv.offload.tiers.inspection import Inspection, permissions_named
    from sidestream_kv.offload.tiers.shared_memory import content_of

    with permissions_named(directory):
        is_socket = directory.is_socket()
    if is_socket:
        content = content_of(directory)
        if as_json:
            print(json.dumps(content, indent=2))
            return
        print(f"most bytes: {content['host_bytes']}")
        for memory in content["memories"]:
            print()
            _print(memory, as_json=False)
        return
    found = dataclasses.asdict(Inspection(directory).stat())
    if not as_json:
        found["last_used_s"] = _time(found["last_used_s"])
    _print(found, as_json=as_json)


@app.command(cls=Command)
def describe(directory: Directory, as_json: AsJson = False) -> None:
    """Print the model and layout to which the directory belongs."""
    from sidestream_kv.offload.tiers.inspection import description_of

    _print(description_of(directory), as_json=as_json)


@app.command(cls=Command)
@named
def verify(
    directory: Directory,
    delete: Annotated[bool, Option("Remove the damaged blocks.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every block and compare it with its checksum. Exit status 1 if a block is damaged."""
    from sidestream_kv.offload.tiers.inspection import Inspection

    found = Inspection(directory, write=delete).verify(delete=delete)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        for fault in found.faults:
            print(fault)
        removed = ", removed" if delete else ""
        print(f"{found.good} blocks are good, {len(found.faults)} damaged{removed}, {found.skipped} being written")
    if found.faults:
        raise typer.Exit(1)


@app.command(cls=Command)
@named
def gc(
    directory: Directory,
    unused_days: Annotated[float | None, Option("Delete blocks that were not used for so many days.", "DAYS")] = None,
    keep: Annotated[str | None, Option("Keep so much, the blocks that were used last.", "SIZE")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete blocks that were not used for long, of DIR or of its ranks, and give their space back to the file
    system. Engines may use the directory: what they read or write now is kept.
    """
    from sidestream_kv.config import parse_bytes
    from sidestream_kv.offload.tiers import inspection

    if unused_days is None and keep is None:
        raise ConfigError("nothing says which blocks to delete: give --unused-days, --keep or both")
    if unused_days is not None and not 0 <= unused_days <= _MOST_DAYS:
        raise ConfigError(f"unused_days is {unused_days:g}: give 0 to {_MOST_DAYS}")
    before_s = None if unused_days is None else time.time() - 86_400 * unused_days
    size = None if keep is None else parse_bytes(keep, option="keep")
    rows = []
    directories = [inspection.Inspection(path, write=True) for path in inspection.directories_of_tier(directory)]
    for each in directories:
        share = None if size is None else size // len(directories)
        found = each.collect(used_before_s=before_s, keep_bytes=share)
        rows.append({"path": str(each.path), **dataclasses.asdict(found)})
        if not as_json:
            print(
                f"{each.path}: {found.deleted} blocks deleted, {found.freed_bytes:,} bytes free again, {found.kept} "
                f"blocks kept, {found.in_use} of them because they are in use"
            )
    if as_json:
        print(json.dumps({"directories": rows}, indent=2))


@app.command(cls=Command)
def clear(directory: Directory) -> None:
    """Delete the tier in DIR, of any format version, and nothing else. Refused while an engine uses it."""
    from sidestream_kv.offload.tiers import inspection

    for path in inspection.directories_of_tier(directory):
        inspection.clear(path)
        print(f"cleared {path}")


@app.command(cls=Command)
def diff(
    directory: Directory,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another disk directory.")],
    as_json: AsJson = False,
) -> None:
    """Tell why two directories share no blocks: print the parts of their descriptions that differ. Exit status 1 if
    there are any.
    """
    from sidestream_kv.offload.tiers.inspection import differences

    found = differences(directory, other)
    if as_json:
        print(json.dumps({name: [ours, theirs] for name, ours, theirs in found}, indent=2))
    elif found:
        for name, ours, theirs in found:
            print(f"{name}: {ours!r} in {directory}, {theirs!r} in {other}")
    else:
        print("same model and layout: engines with the same salt find each other's blocks in one directory")
    if found:
        raise typer.Exit(1)


def _print(values: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        for name, value in values.items():
            print(f"{name}: {value}")


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
