"""Requests that the engine's process does not take."""

from __future__ import annotations

import pytest
from border_rig import border, check_nothing_left, read_all, run

from sidestream.config import SamplingParams
from sidestream.errors import QueueFull


def test_a_refusal_is_sent_to_the_samples_that_are_left_when_the_first_one_was_ended() -> None:
    """The end of the first sample crosses the refusal of all."""
    with border("remote", max_waiting=1, max_running=2) as made:
        client = made.connect()

        async def use() -> None:
            hold = made.rig.hold("compute")
            taken = client.submit([5, 6, 7], SamplingParams(max_tokens=5, n=3))
            refused = client.submit([6, 7, 8], SamplingParams(max_tokens=5, n=2))
            client.abort(refused, "stop", index=0)
            with pytest.raises(QueueFull):
                await refused.read()
            hold.release()
            await read_all(taken, 3)

        run(use())
        check_nothing_left(made)
