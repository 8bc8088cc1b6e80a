"""Waits for answers of shared tiers."""

from __future__ import annotations

import pytest
from transfer_rig import Rig, keys

from sidestream_kv.offload.tickets import Promoted
from sidestream_kv.types import FindPlan


@pytest.mark.parametrize("closing", [False, True])
def test_a_request_whose_blocks_are_not_asked_for_does_not_wait(closing: bool) -> None:
    rig = Rig()
    rig.transfers._switches.abandoned = closing
    rig.transfers._thread.wake = lambda: None  # type: ignore[method-assign]
    rig.transfers.submit([FindPlan(1, 0, keys("a"), 1e6)])
    rig.transfers._worker.turn()  # the one that takes the question
    assert rig.transfers.poll() == [Promoted(1, 0, True, "done")]
    rig.close()
