"""Messages that arrive while a step is awaited: some are handled at once, the others between two steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from engine_rig import PATIENCE_S, SILENCE_S, Reply, Rig, prompts, serving

PROMPT = prompts(21, 1, longest=1)[0] + list(range(1, 30))  # 30 tokens: 7 blocks that a cache may supply
REUSABLE = 28
OTHER = [3] * 10


@pytest.fixture
def rig() -> Iterator[Rig]:
    """The blocks of PROMPT rest in the host tier, and nowhere else."""
    with serving(slots=24) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        yield rig


def await_step(rig: Rig, *, outputs: int = 30) -> Reply:
    """A request that runs on a device that is held up: with two steps launched, the engine thread waits for the
    first.
    """
    steps = rig.engine.num_steps
    reply = rig.submit(OTHER, outputs)
    rig.turn_until(lambda: rig.engine.num_steps == steps + 2)
    return reply


def test_the_load_of_a_request_submitted_during_a_step_begins_at_once(rig: Rig) -> None:
    with rig.hold("compute"):
        other, steps = await_step(rig), rig.engine.num_steps
        reply = rig.submit(PROMPT)
        rig.turn_until(lambda: rig.counted("transfers_total", "load", "done") == 1)
        assert rig.engine.num_steps == steps
    rig.expect(reply, PROMPT)
    assert reply.cached.host == REUSABLE
    rig.expect(other, OTHER, 30)


def test_a_request_aborted_during_a_step_ends_at_once(rig: Rig) -> None:
    with rig.hold("compute"):
        reply = await_step(rig)
        rig.abort(reply)
        assert reply.reason == "abort"


def test_no_load_writes_blocks_of_an_aborted_request_before_its_step_ends() -> None:  # H3
    with serving(blocks=10, slots=24) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        with rig.hold("compute"):
            other = await_step(rig)
            rig.abort(other)
            reply = rig.submit(PROMPT)
            rig.turn_until(lambda: rig.sizes()["loads"] == 1)
            assert rig.counted("transfers_total", "load", "done") == 0, "it writes what a step still uses"
        rig.expect(reply, PROMPT)
        assert reply.cached.host == REUSABLE


def test_a_call_runs_only_between_two_steps(rig: Rig) -> None:
    called = threading.Event()
    caller = threading.Thread(target=rig.engine.call, args=(called.set,))
    with rig.hold("compute"):
        await_step(rig)
        caller.start()
        assert not called.wait(SILENCE_S)
    assert called.wait(PATIENCE_S)
    caller.join()


def test_no_block_is_loaded_for_a_request_that_waits_for_new_weights(rig: Rig) -> None:
    with rig.hold("compute"):
        await_step(rig, outputs=4)
        done = rig.engine.update_weights(lambda: None, fingerprint="others")
        reply = rig.submit(PROMPT)
        assert reply.is_silent()
        assert rig.sizes()["loads"] == 0
    assert done.wait(PATIENCE_S)
    rig.expect(reply, PROMPT)
    assert reply.cached.total == 0
