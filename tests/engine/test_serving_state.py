"""The serving state: health that never improves, and a bound on unfinished samples."""

from __future__ import annotations

import pytest

from sidestream.engine.inbox import ServingState
from sidestream.errors import EngineStopped, QueueFull


def test_samples_are_accepted_up_to_the_bound_and_again_after_one_has_ended() -> None:
    state = ServingState(2)
    state.check_room(2)
    state.accept(2)
    with pytest.raises(QueueFull, match="2 requests are running or waiting, the bound is 2"):
        state.check_room(1)
    state.release()
    state.check_room(1)
    assert state.unfinished == 1


def test_a_draining_engine_accepts_no_sample() -> None:
    state = ServingState(2)
    state.drain()
    assert state.health.status == "draining"
    with pytest.raises(EngineStopped, match="the engine is draining: send the request to another engine"):
        state.check_room(1)


def test_a_failed_engine_stays_failed_and_names_the_error() -> None:
    state = ServingState(2)
    state.fail(RuntimeError("injected"))
    state.drain()
    assert (state.health.status, state.health.detail) == ("failed", "RuntimeError: injected")
    with pytest.raises(EngineStopped, match="the engine is failed: RuntimeError: injected"):
        state.check_room(1)
