"""The table of campaigns of torture schedules, for docs/benchmarks.md, from the files in bench/results/campaigns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_SEED = re.compile(r"--seed (\d+)")
_SCHEDULES_PER_WORKLOAD = 8


def campaign_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """One markdown row for each campaign, in the order of seeds, and a row of all together. Raises ValueError if two
    campaigns ran the same workload, because its schedules would count twice.
    """
    lines = ["| seed | schedules | findings | a minute and core | machine |", "| ---: | ---: | ---: | ---: | --- |"]
    schedules = findings = next_free = 0
    for seed, report in sorted(((_seed(report), report) for report in reports), key=lambda pair: pair[0]):
        if seed < next_free:
            raise ValueError(f"the campaign with seed {seed} ran workloads of the one before, which end at {next_free}")
        figures = {figure["name"]: figure["value"] for figure in report["figures"]}
        environment = report["environment"]
        schedules, findings = schedules + figures["schedules"], findings + figures["findings"]
        next_free = seed + -(-figures["schedules"] // _SCHEDULES_PER_WORKLOAD)
        rate = f"{figures['schedules_per_minute']:.0f}"
        machine = f"{environment['cpu']}, {environment['cores']} cores, {environment['date']}"
        lines.append(f"| {seed} | {figures['schedules']:,} | {figures['findings']} | {rate} | {machine} |")
    lines.append(f"| all | {schedules:,} | {findings} | | |")
    return "\n".join([*lines, ""])


def _seed(report: Mapping[str, Any]) -> int:
    found = _SEED.search(report["command"])
    return 0 if found is None else int(found[1])
