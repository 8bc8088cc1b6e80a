"""The disk that the benchmark of adversarial tiers slows down, stalls and takes away."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from bench import adversarial
from sidestream.errors import TierLost


def test_each_state_of_the_disk_has_its_own_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(adversarial.time, "sleep", slept.append)
    monkeypatch.setattr(adversarial.time, "perf_counter", iter(range(100)).__next__)
    adversary, block, done = adversarial._Adversary(cast(Any, None), compute_s=0.5), np.zeros(1, np.uint8), list[str]()
    for state in ("healthy", "throttled", "crawling"):
        adversary.state = state
        adversary(lambda state=state: done.append(state), block)  # type: ignore[misc]
    assert slept == [9.0, 1.0]  # ten times as long as the healthy disk's second; twice as long as computing
    adversary.state = "gone"
    with pytest.raises(TierLost):
        adversary(lambda: done.append("gone"), block)
    adversary.state = "stalled"
    adversary.open.set()
    adversary(lambda: done.append("stalled"), block)
    assert done == ["healthy", "throttled", "crawling", "stalled"]
