"""Ranks on a simulated device: rank 0 waits for news of the others in virtual time."""

from __future__ import annotations

import random

import pytest

from proof.ranks import SimRanks
from sidestream.errors import DeviceLost
from sidestream.ranks.leader import KNOWN_S
from sidestream_kv.device.base import WakeUp
from sidestream_order.sim import SimDevice, make_policy


def test_a_failed_step_waits_for_news_of_a_lost_rank_in_virtual_time() -> None:
    device = SimDevice(make_policy("random", random.Random(0)))
    ranks = SimRanks(device, 2).ranks
    began_s = device.now()
    with pytest.raises(DeviceLost, match="a step failed on rank 0, and the other ranks wait for it: broken"):
        ranks.check_step(RuntimeError("broken"))
    assert device.now() - began_s >= KNOWN_S


def test_a_step_that_fails_because_a_rank_was_lost_names_that_rank() -> None:
    device = SimDevice(make_policy("random", random.Random(0)))
    ranks = SimRanks(device, 2).ranks

    def read() -> WakeUp:
        device.sleep(KNOWN_S / 5)
        ranks.lose(DeviceLost("rank 1 is gone"))
        return WakeUp()

    reports = device.thread("reports", read)
    reports.wake()
    began_s = device.now()
    with pytest.raises(DeviceLost, match="rank 1 is gone"):
        ranks.check_step(RuntimeError("broken"))
    assert KNOWN_S / 5 <= device.now() - began_s < KNOWN_S
    device.close()
