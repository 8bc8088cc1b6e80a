"""Gauges are correct while the engine is idle, when only its own clock wakes it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from engine_rig import Rig, serving

from proof.faults import late
from sidestream.engine import loop, stats

PROMPT = list(range(1, 24))
TRUE_WITHIN_S = 1.0


def shown(rig: Rig) -> dict[str, int]:
    """What `/metrics` would say."""
    one = ("requests_running", "requests_waiting", "blocks_used", "blocks_cached", "blocks_free")
    tiers = {f"tier_blocks {tier}": rig.counted("tier_blocks", tier) for tier in ("host", "disk")}
    return {name: rig.counted(name) for name in one} | tiers


def actual(rig: Rig) -> dict[str, int]:
    """What the ledgers say. The engine is at rest: they may be read from here."""
    parts = rig.engine.parts
    assert parts.tiers is not None
    return {
        "requests_running": parts.scheduler.num_running,
        "requests_waiting": parts.scheduler.num_waiting,
        "blocks_used": parts.blocks.num_used,
        "blocks_cached": parts.blocks.num_cached,
        "blocks_free": parts.blocks.num_free,
        "tier_blocks host": parts.tiers.host.pool.num_keys,
        "tier_blocks disk": parts.tiers.persistent["disk"].index.stats.entries,
    }


def wait_until_shown(rig: Rig, wanted: dict[str, int]) -> None:
    """Look without waking the engine."""
    until = time.monotonic() + TRUE_WITHIN_S
    while not wanted.items() <= shown(rig).items():
        assert time.monotonic() < until, f"{shown(rig)} is shown a second later, not {wanted}"


def test_gauges_are_correct_during_and_after_a_slow_disk_write(tmp_path: Path) -> None:
    disk_answers = threading.Event()
    with serving(slots=24, disk=tmp_path) as rig:
        assert rig.disk is not None
        rig.disk.on_write = late(disk_answers)
        rig.ask(PROMPT)
        wait_until_shown(rig, {"requests_running": 0, "requests_waiting": 0, "blocks_used": 0, "tier_blocks disk": 0})
        disk_answers.set()  # from here on nothing happens but on the offload worker's thread
        num_blocks = (len(PROMPT) + 7) // rig.model.layout.block_tokens
        wait_until_shown(rig, {"tier_blocks host": num_blocks, "tier_blocks disk": num_blocks})
        assert shown(rig) == actual(rig)


def test_an_idle_engine_does_not_wake_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_GAUGE_PERIOD_S", 0.001)
    monkeypatch.setattr(loop, "_TRIM_AFTER_S", 0.01)
    with serving(slots=24, disk=tmp_path) as rig:
        reply = rig.ask(PROMPT)
        rig.settle()
        rig.turn_until(lambda: rig.engine.loop._trimmed)
        plan, plans = rig.engine.parts.scheduler.plan, list[None]()
        monkeypatch.setattr(rig.engine.parts.scheduler, "plan", lambda **how: plans.append(None) or plan(**how))
        reply.is_silent()  # a while in which it could wake up often
        assert len(plans) <= 1, f"it planned {len(plans)} steps"  # one follows the rest that was waited for
