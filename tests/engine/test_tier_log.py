"""The line about tiers in the log: what moved since the last one, and nothing if nothing did."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_rig import serving

from sidestream.engine import tier_log


def test_a_line_tells_what_tiers_wrote_and_read_since_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=tier_log.__name__)
    with serving(slots=24, disk=tmp_path) as rig:
        log = tier_log.TierLog(rig.engine.parts)
        assert log.due_s == pytest.approx(rig.device.now() + tier_log.PERIOD_S, abs=1.0)
        log.update(rig.device.now() + tier_log.PERIOD_S)
        assert not caplog.records, "nothing moved"
        rig.ask(list(range(1, 24)))
        rig.settle()
        rig.engine.parts.metrics.inc("tier_saved_seconds_total", 2.5, "disk")
        log.update(rig.device.now() + 2 * tier_log.PERIOD_S)
        log.update(rig.device.now() + 3 * tier_log.PERIOD_S)
        (record,) = caplog.records
    assert record.getMessage() == (
        "in 60 s, host: 0 MB written, 0 MB read; disk: 0 MB written, 0 MB read, "
        "requests waited 2.5 s less and 0.0 s more than computing takes"
    )
