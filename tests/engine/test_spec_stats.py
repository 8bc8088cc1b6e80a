"""Statistics of drafts, in metrics and in the log."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sidestream.engine import stats
from sidestream.runner.mailbox import Delivered
from sidestream.types import RowResult
from sidestream_kv.metrics import Metrics


def test_requests_without_drafts_are_logged_once_a_minute_with_all_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="sidestream.engine.stats")
    now_s = [100.0]
    counted = stats.SpecStats(Metrics(), "toy", lambda: now_s[0])
    for _ in range(59):
        counted.count_undrafted({"chance": 2, "blocks": 1})
        now_s[0] += 1.0
    assert not caplog.records
    now_s[0] += 1.0
    counted.count_undrafted({"others": 5})
    [record] = caplog.records
    assert "in 60 s, 182 rows of steps had no drafts: 118 because too few drafts would have" in record.getMessage()
    counted.count_undrafted({"others": 5})
    assert len(caplog.records) == 1


def test_a_row_with_non_finite_logits_counts_no_accepted_draft() -> None:
    class ThreeRows:
        drafts, gated, forced = (2, 2, 0), False, dict[int, bool]()
        batch = SimpleNamespace(columns=SimpleNamespace(request_id=(1, 2, 3), samples=(True, True, True)))

    metrics = Metrics()
    rows = (RowResult((), (), False), RowResult((5, 6)), RowResult((7,)))
    stats.SpecStats(metrics, "toy", lambda: 0.0).count(ThreeRows(), Delivered(rows, draft_s=0.25, verify_s=0.5))  # type: ignore[arg-type]
    histograms = metrics.snapshot().histograms
    assert [histograms[name]["toy",].total for name in ("draft_seconds", "verify_seconds")] == [0.25, 0.5]
    assert metrics.value("draft_tokens_total", "toy") == 4
    assert metrics.value("accepted_tokens_total", "toy") == 1
