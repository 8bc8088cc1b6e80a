"""A hanging engine thread is noticed by every thread that asks for health, and so is its recovery."""

from __future__ import annotations

import pytest
from engine_rig import serving


def test_an_engine_is_stalled_during_a_hanging_step_but_not_while_idle(caplog: pytest.LogCaptureFixture) -> None:
    with serving(watchdog_timeout_s=0.05) as rig:
        with rig.hold("compute"):
            reply = rig.submit([1, 2, 3])
            rig.turn_until(lambda: rig.engine.health().status == "stalled")
            assert rig.engine.health().detail == (
                "the engine thread has not finished a step for more than 0.05 s "
                "(--watchdog-timeout, in Python watchdog_timeout_s)"
            )
        rig.expect(reply, [1, 2, 3])
        rig.turn_until(lambda: rig.engine.health().status == "ok")
        assert rig.submit([1, 2, 3]).wait().is_silent()  # twice as long as the watchdog waits
        assert rig.engine.health().status == "ok"
    messages = [record.getMessage() for record in caplog.records if record.name == "sidestream.engine.loop"]
    assert ["prints where its threads hang" in message for message in messages] == [True, False]
