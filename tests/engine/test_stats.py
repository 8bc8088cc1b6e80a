"""The time of a step, as the loop measures it."""

from __future__ import annotations

from sidestream.engine.stats import step_seconds


def test_step_time_is_the_devices_or_the_hosts_or_unknown() -> None:
    assert step_seconds(2.0, 1.0, before=True, awaited=True) == 2.0
    assert step_seconds(2.0, 1.0, before=False, awaited=True) is None  # it began nobody knows when
    assert step_seconds(2.0, 1.9, before=False, awaited=False) == 1.9
    assert step_seconds(2.0, 1.9, before=True, awaited=False) == 1.9
    assert (
        step_seconds(2.0, 0.9, before=True, awaited=False) == 2.0
    )  # by something else that the host does all the time
