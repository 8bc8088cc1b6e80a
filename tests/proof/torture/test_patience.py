"""What counts as a hang: no work of the device ends any more, however slowly the schedule goes."""

from __future__ import annotations

import pytest

from proof.torture import draw_workload, run_one
from sidestream_kv.device.base import WakeUp
from sidestream_kv.offload.worker import OffloadWorker

# Stores of four answers with recurrent states, and their writes to disk, take 1,100 idle steps under `late`.
SLOW = draw_workload(64039088)


def test_a_long_queue_of_stores_is_no_hang() -> None:
    outcome = run_one(SLOW, "late", 64039091)
    assert (outcome.findings, outcome.steps > 1000) == ((), True)


def test_a_worker_that_does_nothing_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadWorker, "_turn", lambda worker: WakeUp((), None))
    outcome = run_one(SLOW, "random", 0)
    assert [finding.oracle for finding in outcome.findings[:1]] == ["no progress"]
    assert outcome.steps < 1100
