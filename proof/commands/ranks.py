"""`python -m proof torture --device D --tensor-parallel N`: tests a real model whose KV lies on several ranks."""

from __future__ import annotations

from rich.console import Console

from proof.commands.device import ShowProgress, show_findings
from proof.report import Figure, at_least, at_most, publish
from sidestream_kv.device.kinds import CPU, CUDA

BLOCKS = {CUDA: 200_000, CPU: 4_000}
"""Block transfers by kind of device, if no number is given."""


def show_ranks(
    device: str,
    *,
    ranks: int,
    seed: int,
    blocks: int | None,
    as_json: bool,
    show: ShowProgress,
) -> None:
    """Test a model on several ranks. Print the figures, and findings on standard error.

    blocks   number of block transfers on all ranks together; None: the default of the device
    """
    from proof.torture.rank_service import NEAR, torture_ranks

    least = BLOCKS.get(device, 1) if blocks is None else blocks
    report = torture_ranks(
        device,
        ranks=ranks,
        blocks=least,
        seed=seed,
        tell=lambda done, text: show(min(done / least, 1.0), f"{done:,} blocks, {text}"),
    )
    show_findings(report.findings)
    figures = [
        Figure("torture_blocks", report.blocks, "blocks", at_least(least)),
        Figure("torture_wrong_answers", report.wrong, "findings", at_most(0)),
        Figure("logprob_distance_max", report.distance, "nats", at_most(NEAR[device])),
        Figure("ranks", ranks, "ranks"),
        Figure("requests", report.requests, "requests"),
        Figure("tokens", report.tokens, "tokens"),
        Figure("blocks_per_second", report.blocks / max(report.traffic_s, 1e-9), "blocks/s"),
        Figure("blocks_stored", report.stored, "blocks"),
        Figure("blocks_loaded", report.loaded, "blocks"),
        Figure("tokens_found_on_device", report.from_device, "tokens"),
        Figure("tokens_found_on_host", report.from_host, "tokens"),
        Figure("tokens_found_on_disk", report.from_disk, "tokens"),
        Figure("requests_aborted", report.aborted, "requests"),
        Figure("drafts_accepted", report.accepted, "tokens"),
        Figure("preemptions", report.preemptions, "preemptions"),
        Figure("resets", report.resets, "resets"),
        Figure("failed_transfers", report.failed, "transfers"),
        Figure("seconds", report.seconds, "s"),
    ]
    publish("torture", f"model on {ranks} ranks, {device}", figures, as_json=as_json, console=Console())
