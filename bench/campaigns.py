"""The table of campaigns of torture schedules, for bench/results/README.md, from the files in its `campaigns`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from proof.torture.campaign import num_workloads


def campaign_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """One markdown row for each campaign, in the order of seeds, and a row of all together. Raises ValueError if two
    campaigns ran the same workload, because its schedules would count twice.
    """
    lines = [
        "| seed | minutes | workers | schedules | findings | schedules a minute and worker | machine |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    schedules = findings = next_free = 0
    for report in sorted(reports, key=lambda report: int(_option(report, "seed"))):
        seed, minutes, workers = (_option(report, name) for name in ("seed", "minutes", "workers"))
        if int(seed) < next_free:
            raise ValueError(f"the campaign with seed {seed} ran workloads of the one before, which end at {next_free}")
        figures = {figure["name"]: figure["value"] for figure in report["figures"]}
        environment = report["environment"]
        schedules, findings = schedules + figures["schedules"], findings + figures["findings"]
        next_free = int(seed) + num_workloads(figures["schedules"])
        rate = f"{figures['schedules_per_minute']:.0f}"
        machine = f"{cpu_of(environment)}, {environment['date']}"
        lines.append(
            f"| {seed} | {minutes} | {workers} | {figures['schedules']:,} | {figures['findings']} | {rate} | "
            f"{machine} |"
        )
    lines.append(f"| all | | | {schedules:,} | {findings} | | |")
    return "\n".join([*lines, ""])


def cpu_of(environment: Mapping[str, Any]) -> str:
    """The machine's CPU and, in results since 2026-11-28, its speed: milliseconds for a fixed Python loop."""
    loop_ms = environment.get("python_loop_ms")
    speed = "" if loop_ms is None else f" (Python loop {loop_ms:.0f} ms)"
    return f"{environment['cpu']}, {environment['cores']} cores{speed}"


def _option(report: Mapping[str, Any], name: str) -> str:
    found = re.search(rf"--{name} ([\d.]+)", report["command"])
    if found is None:
        raise ValueError(f"the command of a campaign has no --{name}: {report['command']}")
    return found[1]
