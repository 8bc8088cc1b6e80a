"""`python -m proof torture --device`: tests block transfers, or a whole engine, on a real device under load; or checks
that this test detects mutations (removed rules).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from proof.report import Figure, at_least, at_most, publish
from sidestream_kv.device.kinds import CPU, CUDA

if TYPE_CHECKING:
    from proof.torture import DeviceReport, Missed

_BLOCKS = {CUDA: 1_000_000, CPU: 20_000}
_WITH_CHECKER = 10
_MAX_FINDINGS = 5
_MAX_CHARS = 120

ShowProgress = Callable[[float, str], None]


def show_campaign(
    device: str, *, seed: int, blocks: int | None, check_order: bool, as_json: bool, show: ShowProgress
) -> None:
    """Test block transfers. Print the figures, and findings on standard error.

    blocks   number of block transfers; None: the default of the device
    """
    from proof.torture import torture_device

    if blocks is None:
        blocks = _BLOCKS.get(device, 1) // (_WITH_CHECKER if check_order else 1)
    total = blocks
    report = torture_device(
        device,
        blocks=blocks,
        seed=seed,
        check_order=check_order,
        tell=lambda done, text: show(min(done / total, 1.0), f"{done:,} blocks, {text}"),
    )
    show_findings((*report.tally.findings, *report.objections))
    figures = _figures(report, least=blocks, checked=check_order)
    publish("torture", f"transfers on {device}", figures, as_json=as_json, console=Console())


def show_findings(findings: Sequence[str]) -> None:
    """Print the first findings on standard error."""
    console = Console(stderr=True)
    for text in findings[:_MAX_FINDINGS]:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_hunt(
    device: str,
    names: Sequence[str],
    *,
    seed: int,
    blocks: int | None,
    requests: int | None,
    as_json: bool,
    show: ShowProgress,
) -> None:
    """Check that the test detects (kills) mutations: those of transfers or, with `requests`, those of a whole engine's
    gates (the waits of steps for loads). Print the figures, and a table on standard error.
    """
    from proof.torture import GATES, HUNT_BLOCKS, ON_HARDWARE, hunt_device, hunt_service

    total = len(names) or len(ON_HARDWARE if requests is None else GATES.get(device, ())) or 1

    def tell(done: int, name: str) -> None:
        show(done / total, f"{done} of {total}, {name}")

    if requests is None:
        unit = "blocks"
        rows = hunt_device(device, names, blocks=HUNT_BLOCKS if blocks is None else blocks, seed=seed, tell=tell)
    else:
        unit = "requests"
        rows = hunt_service(device, names, requests=requests, seed=seed, tell=tell)
    killed = [row.after for row in rows if row.after is not None]
    figures = [
        Figure("mutations_total", len(rows), "mutations"),
        Figure("mutations_killed", len(killed), "mutations", at_least(len(rows))),
        Figure(f"{unit}_to_kill_max", max(killed, default=0), unit),
    ]
    _show_rows(rows, unit)
    details = {
        "mutations": [
            {"name": row.name, "hazard": row.hazard, "killed_after": row.after, "said": row.said} for row in rows
        ]
    }
    what = "transfers" if requests is None else "toy"
    publish("torture", f"{what} on {device}", figures, as_json=as_json, console=Console(), details=details)


def show_service(device: str, *, seed: int, requests: int, as_json: bool, show: ShowProgress) -> None:
    """Test a whole engine. Print the figures, and findings on standard error."""
    from proof.torture import torture_service

    report = torture_service(
        device,
        requests=requests,
        seed=seed,
        tell=lambda done, text: show(done / requests, f"{done:,} of {requests:,} requests, {text}"),
    )
    show_findings(report.findings)
    figures = [
        Figure("torture_requests", report.requests, "requests", at_least(requests)),
        Figure("torture_wrong_answers", report.wrong, "findings", at_most(0)),
        Figure("tokens", report.tokens, "tokens"),
        Figure("tokens_found_on_device", report.from_device, "tokens"),
        Figure("tokens_found_on_host", report.from_host, "tokens"),
        Figure("requests_aborted", report.aborted, "requests"),
        Figure("drafts_accepted", report.accepted, "tokens"),
        Figure("preemptions", report.preemptions, "preemptions"),
        Figure("resets", report.resets, "resets"),
        Figure("failed_slices", report.failed_slices, "slices"),
        Figure("seconds", report.seconds, "s"),
    ]
    publish("torture", f"toy on {device}", figures, as_json=as_json, console=Console())


def _figures(report: DeviceReport, *, least: int, checked: bool) -> list[Figure]:
    tally = report.tally
    figures = [
        Figure("torture_blocks", tally.blocks, "blocks", at_least(least)),
        Figure("torture_wrong", tally.wrong, "blocks", at_most(0)),
        Figure("blocks_per_second", tally.blocks / max(report.seconds, 1e-9), "blocks/s"),
        Figure("blocks_stored", tally.stored, "blocks"),
        Figure("blocks_loaded", tally.loaded, "blocks"),
        Figure("blocks_loaded_partially", tally.partial, "blocks"),
        Figure("blocks_missed", tally.missed, "blocks"),
        Figure("blocks_found_on_device", tally.hits, "blocks"),
        Figure("blocks_aborted", tally.aborted, "blocks"),
        Figure("blocks_reused_in_use", tally.reused, "blocks"),
        Figure("resets", tally.resets, "resets"),
        Figure("failed_slices", tally.failed_slices, "slices"),
        Figure("seconds", report.seconds, "s"),
    ]
    if checked:
        figures.append(Figure("findings", len(report.objections), "findings", at_most(0)))
    return figures


def _show_rows(rows: Sequence[Missed], unit: str) -> None:
    table = Table(title="mutations")
    for heading in ("mutation", "hazard", unit, "seen by"):
        table.add_column(heading, justify="right" if heading == unit else "left")
    for row in rows:
        table.add_row(
            row.name,
            row.hazard,
            f"{row.after:,}" if row.after is not None else "[red]survived[/]",
            row.said[:_MAX_CHARS],
        )
    Console(stderr=True).print(table)
